"""Groups: the parts of a run, and the operations that combine their values. A process holds all parts or one.

    group = LocalGroup(4)                     # all four parts are in this process
    group = RankGroup(collective)             # this process holds the part whose index is its rank
    totals = group.gather([numbers])          # one value for each part of this process -> the values of all parts
    states = group.call("sampler")            # calls a function that every process has registered with `serve`

Values are plain values and arrays, which data/packing.py can pack. The process that holds part 0 is the *leader*. It
writes the run directory, and decides when the run ends. All others are *followers*: between two rounds they are in
`follow`, which answers the leader's calls until the leader lets the run continue or end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from remuda.collectives import Collective
from remuda.data.packing import pack, unpack
from remuda.errors import WorkerError
from remuda.parts.outcomes import Outcome, attempt, results_of

Handler = Callable[[Any], Sequence[Any]]  # takes the argument of `call`; returns a value for each part of its process
CONTINUE, END = "continue", "end"
# Once the user has asked to stop, the leader waits at most this long, in total, for answers to its calls, which save
# the states of all parts. Replays may be large, but a disk that hangs must not delay the end of the run for ever.
ANSWER_SECONDS = 60.0


class Group(Protocol):
    """The parts of a run; see the module's docstring."""

    count: int  # number of parts of the run
    local: range  # parts of this process

    def name_of(self, part: int) -> str:
        """Return a name of a part for error messages."""

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of all parts, in the order of parts; `values` has one for each part of this process."""

    def vectors(self, length: int) -> list[Tensor]:
        """Return a float32 vector of this length for each part of this process, to be written before `sum`."""

    def sum(self) -> Tensor:
        """Add the vectors of all parts in the order of parts; return the sum, which is valid until the next `sum`."""

    def serve(self, name: str, handler: Handler) -> None:
        """Register the function that `call(name)` calls in this process."""

    def call(self, name: str, argument: Any = None) -> list[Any]:
        """Call the functions registered as `name` in all processes, and return one value for each part of the run.

        Only the leader may call this, and only while all followers are in `follow`. If a function raises an error, it
        is raised in the leader; the followers keep following.
        """

    def take_lines(self) -> list[str]:
        """Return the lines that this process wants the leader to log, and forget them."""

    def begin_round(self) -> None:
        """In the leader, let the followers begin the next round; in a follower, do nothing.

        Every process calls this before it samples.
        """

    def is_asked_to_stop(self) -> bool:
        """Return whether any process has called `ask_to_stop`. A follower then interrupts its round."""

    def ask_to_stop(self) -> None: ...  # asks all processes to interrupt the current round


class LocalGroup:
    """A `Group` whose parts are all in this process."""

    def __init__(self, count: int) -> None:
        self.count, self.local = count, range(count)
        self._handlers: dict[str, Handler] = {}
        self._vectors = torch.zeros(0, 0)
        self._is_asked_to_stop = False

    def name_of(self, part: int) -> str:
        return f"part {part}"

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
        self.followers_wait = False  # only in the leader: whether the followers are in `follow`, or will be next
        self.must_stop: Callable[[], bool] = lambda: False  # only in the leader: whether to end the run soon
        self._answer_by: float | None = None  # after a stop request, value of time.monotonic() until which to wait

    @property
    def is_leader(self) -> bool:
        return self.collective.rank == 0

    def name_of(self, part: int) -> str:
        return str(self.collective.health.infos[part])

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
        with self._limited():
            self.gather([{"call": name, "argument": argument}])
            return self.gather_outcomes(attempt(partial(self._answer, name, argument)))

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """In this context, raise WorkerError if followers do not answer within ANSWER_SECONDS of a stop request."""
        poll = self.collective.while_waiting

        def check() -> None:
            poll()
            if not self.must_stop():
                return
            now = time.monotonic()
            if self._answer_by is None:
                self._answer_by = now + ANSWER_SECONDS
            elif now > self._answer_by:
                raise WorkerError(
                    f"{self.collective.late()} did not save its part of the run within {ANSWER_SECONDS:g} s of the "
                    "stop request: the last checkpoint is kept."
                )

        self.collective.while_waiting = check
        try:
            yield
        finally:
            self.collective.while_waiting = poll

    def _answer(self, name: str, argument: Any) -> Any:
        (value,) = self._handlers[name](argument)
        return value

    def gather_outcomes(self, own: Outcome) -> list[Any]:
        """Return the results of all ranks; if the work failed in any rank, raise its error in all of them."""
        return results_of(own, self.gather([own.message()]), self.collective.health.infos)

    def is_asked_to_stop(self) -> bool:
        return self.collective.health.is_asked_to_stop()

    def ask_to_stop(self) -> None:
        self.collective.health.ask_to_stop()

    def fail(self, error: BaseException) -> None:
        """End all other ranks with this error. After this call, `gather` raises WorkerError in this rank."""
        self._has_failed = True
        self.collective.health.fail(error)

    # --- leader and followers ---

    def expect_followers(self) -> None:
        """Record in the leader that all followers are in `follow`, or will call it next."""
        self.followers_wait = True
        self.collective.health.is_limited = False  # between two rounds, the leader may evaluate for hours

    def take_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def begin_round(self) -> None:
        self._release(CONTINUE)

    def end(self) -> None:
        """Let the followers end the run. Only the leader may call this."""
        self._release(END)

    def _release(self, command: str) -> None:
        if self.followers_wait:
            self.gather([{"call": command}])
            self.collective.health.is_limited = command == CONTINUE
            self.followers_wait = False

    def follow(self) -> bool:
        """Answer the leader's calls until the leader begins a round (return True) or ends the run (return False)."""
        self.collective.health.is_limited = False
        while True:
            order: Mapping[str, Any] = self.gather([None])[0]
            if order["call"] in (CONTINUE, END):
                self.collective.health.is_limited = order["call"] == CONTINUE
                return bool(order["call"] == CONTINUE)
            # The leader alone raises the error of a call, because it decides whether the run continues.
            self.gather([attempt(partial(self._answer, order["call"], order["argument"])).message()])
