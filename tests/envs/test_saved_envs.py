"""Envs that are saved between two rollouts and restored in other envs: all later rows are bit-equal."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from remuda.data.packing import pack, unpack
from remuda.envs import make_envs, probe, resolve
from remuda.envs.check import examine
from remuda.envs.episodes import EpisodeStats
from remuda.envs.previous import WithPrevious
from remuda.errors import NoState

NUM_ENVS = 4


class Odd(EpisodeStats):
    """Statistics that have state."""

    def __init__(self) -> None:
        self.odd_steps = 0

    def step(self, obs: Any, action: Any, reward: float, info: Any) -> None:
        self.odd_steps += int(action) % 2


class Unsavable(EpisodeStats):
    def __init__(self) -> None:
        self.seen = object()


def play(envs: Any, steps: int, seed: int, hold: bool = False) -> bytes:
    """Return rows and episodes of `steps` random steps; the first call is a send, the last a recv."""
    draw = np.random.default_rng(seed)
    per_slot = envs.num_envs // envs.num_slots
    seen: list[Any] = []
    for _ in range(steps):
        for slot in range(envs.num_slots):
            envs.send(slot, draw.integers(0, envs.action.n, per_slot), hold)
        for _ in range(envs.num_slots):
            slot, step = envs.recv()
            obs = tuple(np.array(each) for each in step.obs) if isinstance(step.obs, tuple) else np.array(step.obs)
            seen.append((slot, obs, *(np.array(field) for field in tuple(step)[1:])))
    seen.append(sorted((episode.env, sorted(episode.values.items())) for episode in envs.episodes()))
    return pack(seen)


def start(name: str, workers: int, slots: int, stats: Any = None, previous: bool = False) -> Any:
    envs: Any = make_envs(resolve(name), NUM_ENVS, workers, slots, stats=stats, backend="python")
    return WithPrevious(envs, action=True, reward=True) if previous else envs


def begin(envs: Any, seed: int) -> Any:
    envs.reset(seed=seed)
    for _ in range(envs.num_slots):
        envs.recv()
    return envs


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("workers", "workers_then"), [(0, 0), (2, 2), (2, 0), (0, 1)])
def test_rows_and_statistics_continue_after_restoring(
    workers: int, workers_then: int, slots: int, previous: bool
) -> None:
    stats = f"{__name__}:Odd"
    envs = begin(start("CartPole-v1", workers, slots, stats, previous), seed=3)
    others = begin(start("CartPole-v1", workers_then, slots, stats, previous), seed=8)
    try:
        play(envs, 70, seed=1)
        state = pack(envs.get_state())
        expected = play(envs, 90, seed=2)
        play(others, 11, seed=5)
        others.set_state(unpack(state))
        assert play(others, 90, seed=2) == expected
        assert others.restarts() == envs.restarts()
    finally:
        envs.close()
        others.close()


def test_state_can_be_set_in_envs_that_were_never_reset() -> None:
    with start("CartPole-v1", 0, 1) as envs, start("CartPole-v1", 2, 1) as others:
        begin(envs, seed=3)
        play(envs, 30, seed=1)
        others.set_state(envs.get_state())
        assert play(others, 60, seed=2) == play(envs, 60, seed=2)


def test_saving_changes_nothing() -> None:
    with start("CartPole-v1", 2, 1) as envs, start("CartPole-v1", 2, 1) as others:
        begin(envs, seed=3)
        begin(others, seed=3)
        for turn in range(20):
            envs.get_state()
            assert play(envs, 3, seed=turn) == play(others, 3, seed=turn)


@pytest.mark.parametrize("steps", [12, 20, 60])
def test_held_envs_are_restored_as_held(steps: int) -> None:
    """The other envs keep their last observation, also when restored in new envs."""
    with start("CartPole-v1", 0, 1) as envs, start("CartPole-v1", 2, 1) as others:
        begin(envs, seed=3)
        play(envs, steps, seed=1, hold=True)
        others.set_state(envs.get_state())
        for each in (envs, others):
            each.renew(0)
        first, second = (each.recv()[1] for each in (envs, others))
        assert first.obs.tobytes() == second.obs.tobytes()
        assert play(others, 60, seed=2) == play(envs, 60, seed=2)


def test_rewards_of_long_episodes_are_summed_in_the_same_blocks() -> None:
    name, kwargs = "Remuda/Mock-v0", {"length": 2500, "reward": 0.1}
    envs, others = (make_envs(resolve(name, kwargs), 2) for _ in range(2))
    begin(envs, seed=0)
    play(envs, 1000, seed=0)
    others.set_state(unpack(pack(envs.get_state())))
    assert play(others, 1600, seed=1) == play(envs, 1600, seed=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_what_cannot_be_saved(workers: int) -> None:
    with start("MiniGrid-Empty-5x5-v0", workers, 1) as envs:
        begin(envs, seed=0)
        with pytest.raises(NoState, match="EmptyEnv has no get_state"):
            envs.get_state()
    with start("CartPole-v1", workers, 1, f"{__name__}:Unsavable") as envs:
        begin(envs, seed=0)
        with pytest.raises(NoState, match="CartPole-v1: a object is neither"):
            envs.get_state()


def test_native_envs_cannot_be_saved() -> None:
    with make_envs(resolve("CartPole-v1"), 2, backend="gymnasium") as envs:
        for ask in (envs.get_state, lambda: envs.set_state({})):
            with pytest.raises(NoState, match="native envs"):
                ask()


class Global(gymnasium.Env):
    """Draws from numpy's global generator, which envs should not do."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.random.random(1), {}

    def step(self, action: int) -> Any:
        return np.random.random(1), 0.0, False, False, {}

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


def test_global_generators_of_workers_are_restored() -> None:
    envs, others = (make_envs(resolve(f"{__name__}:Global"), NUM_ENVS, 2) for _ in range(2))
    with envs, others:
        begin(envs, seed=1)
        begin(others, seed=2)
        others.set_state(envs.get_state())
        assert play(others, 5, seed=0) == play(envs, 5, seed=0)


class Forgetful(Global):
    """Has the two methods, but its state is incomplete."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0.0
        return np.zeros(1), {}

    def step(self, action: int) -> Any:
        self.count += 0.001
        return np.array([self.count]), 0.0, False, False, {}

    def set_state(self, state: None) -> None:
        self.count = 0.0


def test_examine_reports_how_runs_are_resumed() -> None:
    assert examine(resolve("CartPole-v1"), seconds=0.01).resume == "exactly, its state is saved"
    grid = examine(resolve("MiniGrid-Empty-5x5-v0"), seconds=0.01)
    assert (
        grid.resume
        == "with new episodes, because its state cannot be saved (EmptyEnv has no get_state() and set_state())"
    )
    assert not grid.problems


def test_examine_detects_an_incomplete_state() -> None:
    report = examine(resolve(f"{__name__}:Forgetful"), seconds=0.01)
    assert any("continued differently: let get_state() return all that changes" in text for text in report.problems)


class Unrelated(Forgetful):
    """Has a method with the name get_state and another meaning."""

    def get_state(self, agent_id: int) -> int:  # type: ignore[override]
        return agent_id


def test_unrelated_get_state_method_is_not_used() -> None:
    assert str(probe(resolve(f"{__name__}:Unrelated")).no_state).startswith(
        "its state could not be taken and put back"
    )
    assert probe(resolve("CartPole-v1")).no_state is None


def test_envs_that_were_never_reset_can_be_saved() -> None:
    """The envs of a worker that has just been replaced wait for their first reset."""
    with start("ALE/Breakout-v5", 2, 1) as envs, start("ALE/Breakout-v5", 2, 1) as others:
        begin(envs, seed=1)
        os.kill(envs.inspect_workers()[0]["pid"], signal.SIGKILL)
        time.sleep(0.1)
        others.set_state(envs.get_state())
        assert play(others, 5, seed=0) == play(envs, 5, seed=0)
        assert others.restarts() == envs.restarts() == NUM_ENVS // 2
