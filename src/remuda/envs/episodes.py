"""Statistics of one episode: four that every run has, the numbers of `info`, and whatever a user adds.

    class Falls(EpisodeStats):              # given as stats=Falls, or as "package.module:Falls"
        def __init__(self) -> None:
            self.falls = 0                  # public attributes that are numbers are logged under their name

        def step(self, obs, action, reward, info) -> None:
            self.falls += info["fell"]

One object lives for one episode: from a reset to the first end whose info does not say that the episode continues.
Rewards are only collected while it runs and counted in blocks: appending to a list and counting it there costs 0.1 us
per step, four running sums would cost four times that.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from remuda.envs.import_paths import import_named
from remuda.errors import ConfigError

CONTINUES = "episode_continues"  # true in the info of an end that is the learner's, and not the episode's


class EpisodeStats:
    """Made anew for every episode, without arguments; subclasses need not call this class's methods."""

    ep_rew: float = 0.0
    ep_len: int = 0
    ep_discounted_rew: float = 0.0
    ep_nonzero_rew: int = 0

    def step(self, obs: Any, action: Any, reward: float, info: Mapping[str, Any]) -> None:
        """For subclasses: called after every step, the last one included."""

    def count(self, rewards: list[float], gamma: float) -> None:
        """Take these further rewards into account."""
        if rewards and type(rewards[0]) is not float:
            rewards = np.asarray(rewards, np.float64).reshape(-1).tolist()
        discounted = 0.0
        for reward in reversed(rewards):
            discounted = reward + gamma * discounted
        self.ep_rew += sum(rewards)
        self.ep_discounted_rew += gamma**self.ep_len * discounted
        self.ep_nonzero_rew += len(rewards) - rewards.count(0.0)
        self.ep_len += len(rewards)

    def values(self, info: Mapping[str, Any]) -> dict[str, float]:
        """What is reported of the episode, given the info of its last step.

        Numbers of `info` that are not finite are left out: one of them would spoil every mean they enter.
        """
        values = {
            "ep_rew": self.ep_rew,
            "ep_len": float(self.ep_len),
            "ep_discounted_rew": self.ep_discounted_rew,
            "ep_nonzero_rew": float(self.ep_nonzero_rew),
        }
        for key, value in info.items():
            if key != CONTINUES and is_number(value) and math.isfinite(value):
                values[f"info/{key}"] = float(value)
        for key, value in vars(self).items():
            if not key.startswith("_") and key not in values and is_number(value):
                values[key] = float(value)
        return values


def is_number(value: Any) -> bool:
    return type(value) in (float, int, bool) or isinstance(value, numbers.Real | np.bool_)


def resolve_stats(stats: str | type[EpisodeStats] | None) -> type[EpisodeStats]:
    """The class that was meant: None is EpisodeStats itself, a string is an import path."""
    if stats is None:
        return EpisodeStats
    found: Any = stats
    if isinstance(stats, str):
        found = import_named(stats, "envs.stats")
    if not (isinstance(found, type) and issubclass(found, EpisodeStats)):
        raise ConfigError(f"stats={stats!r} is not a class of episode statistics: derive it from EpisodeStats.")
    return found
