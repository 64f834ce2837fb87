"""R2D1: deep Q-learning with memory, after R2D2 (OpenReview r1lyTjAqYX), on as many machines as there are.

Sequences start from the state that the acting agent had there; a burn-in brings it up to date with the weights of
today. Values are learned on a compressed scale, and a sequence is drawn in proportion to a mixture of its largest and
its mean error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from remuda.agents import QAgent
from remuda.algorithms.dqn import DQN
from remuda.algorithms.off_policy import Rows
from remuda.maths import rescale, unscale


class R2D1(DQN):
    """Sequences in place of rows."""

    def __init__(self, agent: QAgent, seed: int, *, rescaled: bool = True, eta: float = 0.9, **options: Any) -> None:
        super().__init__(agent, seed, **options)
        self.rescaled, self.eta = rescaled, eta

    def target_value(self, rows: Rows, next_q: Tensor) -> Tensor:
        if not self.rescaled:
            return super().target_value(rows, next_q)
        return rescale(rows.reward + rows.discount * unscale(next_q))
