"""Warnings for the user that may come from another process: a short text for the screen, a traceback for log.txt.

notices = collect_warnings()              # in a worker, which sends the notices to its parent
reporter = Reporter(logging.getLogger("remuda"))
reporter.report(notices)                  # in the process that owns the run's log
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple


class Notice(NamedTuple):
    """One warning. A sender gives `traceback` and `place` of an error only in its first warning about that place."""

    text: str
    traceback: str = ""
    # With a traceback, the file:line of the error. Without one, a key of a warning that is shown only once per run.
    place: str = ""

    @property
    def is_once(self) -> bool:
        """Whether the warning is logged only once per run, and left out of the count that `Reporter` keeps."""
        return bool(self.place) and not self.traceback


class Reporter:
    """Logs the first notice with each `place`, and of the notices without `is_once` the 1st, 2nd, 4th, 8th, ..."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._count, self._places = logger, 0, set[str]()

    def report(self, notices: Iterable[Notice]) -> None:
        """Count the notices and log some of them. Notices from a link may be plain lists of their fields."""
        for notice in map(Notice._make, notices):
            is_new = bool(notice.place) and notice.place not in self._places
            if is_new:
                self._places.add(notice.place)
            self._count += not notice.is_once
            if is_new or (not notice.is_once and self._count & (self._count - 1) == 0):
                extra = {"traceback": notice.traceback, "place": notice.place} if is_new else {}
                self._logger.warning("%s", notice.text, extra=extra)


def notice_of(record: logging.LogRecord) -> Notice:
    """Return the notice of a log record, with the traceback that a Reporter attached to it."""
    return Notice(record.getMessage(), getattr(record, "traceback", ""), getattr(record, "place", ""))


def collect_warnings() -> list[Notice]:
    """Return a list. Every warning that Remuda logs in this process from now on is appended to it."""
    notices: list[Notice] = []
    logging.getLogger("remuda").addHandler(_Collector(notices))
    return notices


class _Collector(logging.Handler):
    def __init__(self, notices: list[Notice]) -> None:
        super().__init__(logging.WARNING)
        self._notices = notices

    def emit(self, record: logging.LogRecord) -> None:
        self._notices.append(notice_of(record))
