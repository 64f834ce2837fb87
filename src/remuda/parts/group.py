"""The parts of a run, of which one process may hold all or one, and the operations that combine them.

    group = LocalGroup(4)                     # all four parts are in this process
    group = RankGroup(collective)             # this process holds the part whose index is its rank
    totals = group.gather([numbers])          # one value for each part of this process -> the values of all parts
    states = group.call("sampler")            # calls a function that every process has registered with `serve`

Values are plain values and arrays, which data/packing.py can pack. The process that holds part 0 is the *leader*. It
writes the run directory, and decides when the run ends. All others are *followers*: between two rounds they are in
`follow`, which answers the leader's calls until the leader lets the run continue or end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from remuda.collectives import Collective
from remuda.data.packing import pack, unpack
from remuda.errors import WorkerError

Handler = Callable[[Any], Sequence[Any]]  # takes the argument of `call`, and returns one value for each part
CONTINUE, END = "continue", "end"


class Group(Protocol):
    """The parts of a run; see the module's docstring."""

    count: int  # number of parts of the run
    local: range  # parts of this process

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of all parts, in their order; this process passes one for each of its parts."""

    def vectors(self, length: int) -> list[Tensor]:
        """Return a float32 vector for each part of this process, to be written before the next `sum`."""

    def sum(self) -> Tensor:
        """Return the sum of the vectors of all parts, added in their order; it is valid until the next `sum`."""

    def serve(self, name: str, handler: Handler) -> None:
        """Register the function that `call(name)` calls in this process."""

    def call(self, name: str, argument: Any = None) -> list[Any]:
        """Call the functions registered as `name` in all processes, and return one value for each part of the run.

        Only the leader may call this, and only while the others follow.
        """

    def take_lines(self) -> list[str]:
        """Return the lines that this process wants the leader to log, and forget them."""

    def begin_round(self) -> None:
        """Let the followers begin the next round; called in every process before it samples."""

    def is_asked_to_stop(self) -> bool:
        """Return whether a process has asked all others to cut the round short."""

    def ask_to_stop(self) -> None: ...


class LocalGroup:
    """A `Group` whose parts are all in this process."""

    def __init__(self, count: int) -> None:
        self.count, self.local = count, range(count)
        self._handlers: dict[str, Handler] = {}
        self._vectors = torch.zeros(0, 0)
        self._is_asked_to_stop = False

    def gather(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def vectors(self, length: int) -> list[Tensor]:
        if self._vectors.shape != (self.count, length):
            self._vectors = torch.zeros(self.count, length)
        return list(self._vectors)

    def sum(self) -> Tensor:
        total = self._vectors[0].clone()
        for vector in self._vectors[1:]:
            total += vector
        return total

    def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler

    def call(self, name: str, argument: Any = None) -> list[Any]:
        return list(self._handlers[name](argument))

    def take_lines(self) -> list[str]:
        return []

    def begin_round(self) -> None:
        """Do nothing: there are no followers."""

    def is_asked_to_stop(self) -> bool:
        return self._is_asked_to_stop

    def ask_to_stop(self) -> None:
        self._is_asked_to_stop = True


class RankGroup:
    """A `Group` whose parts are the ranks of a collective."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.count, self.local = collective.size, range(collective.rank, collective.rank + 1)
        self._handlers: dict[str, Handler] = {}
        self.lines: list[str] = []  # warnings of a follower, for the log of the leader
        self._has_failed = False
        self._followers_wait = False  # in the leader: whether the followers are in `follow`, or about to be

    @property
    def is_leader(self) -> bool:
        return self.collective.rank == 0

    def gather(self, values: Sequence[Any]) -> list[Any]:
        if self._has_failed:
            raise WorkerError("the ranks of this run have ended.")
        (value,) = values
        return [unpack(message) for message in self.collective.gather(pack(value))]

    def vectors(self, length: int) -> list[Tensor]:
        return [self.collective.vector(length)]

    def sum(self) -> Tensor:
        return self.collective.sum()

    def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler

    def call(self, name: str, argument: Any = None) -> list[Any]:
        self.gather([{"call": name, "argument": argument}])
        return self.gather(self._handlers[name](argument))

    def is_asked_to_stop(self) -> bool:
        return self.collective.health.is_asked_to_stop()

    def ask_to_stop(self) -> None:
        self.collective.health.ask_to_stop()

    def fail(self, error: BaseException) -> None:
        """End all other ranks with this error; this rank exchanges nothing with them any more."""
        self._has_failed = True
        self.collective.health.fail(error)

    # --- leader and followers ---

    def expect_followers(self) -> None:
        """Record in the leader that all followers are in `follow`, or will be before they do anything else."""
        self._followers_wait = True

    def take_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def begin_round(self) -> None:
        self._release(CONTINUE)

    def end(self) -> None:
        """Let the followers end the run. Only the leader may call this."""
        self._release(END)

    def _release(self, command: str) -> None:
        if self._followers_wait:
            self._followers_wait = False
            self.gather([{"call": command}])

    def follow(self) -> bool:
        """Answer the leader's calls until it begins a round or ends the run; return whether it has begun a round."""
        while True:
            order: Mapping[str, Any] = self.gather([None])[0]
            if order["call"] in (CONTINUE, END):
                return bool(order["call"] == CONTINUE)
            self.gather(self._handlers[order["call"]](order["argument"]))
