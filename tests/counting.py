"""Envs with known observations, rewards and episode lengths, which fail on request.

An observation is [marker, episode, step]: the marker is the last seed modulo 1000, and episodes are numbered from 1.
Episode n lasts lengths[(n - 1) % len(lengths)] steps; the reward of a step is 100 * episode + step + action / 4.
Workers find this module as "counting:make".
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np

from remuda.envs import EpisodeStats

FLOATS = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)


class CountingEnv(gymnasium.Env[Any, Any]):
    """The env that the module's docstring describes.

    `ends` is "terminate", "truncate", or "alternate": odd episodes terminate, even episodes are truncated.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self,
        lengths: Sequence[int] = (3, 5, 2),
        ends: str = "alternate",
        reuse_buffer: bool = False,
        observation: str = "box",
        action: str = "discrete",
        fault: str | None = None,
        at: int = 0,  # the call of step() at which the fault happens, counted from 1; 0 for reset()
        once: str | None = None,  # a file; the fault happens only in the env that creates it
        only: int | None = None,  # a marker; the fault happens only in the env that has it
        raise_step: float = 0.0,
        raise_reset: float = 0.0,
        chatter: int = 0,  # the number of additional entries of info
        render_mode: str | None = None,
    ) -> None:
        self.lengths, self.ends, self.reuse_buffer, self.fault, self.at = lengths, ends, reuse_buffer, fault, at
        self.once, self.raise_step, self.raise_reset, self.render_mode = once, raise_step, raise_reset, render_mode
        self.kind, self.only, self.chatter = observation, only, chatter
        self.observation_space = {
            "box": FLOATS,
            "float64": gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "uint8": gymnasium.spaces.Box(0, 255, (2, 3), np.uint8),
            "discrete": gymnasium.spaces.Discrete(1000, start=5),
            "dict": gymnasium.spaces.Dict({"a": FLOATS}),
        }[observation]
        self.action_space = {
            "discrete": gymnasium.spaces.Discrete(4, start=0),
            "shifted": gymnasium.spaces.Discrete(4, start=-1),
            "box": gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32),
            "unbounded": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "multi": gymnasium.spaces.MultiDiscrete([2, 3]),
        }[action]
        self.marker = self.episode = self.steps = self.calls = 0
        self.buffer = np.zeros(3, np.float32)
        self.taken: list[Any] = []

    def get_state(self) -> Any:
        return self.marker, self.episode, self.steps, self.calls

    def set_state(self, state: Any) -> None:
        self.marker, self.episode, self.steps, self.calls = state

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.marker = seed % 1000
        self.episode, self.steps = self.episode + 1, 0
        if self.raise_reset and self.np_random.random() < self.raise_reset:
            raise RuntimeError("reset failed randomly")
        if self.fault is not None and self.at == 0:
            obs, *_ = self.misbehave(self.observe(), 0.0, False, False, {})
            return obs, {}
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        if not self.action_space.contains(action):
            raise AssertionError(f"action {action!r} is not in {self.action_space}")
        self.steps, self.calls = self.steps + 1, self.calls + 1
        if self.raise_step and self.np_random.random() < self.raise_step:
            raise RuntimeError("step failed randomly")
        is_over = self.steps >= self.lengths[(self.episode - 1) % len(self.lengths)]
        is_terminal = self.ends == "terminate" or (self.ends == "alternate" and self.episode % 2 == 1)
        reward = 100.0 * self.episode + self.steps + float(np.sum(action)) / 4
        info = {
            "half": self.steps / 2,
            "odd": bool(self.steps % 2),
            "nan": float("nan"),
            "name": "x",
            "n": np.int64(7),
            **{f"number {index}": index for index in range(self.chatter)},
        }
        result = (self.observe(), reward, is_over and is_terminal, is_over and not is_terminal, info)
        return self.misbehave(*result) if self.fault is not None and self.calls == self.at else result

    def observe(self) -> Any:
        values = (self.marker, self.episode, self.steps)
        if self.kind == "discrete":
            return 5 + self.steps
        if self.kind == "uint8":
            return np.array([values, values], np.int64).astype(np.uint8)
        if self.kind == "float64":
            return np.array(values, np.float64)
        if self.reuse_buffer:
            self.buffer[:] = values
            return self.buffer
        return np.array(values, np.float32)

    def misbehave(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        if self.only is not None and self.only != self.marker:
            return obs, reward, terminated, truncated, info
        if self.once is not None:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return obs, reward, terminated, truncated, info
        match self.fault:
            case "raise":
                raise RuntimeError("told to fail")
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(100)
            case "hold":  # a loop in C that never releases the GIL
                sum(itertools.repeat(1, 10**12))
            case "nan":
                obs[1] = np.nan
            case "infinite":
                obs[2] = np.inf
            case "shape":
                obs = np.zeros(5, np.float32)
            case "dtype":
                obs = obs.astype(np.float64)
            case "list":
                obs = obs.tolist()
            case "overflow":
                obs = np.array([0.0, 1e300, 0.0])
            case "complex":
                obs = obs.astype(np.complex128)
            case "lossy":
                obs = obs * 0.0 + 0.5
            case "beyond":
                obs = obs.astype(np.int64) * 0 + 256
            case "whole":
                obs = obs.astype(np.float64)
            case "wide":
                obs = obs.astype(np.int64)
            case "text":
                obs = ["a", "b", "c"]
            case "range":
                obs = 4
            case "fraction":
                obs = 6.5
            case "nan reward":
                reward = float("nan")
            case "no reward":
                reward = None
            case "long reward":
                reward = np.zeros(2)
            case "flag":
                terminated = "no"
            case "four":
                return obs, reward, terminated, info
            case _:
                raise ValueError(self.fault)
        return obs, reward, terminated, truncated, info

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


class Peaks(EpisodeStats):
    """User-defined statistics, some of which are not logged."""

    def __init__(self) -> None:
        self.peak = 0.0
        self.last_step = 0
        self.name = "not a number"
        self._hidden = 1

    def step(self, obs: Any, action: Any, reward: float, info: Any) -> None:
        self.peak = max(self.peak, reward)
        self.last_step = int(obs[2])


class BrokenStats(EpisodeStats):
    """Statistics that raise at the third step of an episode."""

    calls = 0

    def step(self, obs: Any, action: Any, reward: float, info: Any) -> None:
        if obs[2] == 3:
            raise KeyError("no such key")


def make(**kwargs: Any) -> CountingEnv:
    return CountingEnv(**kwargs)


def make_nothing() -> str:
    return "not an env"


def make_failing() -> CountingEnv:
    raise OSError("no display")


class Outer:
    """A class with env factories, which have no import path of the form module:name."""

    @staticmethod
    def make(**kwargs: Any) -> CountingEnv:
        return CountingEnv(**kwargs)

    def bound(self) -> CountingEnv:
        return CountingEnv()


class LivesEnv(gymnasium.Env[Any, Any]):
    """Games of `lives` lives with `life` steps each. Every lost life terminates an episode, the last one the game.

    An observation is [game, lost lives, step of the game], and every reward is 1. A reset after a lost life continues
    the game, unless it has a seed.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lives: int = 3, life: int = 2) -> None:
        self.lives, self.life = lives, life
        self.game = self.lost = self.steps = 0
        self.continues = False
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        if not self.continues or seed is not None:
            self.game, self.lost, self.steps = self.game + 1, 0, 0
        self.continues = False
        return self.observe(), {"lives": self.lives - self.lost}

    def step(self, action: Any) -> Any:
        self.steps += 1
        is_lost = self.steps % self.life == 0
        self.lost += is_lost
        self.continues = is_lost and self.lost < self.lives
        info = {"lives": self.lives - self.lost, "episode_continues": self.continues}
        return self.observe(), 1.0, is_lost, False, info

    def observe(self) -> Any:
        return np.array([self.game, self.lost, self.steps], np.float32)


class NestedEnv(gymnasium.Env[Any, Any]):
    """An env with every kind of space, whose observation entries encode the step and whose reward sums up the action.

    Each action is checked with `contains` and recorded. Its arrays are then overwritten, because envs may do this.
    """

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Dict(
                {
                    "left": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
                    "right eye": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
                }
            ),
            "gear": gymnasium.spaces.Discrete(50, start=2),
            "switches": gymnasium.spaces.MultiBinary(3),
            "dials": gymnasium.spaces.MultiDiscrete([4, 60], start=[1, -1]),
            "pair": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64), gymnasium.spaces.Discrete(99))
            ),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {
            "move": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Discrete(3, start=-1), gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64))
            ),
            "buttons": gymnasium.spaces.MultiBinary(2),
            "modes": gymnasium.spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[5, 0]),
        }
    )

    def __init__(self, length: int = 4, fault: str | None = None, at: int = 2) -> None:
        self.length, self.fault, self.at = length, fault, at
        self.steps = 0
        self.taken: list[Any] = []
        self.image = np.zeros((2, 2), np.uint8)  # reused, so that a stored view of it would change later

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise AssertionError(f"action {action!r} is not in {self.action_space}")
        if type(action) is not dict or type(action["move"]) is not tuple:
            raise AssertionError(f"action {action!r} is not made of dicts and tuples")
        self.taken.append(copy.deepcopy(action))
        reward = float(action["move"][0] + action["move"][1].sum() + 10 * action["buttons"].sum())
        reward += 100 * float(action["modes"].sum())
        for array in (action["move"][1], action["buttons"], action["modes"]):
            array[...] = 0
        self.steps += 1
        obs = self.observe()
        if self.fault is not None and self.steps == self.at:
            obs = self.break_entry(obs)
        return obs, reward, False, self.steps == self.length, {}

    def observe(self) -> Any:
        self.image[...] = self.steps
        return {
            "camera": {"left": self.image, "right eye": np.full(2, self.steps / 2, np.float32)},
            "gear": self.steps + 2,
            "switches": np.array([self.steps % 2, 0, 1], np.int8),
            "dials": np.array([1 + self.steps % 4, self.steps - 1]),
            "pair": (np.array([self.steps / 4]), np.int64(self.steps)),
        }

    def break_entry(self, obs: Any) -> Any:
        match self.fault:
            case "nan":
                obs["camera"]["right eye"][1] = np.nan
            case "shape":
                obs["camera"]["left"] = np.zeros((2, 3), np.uint8)
            case "dtype":
                obs["camera"]["left"] = np.full((2, 2), -1, np.int16)
            case "range":
                obs["gear"] = 52
            case "dial":
                obs["dials"] = np.array([1, 59])
            case "fraction":
                obs["dials"] = np.array([1.0, 2.0])
            case "switch":
                obs["switches"] = np.array([0, 2, 0], np.int8)
            case "infinite":
                obs["pair"] = (np.array([np.inf]), 1)
            case "missing":
                del obs["gear"]
            case "short":
                obs["pair"] = obs["pair"][:1]
            case "no dict":
                obs["camera"] = obs["camera"]["left"]
            case "no tuple":
                obs["pair"] = 3
        return obs


def make_lives(**kwargs: Any) -> LivesEnv:
    return LivesEnv(**kwargs)


def make_nested(**kwargs: Any) -> NestedEnv:
    return NestedEnv(**kwargs)
