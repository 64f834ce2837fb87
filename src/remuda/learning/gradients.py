"""`Gradients`: the result of `Learner.gradients` and the input of `Learner.apply`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Pieces: TypeAlias = tuple[Tensor, ...]  # consecutive parts of one vector, in the order of a group's parameters


@dataclass(frozen=True)
class Gradients:
    """The gradient of one batch for each parameter group, as a tuple of pieces.

    Autograd returns one piece for each parameter; concatenating the pieces would cost a copy of all gradients.
    """

    pieces: dict[str, Pieces]
    version: int  # version of the parameters from which the gradients were computed
    metrics: dict[str, Tensor | float]
    priority: Tensor | None
    stop: bool

    @property
    def groups(self) -> dict[str, Tensor]:
        """The gradient of each group as one vector."""
        return {name: torch.cat(pieces) for name, pieces in self.pieces.items()}
