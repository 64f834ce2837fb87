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
    while_waiting: Callable[[], object]  # called about every 20 ms during a wait; may raise an error

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order; that of this rank is `message`."""

    def vector(self, length: int) -> Tensor:
        """Return a float32 vector of this length, into which the caller writes this rank's numbers for `sum`.

        All ranks must pass the same `length`. The next operation must be `sum`.
        """

    def sum(self) -> Tensor:
        """Return the sum of the vectors of all ranks; it is valid until the next call of `sum`."""

    def late(self) -> str:
        """Return a phrase that names the ranks for which this rank is waiting."""

    def close(self) -> None: ...
