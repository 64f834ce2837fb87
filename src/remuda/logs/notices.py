"""Pass the package's warnings, for example about replaced workers, to the log of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from remuda.processes.notices import notice_of


@contextmanager
def warnings_go_to(log: Callable[[str, str], None]) -> Iterator[None]:
    """Call `log(text, traceback)` for the warnings that the package logs inside the context.

    `traceback` is "" if the warning has no traceback, or if a traceback for the same line of the user's code was
    passed before. Warnings that are marked as `is_once` are passed only once.
    """
    handler, logger = _NoticeHandler(log), logging.getLogger("remuda")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _NoticeHandler(logging.Handler):
    def __init__(self, log: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._log, self._places = log, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        notice = notice_of(record)
        is_new = notice.place not in self._places
        if notice.place:
            self._places.add(notice.place)
        if is_new or not notice.is_once:
            self._log(f"warning: {notice.text}", notice.traceback if is_new else "")
