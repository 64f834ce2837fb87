"""A collective over shared memory, for ranks on one host.

    collective = SharedCollective.create(2, "host", send_to_rank_1)      # in rank 0; calls send_to_rank_1(address)
    collective = SharedCollective.join(address, 1, "host")               # in rank 1; the address is JSON

The operations are numbered. A rank writes its contribution, issues a memory fence, and sets its entry of `arrived` to
the number of the operation. It then waits until all entries have reached that number. There are no locks, so a rank
that dies leaves nothing locked. A rank can be ahead of others by one operation only, so contributions alternate
between two places, and none is overwritten while another rank reads it. Long vectors have only one place, see `sum`.

The memory has no name. Other ranks open it through rank 0's file descriptor, under /proc.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from remuda.collectives.health import MAX_ERROR_BYTES, Health, RankInfo
from remuda.data import Fence, SharedArrays
from remuda.errors import WorkerError
from remuda.processes.identity import machine_id, start_time

BOX_BYTES = 1 << 16  # number of bytes of a message that one operation exchanges; longer messages take several
SMALL = 1 << 14  # vectors up to this length are added whole by every rank; of longer ones, each adds a slice
SPIN_SECONDS = 2e-4  # how long a wait only yields the core, before it sleeps
CHECK_SECONDS = 0.02  # time between two checks of the other ranks during a wait
JOIN_SECONDS = 120.0  # time limit for all ranks to join
HOST_BYTES = 256

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def layout(size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        **dict.fromkeys(("arrived", "beats", "pid", "started", "report_bytes", "host_bytes"), ((size,), "int64")),
        "report": ((size, MAX_ERROR_BYTES), "uint8"),
        "host": ((size, HOST_BYTES), "uint8"),
        "box_bytes": ((2, size), "int64"),
        "box": ((2, size, BOX_BYTES), "uint8"),
        "stop": ((1,), "int64"),
        "signal": ((1,), "int64"),
    }


class SharedBoard:
    """The `Board` of `health.py` in shared memory."""

    def __init__(self, memory: SharedArrays, rank: int) -> None:
        self._memory, self._rank, self._fence = memory, rank, Fence()

    def beat(self, rank: int, count: int) -> None:
        self._memory["beats"][rank] = count

    def beats(self) -> list[int]:
        found: list[int] = self._memory["beats"].tolist()
        return found

    def report(self, text: bytes) -> None:
        self._memory["report"][self._rank, : len(text)] = np.frombuffer(text, np.uint8)
        self._fence()
        self._memory["report_bytes"][self._rank] = len(text)

    def reports(self) -> list[bytes]:
        lengths = self._memory["report_bytes"].tolist()
        if not any(lengths):
            return [b""] * len(lengths)
        self._fence()
        return [self._memory["report"][rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def newest_reports(self) -> list[bytes]:
        return self.reports()

    def ask_to_stop(self) -> None:
        self._memory["stop"][0] = 1

    def is_asked_to_stop(self) -> bool:
        return bool(self._memory["stop"][0])

    def pass_signal(self, number: int) -> None:
        self._memory["signal"][0] = number

    def passed_signal(self) -> int:
        return int(self._memory["signal"][0])

    def close(self) -> None:
        """Do nothing: the memory belongs to the collective."""


class SharedCollective:
    """A `Collective` whose ranks share memory."""

    def __init__(self, memory: SharedArrays, rank: int, host: str, while_waiting: Callable[[], object]) -> None:
        self._memory, self.rank, self.size = memory, rank, len(memory["arrived"])
        self.while_waiting = while_waiting
        self._fence, self._arrived, self._number = Fence(), memory["arrived"], 0
        self._vectors: SharedArrays | None = None
        self._length, self._side, self._vector_number = 0, 0, 0
        self._is_closed, self._check_at = False, 0.0
        name = host.encode()[:HOST_BYTES].decode(errors="ignore").encode()  # whole characters only
        memory["host"][rank, : len(name)] = np.frombuffer(name, np.uint8)
        memory["host_bytes"][rank], memory["pid"][rank] = len(name), os.getpid()
        memory["started"][rank] = start_time(os.getpid())
        self._join()

    @classmethod
    def create(
        cls,
        size: int,
        host: str,
        announce: Callable[[Mapping[str, Any]], object],
        while_waiting: Callable[[], object] = lambda: None,
    ) -> Self:
        """Return the collective of rank 0, once all other ranks have joined.

        `announce(address)` must send the address, an argument of `join`, to the other ranks. It may also start them.
        """
        memory = SharedArrays(layout(size))
        try:
            announce({"pid": os.getpid(), "fd": memory.fd, "size": size})
            return cls(memory, 0, host, while_waiting)
        except BaseException:
            memory.close()
            raise

    @classmethod
    def join(
        cls,
        address: Mapping[str, Any],
        rank: int,
        host: str,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> Self:
        """Return the collective of `rank`, any rank except 0, once all ranks have joined."""
        memory = open_memory(address, layout(address["size"]))
        try:
            return cls(memory, rank, host, while_waiting)
        except BaseException:
            memory.close()
            raise

    def _join(self) -> None:
        """Wait until all ranks have joined, and start the heartbeats."""
        self._arrive()
        self._wait(JOIN_SECONDS)
        memory, machine, infos = self._memory, machine_id(), []
        for rank in range(self.size):
            host = memory["host"][rank, : int(memory["host_bytes"][rank])].tobytes().decode(errors="replace")
            infos.append(RankInfo(rank, host, int(memory["pid"][rank]), machine, int(memory["started"][rank])))
        self.health = Health(SharedBoard(memory, self.rank), self.rank, infos)

    # --- the operations ---

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order. Long messages are exchanged in parts."""
        found = [bytearray() for _ in range(self.size)]
        lengths: list[int] = []
        start = 0
        while not lengths or start < max(lengths):
            side = (self._number + 1) % 2
            box, part = self._memory["box"][side], message[start : start + BOX_BYTES]
            box[self.rank, : len(part)] = np.frombuffer(part, np.uint8)
            self._memory["box_bytes"][side, self.rank] = len(message)
            self._arrive()
            self._wait()
            lengths = self._memory["box_bytes"][side].tolist()
            for rank, length in enumerate(lengths):
                found[rank] += box[rank, : max(0, min(BOX_BYTES, length - start))].tobytes()
            start += BOX_BYTES
        return [bytes(each) for each in found]

    def vector(self, length: int) -> Tensor:
        if length != self._length:
            self._allocate(length)
        assert self._vectors is not None
        self._vector_number = self._number + 1
        self._side = self._vector_number % self._sides
        return torch.from_numpy(self._vectors["vectors"][self._side, self.rank])

    def _allocate(self, length: int) -> None:
        """Let rank 0 allocate memory for the vectors, and all other ranks open it."""
        if self._vectors is not None:
            self._vectors.close()
        self._length, self._sides = length, 2 if length <= SMALL else 1
        shapes = {"vectors": ((self._sides, self.size, length), "float32"), "result": ((length,), "float32")}
        if self.rank == 0:
            self._vectors = SharedArrays(shapes)
        fd = 0 if self._vectors is None or self.rank else self._vectors.fd
        (address, *_) = self.gather(f"{os.getpid()} {fd}".encode())
        if self.rank:
            pid, fd = map(int, address.split())
            self._vectors = open_memory({"pid": pid, "fd": fd}, shapes)
        self.gather(b"")  # rank 0 must not close its descriptor before all ranks have opened it
        self._result = torch.empty(length) if length <= SMALL else torch.from_numpy(self._vectors["result"])  # type: ignore[index]
        bounds = [rank * length // self.size for rank in range(self.size + 1)]
        self._own = slice(bounds[self.rank], bounds[self.rank + 1])

    def sum(self) -> Tensor:
        assert self._vectors is not None
        assert self._vector_number == self._number + 1, "vector() must be called just before sum()"
        vectors = torch.from_numpy(self._vectors["vectors"][self._side])
        self._arrive()
        self._wait()
        if self._length <= SMALL:
            return ordered_sum(vectors, self._result)
        # Every rank adds its slice of all vectors. A vector needs only one place: a rank writes its next vector after
        # it has received the whole result, and by then all ranks have read their slices.
        ordered_sum(vectors[:, self._own], self._result[self._own])
        self._arrive()
        self._wait()
        return self._result

    # --- arriving and waiting ---

    def _arrive(self) -> None:
        """Announce that this rank has written its contribution to the next operation."""
        if time.perf_counter() > self._check_at:  # also if no wait is long enough for a check
            self._check()
        self._fence()
        self._number += 1
        self._arrived[self.rank] = self._number

    def _wait(self, seconds: float | None = None) -> None:
        """Wait until all ranks have arrived, or raise an error: if another rank has failed, or after `seconds`."""
        start, sleep = time.perf_counter(), 2e-5
        while int(self._arrived.min()) < self._number:
            now = time.perf_counter()
            if now < start + SPIN_SECONDS:
                _yield_core()
                continue
            if now > self._check_at:
                try:
                    self._check()
                except WorkerError:
                    if int(self._arrived.min()) < self._number:
                        raise  # otherwise the rank took part in this operation before it ended
                if seconds is not None and now > start + seconds:
                    missing = np.flatnonzero(self._arrived < self._number).tolist()
                    raise WorkerError(f"ranks {missing} of {self.size} have not joined within {seconds:g} s.")
            time.sleep(sleep)
            sleep = min(2 * sleep, 1e-3)
        self._fence()

    def late(self) -> str:
        """Name the ranks that have not yet arrived at the current operation."""
        return " and ".join(str(self.health.infos[rank]) for rank in np.flatnonzero(self._arrived < self._number))

    def _check(self) -> None:
        self._check_at = time.perf_counter() + CHECK_SECONDS
        if hasattr(self, "health"):
            self.health.check()
        self.while_waiting()

    def close(self) -> None:
        """Leave the collective. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if hasattr(self, "health"):
            self.health.close()
        if self._vectors is not None:
            self._vectors.close()
        self._memory.close()


def ordered_sum(vectors: Tensor, out: Tensor) -> Tensor:
    """Add the rows of `vectors` [ranks, length] in their order, write the sum to `out`, and return `out`."""
    torch.add(vectors[0], vectors[1], out=out) if len(vectors) > 1 else out.copy_(vectors[0])
    for vector in vectors[2:]:
        out.add_(vector)
    return out


def open_memory(address: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> SharedArrays:
    """Open the memory behind a file descriptor of another process of the same user.

    `address` holds the `pid` of the process and the number `fd` of the descriptor.
    """
    fd = os.open(f"/proc/{address['pid']}/fd/{address['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedArrays.attach(fd, shapes)
    finally:
        os.close(fd)
