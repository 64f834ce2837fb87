"""Every row of envs, in this process and in workers, compared with rows computed from the definition of the env."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import counting
import numpy as np
import pytest

from remuda.core import Step, derive_seed
from remuda.envs import EnvSpec, LocalEnvs, PooledEnvs, make_envs, resolve
from remuda.errors import ConfigError

LENGTHS = (3, 5, 2)
# (workers, slots, whether buffers are reused); 2 or 3 workers share slots of 10 or 5 envs unevenly
BACKENDS = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (3, 1, 0), (2, 2, 1), (3, 2, 0)]


def start(spec: EnvSpec, num_envs: int, num_workers: int = 0, slots: int = 1, **options: Any) -> Any:
    """Make LocalEnvs for 0 workers, else PooledEnvs."""
    if num_workers == 0:
        return LocalEnvs(spec, num_envs, slots, **options)
    return PooledEnvs(spec, num_envs, num_workers, slots, **options)


def rows_by_hand(seed: int, index: int, actions: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield obs, reward, terminated, truncated and mask of one CountingEnv, computed from its definition."""
    marker, episode, step = derive_seed(seed, index, 0) % 1000, 1, 0
    yield (marker, 1, 0), 0.0, False, False, False
    is_over = False
    for action in actions:
        if is_over:
            episode, step, is_over = episode + 1, 0, False
            yield (marker, episode, 0), 0.0, False, False, False
            continue
        step += 1
        is_over = step == LENGTHS[(episode - 1) % 3]
        odd = episode % 2 == 1
        yield (marker, episode, step), 100 * episode + step + action / 4, is_over and odd, is_over and not odd, True


def play(envs: Any, seed: int, actions: np.ndarray) -> list[Step]:
    """Return rows [T + 1] of all envs, with any number of slots; actions are [T, B]."""
    envs.reset(seed)
    width = envs.num_envs // envs.num_slots
    rows = []
    for t in range(len(actions) + 1):
        parts = []
        for expected in range(envs.num_slots):
            slot, step = envs.recv()
            assert slot == expected
            parts.append(Step(*(np.array(field) for field in step)))
            if t < len(actions):
                envs.send(slot, actions[t, slot * width : (slot + 1) * width])
        rows.append(Step(*(np.concatenate(fields) for fields in zip(*parts, strict=True))))
    return rows


@pytest.mark.parametrize(("workers", "slots", "reuse_buffer"), BACKENDS)
def test_rows_equal_those_computed_by_hand(workers: int, slots: int, reuse_buffer: int) -> None:
    actions = np.random.default_rng(0).integers(0, 4, (30, 10))
    spec = resolve("counting:make", {"lengths": list(LENGTHS), "reuse_buffer": bool(reuse_buffer)})
    with make_envs(spec, 10, workers, slots) as envs:
        rows = play(envs, 11, actions)
    for index in range(10):
        for t, expected in enumerate(rows_by_hand(11, index, actions[:, index].tolist())):
            row = rows[t][index]
            assert (tuple(row.obs), row.reward, row.terminated, row.truncated, row.mask) == expected, (index, t)
    assert rows[0].obs.dtype == np.float32
    assert rows[0].reward.dtype == np.float32
    assert rows[0].mask.dtype == bool


@pytest.mark.parametrize("kind", ["discrete", "uint8", "float64"])
@pytest.mark.parametrize("workers", [0, 2])
def test_observations_are_stored_with_the_dtype_of_their_space(kind: str, workers: int) -> None:
    with make_envs(resolve("counting:make", {"observation": kind}), 3, workers) as envs:
        rows = play(envs, 2, np.zeros((4, 3), np.int64))
        space = envs.observation
    stored = np.stack([row.obs for row in rows])
    if kind == "discrete":
        assert (space.kind, space.n, space.start, space.dtype) == ("discrete", 1000, 5, "int64")
        assert stored[:, 0].tolist() == [0, 1, 2, 3, 0]  # counted from 0, not from the start of 5
    elif kind == "uint8":
        assert stored.shape == (5, 3, 2, 3)
        assert stored[:, 1, 1, 2].tolist() == [0, 1, 2, 3, 0]
        assert space.dtype == "uint8"
        assert space.high is not None
        assert (space.high == 255).all()
    else:
        assert stored.dtype == np.float32
        assert stored[:, 2, 2].tolist() == [0, 1, 2, 3, 0]


def test_actions_are_passed_to_the_env_in_its_own_space() -> None:
    for kind, sent, expected in [
        ("shifted", np.array([0]), np.int64(-1)),
        ("box", np.array([[0.5, -1.0]], np.float32), np.array([0.5, -1.0], np.float32)),
        ("unbounded", np.array([[0.5, 9.0]], np.float32), np.array([0.5, 9.0], np.float64)),
    ]:
        with LocalEnvs(resolve("counting:make", {"action": kind}), 1) as envs:
            play(envs, 1, sent[None])
            (taken,) = envs._env_groups[0].envs[0]._env.taken
        assert np.array_equal(taken, expected)
        assert taken.dtype == expected.dtype


@pytest.mark.parametrize("slots", [1, 2])
def test_local_and_pooled_envs_are_bit_equal_on_cartpole(slots: int) -> None:
    actions = np.random.default_rng(1).integers(0, 2, (120, 4))
    found = []
    for workers in (0, 1, 2):
        with make_envs(resolve("CartPole-v1"), 4, workers, slots) as envs:
            rows = play(envs, 5, actions)
            found.append((rows, envs.episodes()))
    for rows, episodes in found[1:]:
        for mine, theirs in zip(found[0][0], rows, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert episodes == found[0][1]
        assert len(episodes) >= 8


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_seeds_repeat_and_different_seeds_do_not(workers: int) -> None:
    actions = np.ones((10, 4), np.int64)
    with make_envs(resolve("CartPole-v1"), 4, workers) as envs:
        first, again, other = play(envs, 5, actions), play(envs, 5, actions), play(envs, 6, actions)
    assert all(np.array_equal(a.obs, b.obs) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].obs, other[0].obs)
    assert len({row.tobytes() for row in first[0].obs}) == 4  # every env has another first observation


@pytest.mark.parametrize("workers", [0, 2])
def test_warm_up_decorrelates_and_counts_its_steps(workers: int) -> None:
    spec = resolve("counting:make", {"lengths": [1000], "ends": "terminate"})
    with make_envs(spec, 8, workers) as envs:
        taken = envs.reset(3, warm_up=50)
        _, step = envs.recv()
        steps = step.obs[:, 2].copy()
        assert steps.sum() == taken
        assert len(set(steps.tolist())) > 3
        assert steps.max() <= 50
        assert not step.mask.any()
        assert not step.reward.any()
        envs.send(0, np.zeros(8, np.int64))
        _, step = envs.recv()
        assert (step.obs[:, 2] == steps + 1).all()
        assert step.mask.all()
        assert envs.reset(3, warm_up=50) == taken


@pytest.mark.parametrize("workers", [0, 2])
def test_warm_up_episodes_are_not_reported_and_the_running_one_is_complete(workers: int) -> None:
    spec = resolve("counting:make", {"lengths": [4], "ends": "truncate"})
    with make_envs(spec, 4, workers) as envs:
        assert envs.reset(3, warm_up=30) > 16
        envs.recv()
        assert envs.episodes() == []
        seen: list[Any] = []
        for _ in range(4):
            envs.send(0, np.zeros(4, np.int64))
            envs.recv()
            seen += envs.episodes()
        assert sorted(episode.env for episode in seen) == [0, 1, 2, 3]
        assert {episode.values["ep_len"] for episode in seen} == {4.0}


def test_each_seed_of_a_list_is_played_once_and_then_the_env_idles() -> None:
    seeds = [[101, 102], [201], []]
    spec = resolve("counting:make", {"lengths": [2], "ends": "terminate"})
    with LocalEnvs(spec, 3, seeds=seeds) as envs:
        rows = play(envs, 1, np.zeros((9, 3), np.int64))
        episodes = envs.episodes()
        taken = [len(env._env.taken) for env in envs._env_groups[0].envs]
        again = play(envs, 1, np.zeros((9, 3), np.int64))
    assert [row.obs[0, 0] for row in rows] == [101, 101, 101, 102, 102, 102, 102, 102, 102, 102]
    assert [bool(row.mask[0]) for row in rows] == [False, True, True, False, True, True, False, False, False, False]
    assert [row.obs[1].tolist() for row in rows[3:]] == [[201, 1, 2]] * 7  # keeps its last observation
    assert not any(row.mask[2] or row.terminated[2] or row.reward[2] for row in rows)
    assert [episode.env for episode in episodes] == [0, 1, 0]
    assert taken == [4, 2, 0]
    assert [row.obs[0, 0] for row in again] == [row.obs[0, 0] for row in rows]


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_of_episodes_have_known_values(workers: int) -> None:
    spec = resolve("counting:make", {"lengths": list(LENGTHS)})
    with make_envs(spec, 2, workers, gamma=0.5) as envs:
        play(envs, 1, np.full((4, 2), 2))
        first = envs.episodes()
        assert envs.episodes() == []
    assert [episode.env for episode in first] == [0, 1]
    assert dict(first[0].values) == {
        "ep_rew": 101.5 + 102.5 + 103.5,
        "ep_len": 3.0,
        "ep_discounted_rew": 101.5 + 102.5 / 2 + 103.5 / 4,
        "ep_nonzero_rew": 3.0,
        "info/half": 1.5,
        "info/odd": 1.0,
        "info/n": 7.0,
    }


def test_summing_rewards_in_blocks_gives_the_same_statistics() -> None:
    spec = resolve("counting:make", {"lengths": [2500], "ends": "terminate"})
    with LocalEnvs(spec, 1, gamma=0.999) as envs:
        play(envs, 1, np.zeros((2500, 1), np.int64))
        assert len(envs._env_groups[0].envs[0]._rewards) == 0
        (episode,) = envs.episodes()
    rewards = 100.0 + np.arange(1, 2501)
    assert episode.values["ep_len"] == 2500
    assert episode.values["ep_rew"] == rewards.sum()
    assert episode.values["ep_discounted_rew"] == pytest.approx((rewards * 0.999 ** np.arange(2500)).sum(), rel=1e-12)


def test_statistics_too_long_for_shared_memory_are_received() -> None:
    spec, found = resolve("counting:make", {"lengths": list(LENGTHS), "chatter": 400}), []
    for workers, slots in [(0, 2), (2, 2), (1, 1)]:
        with make_envs(spec, 4, workers, slots) as envs:
            play(envs, 1, np.zeros((20, 4), np.int64))
            found.append(sorted((episode.env, *episode.values.items()) for episode in envs.episodes()))
    assert len(found[0]) > 12
    assert len(found[0][0]) == 1 + 7 + 400
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stats", ["counting:Peaks", counting.Peaks])
def test_user_statistics_are_reported(workers: int, stats: Any) -> None:
    with make_envs(resolve("counting:make"), 2, workers, stats=stats) as envs:
        play(envs, 1, np.zeros((9, 2), np.int64))
        episodes = envs.episodes()
    values = [episode.values for episode in episodes if episode.env == 1]
    assert [(each["peak"], each["last_step"], each["ep_len"]) for each in values] == [(103, 3, 3), (205, 5, 5)]
    assert not {"name", "_hidden"} & set(values[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_end_for_the_learner_only_does_not_end_the_episode(workers: int) -> None:
    # 3 lives of 2 steps: the first row, then 2 steps and a reset row for each life.
    spec = resolve("counting:make_lives")
    with make_envs(spec, 2, workers) as envs:
        rows = play(envs, 1, np.zeros((17, 2), np.int64))
        episodes = envs.episodes()
    seen = [(*row.obs[1].astype(int).tolist(), bool(row.terminated[1]), bool(row.mask[1])) for row in rows[:11]]
    assert seen == [
        (1, 0, 0, False, False),
        (1, 0, 1, False, True),
        (1, 1, 2, True, True),
        (1, 1, 2, False, False),  # a reset row in which the game continues
        (1, 1, 3, False, True),
        (1, 2, 4, True, True),
        (1, 2, 4, False, False),
        (1, 2, 5, False, True),
        (1, 3, 6, True, True),  # the game is over
        (2, 0, 0, False, False),
        (2, 0, 1, False, True),
    ]
    assert [(episode.env, episode.values["ep_rew"], episode.values["ep_len"]) for episode in episodes] == [
        (0, 6, 6),
        (1, 6, 6),
        (0, 6, 6),
        (1, 6, 6),
    ]
    assert "info/episode_continues" not in episodes[0].values
    assert episodes[0].values["info/lives"] == 0


def test_continued_game_uses_no_seed() -> None:
    spec = resolve("counting:make_lives", {"lives": 2})
    with LocalEnvs(spec, 1, seeds=[[7, 8]]) as envs:
        play(envs, 1, np.zeros((14, 1), np.int64))
        assert [episode.values["ep_len"] for episode in envs.episodes()] == [4, 4]
        assert envs._env_groups[0].envs[0]._env.seeds == [7, None, 8, None]
    with LocalEnvs(spec, 1, levels=[5]) as envs:
        play(envs, 1, np.zeros((10, 1), np.int64))
        assert envs._env_groups[0].envs[0]._env.seeds == [5, None, 5, None]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_training_uses_only_the_seeds_in_levels(workers: int) -> None:
    levels = [3, 14, 15, 92]
    spec = resolve("counting:make", {"lengths": [1]})
    with start(spec, 6, workers, 1 + workers % 2, levels=levels) as envs:
        markers = np.stack([row.obs[:, 0] for row in play(envs, 4, np.zeros((80, 6), np.int64))]).astype(int)
        again = np.stack([row.obs[:, 0] for row in play(envs, 5, np.zeros((80, 6), np.int64))]).astype(int)
    for index in range(6):  # every episode has two rows: its first and its only step
        for t in range(81):
            expected = levels[derive_seed(4, index, 0, t // 2) % 4]
            assert markers[t, index] == expected, (t, index)
    assert set(markers.reshape(-1).tolist()) == set(levels)
    assert (markers != again).any()


def test_levels_are_drawn_again_after_a_failure() -> None:
    with LocalEnvs(
        resolve("counting:make", {"fault": "raise", "at": 4, "lengths": [100]}), 1, levels=[5, 6, 7]
    ) as envs:
        rows = play(envs, 1, np.zeros((17, 1), np.int64))
        assert envs.restarts() == 4
    seen = [int(row.obs[0, 0]) for row in rows]
    assert seen == [[5, 6, 7][derive_seed(1, 0, t // 4, 0) % 3] for t in range(18)]


def held_rows(workers: int, slots: int) -> list[Any]:
    """Return [obs, reward, ended, mask, half] of 4 envs: after a reset, 8 held sends, a renewal and 4 sends.

    The last send is not held.
    """
    width, seen = 4 // slots, []
    with start(resolve("counting:make", {"lengths": list(LENGTHS)}), 4, workers, slots, info=["half"]) as envs:
        envs.reset(2)
        for t in range(14):
            for _ in range(slots):
                slot, step = envs.recv()
                fields = (step.obs, step.reward, step.terminated | step.truncated, step.mask, envs.info(slot)["half"])
                seen.append([np.array(field) for field in fields])
                if t == 8:
                    envs.renew(slot)
                else:
                    envs.send(slot, np.zeros(width, np.int64), hold=t != 12)
        envs.recv()
    return seen


def test_held_envs_wait_for_renewal() -> None:
    rows = held_rows(0, 1)
    assert [row[0][1, 1:].tolist() for row in rows] == [
        *([1.0, step] for step in (0, 1, 2, 3)),
        *[[1.0, 3.0]] * 5,  # held with its last observation
        *([2.0, step] for step in (0, 1, 2, 3)),  # renewed; the second episode has 5 steps
        [2.0, 4.0],
    ]
    assert [bool(row[3][1]) for row in rows] == [False] + [True] * 3 + [False] * 6 + [True] * 4
    assert [bool(row[2][1]) for row in rows] == [t == 3 for t in range(14)]
    assert [float(row[1][1]) for row in rows][3:10] == [103.0, 0, 0, 0, 0, 0, 0]
    assert np.array_equal([row[4][1] for row in rows][:5], [np.nan, 0.5, 1, 1.5, np.nan], equal_nan=True)


def test_renewal_does_not_change_running_envs() -> None:
    with LocalEnvs(resolve("counting:make", {"lengths": [9, 2]}), 1) as envs:
        envs.reset(1)
        envs.recv()
        for t in range(4):
            envs.send(0, np.zeros(1, np.int64), hold=True)
            _, step = envs.recv()
            envs.renew(0)
            _, step = envs.recv()
            assert (step.obs[0, 1:].tolist(), step.reward[0], step.mask[0]) == ([1, t + 1], 0, False)
        assert envs.episodes() == []


@pytest.mark.parametrize(("workers", "slots"), [(0, 2), (1, 1), (2, 1), (2, 2)])
def test_hold_is_the_same_in_every_backend(workers: int, slots: int) -> None:
    expected, found = held_rows(0, 1), held_rows(workers, slots)
    for t, row in enumerate(expected):
        parts = found[t * slots : (t + 1) * slots]
        for field, mine in enumerate(row):
            assert np.array_equal(mine, np.concatenate([part[field] for part in parts]), equal_nan=True)


def test_env_that_fails_while_held_waits_for_renewal(tmp_path: Any) -> None:
    kwargs = {"fault": "raise", "at": 2, "once": str(tmp_path / "done"), "lengths": [3]}
    with LocalEnvs(resolve("counting:make", kwargs), 1) as envs:
        envs.reset(1)
        rows = []
        for t in range(7):
            _, step = envs.recv()
            rows.append((*step.obs[0].astype(int).tolist(), bool(step.mask[0])))
            if t == 3:
                envs.renew(0)
            else:
                envs.send(0, np.zeros(1, np.int64), hold=True)
        assert envs.restarts() == 1
    first, second = derive_seed(1, 0, 0) % 1000, derive_seed(1, 0, 1) % 1000
    assert rows == [
        (first, 1, 0, False),
        (first, 1, 1, True),
        (first, 1, 1, False),  # it raised, which counts as an end
        (first, 1, 1, False),
        (second, 1, 0, False),
        (second, 1, 1, True),
        (second, 1, 2, True),
    ]


@pytest.mark.parametrize(("workers", "slots"), [(0, 1), (2, 2)])
def test_requested_entries_of_info_are_returned(workers: int, slots: int) -> None:
    names = ["half", "odd", "n", "name", "nan", "lost"]
    with start(resolve("counting:make", {"lengths": [3]}), 4, workers, slots, info=names) as envs:
        envs.reset(1)
        for t in range(6):
            for _ in range(slots):
                slot, _ = envs.recv()
                info = envs.info(slot)
                assert list(info) == names
                assert all(array.shape == (4 // slots,) and array.dtype == np.float64 for array in info.values())
                step = t % 4
                known = [step / 2, step % 2, 7] if step else [np.nan] * 3  # the first row's info is empty
                for name, value in zip(names, [*known, np.nan, np.nan, np.nan], strict=True):
                    assert np.array_equal(info[name], np.full(4 // slots, value), equal_nan=True), (name, t)
                envs.send(slot, np.zeros(4 // slots, np.int64))
    with LocalEnvs(resolve("counting:make"), 1) as envs:
        assert envs.info(0) == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_actions_may_be_overwritten_once_sent(workers: int) -> None:
    with make_envs(resolve("counting:make"), 2, workers) as envs:
        envs.reset(1)
        envs.recv()
        actions = np.array([1, 2])
        envs.send(0, actions)
        actions[:] = 3
        _, step = envs.recv()
        assert step.reward.tolist() == [101.25, 101.5]


def test_calls_out_of_order_are_refused() -> None:
    with make_envs(resolve("counting:make"), 4, 2, slots=2) as envs:
        with pytest.raises(RuntimeError, match="without a send"):
            envs.recv()
        envs.reset(1)
        with pytest.raises(RuntimeError, match="slot 1 has not been received"):
            envs.send(1, np.zeros(2, np.int64))
        envs.recv()
        with pytest.raises(ValueError, match=r"shape \(1,\), this slot takes \(2,\)"):
            envs.send(0, np.zeros(1, np.int64))
        with pytest.raises(ValueError, match="actions have dtype float64, this slot takes integers"):
            envs.send(0, np.array([0.6, 1.4]))
        envs.send(0, np.zeros(2, np.int64))
        envs.reset(1)  # discards the steps in flight
        assert [envs.recv()[0], envs.recv()[0]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_envs": 5, "slots": 2}, "envs=5 does not divide by slots=2: use 4."),
        ({"num_envs": 0}, "envs=0 in slots=1: both are at least 1."),
        ({"num_envs": 4, "slots": 2, "num_workers": 3}, "workers=3 for 2 envs per slot"),
        ({"num_envs": 4, "num_workers": -1}, "workers=-1: use 0"),
        ({"num_envs": 2, "seeds": [[1]]}, "seeds has 1 lists for envs=2"),
        ({"num_envs": 2, "num_workers": 1, "seeds": [[1]]}, "seeds has 1 lists for envs=2"),
        ({"num_envs": 2, "stats": "counting"}, "not an import path"),
        ({"num_envs": 2, "stats": "counting:make"}, "derive it from EpisodeStats"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_envs(resolve("counting:make"), **arguments)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"seeds": [[1]], "levels": [1]}, "levels and seeds were both given"),
        ({"levels": []}, "levels=[] of env seeds: give at least one"),
        ({"levels": [-1]}, "levels=[-1] of env seeds"),
        ({"info": "speed"}, "info='speed' is not a list of different names"),
        ({"info": ["x", "x"]}, "info=['x', 'x'] is not a list of different names"),
    ],
)
def test_invalid_options_are_refused(workers: int, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(resolve("counting:make"), 1, workers, **arguments)
    assert sentence in str(caught.value)
