"""What one peer contributes: gradients that it holds until an update has counted them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from remuda.rpc.core.messages import Header


class Held(msgspec.Struct, frozen=True):
    """The sum of consecutive contributions of one peer."""

    gradient: Any  # anything that supports `+`; it must not change any more
    samples: int
    gradients: int  # number of contributions
    last: int  # sequence number of the newest contribution

    def after(self, earlier: Held | None) -> Held:
        """Return the sum of `earlier` and this."""
        if earlier is None:
            return self
        samples, gradients = earlier.samples + self.samples, earlier.gradients + self.gradients
        return Held(earlier.gradient + self.gradient, samples, gradients, self.last)


class Contributions:
    """The contributions of one peer that no committed update has counted yet."""

    def __init__(self) -> None:
        self.sequence = 0  # number of the newest contribution
        self.confirmed = 0  # number of the newest contribution that the leader has confirmed, or that was cut
        self.open: Held | None = None  # the sum of contributions that were not part of any reduction
        self.reducing: dict[int, Held] = {}  # by version: part of a reduction of this epoch
        self.returned: list[Held] = []  # parts of reductions of earlier epochs, which may still be counted

    def copy(self) -> Contributions:
        copy = Contributions()
        copy.sequence, copy.confirmed, copy.open = self.sequence, self.confirmed, self.open
        copy.reducing, copy.returned = dict(self.reducing), list(self.returned)
        return copy

    def key(self) -> tuple[object, ...]:
        """Return all values, as a tuple that can be hashed."""
        reducing = tuple(sorted(self.reducing.items()))
        return (self.sequence, self.confirmed, self.open, reducing, tuple(self.returned))

    def add(self, gradient: object, samples: int) -> None:
        self.sequence += 1
        self.open = Held(gradient, samples, 1, self.sequence).after(self.open)

    def next(self) -> Held | None:
        """Return what the next update gets: contributions that were returned go first, one for each update."""
        return self.returned[0] if self.returned else self.open

    def cut(self, version: int) -> Held | None:
        """Return what update `version` gets, and expect it to be counted."""
        held = self.next()
        if self.returned:
            del self.returned[0]
        else:
            self.open = None
        if held is not None:
            self.reducing[version] = held
        return held

    def abandon(self) -> None:
        """Take back what reductions of this epoch were given, because the epoch has ended."""
        self.returned += [self.reducing[version] for version in sorted(self.reducing)]
        self.reducing = {}

    def drop_counted(self, peer: str, counted: Mapping[str, int], prepared: Iterable[Header]) -> None:
        """Forget returned contributions that a committed or prepared result has counted."""
        last = max([counted.get(peer, 0), *(dict(header.counted).get(peer, 0) for header in prepared)])
        self.returned = [held for held in self.returned if held.last > last]
