"""Stores of torch.distributed: how to reach one, how to wait for its keys, and a `Board` that never blocks.

    store = open_tcp_store("node-0", 29500, is_host=False, while_waiting=check)
    wait_for_keys(store, ["address"], check, 120.0)
    board = StoreBoard(store, rank, size, check)

Operations of a store block until its host answers, even if that takes minutes, and cannot be interrupted. Therefore
`wait_for_keys` asks repeatedly, and `StoreBoard` leaves all operations to a thread of its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.05  # time between two questions to a store
REPORT_SECONDS = 1.0  # how long a rank waits until its report is written, or until those of others are read
STOP_KEY, SIGNAL_KEY = "stop", "signal"


def open_tcp_store(
    address: str, port: int, is_host: bool, while_waiting: Callable[[], object], seconds: float
) -> TCPStore:
    """Connect to the store at this address, or create it if `is_host`; raise RuntimeError if that is impossible.

    Wait up to `seconds` for the store to be there.
    """
    deadline = time.monotonic() + seconds
    while not is_host:  # the store itself would wait for its host without an end to interruptions
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(error.strerror or str(error)) from None
        while_waiting()
        time.sleep(POLL_SECONDS)
    limit = timedelta(seconds=min(seconds, 30.0))
    return TCPStore(address, port, None, is_host, timeout=limit, wait_for_workers=False, multi_tenant=True)


def wait_for_keys(store: Any, keys: Sequence[str], while_waiting: Callable[[], object], seconds: float) -> None:
    """Wait until all keys are in the store; raise RuntimeError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing was heard of them within {seconds:g} s")
        while_waiting()
        time.sleep(POLL_SECONDS)


_kept: list[tuple[int, weakref.ref[Any]]] = []  # descriptors, and the object for which each must stay open


def keep_open(fd: int, group: object) -> None:
    """Keep a descriptor open as long as `group`, the process group of a file store, exists.

    A FileStore opens its path again when the group is destroyed, which may be long after the run. Had the descriptor
    been closed, another file of the process could have its number by then, and the store would write to that file. A
    descriptor without a group is closed by the next call of this function.
    """
    for other in list(_kept):
        if other[1]() is None:
            _kept.remove(other)
            os.close(other[0])
    _kept.append((fd, weakref.ref(group)))


class StoreBoard:
    """The `Board` of `health.py` in a store. Each `beat` triggers one exchange with the store, in a thread."""

    def __init__(
        self, store: Any, rank: int, size: int, while_waiting: Callable[[], object], seconds: float = 120.0
    ) -> None:
        """Wait until all ranks have their entries; raise RuntimeError after `seconds`."""
        self._store = store
        self._keys = [[f"{name}/{each}" for each in range(size)] for name in ("beat", "report")]
        self._rank, self._report = rank, b""
        for keys, empty in zip(self._keys, ("0", ""), strict=True):
            store.set(keys[rank], empty)
        wait_for_keys(store, [key for keys in self._keys for key in keys], while_waiting, seconds)
        self._beats, self._reports = [0] * size, [b""] * size
        self._own_beats: dict[int, int] = {}  # heartbeats to be written, by rank
        self._asks_to_stop = self._is_asked_to_stop = False
        self._own_signal = self._passed_signal = 0
        self._answers = self._seen_answers = 0  # number of complete exchanges, and how many `beats` has seen
        self._wake, self._has_reported, self._is_closing = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._exchange, name="remuda-store", daemon=True)
        self._thread.start()

    def _exchange(self) -> None:
        while not self._is_closing.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                for rank in list(self._own_beats):
                    self._store.set(self._keys[0][rank], str(self._own_beats.pop(rank)))
                if self._report:
                    self._store.set(self._keys[1][self._rank], self._report)
                    self._report = b""
                    self._has_reported.set()
                if self._asks_to_stop:
                    self._store.set(STOP_KEY, "1")
                if self._own_signal:
                    self._store.set(SIGNAL_KEY, str(self._own_signal))
                beats, self._reports = (self._store.multi_get(keys) for keys in self._keys)
                self._beats = [int(text) for text in beats]
                self._is_asked_to_stop = self._is_asked_to_stop or bool(self._store.check([STOP_KEY]))
                if self._store.check([SIGNAL_KEY]):
                    self._passed_signal = int(self._store.get(SIGNAL_KEY))
                self._answers += 1
            except DistNetworkError:  # the connection is closed for good; `beats` notices that no answer comes
                return
            except (OSError, RuntimeError):
                continue

    def beat(self, rank: int, count: int) -> None:
        self._own_beats[rank] = count
        self._wake.set()

    def beats(self) -> list[int]:
        if self._answers == self._seen_answers:
            raise TimeoutError("the store has not answered since the last call")
        self._seen_answers = self._answers
        return self._beats

    def report(self, text: bytes) -> None:
        self._report = text
        self._wake.set()
        if self._thread.is_alive():
            self._has_reported.wait(REPORT_SECONDS)

    def reports(self) -> list[bytes]:
        return self._reports

    def newest_reports(self) -> list[bytes]:
        # An exchange that is under way may have read the reports before this call, so wait for the end of the next.
        wanted, deadline = self._answers + 2, time.monotonic() + REPORT_SECONDS
        while self._answers < wanted and self._thread.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.005)
        return self._reports

    def ask_to_stop(self) -> None:
        self._asks_to_stop = True
        self._wake.set()

    def is_asked_to_stop(self) -> bool:
        return self._is_asked_to_stop

    def pass_signal(self, number: int) -> None:
        self._own_signal = number
        self._wake.set()

    def passed_signal(self) -> int:
        return self._passed_signal

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer: then it ends with the process."""
        self._is_closing.set()
        self._wake.set()
        self._thread.join(0.5)
