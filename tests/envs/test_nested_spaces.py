"""Spaces of every kind are converted, sent to workers, stored and checked by entry, and passed back to envs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple

from remuda.core import Space, derive_seed
from remuda.data import leaves, map_tree, namedarraytuple
from remuda.envs import LocalEnvs, examine, make_envs, resolve
from remuda.envs.action_values import action_leaves, stored_action, writer
from remuda.envs.env_group import rows_layout
from remuda.envs.observation_values import reader
from remuda.envs.spaces import action_space, observation_space, space_from_wire, space_to_wire
from remuda.errors import EnvError, EnvSpecError

SPEC = "counting:make_nested"
OBS_LEAVES = ["camera.left", "camera.right_eye", "dials", "gear", "pair.item0", "pair.item1", "switches"]


def same(a: Space, b: Space) -> bool:
    plain = ("kind", "shape", "dtype", "n", "start", "keys")
    arrays = ("low", "high", "sizes", "starts")
    return (
        all(getattr(a, name) == getattr(b, name) for name in plain)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays if getattr(a, name) is not None)
        and [getattr(a, name) is None for name in arrays] == [getattr(b, name) is None for name in arrays]
        and list(a.entries) == list(b.entries)
        and all(same(a.entries[name], b.entries[name]) for name in a.entries)
    )


def nested_spaces() -> tuple[Space, Space]:
    env = resolve(SPEC).build()
    return observation_space(env.observation_space, SPEC), action_space(env.action_space, SPEC)


def test_leaves_have_paths_kinds_and_stored_types() -> None:
    observation, action = nested_spaces()
    assert [path for path, _ in observation.leaves()] == OBS_LEAVES
    assert [(leaf.kind, leaf.dtype, leaf.shape) for _, leaf in observation.leaves()] == [
        ("box", "uint8", (2, 2)),
        ("box", "float32", (2,)),
        ("multidiscrete", "int64", (2,)),
        ("discrete", "int64", ()),
        ("box", "float32", (1,)),
        ("discrete", "int64", ()),
        ("multibinary", "int8", (3,)),
    ]
    assert observation.entries["camera"].keys == ("left", "right eye")
    dials = observation.entries["dials"]
    assert (dials.sizes.tolist(), dials.starts.tolist()) == ([4, 60], [1, -1])
    assert [path for path, _ in action.leaves()] == ["buttons", "modes", "move.item0", "move.item1"]


def test_space_survives_conversion_to_wire_format() -> None:
    for space in nested_spaces():
        assert same(space_from_wire(space_to_wire(space)), space)
    observation, action = nested_spaces()
    assert not same(observation, action)


def test_keys_become_unique_field_names() -> None:
    keys = ["left", "a b", "a.b", "a_b", "_hidden", "1st", "items", "", "größe", "class", "²"]
    space = observation_space(Dict([(key, Discrete(2)) for key in keys]), "x")
    assert space.keys == tuple(keys)
    names = tuple(space.entries)
    assert names == ("left", "a_b_2", "a_b_3", "a_b", "x_hidden", "x1st", "xitems", "x", "größe", "class", "x_")
    tree = space.tree(lambda path, leaf: np.zeros(3))
    assert tree._fields == names


@pytest.mark.parametrize(
    ("space", "where"),
    [
        (Text(5), ""),
        (Graph(Discrete(2), None), ""),
        (Sequence(Discrete(2)), ""),
        (OneOf([Discrete(2), Discrete(3)]), ""),
        (Dict({"a": Dict({"say": Text(5)})}), " at a.say"),
        (Tuple((Discrete(2), Sequence(Discrete(2)))), " at item1"),
        (Dict({}), ""),
        (Dict({"a": Tuple(())}), " at a"),
    ],
)
def test_other_spaces_are_refused_by_path_in_one_sentence(space: Any, where: str) -> None:
    for which, convert in (("observation", observation_space), ("action", action_space)):
        with pytest.raises(EnvSpecError) as caught:
            convert(space, "Odd-v0")
        text = str(caught.value)
        assert text.startswith(f"Odd-v0 has the {which} space ")
        assert f"{where}; Box" in text
        assert text.endswith("give as env.")
        assert "\n" not in text
    with pytest.raises(EnvSpecError, match=r"action space .* at a; Box of floats, Discrete"):
        action_space(Dict({"a": Box(0, 3, (2,), np.int64)}), "Odd-v0")
    with pytest.raises(EnvSpecError, match="Dict"):
        observation_space(Dict({1: Discrete(2)}), "Odd-v0")


def test_layout_has_a_name_for_every_leaf() -> None:
    observation, action = nested_spaces()
    layout = rows_layout(observation, action, 5, ("speed",))
    assert [name for name in layout if name.startswith("obs")] == [f"obs.{path}" for path in OBS_LEAVES]
    assert layout["obs.camera.left"] == ((5, 2, 2), "uint8")
    assert layout["action.move.item1"] == ((5, 2), "float32")
    assert layout["info.speed"] == ((5,), "float64")
    plain = rows_layout(Space("discrete", (), "int64", n=3), Space("discrete", (), "int64", n=2), 5)
    assert {"obs", "action"} <= set(plain)


def actions_for(space: Space, rng: np.random.Generator, count: int) -> Any:
    def draw(path: str, leaf: Space) -> Any:
        match leaf.kind:
            case "box":
                return rng.uniform(-1, 1, (count, *leaf.shape)).astype(np.float32)
            case "discrete":
                return rng.integers(0, leaf.n, count)
            case "multibinary":
                return rng.integers(0, 2, (count, *leaf.shape))
        return rng.integers(0, leaf.sizes, (count, *leaf.shape))

    return space.tree(draw)


def play_nested(workers: int, slots: int, steps: int = 11) -> list[Any]:
    """Return rows of 6 envs with the same actions for any number of workers and slots."""
    rng, rows = np.random.default_rng(3), []
    with make_envs(resolve(SPEC), 6, workers, slots) as envs:
        envs.reset(5)
        width = 6 // slots
        for _ in range(steps):
            actions, parts = actions_for(envs.action, rng, 6), []
            for _ in range(slots):
                slot, step = envs.recv()
                parts.append(map_tree(np.array, step))
                envs.send(slot, map_tree(lambda leaf, slot=slot: leaf[slot * width : (slot + 1) * width], actions))
            rows.append((map_tree(lambda *each: np.concatenate(each), *parts), actions))
    return rows


@pytest.mark.parametrize(("workers", "slots"), [(0, 1), (0, 2), (2, 1), (3, 2)])
def test_rows_of_nested_spaces_have_known_values(workers: int, slots: int) -> None:
    rows = play_nested(workers, slots)
    for t, (row, _) in enumerate(rows):
        step = t % 5  # the first observation, then 4 steps
        assert (row.obs.camera.left == step).all()
        assert (row.obs.camera.right_eye == step / 2).all()
        assert row.obs.gear.tolist() == [step] * 6  # counted from 0, not from 2
        assert row.obs.dials.tolist() == [[step % 4, step]] * 6
        assert row.obs.switches.tolist() == [[step % 2, 0, 1]] * 6
        assert (row.obs.pair.item0 == step / 4).all()
        assert (row.obs.pair.item1 == step).all()
        assert row.obs.pair.item0.dtype == np.float32
        assert (row.mask == (step > 0)).all()
        assert (row.truncated == (step == 4)).all()
        if step > 0:
            a = rows[t - 1][1]  # the action that was sent after the previous row
            expected = a.move.item0 - 1 + a.move.item1.sum(1) + 10 * a.buttons.sum(1) + 100 * (a.modes.sum(1) + 5)
            assert np.allclose(row.reward, expected, atol=1e-4)


def test_local_and_pooled_envs_are_bit_equal_on_nested_spaces() -> None:
    first = play_nested(0, 1)
    for workers, slots in [(1, 1), (2, 2)]:
        for (mine, _), (theirs, _) in zip(first, play_nested(workers, slots), strict=True):
            for (path, a), (other, b) in zip(leaves(mine), leaves(theirs), strict=True):
                assert path == other
                assert a.tobytes() == b.tobytes()


def test_env_gets_actions_with_its_own_keys_and_types_and_may_modify_them() -> None:
    with LocalEnvs(resolve(SPEC), 2) as envs:
        envs.reset(1)
        envs.recv()
        actions = actions_for(envs.action, np.random.default_rng(0), 2)
        before = map_tree(np.array, actions)
        envs.send(0, actions)
        envs.recv()
        given = envs._env_groups[0].envs[1]._env.taken[0]
        kept = envs._actions[0]
    assert given["move"][0] == before.move.item0[1] - 1
    assert given["move"][1].dtype == np.float64
    assert given["modes"].dtype == np.int32
    assert given["modes"].tolist() == (before.modes[1] + [5, 0]).tolist()
    assert given["buttons"].dtype == np.int8
    for (_, sent), (_, mine), (_, stored) in zip(leaves(actions), leaves(before), leaves(kept), strict=True):
        assert np.array_equal(sent, mine)
        assert np.array_equal(stored, mine)  # the env modified only its own copy


@pytest.mark.parametrize("workers", [0, 1])
def test_actions_may_use_the_keys_of_the_env(workers: int) -> None:
    plain = {
        "modes": np.array([[1, 2], [0, 1]]),
        "move": (np.array([2, 0]), np.array([[0.5, 0.25], [0.0, -1.0]])),
        "buttons": np.array([[1, 1], [0, 1]]),
    }
    with make_envs(resolve(SPEC), 2, workers) as envs:
        envs.reset(1)
        envs.recv()
        envs.send(0, plain)
        _, step = envs.recv()
        assert step.reward.tolist() == [1 + 0.75 + 20 + 800, -1 - 1 + 10 + 600]


def test_keys_that_are_not_identifiers_may_be_used_either_way() -> None:
    space = action_space(Dict({"go left": Discrete(2), "wait": Discrete(3)}), "x")
    one, other = np.array([1]), np.array([2])
    named = namedarraytuple("Entries", ("go_left", "wait"))(one, other)
    for action in ({"go left": one, "wait": other}, {"wait": other, "go_left": one}, named, (one, other)):
        assert [leaf.tolist() for leaf in action_leaves(space, action, 1)] == [[1], [2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_actions_of_the_wrong_form_are_reported_with_their_path(workers: int) -> None:
    with make_envs(resolve(SPEC), 2, workers) as envs:
        envs.reset(1)
        envs.recv()
        good = actions_for(envs.action, np.random.default_rng(0), 2)
        for bad, sentence in [
            (
                good.replace(buttons=np.zeros((2, 3))),
                r"actions buttons have shape \(2, 3\), this slot takes \(2, 2\)",
            ),
            (good.replace(move=good.move.replace(item0=np.zeros(3))), r"actions move.item0 have shape \(3,\)"),
            (good.replace(move=good.modes), r"actions move are a ndarray, this slot takes entries item0, item1"),
            (good.modes, r"actions are a ndarray, this slot takes entries buttons, modes, move: give them"),
            ({"move": 1}, r"actions have the entries move, this slot takes buttons, modes, move: give exactly"),
            ((1, 2), r"actions have the entries item0, item1, this slot takes"),
            (good.move, r"actions have the entries item0, item1, this slot takes"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                envs.send(0, bad)
        envs.send(0, good)  # none of the actions above was sent
        assert envs.recv()[1].mask.all()


def step_on(envs: Any, steps: int) -> None:
    envs.reset(7)
    for _ in range(steps):
        slot, _ = envs.recv()
        envs.send(slot, actions_for(envs.action, np.random.default_rng(0), envs.num_envs))


FAULTS = [
    ("nan", "observation.camera.right_eye is nan at [1]"),
    ("infinite", "observation.pair.item0 is inf at [0]"),
    ("shape", "observation.camera.left has shape (2, 3), its space says (2, 2)"),
    ("dtype", "observation.camera.left has dtype int16, its space says uint8, which cannot hold -1 at [0, 0]"),
    ("range", "observation.gear is 52, its space says 2 to 51"),
    ("dial", "observation.dials is 59 at [1], its space says -1 to 58"),
    ("fraction", "observation.dials has dtype float64, its space says integers"),
    ("switch", "observation.switches is 2 at [1], its space says 0 or 1"),
    ("missing", "observation has the keys camera, dials, pair, switches, its space says camera, dials, gear,"),
    ("short", "observation.pair has 1 entries, its space says 2"),
    ("no dict", "observation.camera is a ndarray, its space says a dict"),
    ("no tuple", "observation.pair is a int, its space says a tuple"),
]


@pytest.mark.parametrize(
    ("fault", "what", "workers"), [(*each, 0) for each in FAULTS] + [(*each, 1) for each in FAULTS[:3]]
)
def test_invalid_entries_are_refused(fault: str, what: str, workers: int) -> None:
    with make_envs(resolve(SPEC, {"fault": fault}), 1, workers) as envs, pytest.raises(EnvError) as caught:
        step_on(envs, 4)
    text = str(caught.value)
    assert text.startswith(f"env 0 of {SPEC} (seed {derive_seed(7, 0, 0)}, step 2 of its episode 1): {what}")
    assert text.endswith(".")
    assert "\n" not in text


def test_warm_up_works_on_nested_spaces() -> None:
    with LocalEnvs(resolve(SPEC, {"length": 1000}), 4) as envs:
        taken = envs.reset(1, warm_up=20)
        _, step = envs.recv()
        assert step.obs.gear.sum() == taken > 0


def test_samples_survive_conversion_to_arrays() -> None:
    for space in (
        resolve(SPEC).build().action_space,
        Discrete(4, start=-2, dtype=np.int32),
        MultiDiscrete([[3, 4], [2, 9]], start=[[0, 5], [-3, 1]]),
        MultiBinary([2, 3]),
        Box(-1.0, 1.0, (), np.float32),
        Tuple((Tuple((Discrete(2),)), Dict({"b": MultiBinary(1)}))),
    ):
        space.seed(0)
        core = action_space(space, "x")
        write = writer(space, core)
        for _ in range(20):
            sample = space.sample()
            (back,) = write(map_tree(lambda leaf: leaf, stored_action(core, sample)))
            assert space.contains(back)
            assert gymnasium.utils.env_checker.data_equivalence(plain(back), plain(sample))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else np.asarray(value)


def test_reader_accepts_all_samples_of_the_space() -> None:
    space = resolve(SPEC).build().observation_space
    read = reader(space, observation_space(space, "x"))
    space.seed(1)
    for _ in range(20):
        sample = space.sample()
        left, right, dials, gear, first, second, switches = (leaf for _, leaf in leaves(read(sample)))
        assert left is sample["camera"]["left"]
        assert right is sample["camera"]["right eye"]
        assert dials.tolist() == (sample["dials"] - [1, -1]).tolist()
        assert (gear, second) == (sample["gear"] - 2, sample["pair"][1])
        assert first is sample["pair"][0]
        assert switches is sample["switches"]


def test_examine_supports_nested_spaces() -> None:
    report = examine(resolve(SPEC), seconds=0.05)
    assert report.is_repeatable
    assert report.steps_per_second > 0
    assert not [problem for problem in report.problems if "EnvError" in problem or "space" in problem]


def test_bounds_of_actions_are_never_rounded_outwards() -> None:
    """0.1 and 0.3 are not exact in float32; infinite bounds stay infinite."""
    low, high = np.array([0.1, -0.3, -1.7e308, -np.inf, 0.5]), np.array([0.3, -0.1, 1.7e308, np.inf, 0.5])
    space = action_space(Box(low, high, dtype=np.float64), "x")
    assert space.low is not None
    assert space.high is not None
    assert (space.low.dtype, space.high.dtype) == (np.float32, np.float32)
    inside = [0, 1, 4]
    assert (space.low[inside].astype(np.float64) >= low[inside]).all()
    assert (space.high[inside].astype(np.float64) <= high[inside]).all()
    np.testing.assert_allclose(space.low[inside], low[inside], rtol=1e-6)
    assert np.isinf(space.low[[2, 3]]).all()
    assert np.isinf(space.high[[2, 3]]).all()
