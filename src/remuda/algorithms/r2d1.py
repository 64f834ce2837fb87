"""R2D1: recurrent deep Q-learning, the non-distributed form of R2D2 (OpenReview r1lyTjAqYX).

Sequences start from the recurrent state that was stored while sampling; the burn-in rows bring this state up to date
with the current weights. Values are learned on a compressed scale (`maths.rescale`). The priority of a sequence is a
mixture of its largest and its mean error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from remuda.agents import QAgent
from remuda.algorithms.dqn import DQN
from remuda.algorithms.off_policy import Rows
from remuda.maths import rescale, unscale


class R2D1(DQN):
    """DQN on sequences, with values on a compressed scale if `rescaled`."""

    def __init__(self, agent: QAgent, seed: int, *, rescaled: bool = True, eta: float = 0.9, **options: Any) -> None:
        super().__init__(agent, seed, **options)
        self.rescaled, self.eta = rescaled, eta

    def target_value(self, rows: Rows, next_q: Tensor) -> Tensor:
        if not self.rescaled:
            return super().target_value(rows, next_q)
        return rescale(rows.reward + rows.discount * unscale(next_q))
