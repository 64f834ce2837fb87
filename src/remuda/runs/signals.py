"""SIGINT and SIGTERM as a request to stop: the first is acknowledged and obeyed politely, the second at once."""

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

PATIENCE_SECONDS = 5.0  # that a round may take to end by itself: a checkpoint is promised within 10
ENV_SECONDS = 1.0  # after that, for an env of this process to return from its current call
STOPPING = (
    f"stopping when this round ends, after {PATIENCE_SECONDS:.0f} s at the latest, and saving what was learned; "
    "a second signal stops at once, without saving"
)
# Calls into the user's env that may be abandoned: nothing is being learned meanwhile.
ENV_CALLS: frozenset[CodeType] = frozenset({LocalEnvs.recv.__code__, LocalEnvs.reset.__code__})


class StopSignals:
    """While inside, the first signal sets `received`; a second raises KeyboardInterrupt where the program stands.

    An env of this process that is still inside its step() or reset() when the time for a polite end is over is
    abandoned: the signal is sent to the main thread once more, and its handler raises `Abandoned` there. Native code
    that holds the interpreter lock cannot be interrupted this way; worker processes (--scheme parallel) can.

    Outside the main thread Python delivers no signals, and nothing is installed.
    """

    def __init__(self, consequence: str = "stopping") -> None:
        """`consequence` is what the user is told that the first signal brings about."""
        self._consequence = consequence
        self.received: signal.Signals | None = None
        self.deadline = math.inf  # when the current round is cut short, on the monotonic clock
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._is_reminder = False  # the next signal comes from the timer, not from the user

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # so that no reminder arrives after the caller's handlers are back
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        return self.received.name if self.received is not None else "nobody"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_reminder:
            self._is_reminder = False
            abandon_env(frame)
            return
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        acknowledge(f"{self.received.name}: {self._consequence}")
        self._timer = threading.Timer(PATIENCE_SECONDS + ENV_SECONDS, self._remind)
        self._timer.daemon = True
        self._timer.start()

    def _remind(self) -> None:
        assert self.received is not None
        self._is_reminder = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, self.received)  # also wakes an env that sleeps


def acknowledge(line: str) -> None:
    """Print a line on standard error from a signal handler."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (RuntimeError, ValueError, OSError, AttributeError):  # inside another write, or there is no sys.stderr
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


def abandon_env(frame: FrameType | None) -> None:
    """Raise `Abandoned` if the main thread is inside a call of an env; say where it hangs."""
    place = frame
    while frame is not None:
        if frame.f_code in ENV_CALLS:
            assert place is not None
            where = f"{place.f_code.co_filename}:{place.f_lineno}, in {place.f_code.co_name}"
            raise Abandoned(f"an env did not return from its call after a stop signal ({where})")
        frame = frame.f_back
