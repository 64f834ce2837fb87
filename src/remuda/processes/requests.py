"""Requests and answers as sequence numbers in shared memory; a process is woken only if it sleeps.

    requests = Requests(arrays)                                  # in the parent; `layout` describes the arrays
    for worker in requests.ask(slot, number=8):                  # the request's content is in other shared arrays
        bells[worker].ring()                                     # `ask` returns only workers that sleep
    if not requests.is_done(slot, 8):
        requests.sleep(8)                                        # the last worker to answer rings the parent's bell
        ...                                                      # check once more, then poll the bell
        requests.wake()

    answers = Answers(arrays, worker)                            # in a worker
    while (request := answers.oldest()) is not None:
        number, slot = request
        ...                                                      # carry it out
        if answers.give(slot, number, seconds, stats=b""):
            parent_bell.ring()
    if answers.sleep():                                          # True if no request has arrived: poll the bell
        ...
        answers.wake()

A slot is a group of envs or another unit of work, with one request at a time. By default all workers serve every
slot, and each worker does a share of the slot's work. With `exclusive`, every slot belongs to one worker, so that no
slot waits for several workers. There are no locks that a dying process could hold: each number in memory has one
writer at a time.

A process that is about to sleep first writes that it sleeps, and then checks once more for requests or answers. A
process that sends a request or answer first writes it, and then checks whether the receiver sleeps. A memory fence
between these two steps, on both sides, ensures that no sleeping process misses a request or answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from remuda.data import Fence, NumpyArray
from remuda.machine import usable_cores

ANY = -1  # passed to `Requests.sleep` to wake the parent when any request is complete
ON_LINK = -1  # stored as the size of statistics that are too long for shared memory and are sent over the link
SPIN_SECONDS = 4e-4  # how long to spin before sleeping
FAILED_SPINS = 3  # after more than 3 unsuccessful spins in a row, only every RARELY-th call of `poll` spins
RARELY = 32

_yield_core: Callable[[], None] = os.sched_yield if hasattr(os, "sched_yield") else lambda: None


class SpinWait:
    """Lets a process poll in a loop (spin) briefly before it sleeps, because being woken takes up to 100 us.

    The core is yielded between two polls, because with one worker per core the parent has no core of its own. With
    more workers than cores there is no spinning. After four unsuccessful spins in a row, only every 32nd wait spins.
    """

    def __init__(self, num_workers: int) -> None:
        self._has_core = num_workers <= usable_cores()
        self._waits = self._failed = 0

    def poll(self, is_done: Callable[[], bool]) -> bool:
        """Poll `is_done()` briefly, unless spinning does not pay off; return whether `is_done()` became true."""
        self._waits += 1
        if not self._has_core or (self._failed > FAILED_SPINS and self._waits % RARELY):
            return False
        end = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < end:
            _yield_core()
            if is_done():
                self._failed = 0
                return True
        self._failed += 1
        return False


def layout(num_slots: int, num_workers: int, stats_bytes: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shapes and dtypes of the shared arrays. `stats_bytes` limits the statistics of one worker's answer."""
    each = (num_slots, num_workers)
    return {
        "todo": ((num_slots,), "int64"),  # number of the last request for each slot
        "done": (each, "int64"),  # number of the request that each worker answered last for each slot
        "stats_of": (each, "int64"),  # number of the last request whose answer came with statistics
        "stats_size": (each, "int64"),  # size in bytes of each worker's last statistics, or ON_LINK
        "busy": (each, "float64"),  # seconds that each worker needed for its last answer
        "asleep": ((num_workers,), "int64"),  # 1 while the worker sleeps
        "awaited": ((1,), "int64"),  # number of the request that the parent sleeps for, or ANY; 0 while it is awake
        "stats": ((*each, stats_bytes), "uint8"),
    }


def server_of(slot: int, num_slots: int, num_workers: int) -> int:
    """Return the index of the worker to which an exclusive slot belongs."""
    return slot * num_workers // num_slots


def _view(array: NumpyArray) -> Any:
    # Reading one number from a memoryview costs 30 ns, and from an array 100 ns.
    return memoryview(array)  # type: ignore[arg-type]


class Requests:
    """The parent's side of the shared memory: publishes requests and reads answers."""

    def __init__(self, arrays: Mapping[str, NumpyArray], exclusive: bool = False) -> None:
        self._todo, self._asleep, self._awaited = (_view(arrays[name]) for name in ("todo", "asleep", "awaited"))
        num_slots, num_workers = arrays["done"].shape
        self._slots = range(num_slots)
        self.servers = [range(num_workers)] * num_slots  # the workers that serve each slot
        if exclusive:
            owners = [server_of(slot, num_slots, num_workers) for slot in self._slots]
            self.servers = [range(owner, owner + 1) for owner in owners]
        self._done, self._stats_of, self._stats_size, self._busy = (
            [_view(arrays[name][slot, own.start : own.stop]) for slot, own in enumerate(self.servers)]
            for name in ("done", "stats_of", "stats_size", "busy")
        )
        stats = arrays["stats"]
        self._stats = [[_view(stats[slot, worker]) for worker in own] for slot, own in enumerate(self.servers)]
        self._fence = Fence()

    def ask(self, slot: int, number: int) -> list[int]:
        """Publish a request for this slot; return the workers that must be woken."""
        self._fence()  # the content of the request must be visible before its number
        self._todo[slot] = number
        self._fence()
        asleep = self._asleep.tolist()
        return [worker for worker in self.servers[slot] if asleep[worker]]

    def is_done(self, slot: int, number: int) -> bool:
        return bool(self._done[slot].tolist() == [number] * len(self.servers[slot]))

    def pending(self, slot: int, number: int) -> list[int]:
        """Return the workers that have not answered this request yet."""
        answered = zip(self.servers[slot], self._done[slot].tolist(), strict=True)
        return [worker for worker, done in answered if done != number]

    def unanswered(self, worker: int) -> list[int]:
        """Return the slots whose last request this worker has not answered yet."""
        own = [slot for slot in self._slots if worker in self.servers[slot]]
        return [slot for slot in own if self._done[slot][worker - self.servers[slot].start] != self._todo[slot]]

    def sleep(self, number: int) -> None:
        """Ask workers to ring the parent's bell when request `number` (ANY: any request) is complete.

        Then call `is_done` once more before you wait for the bell, because the workers may already be done.
        """
        self._awaited[0] = number
        self._fence()

    def wake(self) -> None:
        self._awaited[0] = 0

    def busy(self, slot: int) -> float:
        """Return how many seconds the fastest worker needed for the last request of this slot."""
        self._fence()  # the times must be read after the number that marks the request as done
        return float(min(self._busy[slot].tolist()))

    def has_stats(self, slot: int, number: int) -> bool:
        return number in self._stats_of[slot].tolist()

    def stats(self, worker: int, slot: int, number: int) -> bytes | None:
        """Return the statistics of an answer: b"" if there are none, None if they are sent over the link."""
        place = worker - self.servers[slot].start
        if self._stats_of[slot][place] != number:
            return b""
        size = self._stats_size[slot][place]
        return None if size == ON_LINK else bytes(self._stats[slot][place][:size])

    def discard_stats(self, worker: int, slot: int) -> None:
        """Discard the statistics that a lost worker wrote for a slot, because the request will be answered again."""
        self._stats_of[slot][worker - self.servers[slot].start] = 0


class Answers:
    """A worker's side of the shared memory: reads requests and publishes answers."""

    def __init__(self, arrays: Mapping[str, NumpyArray], worker: int, exclusive: bool = False) -> None:
        self._worker, self._is_exclusive = worker, exclusive
        self._todo, self._asleep, self._awaited = (_view(arrays[name]) for name in ("todo", "asleep", "awaited"))
        done = arrays["done"]
        slots = range(done.shape[0])
        self.num_workers = done.shape[1]
        self.slots = [s for s in slots if not exclusive or server_of(s, done.shape[0], done.shape[1]) == worker]
        self._done, self._stats_of, self._stats_size, self._busy = (
            [_view(arrays[name][slot]) for slot in slots] for name in ("done", "stats_of", "stats_size", "busy")
        )
        self._stats = [_view(arrays["stats"][slot, worker]) for slot in slots]
        self._given = [self._done[slot][worker] for slot in self.slots]
        self._fence = Fence()

    def _requested(self) -> list[int]:
        """Return the number of the newest request for each slot of this worker."""
        todo: list[int] = self._todo.tolist()
        return [todo[slot] for slot in self.slots] if self._is_exclusive else todo

    def oldest(self) -> tuple[int, int] | None:
        """Return (number, slot) of the request that has waited longest, or None if no request waits."""
        requested = self._requested()
        if requested == self._given:
            return None
        waiting = zip(requested, self._given, self.slots, strict=True)
        number, slot = min((number, slot) for number, given, slot in waiting if number != given)
        self._fence()  # the content of the request must be read after its number
        return number, slot

    def is_asked(self) -> bool:
        return self._requested() != self._given

    def has_room(self, slot: int, stats: bytes) -> bool:
        return len(stats) <= len(self._stats[slot])

    def give(self, slot: int, number: int, seconds: float, stats: bytes | None) -> bool:
        """Announce an answer whose content is already in shared memory; return whether the parent must be woken.

        Pass None as `stats` if the statistics travel over the link.
        """
        if stats is None or stats:
            self._stats_size[slot][self._worker] = ON_LINK if stats is None else len(stats)
            if stats is not None:
                self._stats[slot][: len(stats)] = stats
            self._stats_of[slot][self._worker] = number
        self._busy[slot][self._worker] = seconds
        self._fence()
        self._done[slot][self._worker] = self._given[self.slots.index(slot)] = number
        self._fence()
        # Only the last worker wakes the parent, because an earlier wake-up would take a core from a busy worker.
        is_done = self._is_exclusive or self._done[slot].tolist() == [number] * self.num_workers
        return is_done and self._awaited[0] in (number, ANY)

    def sleep(self) -> bool:
        """Announce that the worker is about to sleep and return True; return False if a request has arrived."""
        self._asleep[self._worker] = 1
        self._fence()
        if not self.is_asked():
            return True
        self.wake()
        return False

    def wake(self) -> None:
        self._asleep[self._worker] = 0
