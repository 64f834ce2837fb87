"""The interface of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from remuda.collectives.health import Health


class Collective(Protocol):
    """Operations in which all ranks of a run take part; see the package's docstring."""

    rank: int
    size: int  # number of ranks
    health: Health
    while_waiting: Callable[[], object]  # called every few milliseconds during a wait; may raise an error

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in their order."""

    def vector(self, length: int) -> Tensor:
        """Return this rank's vector of float32 numbers for `sum`, which must be the next operation.

        All ranks must ask for the same length.
        """

    def sum(self) -> Tensor:
        """Return the sum of the vectors of all ranks. It is valid until the next call of `sum`."""

    def late(self) -> str:
        """Name the ranks for which this one is waiting."""

    def close(self) -> None: ...
