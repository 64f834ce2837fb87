"""Requests and answers as sequence numbers in shared memory: who finds the other awake wakes nobody.

    requests = Requests(arrays)                                  # the parent; `layout` says which arrays
    for worker in requests.ask(slot, number=8):                  # whatever the request means lies in other arrays
        bells[worker].ring()                                     # only those that sleep
    if not requests.is_done(slot, 8):
        requests.sleep(8)                                        # whoever answers last will ring
        ...                                                      # poll the bell, look again
        requests.wake()

    answers = Answers(arrays, worker)                            # a worker
    while (asked := answers.oldest()) is not None:
        number, slot = asked
        ...                                                      # do what was asked
        if answers.give(slot, number, seconds, news=b""):
            parent_bell.ring()
    if answers.sleep():                                          # nothing came in between: poll the bell
        ...
        answers.wake()

Every slot has one request at a time, and every worker does its share of every request; with `alone`, every slot
belongs to one worker, and how long the others take does not matter to it. No locks, so none dies with its holder:
each number has one writer. A side that is about to sleep first says so and then looks once more; the
other first writes and then looks whether anybody sleeps. A fence between the two, on both sides, loses no wake-up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from remuda.data import Fence
from remuda.machine import usable_cores

ANY = -1  # as the request that the parent sleeps for
ON_LINK = -1  # size of news that had no room in memory and come another way
LINGER_SECONDS = 4e-4  # how long to look before sleeping
IN_VAIN = 3  # lingerings in a row, after which only every so many are tried
SELDOM = 32

_leave_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class SpinWait:
    """Looks for a moment before its owner sleeps, and learns whether that pays: to be woken costs up to 100 us.

    Between two looks the core is left to whoever else can run: with a worker for each core the parent has none of
    its own. With more workers than cores nobody lingers at all.
    """

    def __init__(self, num_workers: int) -> None:
        self._has_core = num_workers <= usable_cores()
        self._times = self._in_vain = 0

    def poll(self, is_there: Callable[[], bool]) -> bool:
        """Whether it comes true within a moment."""
        self._times += 1
        if not self._has_core or (self._in_vain > IN_VAIN and self._times % SELDOM):
            return False
        end = time.perf_counter() + LINGER_SECONDS
        while time.perf_counter() < end:
            _leave_core()
            if is_there():
                self._in_vain = 0
                return True
        self._in_vain += 1
        return False


def layout(num_slots: int, num_workers: int, room: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays, with so many bytes for the news of one answer."""
    each = (num_slots, num_workers)
    return {
        "todo": ((num_slots,), "int64"),  # number of the last request
        "done": (each, "int64"),  # number of the last answer
        "said": (each, "int64"),  # number of the last answer that came with news
        "size": (each, "int64"),  # of those news in bytes, or ON_LINK
        "busy": (each, "float64"),  # seconds that the last answer took
        "asleep": ((num_workers,), "int64"),
        "awaited": ((1,), "int64"),  # the request for which the parent sleeps; 0: it does not
        "news": ((*each, room), "uint8"),
    }


def server_of(slot: int, num_slots: int, num_workers: int) -> int:
    """Whose slot this is, of those that serve slots alone."""
    return slot * num_workers // num_slots


def _view(array: NDArray[Any]) -> Any:
    return memoryview(array)  # type: ignore[arg-type]  # reading one number costs 30 ns, of an array itself 100


class Requests:
    """The parent's side."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], alone: bool = False) -> None:
        self._todo, self._asleep, self._awaited = (_view(arrays[name]) for name in ("todo", "asleep", "awaited"))
        num_slots, num_workers = arrays["done"].shape
        self._slots = range(num_slots)
        self.servers = [range(num_workers)] * num_slots  # of each slot
        if alone:
            firsts = [server_of(slot, num_slots, num_workers) for slot in self._slots]
            self.servers = [range(first, first + 1) for first in firsts]
        self._done, self._said, self._size, self._busy = (
            [_view(arrays[name][slot, of.start : of.stop]) for slot, of in enumerate(self.servers)]
            for name in ("done", "said", "size", "busy")
        )
        self._news = [[_view(arrays["news"][slot, worker]) for worker in of] for slot, of in enumerate(self.servers)]
        self._fence = Fence()

    def ask(self, slot: int, number: int) -> list[int]:
        """Whoever serves this slot; returns who must be woken."""
        self._fence()  # what is asked lies in memory before the number that asks for it
        self._todo[slot] = number
        self._fence()
        asleep = self._asleep.tolist()
        return [worker for worker in self.servers[slot] if asleep[worker]]

    def is_done(self, slot: int, number: int) -> bool:
        return bool(self._done[slot].tolist() == [number] * len(self.servers[slot]))

    def pending(self, slot: int, number: int) -> list[int]:
        """Workers that have not answered yet."""
        answered = zip(self.servers[slot], self._done[slot].tolist(), strict=True)
        return [worker for worker, done in answered if done != number]

    def owed(self, worker: int) -> list[int]:
        """Slots that this worker has not answered yet."""
        own = [slot for slot in self._slots if worker in self.servers[slot]]
        return [slot for slot in own if self._done[slot][worker - self.servers[slot].start] != self._todo[slot]]

    def sleep(self, number: int) -> None:
        """From now on whoever completes this request, or ANY, rings: look once more before sleeping."""
        self._awaited[0] = number
        self._fence()

    def wake(self) -> None:
        self._awaited[0] = 0

    def busy(self, slot: int) -> float:
        """Seconds that the last answer took the quickest worker."""
        self._fence()  # answers are read after the number that says they are there
        return float(min(self._busy[slot].tolist()))

    def has_news(self, slot: int, number: int) -> bool:
        return number in self._said[slot].tolist()

    def news(self, worker: int, slot: int, number: int) -> bytes | None:
        """What this worker had to say with its answer; empty for nothing, None for what comes by its link."""
        place = worker - self.servers[slot].start
        if self._said[slot][place] != number:
            return b""
        size = self._size[slot][place]
        return None if size == ON_LINK else bytes(self._news[slot][place][:size])

    def forget(self, worker: int, slot: int) -> None:
        """News of an answer that will be given again."""
        self._said[slot][worker - self.servers[slot].start] = 0


class Answers:
    """A worker's side."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], worker: int, alone: bool = False) -> None:
        self._worker, self._is_alone = worker, alone
        self._todo, self._asleep, self._awaited = (_view(arrays[name]) for name in ("todo", "asleep", "awaited"))
        done = arrays["done"]
        slots = range(done.shape[0])
        self.num_workers = done.shape[1]
        self.slots = [s for s in slots if not alone or server_of(s, done.shape[0], done.shape[1]) == worker]
        self._done, self._said, self._size, self._busy = (
            [_view(arrays[name][slot]) for slot in slots] for name in ("done", "said", "size", "busy")
        )
        self._news = [_view(arrays["news"][slot, worker]) for slot in slots]
        self._given = [self._done[slot][worker] for slot in self.slots]
        self._fence = Fence()

    def _asked(self) -> list[int]:
        """The numbers of the last requests for its own slots."""
        todo: list[int] = self._todo.tolist()
        return [todo[slot] for slot in self.slots] if self._is_alone else todo

    def oldest(self) -> tuple[int, int] | None:
        """(number, slot) of the request that has waited longest."""
        asked = self._asked()
        if asked == self._given:
            return None
        waiting = zip(asked, self._given, self.slots, strict=True)
        number, slot = min((number, slot) for number, given, slot in waiting if number != given)
        self._fence()  # what is asked is read after the number that asks for it
        return number, slot

    def is_asked(self) -> bool:
        return self._asked() != self._given

    def has_room(self, slot: int, news: bytes) -> bool:
        return len(news) <= len(self._news[slot])

    def give(self, slot: int, number: int, seconds: float, news: bytes | None) -> bool:
        """The answer lies in memory; returns whether the parent sleeps for it. News of None come by the link."""
        if news is None or news:
            self._size[slot][self._worker] = ON_LINK if news is None else len(news)
            if news is not None:
                self._news[slot][: len(news)] = news
            self._said[slot][self._worker] = number
        self._busy[slot][self._worker] = seconds
        self._fence()
        self._done[slot][self._worker] = self._given[self.slots.index(slot)] = number
        self._fence()
        # waking the parent for every worker would take a core from those that are still at it
        is_done = self._is_alone or self._done[slot].tolist() == [number] * self.num_workers
        return is_done and self._awaited[0] in (number, ANY)

    def sleep(self) -> bool:
        """Whether there is nothing to do, and the parent knows that it must ring."""
        self._asleep[self._worker] = 1
        self._fence()
        if not self.is_asked():
            return True
        self.wake()
        return False

    def wake(self) -> None:
        self._asleep[self._worker] = 0
