"""The amount of exploration of every env. It is a function of the row number, so checkpoints need not save it.

    explore = Exploration(amount, random_rows=100)
    explore.at(row)                     # [B], passed to Agent.act as `explore`: epsilon for Q-learning
    sampler = EnvSampler(envs, agent, weights, T, seed, explore=explore)

Before row `random_rows`, actions are drawn uniformly from the action space, and the agent's actions are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remuda.core import Space
from remuda.randomness import Purpose
from remuda.sampling.noise import Noise


@dataclass(frozen=True)
class Exploration:
    """How much the envs of a sampler explore, and how many of their first rows have random actions."""

    amount: Callable[[int], Tensor] | None = None  # maps a row number to amounts [B]; None: the agent's default
    random_rows: int = 0

    def at(self, row: int) -> Tensor | None:
        return None if self.amount is None else self.amount(row)

    def columns(self, first: int, last: int) -> Exploration:
        """Return the exploration of the envs `first` to `last - 1`."""
        amount = self.amount
        return Exploration(None if amount is None else lambda row: amount(row)[first:last], self.random_rows)


class RandomActions:
    """Actions drawn uniformly from a Discrete or bounded Box space, for each env and row."""

    def __init__(self, action: Space, seed: int, envs: Sequence[int]) -> None:
        self.action = action
        width = 1 if action.kind == "discrete" else int(np.prod(action.shape))
        self._noise = Noise(seed, envs, [("uniform", width)], Purpose.RANDOM_ACTIONS)

    def rows(self, first: int, count: int) -> NDArray[np.int64] | NDArray[np.float32]:
        """Return random actions for B envs in the `count` rows from row number `first` on.

        The shape is [count, B] for Discrete spaces. For Box spaces it is [count, B, width], because agents return
        flat actions, too.
        """
        uniform = self._noise.rows(first, count).numpy()
        if self.action.kind == "discrete":
            return (uniform[..., 0] * self.action.n).astype(np.int64)
        assert self.action.low is not None
        assert self.action.high is not None
        low, high = self.action.low.reshape(-1), self.action.high.reshape(-1)
        drawn: NDArray[np.float32] = (low + uniform * (high - low)).astype(np.float32)
        return drawn
