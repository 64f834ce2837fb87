"""Measurement of the time that a run spends on each activity.

watch = Stopwatch()
seconds = watch.lap({"env": 0.2, "update": 0.1})        # one round; the remaining time is `other`
with watch.timed("evaluation"):                         # between two rounds
    evaluate()
watch.total, watch.interval                             # seconds of the whole run, and since the last metrics line
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Seconds by activity: `total` of the whole run, and `interval` since the last metrics line.

    The caller clears `interval` after each metrics line. `timed` adds to `total` only.
    """

    def __init__(self) -> None:
        self.interval: dict[str, float] = defaultdict(float)
        self.total: dict[str, float] = defaultdict(float)
        self.start()
        self.restart()

    def start(self, elapsed: float = 0.0) -> None:
        """Start measuring the run; `elapsed` is the duration of earlier processes of a resumed run, in seconds."""
        self._started = time.perf_counter() - elapsed

    def elapsed(self) -> float:
        """Return the duration of the run in seconds, including the earlier processes of a resumed run."""
        return time.perf_counter() - self._started

    def restart(self) -> None:
        """Set the start of the current round to now."""
        self._mark = time.perf_counter()

    def lap(self, seconds: Mapping[str, float]) -> float:
        """End the current round and return its duration.

        `seconds` (by activity) are added to `total` and `interval`. The rest of the duration is added as `other`.
        """
        now = time.perf_counter()
        whole, self._mark = now - self._mark, now
        for name, value in {**seconds, "other": max(0.0, whole - sum(seconds.values()))}.items():
            self.interval[name] += value
            self.total[name] += value
        return whole

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the context to `total[name]`, even if the context raises an error.

        `interval` does not change. Use the context only between two rounds; when it ends, the next round starts.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total[name] += time.perf_counter() - start
            self.restart()

    def trained(self) -> float:
        """Return the measured seconds of the run, except those of evaluations and checkpoints."""
        return sum(value for name, value in self.total.items() if name not in ("evaluation", "checkpoint"))
