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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from remuda import errors
from remuda.errors import RemudaError, WorkerError
from remuda.processes.identity import open_process, state_of

BEAT_SECONDS = 0.25  # time between two heartbeats of a rank
SILENT_SECONDS = 6.0  # a rank counts as lost after this time without a heartbeat, so that all ranks end within 10 s
# A main thread counts as hanging after this time without progress within a round, and neighbors no longer vouch for a
# rank after this time without a heartbeat of its own.
STALL_SECONDS = 600.0
ANSWER_SECONDS = 4.0  # a board counts as lost after this time without an answer
MAX_ERROR_BYTES = 16_000


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
    machine: str = ""  # see `machine_id`; equal only if this process can see the other by its pid
    started: int = 0  # see `start_time`

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Board(Protocol):
    """What each rank publishes for all others. A rank writes only its own entries, and reads those of all ranks.

    The request to stop and the signal are the only entries that all ranks share.
    """

    def beat(self, rank: int, count: int) -> None: ...
    def beats(self) -> Sequence[int]: ...  # the newest heartbeat of every rank; OSError if there is no answer
    def report(self, text: bytes) -> None: ...  # publishes the end of this rank: b"left", or a failure as JSON
    def reports(self) -> Sequence[bytes]: ...  # the report of every rank; b"" for ranks that have not ended
    def newest_reports(self) -> Sequence[bytes]: ...  # the same, but never older than this call
    def ask_to_stop(self) -> None: ...  # asks all ranks to cut their round short
    def is_asked_to_stop(self) -> bool: ...
    def pass_signal(self, number: int) -> None: ...  # tells rank 0 that this rank has received a stop signal
    def passed_signal(self) -> int: ...  # the number of a signal that was passed on, or 0
    def close(self) -> None: ...


class Health:
    """Watches the other ranks, and publishes for them that this rank is alive, or how it has ended."""

    def __init__(self, board: Board, rank: int, infos: Sequence[RankInfo]) -> None:
        self._board, self.rank, self.infos = board, rank, list(infos)
        # The next four hold what the heartbeat thread found when it last read the board. The main thread uses these
        # copies at every step of an env, because reading a store takes a round trip to another host.
        self._silent: int | None = None  # a rank whose heartbeats have stopped
        self._is_cut_off = False  # whether the board has not answered for ANSWER_SECONDS
        self._reports: Sequence[bytes] = [b""] * len(infos)
        self._is_asked_to_stop = False
        self._has_reported = False
        self.progress = 0  # the main thread counts its steps and exchanges here, and waits for other ranks
        self.is_limited = False  # whether the main thread must make progress; True within rounds
        self.ends_process = rank > 0  # whether this process is ended if its main thread hangs
        self.on_signal: Callable[[int], None] | None = None  # called once, in the thread, with a signal passed on
        self._error: RemudaError | None = None  # the error that `check` has raised
        self._ends, self._by_pidfd = select.poll(), dict[int, RankInfo]()  # to notice ends of ranks on this host
        for info in self.infos:
            if info.rank != rank and info.machine and info.machine == self.infos[rank].machine:
                pidfd = open_process(info.pid, info.started)
                if pidfd is not None:  # otherwise the rank has ended, and its heartbeats will be missing
                    self._by_pidfd[pidfd] = info
                    self._ends.register(pidfd, select.POLLIN)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="remuda-heartbeat", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Write this rank's heartbeats, and notice when those of another rank stop.

        Ranks on one machine also vouch for each other: if a rank writes no heartbeats while its process is running,
        its main thread is in native code that holds the interpreter lock. The others then write heartbeats for it.

        Time during which this thread itself did not run does not count as silence, because the whole run may have
        been suspended, for example by Ctrl-Z.
        """
        count, seen, unanswered = 0, [-1] * len(self.infos), 0.0
        silence, before = [0.0] * len(self.infos), time.monotonic()
        alone = [0.0] * len(self.infos)  # time since the last heartbeat that a rank has written itself
        stalled, progress = 0.0, -1
        while not self._is_closing.wait(BEAT_SECONDS):
            count += 1
            found = None
            with contextlib.suppress(OSError):
                self._board.beat(self.rank, count)
                found = list(self._board.beats())
                self._reports = self._board.reports()
                self._is_asked_to_stop = self._is_asked_to_stop or self._board.is_asked_to_stop()
                if self.on_signal is not None and (number := self._board.passed_signal()):
                    self.on_signal(number)
                    self.on_signal = None
            now = time.monotonic()
            passed, before = min(now - before, 2 * BEAT_SECONDS), now
            is_moving = not self.is_limited or self.progress != progress
            stalled, progress = 0.0 if is_moving else stalled + passed, self.progress
            if stalled > STALL_SECONDS:
                self._end_hanging_process()
                stalled = 0.0
            unanswered = unanswered + passed if found is None else 0.0
            self._is_cut_off = unanswered > ANSWER_SECONDS
            if found is None:  # the board is lost or busy, which tells nothing about the other ranks
                continue
            for rank, beat in enumerate(found):
                silence[rank] = 0.0 if beat != seen[rank] or rank == self.rank else silence[rank] + passed
                alone[rank] = 0.0 if beat > 0 and beat != seen[rank] else alone[rank] + passed
                if 2 * BEAT_SECONDS < alone[rank] < STALL_SECONDS and self._is_running(rank):
                    self._board.beat(rank, -count)  # negative, to distinguish it from heartbeats of the rank itself
            seen = found
            worst = max(range(len(silence)), key=silence.__getitem__)
            self._silent = worst if silence[worst] > SILENT_SECONDS else None

    def _is_running(self, rank: int) -> bool:
        """Return whether another rank is on this machine, and its process has neither ended nor been stopped."""
        info = self.infos[rank]
        return info in self._by_pidfd.values() and state_of(info.pid) not in ("", *"TtZX")

    def _end_hanging_process(self) -> None:
        """End the run in all other ranks, and this process if `ends_process`, with the stack of the main thread."""
        sentence = (
            f"its main thread has made no progress for {STALL_SECONDS:g} s within a round. Continue from the last "
            "checkpoint with --resume."
        )
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main))
        self._report(report_of(WorkerError(sentence), named=False, trace=stack))
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or None
            sys.stderr.write(f"remuda: {self.infos[self.rank]}: {sentence}\n{stack}")
            sys.stderr.flush()
        if self.ends_process:
            os._exit(1)

    def check(self) -> None:
        """Raise an error if another rank has failed, left, or fallen silent."""
        self.progress += 1
        self._error = self._find_error()
        if self._error is not None:
            raise self._error

    def _find_error(self) -> RemudaError | None:
        ended = [self._by_pidfd[pidfd] for pidfd, _ in self._ends.poll(0)]
        if ended:  # a report may be newer than the thread's last read
            self._reports = self._board.newest_reports()
        for info, report in zip(self.infos, self._reports, strict=True):
            if report and info.rank != self.rank:
                return error_of(info, report)
        if ended:
            return WorkerError(
                f"{ended[0]} has ended without an error, as a killed process does. Continue from the last checkpoint "
                "with --resume."
            )
        if self._is_cut_off:
            host = self.infos[0].host
            return WorkerError(
                f"{self.infos[self.rank]} has had no answer from the store of the run on {host} for "
                f"{ANSWER_SECONDS:g} s: that machine, its network or torchrun on it was lost or stopped. Continue "
                "from the last checkpoint with --resume."
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
        for pidfd, info in self._by_pidfd.items():
            if info == silent:
                with contextlib.suppress(OSError):  # it has just ended
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # never hits another process with the same pid

    def fail(self, error: BaseException) -> None:
        """Publish the error that ended this rank, so that all other ranks end too."""
        # An error that `check` has raised already names the rank that caused it.
        self._report(report_of(error, named=error is self._error))

    def leave(self) -> None:
        """Publish that this rank has ended without an error."""
        self._report(b"left")

    def _report(self, text: bytes) -> None:
        if not self._has_reported:
            self._has_reported = True
            if not self._is_cut_off:
                self._board.report(text)

    def ask_to_stop(self) -> None:
        """Ask all ranks to cut their round short."""
        self._is_asked_to_stop = True
        self._board.ask_to_stop()

    def pass_signal(self, number: int) -> None:
        """Let rank 0 stop the run as if it had received this signal itself."""
        self._board.pass_signal(number)

    def is_asked_to_stop(self) -> bool:
        self.progress += 1
        return self._is_asked_to_stop

    def close(self) -> None:
        self.leave()
        self._is_closing.set()
        self._thread.join()
        self._board.close()
        for pidfd in self._by_pidfd:
            os.close(pidfd)
        self._by_pidfd.clear()


def report_of(error: BaseException, named: bool, trace: str | None = None) -> bytes:
    """Return the report of a rank that ends with this error; `named`: its text already names the rank that failed.

    `trace` replaces the traceback of the error. The traceback loses its beginning if the report would be too long.
    """
    found = {"error": type(error).__name__, "text": str(error)[:2000], "named": named}
    trace = "".join(traceback.format_exception(error)) if trace is None else trace
    trace = trace.encode(errors="replace").decode()
    while True:
        report = json.dumps({**found, "traceback": trace}, ensure_ascii=False).encode(errors="replace")
        if len(report) <= MAX_ERROR_BYTES:
            return report
        trace = trace[len(trace) // 4 + 1 :]


def error_of(info: RankInfo, report: bytes) -> RemudaError:
    """Return the error that the `report` of a rank describes.

    It has the same class as the rank's error if that is a class of Remuda other than Interrupted; otherwise it is a
    WorkerError.
    """
    if report == b"left":
        return WorkerError(f"{info} has left the run while others were training.")
    found = json.loads(report)
    kind, text = vars(errors).get(found["error"]), found["text"]
    if not (isinstance(kind, type) and issubclass(kind, RemudaError)) or kind is errors.Interrupted:
        kind, text = WorkerError, f"{found['error']}: {text}"
    error = kind(text if found.get("named") else f"{info}: {text}")
    error.add_note(found["traceback"])
    return error
