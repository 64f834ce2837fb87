"""Handlers for SIGINT and SIGTERM: the first signal ends a run after the current round, the second at once."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, Self

from remuda.envs.local import LocalEnvs
from remuda.errors import Abandoned

PATIENCE_SECONDS = 5.0  # time for a round to end by itself; a checkpoint is promised within 10 s of the signal
ENV_SECONDS = 1.0  # additional time for an env in this process to return from its current call
STOPPING = (
    f"stopping when this round ends, after {PATIENCE_SECONDS:.0f} s at the latest, and saving what was learned; "
    "a second signal stops at once, without saving"
)
# Functions that call the user's envs. It is safe to abandon them, because no update is in progress while they run.
ENV_CALLS: frozenset[CodeType] = frozenset({LocalEnvs.recv.__code__, LocalEnvs.reset.__code__})


class StopSignals:
    """Context manager in which the first signal sets `received` and the second raises KeyboardInterrupt.

    If a Python env in this process is still inside step() or reset() after PATIENCE_SECONDS + ENV_SECONDS, the call
    is abandoned: a timer sends the signal to the main thread again, and the handler raises `Abandoned` there. This
    cannot interrupt native code that holds the interpreter lock. Envs in worker processes (--scheme parallel) never
    block the main thread.

    Python delivers signals to the main thread only. In any other thread, entering the context installs no handlers.
    """

    def __init__(self, consequence: str = "stopping") -> None:
        """`consequence` is printed when the first signal arrives; it tells the user what this signal does."""
        self._consequence = consequence
        self.received: signal.Signals | None = None
        self.deadline = math.inf  # value of time.monotonic() at which the current round is stopped early
        self._previous: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._is_passed = False  # whether `receive` passed the signal on, and this process has not got it itself yet
        self._is_from_timer = False  # whether the next signal comes from the timer, not from the user

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # the timer must not send a signal after the previous handlers are restored
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """The name of the signal that was received."""
        return self.received.name if self.received is not None else "no signal"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_from_timer:
            self._is_from_timer = False
            abandon_env(frame)
            return
        if self.received is not None and not self._is_passed:
            raise KeyboardInterrupt
        if self.received is None:
            self._begin(number)
        self._is_passed = False  # only the second signal to this process itself stops at once

    def receive(self, number: int) -> None:
        """Act as if the first signal had arrived, because another process of the run has received it.

        If the same request then reaches this process too, it does not count as a second signal. May be called by any
        thread.
        """
        if self.received is None:
            self._is_passed = True
            self._begin(number)

    def _begin(self, number: int) -> None:
        self.received = signal.Signals(number)
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        acknowledge(f"{self.received.name}: {self._consequence}")
        self._timer = threading.Timer(PATIENCE_SECONDS + ENV_SECONDS, self._resend)
        self._timer.daemon = True
        self._timer.start()

    def _resend(self) -> None:
        assert self.received is not None
        self._is_from_timer = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, self.received)  # the signal also interrupts a sleep inside an env


def acknowledge(line: str) -> None:
    """Print a line to standard error from a signal handler."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (RuntimeError, ValueError, OSError, AttributeError):  # another write was interrupted, or stderr is None
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


def abandon_env(frame: FrameType | None) -> None:
    """If `frame` is inside a call into an env, raise `Abandoned` with the file and line that `frame` is executing."""
    innermost = frame
    while frame is not None:
        if frame.f_code in ENV_CALLS:
            assert innermost is not None
            where = f"{innermost.f_code.co_filename}:{innermost.f_lineno}, in {innermost.f_code.co_name}"
            raise Abandoned(f"an env did not return from its call after a stop signal ({where})")
        frame = frame.f_back
