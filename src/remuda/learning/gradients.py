"""`Gradients`: the result of the gradient step (G) and the input of the update (U)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Pieces: TypeAlias = tuple[Tensor, ...]  # consecutive parts of one vector, in the order of a group's parameters


@dataclass(frozen=True)
class Gradients:
    """The gradient of one batch for each parameter group.

    Autograd returns one piece for each parameter; concatenating them here would cost a copy of all gradients.
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


LARGE, ROWS = 1 << 18, 8  # a piece of at least LARGE numbers is divided into ROWS rows, for several threads


def norm(pieces: Pieces) -> float:
    """Return the norm of all pieces together."""
    norms: list[Tensor] = []
    small = [piece for piece in pieces if not is_large(piece)]
    if small:
        norms += torch._foreach_norm(small)
    for piece in pieces:
        if is_large(piece):  # torch uses one thread for the norm of a vector, and several for the norms of rows
            norms += torch.linalg.vector_norm(piece.view(ROWS, -1), dim=1).unbind()
    return float(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))


def is_large(piece: Tensor) -> bool:
    return len(piece) >= LARGE and len(piece) % ROWS == 0
