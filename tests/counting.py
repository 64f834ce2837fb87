"""Envs whose every answer is known by hand, and that misbehave when told to.

An observation is [marker, episode, step]: the marker is the last seed modulo 1000, episodes count from 1.
Episode n lasts lengths[(n - 1) % len(lengths)] steps; the reward of a step is 100 * episode + step + action / 4.
Workers find this module as "counting:make".
"""

from __future__ import annotations

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
    """See the module; `ends` is "terminate", "truncate" or "alternate" (odd episodes terminate, even ones do not)."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self,
        lengths: Sequence[int] = (3, 5, 2),
        ends: str = "alternate",
        reuse_buffer: bool = False,
        observation: str = "box",
        action: str = "discrete",
        fault: str | None = None,
        at: int = 0,  # the call of step(), counted over the env's life from 1; 0: reset
        once: str | None = None,  # a file: the fault happens only to whoever creates it
        only: int | None = None,  # the fault happens only to the env with this marker
        raise_step: float = 0.0,
        raise_reset: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        self.lengths, self.ends, self.reuse_buffer, self.fault, self.at = lengths, ends, reuse_buffer, fault, at
        self.once, self.raise_step, self.raise_reset, self.render_mode = once, raise_step, raise_reset, render_mode
        self.kind, self.only = observation, only
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

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.marker = seed % 1000
        self.episode, self.steps = self.episode + 1, 0
        if self.raise_reset and self.np_random.random() < self.raise_reset:
            raise RuntimeError("reset failed by chance")
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
            raise RuntimeError("step failed by chance")
        is_over = self.steps >= self.lengths[(self.episode - 1) % len(self.lengths)]
        is_terminal = self.ends == "terminate" or (self.ends == "alternate" and self.episode % 2 == 1)
        reward = 100.0 * self.episode + self.steps + float(np.sum(action)) / 4
        info = {
            "half": self.steps / 2,
            "odd": bool(self.steps % 2),
            "nan": float("nan"),
            "name": "x",
            "n": np.int64(7),
        }
        answer = (self.observe(), reward, is_over and is_terminal, is_over and not is_terminal, info)
        return self.misbehave(*answer) if self.fault is not None and self.calls == self.at else answer

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
            case "hold":  # a loop in C that never gives other threads a turn
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
                obs = [0.0, 0.0, 0.0]
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
    """Statistics of a user."""

    def __init__(self) -> None:
        self.peak = 0.0
        self.last_step = 0
        self.name = "not a number"
        self._hidden = 1

    def step(self, obs: Any, action: Any, reward: float, info: Any) -> None:
        self.peak = max(self.peak, reward)
        self.last_step = int(obs[2])


class BrokenStats(EpisodeStats):
    """Fails at the third step."""

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
    """Somewhere to be found by a dotted path."""

    @staticmethod
    def make(**kwargs: Any) -> CountingEnv:
        return CountingEnv(**kwargs)

    def bound(self) -> CountingEnv:
        return CountingEnv()
