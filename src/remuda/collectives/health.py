"""Supervision of ranks: heartbeats, and errors and stop requests that reach all ranks while they wait.

    health = Health(board, rank, infos)          # starts a thread that writes and reads heartbeats
    health.check()                               # raises an error if another rank has failed or is silent
    health.fail(error)                           # ends the waits of all other ranks with this error
    health.close()

A `Board` is the memory that all ranks see: shared memory on one host, the store of torch.distributed between hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from remuda import errors
from remuda.errors import RemudaError, WorkerError

BEAT_SECONDS = 0.25  # time between two heartbeats of a rank
SILENT_SECONDS = 6.0  # a rank counts as lost after this time without a heartbeat, so that all ranks end within 10 s
MAX_ERROR_BYTES = 16_000


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Board(Protocol):
    """What each rank publishes for all others. A rank writes only its own entries, and reads those of all ranks.

    The request to stop is the only entry that all ranks share.
    """

    def beat(self, count: int) -> None: ...
    def beats(self) -> Sequence[int]: ...  # the newest heartbeat of every rank
    def report(self, text: bytes) -> None: ...  # publishes the end of this rank: b"left", or a failure as JSON
    def reports(self) -> Sequence[bytes]: ...  # the report of every rank; b"" for ranks that have not ended
    def ask_to_stop(self) -> None: ...  # asks all ranks to cut their round short
    def is_asked_to_stop(self) -> bool: ...


class Health:
    """Watches the other ranks, and publishes for them that this rank is alive, or how it has ended."""

    def __init__(self, board: Board, rank: int, infos: Sequence[RankInfo]) -> None:
        self._board, self.rank, self.infos = board, rank, list(infos)
        # The next three hold what the heartbeat thread found when it last read the board. The main thread uses these
        # copies at every step of an env, because reading a store takes a round trip to another host.
        self._silent: int | None = None  # a rank whose heartbeats have stopped
        self._reports: Sequence[bytes] = [b""] * len(infos)
        self._is_asked_to_stop = False
        self._has_reported = False
        self._error: RemudaError | None = None  # the error that `check` has raised
        self._ends, self._by_pidfd = select.poll(), dict[int, RankInfo]()  # to notice ends of ranks on this host
        for info in self.infos:
            if info.rank != rank and info.host == self.infos[rank].host:
                with contextlib.suppress(OSError):  # the rank has ended: its heartbeats will be missing
                    pidfd = os.pidfd_open(info.pid)
                    self._by_pidfd[pidfd] = info
                    self._ends.register(pidfd, select.POLLIN)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="remuda-heartbeat", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Write this rank's heartbeats, and notice when those of another rank stop.

        Time during which this thread itself did not run does not count as silence, because the whole run may have
        been suspended, for example by Ctrl-Z.
        """
        count, seen = 0, [-1] * len(self.infos)
        silence, before = [0.0] * len(self.infos), time.monotonic()
        while not self._is_closing.wait(BEAT_SECONDS):
            count += 1
            try:
                self._board.beat(count)
                found = self._board.beats()
                self._reports = self._board.reports()
                self._is_asked_to_stop = self._is_asked_to_stop or self._board.is_asked_to_stop()
            except (OSError, RuntimeError):  # the host of the store is lost or busy
                found = seen
            now = time.monotonic()
            passed, before = min(now - before, 2 * BEAT_SECONDS), now
            for rank, beat in enumerate(found):
                silence[rank] = 0.0 if beat != seen[rank] or rank == self.rank else silence[rank] + passed
            seen = list(found)
            worst = max(range(len(silence)), key=silence.__getitem__)
            self._silent = worst if silence[worst] > SILENT_SECONDS else None

    def check(self) -> None:
        """Raise an error if another rank has failed, left, or fallen silent."""
        self._error = self._find_error()
        if self._error is not None:
            raise self._error

    def _find_error(self) -> RemudaError | None:
        ended = [self._by_pidfd[pidfd] for pidfd, _ in self._ends.poll(0)]
        if ended:  # a report may be newer than the thread's last read
            with contextlib.suppress(OSError, RuntimeError):
                self._reports = self._board.reports()
        for info, report in zip(self.infos, self._reports, strict=True):
            if report and info.rank != self.rank:
                return error_of(info, report)
        if ended:
            return WorkerError(
                f"{ended[0]} has ended without an error, as a killed process does. Continue from the last checkpoint "
                "with --resume."
            )
        if self._silent is not None:
            info = self.infos[self._silent]
            self._kill(info)
            return WorkerError(
                f"{info} has given no sign of life for {SILENT_SECONDS:g} s: it was stopped, or its machine or "
                "network is lost. Continue from the last checkpoint with --resume."
            )
        return None

    def _kill(self, silent: RankInfo) -> None:
        """Kill a silent rank if it is on this host, so that it cannot wake up later, next to a resumed run."""
        if silent.host == self.infos[self.rank].host:
            with contextlib.suppress(OSError):
                os.kill(silent.pid, signal.SIGKILL)

    def fail(self, error: BaseException) -> None:
        """Publish the error that ended this rank, so that all other ranks end too."""
        trace = "".join(traceback.format_exception(error))
        # An error that `check` has raised already names the rank that caused it.
        named = error is self._error
        found = {"error": type(error).__name__, "text": str(error)[:2000], "named": named, "traceback": trace[-8000:]}
        self._report(json.dumps(found).encode()[:MAX_ERROR_BYTES])

    def leave(self) -> None:
        """Publish that this rank has ended without an error."""
        self._report(b"left")

    def _report(self, text: bytes) -> None:
        if not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(OSError, RuntimeError):
                self._board.report(text)

    def ask_to_stop(self) -> None:
        """Ask all ranks to cut their round short."""
        self._is_asked_to_stop = True
        with contextlib.suppress(OSError, RuntimeError):
            self._board.ask_to_stop()

    def is_asked_to_stop(self) -> bool:
        return self._is_asked_to_stop

    def close(self) -> None:
        self.leave()
        self._is_closing.set()
        self._thread.join()
        for pidfd in self._by_pidfd:
            os.close(pidfd)
        self._by_pidfd.clear()


def error_of(info: RankInfo, report: bytes) -> RemudaError:
    """Return the error that the `report` of a rank describes.

    It has the same class as the rank's error if that is a class of Remuda other than Interrupted; otherwise it is a
    WorkerError.
    """
    if report == b"left":
        return WorkerError(f"{info} has left the run while others were training.")
    try:
        found = json.loads(report)
    except ValueError:  # the report was too long and is cut off
        text = "an error that is too long to be shown"
        found = {"error": "WorkerError", "text": text, "named": False, "traceback": ""}
    kind, text = vars(errors).get(found["error"]), found["text"]
    if not (isinstance(kind, type) and issubclass(kind, RemudaError)) or kind is errors.Interrupted:
        kind, text = WorkerError, f"{found['error']}: {text}"
    error = kind(text if found.get("named") else f"{info}: {text}")
    error.add_note(found["traceback"])
    return error
