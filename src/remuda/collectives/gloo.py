"""A collective over gloo, the CPU backend of torch.distributed, for ranks on several hosts.

    collective = GlooCollective(store, rank, size, host)         # in every rank, with a store of torch.distributed

gloo's own all-reduce adds the vectors in an order that depends on the number of ranks: with 3 ranks, the bits differ
from those of adding the vectors in rank order. Here every rank is responsible for one slice: it receives this slice
of all vectors, adds the slices in rank order, and sends the sum to all other ranks. This transfers as many bytes as
an all-reduce.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from remuda.collectives.health import Board, Health, RankInfo
from remuda.collectives.shared import CHECK_SECONDS, JOIN_SECONDS, SPIN_SECONDS, ordered_sum
from remuda.collectives.stores import StoreBoard, wait_for_keys
from remuda.errors import ConfigError, WorkerError
from remuda.processes.identity import machine_id, start_time

DIAGNOSIS_SECONDS = 8.0  # how long a rank whose connection broke waits to learn which rank has failed
ARRIVAL_SECONDS = 0.5  # time for the arrival of data that a rank sent before it ended


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
        make_board: Callable[[], Board] | None = None,
    ) -> None:
        """Connect to all other ranks.

        `address` is that of the network interface to use; with None, gloo chooses, or GLOO_SOCKET_IFNAME.
        `make_board` returns the board for heartbeats; by default it is in `store`, which gloo may block for a while.
        """
        self.rank, self.size, self.while_waiting = rank, size, while_waiting
        self._is_closed, self._length, self._check_at = False, -1, 0.0
        limit = datetime.timedelta(seconds=JOIN_SECONDS)
        store.set_timeout(limit)
        pid = os.getpid()
        store.set(f"info/{rank}", json.dumps([rank, host, pid, machine_id(), start_time(pid)]))
        keys = [f"info/{each}" for each in range(size)]
        try:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = datetime.timedelta(days=1)  # `_check` ends a wait if another rank has failed
            options._devices = devices(address)
            wait_for_keys(store, keys, while_waiting, JOIN_SECONDS)
            infos = [RankInfo(*json.loads(text)) for text in store.multi_get(keys)]
            board = make_board() if make_board else StoreBoard(store, rank, size, while_waiting, JOIN_SECONDS)
        except RuntimeError as error:
            raise self._not_connected(error) from None
        self.health = Health(board, rank, infos)
        try:
            self.group = self._connect(store, options)
        except BaseException as error:
            self.health.fail(error)
            self.close()
            raise

    def _connect(self, store: Any, options: Any) -> Any:
        """Return the process group of all ranks. A thread waits for them, because gloo cannot be interrupted."""
        found: list[Any] = []

        def connect() -> None:
            try:
                found.append(ProcessGroupGloo(store, self.rank, self.size, options))
            except RuntimeError as error:  # a store also raises this after its time limit
                found.append(error)

        thread = threading.Thread(target=connect, name="remuda-connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + JOIN_SECONDS
        while thread.is_alive():
            thread.join(CHECK_SECONDS)
            self.health.check()
            self.while_waiting()
            if time.monotonic() > deadline:
                raise self._not_connected(RuntimeError(f"no connection within {JOIN_SECONDS:g} s"))
        if isinstance(found[0], RuntimeError):
            raise self._not_connected(found[0])
        return found[0]

    def _not_connected(self, error: RuntimeError) -> WorkerError:
        reason = str(error).splitlines()[0]
        return WorkerError(f"rank {self.rank} could not connect to the {self.size - 1} other ranks ({reason}).")

    def gather(self, message: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self._run(self.group._allgather_base, lengths, torch.tensor([len(message)]))
        longest = int(lengths.max())
        if not longest:
            return [b""] * self.size
        own = torch.zeros(longest, dtype=torch.uint8)
        if message:
            own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = torch.zeros(self.size * longest, dtype=torch.uint8)
        self._run(self.group._allgather_base, found, own)
        rows = found.view(self.size, longest).numpy()
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def vector(self, length: int) -> Tensor:
        if length != self._length:
            self._length, self._slice = length, -(-length // self.size)
            # The vectors are padded, because the slices of all ranks must have the same length.
            self._vector, self._received, self._result = (torch.zeros(self.size * self._slice) for _ in range(3))
        return self._vector[:length]

    def sum(self) -> Tensor:
        self._run(self.group.alltoall_base, self._received, self._vector, [], [])
        own = torch.empty(self._slice)
        ordered_sum(self._received.view(self.size, self._slice), own)
        self._run(self.group._allgather_base, self._result, own)
        return self._result[: self._length]

    def late(self) -> str:
        """Name all other ranks, because gloo does not tell which of them have arrived at the current operation."""
        return " or ".join(str(info) for info in self.health.infos if info.rank != self.rank)

    def _run(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Start an operation of gloo and wait until it is complete."""
        start, sleep = time.perf_counter(), 2e-5
        if start > self._check_at:  # also if no wait is long enough for a check
            self._check()
        try:
            work = operation(*arguments)
            while not work.is_completed():
                now = time.perf_counter()
                if now < start + SPIN_SECONDS:
                    os.sched_yield()
                    continue
                if now > self._check_at:
                    self._check_unless_complete(work)
                time.sleep(sleep)
                sleep = min(2 * sleep, 1e-3)
            work.wait()
        except RuntimeError as error:
            self._diagnose(error)

    def _check(self) -> None:
        self._check_at = time.perf_counter() + CHECK_SECONDS
        self.health.check()
        self.while_waiting()

    def _check_unless_complete(self, work: Any) -> None:
        """Raise an error if another rank has failed, unless the operation `work` completes nevertheless.

        The rank may have sent its data for the operation before it failed, and the data may still be on its way.
        """
        try:
            self._check()
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


def devices(address: str | None) -> list[Any]:
    """Return the network devices of gloo: that of `address`, those in GLOO_SOCKET_IFNAME, or gloo's own choice.

    Only another constructor of gloo's process group reads GLOO_SOCKET_IFNAME, so it is read here.
    """
    if address is not None:
        return [ProcessGroupGloo.create_device(hostname=address)]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    try:
        return [ProcessGroupGloo.create_device(interface=name) for name in names]
    except RuntimeError:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={','.join(names)} names a network interface without an address: use some of {there}."
        ) from None
