"""A collective over gloo, the CPU backend of torch.distributed, for ranks on several hosts.

    collective = GlooCollective(store, rank, size, host)         # in every rank, with a store of torch.distributed

gloo's own all-reduce adds the vectors in an order that depends on the number of ranks: with 3 ranks, the bits differ
from those of adding the vectors in rank order. Here every rank is responsible for one slice: it receives this slice
of all vectors, adds the slices in rank order, and sends the sum to all other ranks. This transfers as many bytes as
an all-reduce.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from remuda.collectives.health import Health, RankInfo
from remuda.collectives.shared import CHECK_SECONDS, JOIN_SECONDS, SPIN_SECONDS, ordered_sum
from remuda.errors import WorkerError

DIAGNOSIS_SECONDS = 8.0  # how long a rank whose connection broke waits to learn which rank has failed
ARRIVAL_SECONDS = 0.5  # time for the arrival of data that a rank sent before it ended
STOP_KEY = "stop"


class StoreBoard:
    """The `Board` of `health.py` in a store of torch.distributed."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._beats, self._reports = ([f"{name}/{each}" for each in range(size)] for name in ("beat", "report"))
        store.set(self._beats[rank], "0")
        store.set(self._reports[rank], "")

    def beat(self, count: int) -> None:
        self._store.set(self._beats[self._rank], str(count))

    def beats(self) -> list[int]:
        return [int(text) for text in self._store.multi_get(self._beats)]

    def report(self, text: bytes) -> None:
        self._store.set(self._reports[self._rank], text)

    def reports(self) -> list[bytes]:
        found: list[bytes] = self._store.multi_get(self._reports)
        return found

    def ask_to_stop(self) -> None:
        self._store.set(STOP_KEY, "1")

    def is_asked_to_stop(self) -> bool:
        return bool(self._store.check([STOP_KEY]))


class GlooCollective:
    """A `Collective` whose ranks are connected by gloo."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        host: str,
        address: str | None = None,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect to all other ranks. `address` is that of the network interface to use; with None, gloo chooses."""
        self.rank, self.size, self.while_waiting = rank, size, while_waiting
        self._is_closed, self._length = False, -1
        limit = datetime.timedelta(seconds=JOIN_SECONDS)
        store.set_timeout(limit)
        store.set(f"info/{rank}", f"{os.getpid()} {host}")
        try:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = datetime.timedelta(days=1)  # `_check` ends a wait if another rank has failed
            device = ProcessGroupGloo.create_device(hostname=address) if address else None
            options._devices = [device or ProcessGroupGloo.create_default_device()]
            infos = [store.get(f"info/{each}").decode().split(" ", 1) for each in range(size)]
            board = StoreBoard(store, rank, size)
            store.wait([f"report/{each}" for each in range(size)], limit)
            self._group: Any = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:  # a store also raises this after its time limit
            reason = str(error).splitlines()[0]
            raise WorkerError(f"rank {rank} could not connect to the {size - 1} other ranks ({reason}).") from None
        self.health = Health(board, rank, [RankInfo(each, name, int(pid)) for each, (pid, name) in enumerate(infos)])

    def gather(self, message: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self._run(self._group._allgather_base, lengths, torch.tensor([len(message)]))
        longest = int(lengths.max())
        if not longest:
            return [b""] * self.size
        own = torch.zeros(longest, dtype=torch.uint8)
        if message:
            own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = torch.zeros(self.size * longest, dtype=torch.uint8)
        self._run(self._group._allgather_base, found, own)
        rows = found.view(self.size, longest).numpy()
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def vector(self, length: int) -> Tensor:
        if length != self._length:
            self._length, self._slice = length, -(-length // self.size)
            # The vectors are padded, because the slices of all ranks must have the same length.
            self._vector, self._received, self._result = (torch.zeros(self.size * self._slice) for _ in range(3))
        return self._vector[:length]

    def sum(self) -> Tensor:
        self._run(self._group.alltoall_base, self._received, self._vector, [], [])
        own = torch.empty(self._slice)
        ordered_sum(self._received.view(self.size, self._slice), own)
        self._run(self._group._allgather_base, self._result, own)
        return self._result[: self._length]

    def late(self) -> str:
        """Name all other ranks, because gloo does not tell which of them have arrived at the current operation."""
        return " or ".join(str(info) for info in self.health.infos if info.rank != self.rank)

    def _run(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Start an operation of gloo and wait until it is complete."""
        try:
            work = operation(*arguments)
            start = time.perf_counter()
            check_at, sleep = start + CHECK_SECONDS, 2e-5
            while not work.is_completed():
                now = time.perf_counter()
                if now < start + SPIN_SECONDS:
                    os.sched_yield()
                    continue
                if now > check_at:
                    check_at = now + CHECK_SECONDS
                    self._check(work)
                time.sleep(sleep)
                sleep = min(2 * sleep, 1e-3)
            work.wait()
        except RuntimeError as error:
            self._diagnose(error)

    def _check(self, work: Any) -> None:
        """Raise an error if another rank has failed, unless the operation `work` completes nevertheless.

        The rank may have sent its data for the operation before it failed, and the data may still be on its way.
        """
        try:
            self.health.check()
            self.while_waiting()
        except WorkerError:
            deadline = time.monotonic() + ARRIVAL_SECONDS
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise
                time.sleep(1e-3)

    def _diagnose(self, error: RuntimeError) -> None:
        """Raise the error of the rank that broke the connection; wait up to DIAGNOSIS_SECONDS until it is known."""
        deadline = time.monotonic() + DIAGNOSIS_SECONDS
        while time.monotonic() < deadline:
            self.health.check()
            self.while_waiting()
            time.sleep(CHECK_SECONDS)
        reason = str(error).splitlines()[0]
        raise WorkerError(f"rank {self.rank} lost its connection to another rank ({reason}).") from error

    def close(self) -> None:
        """Leave the collective. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.health.close()
