"""What G hands to U."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """Of one batch."""

    groups: dict[str, Tensor]  # each a vector, in the order of the group's parameters
    version: int  # of the parameters they were computed from
    metrics: dict[str, Tensor | float]
    priority: Tensor | None
    stop: bool
