"""SIGINT and SIGTERM as a request to stop: the first is polite, the second is obeyed at once."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

PATIENCE_SECONDS = 5.0  # that a round may take to end by itself: a checkpoint is promised within 10


class StopSignals:
    """While inside, the first signal sets `received`; a second raises KeyboardInterrupt where the program stands.

    Outside the main thread Python delivers no signals, and nothing is installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.deadline = math.inf  # by when what is going on should be cut short, on the monotonic clock
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        return self.received.name if self.received is not None else "nobody"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self.deadline = time.monotonic() + PATIENCE_SECONDS
