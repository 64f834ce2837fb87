"""Warnings for the user that may come from another process: a short text for the screen, a traceback for log.txt.

reporter = Reporter(logging.getLogger("remuda.envs"))
reporter.report(notices)                  # in the process that owns the run's log
notices = collect_warnings()              # in a worker: warnings that its parent is to report
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple


class Notice(NamedTuple):
    """One warning. `traceback` and `place` are empty where a process has sent the same place before."""

    text: str
    traceback: str = ""
    place: str = ""  # file:line that the traceback belongs to; without a traceback: a key, for one warning per run

    @property
    def is_once(self) -> bool:
        """Whether the user is to see it once in a run, whatever else is reported."""
        return bool(self.place) and not self.traceback


class Reporter:
    """Logs the 1st, 2nd, 4th, 8th, ... notice and every first one of a place: a flaky env would hide all else."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._count, self._places = logger, 0, set[str]()

    def report(self, notices: Iterable[Notice]) -> None:
        """Count these notices, which may have come over a wire as plain lists, and log those that are due."""
        for notice in map(Notice._make, notices):
            is_new = bool(notice.place) and notice.place not in self._places
            if is_new:
                self._places.add(notice.place)
            self._count += not notice.is_once
            if is_new or (not notice.is_once and self._count & (self._count - 1) == 0):
                extra = {"traceback": notice.traceback, "place": notice.place} if is_new else {}
                self._logger.warning("%s", notice.text, extra=extra)


def notice_of(record: logging.LogRecord) -> Notice:
    """Return what a log record says, with the traceback that a Reporter attached to it."""
    return Notice(record.getMessage(), getattr(record, "traceback", ""), getattr(record, "place", ""))


def collect_warnings() -> list[Notice]:
    """Return a list to which every later warning of the package in this process is appended."""
    notices: list[Notice] = []
    logging.getLogger("remuda").addHandler(_Collector(notices))
    return notices


class _Collector(logging.Handler):
    def __init__(self, notices: list[Notice]) -> None:
        super().__init__(logging.WARNING)
        self._notices = notices

    def emit(self, record: logging.LogRecord) -> None:
        self._notices.append(notice_of(record))
