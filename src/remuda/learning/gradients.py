"""What G hands to U."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Pieces: TypeAlias = tuple[Tensor, ...]  # vectors that make up one, in the order of a group's parameters


@dataclass(frozen=True)
class Gradients:
    """Of one batch, each group's in pieces: autograd leaves one for each parameter, and a copy of all takes time."""

    pieces: dict[str, Pieces]
    version: int  # of the parameters they were computed from
    metrics: dict[str, Tensor | float]
    priority: Tensor | None
    stop: bool

    @property
    def groups(self) -> dict[str, Tensor]:
        """Each group's as one vector."""
        return {name: torch.cat(pieces) for name, pieces in self.pieces.items()}


LARGE, ROWS = 1 << 18, 8  # numbers of a piece that threads had better share, and in how many parts


def norm(pieces: Pieces) -> float:
    """Of all of them together."""
    norms: list[Tensor] = []
    small = [piece for piece in pieces if not is_large(piece)]
    if small:
        norms += torch._foreach_norm(small)
    for piece in pieces:
        if is_large(piece):  # torch takes one thread for the norm of a vector, and several for those of rows
            norms += torch.linalg.vector_norm(piece.view(ROWS, -1), dim=1).unbind()
    return float(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))


def is_large(piece: Tensor) -> bool:
    return len(piece) >= LARGE and len(piece) % ROWS == 0
