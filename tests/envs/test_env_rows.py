"""Every row that envs answer, against rows computed by hand; in this process and in workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import counting
import numpy as np
import pytest

from remuda.core import Step, env_seed
from remuda.envs import LocalEnvs, make_envs, resolve
from remuda.errors import ConfigError

LENGTHS = (3, 5, 2)
# workers, slots, buffers reused; 10 envs in slots of 10 or 5 are shared out unevenly by 2 or 3 workers
BACKENDS = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (3, 1, 0), (2, 2, 1), (3, 2, 0)]


def rows_by_hand(seed: int, index: int, actions: list[int]) -> Iterator[tuple[Any, ...]]:
    """obs, reward, terminated, truncated, mask of one CountingEnv, from the definition alone."""
    marker, episode, step = env_seed(seed, index, 0) % 1000, 1, 0
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
    """Rows [T + 1] of all envs, whatever the slots; actions is [T, B]."""
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
def test_rows_are_those_computed_by_hand(workers: int, slots: int, reuse_buffer: int) -> None:
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
def test_other_observations_are_stored_as_their_space_says(kind: str, workers: int) -> None:
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


def test_actions_reach_the_env_as_its_space_says() -> None:
    for kind, sent, expected in [
        ("shifted", np.array([0]), np.int64(-1)),
        ("box", np.array([[0.5, -1.0]], np.float32), np.array([0.5, -1.0], np.float32)),
        ("unbounded", np.array([[0.5, 9.0]], np.float32), np.array([0.5, 9.0], np.float64)),
    ]:
        with LocalEnvs(resolve("counting:make", {"action": kind}), 1) as envs:
            play(envs, 1, sent[None])
            (taken,) = envs._lanes[0].envs[0]._env.taken
        assert np.array_equal(taken, expected)
        assert taken.dtype == expected.dtype


@pytest.mark.parametrize("slots", [1, 2])
def test_both_backends_agree_on_cartpole_bit_by_bit(slots: int) -> None:
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
def test_the_same_seed_repeats_and_another_does_not(workers: int) -> None:
    actions = np.ones((10, 4), np.int64)
    with make_envs(resolve("CartPole-v1"), 4, workers) as envs:
        first, again, other = play(envs, 5, actions), play(envs, 5, actions), play(envs, 6, actions)
    assert all(np.array_equal(a.obs, b.obs) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].obs, other[0].obs)
    assert len({row.tobytes() for row in first[0].obs}) == 4  # every env begins elsewhere


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
def test_warm_up_episodes_are_not_reported_but_the_running_one_counts_whole(workers: int) -> None:
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


def test_lists_of_seeds_are_played_once_and_then_the_env_idles() -> None:
    seeds = [[101, 102], [201], []]
    spec = resolve("counting:make", {"lengths": [2], "ends": "terminate"})
    with LocalEnvs(spec, 3, seeds=seeds) as envs:
        rows = play(envs, 1, np.zeros((9, 3), np.int64))
        episodes = envs.episodes()
        taken = [len(env._env.taken) for env in envs._lanes[0].envs]
        again = play(envs, 1, np.zeros((9, 3), np.int64))
    assert [row.obs[0, 0] for row in rows] == [101, 101, 101, 102, 102, 102, 102, 102, 102, 102]
    assert [bool(row.mask[0]) for row in rows] == [False, True, True, False, True, True, False, False, False, False]
    assert [row.obs[1].tolist() for row in rows[3:]] == [[201, 1, 2]] * 7  # keeps its last observation
    assert not any(row.mask[2] or row.terminated[2] or row.reward[2] for row in rows)
    assert [episode.env for episode in episodes] == [0, 1, 0]
    assert taken == [4, 2, 0]
    assert [row.obs[0, 0] for row in again] == [row.obs[0, 0] for row in rows]


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_of_episodes_by_hand(workers: int) -> None:
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


def test_long_episodes_are_folded_without_a_difference() -> None:
    spec = resolve("counting:make", {"lengths": [2500], "ends": "terminate"})
    with LocalEnvs(spec, 1, gamma=0.999) as envs:
        play(envs, 1, np.zeros((2500, 1), np.int64))
        assert len(envs._lanes[0].envs[0]._rewards) == 0
        (episode,) = envs.episodes()
    rewards = 100.0 + np.arange(1, 2501)
    assert episode.values["ep_len"] == 2500
    assert episode.values["ep_rew"] == rewards.sum()
    assert episode.values["ep_discounted_rew"] == pytest.approx((rewards * 0.999 ** np.arange(2500)).sum(), rel=1e-12)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stats", ["counting:Peaks", counting.Peaks])
def test_a_users_own_statistics(workers: int, stats: Any) -> None:
    with make_envs(resolve("counting:make"), 2, workers, stats=stats) as envs:
        play(envs, 1, np.zeros((9, 2), np.int64))
        episodes = envs.episodes()
    values = [episode.values for episode in episodes if episode.env == 1]
    assert [(each["peak"], each["last_step"], each["ep_len"]) for each in values] == [(103, 3, 3), (205, 5, 5)]
    assert not {"name", "_hidden"} & set(values[0])


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
        envs.send(0, np.zeros(2, np.int64))
        envs.reset(1)  # what was under way is given up
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
def test_arguments_that_do_not_fit(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_envs(resolve("counting:make"), **arguments)
    assert sentence in str(caught.value)
