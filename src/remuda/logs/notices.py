"""Warnings of the package, such as of replaced workers, become lines of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from remuda.processes.notices import notice_of


@contextmanager
def warnings_go_to(log: Callable[[str, str], None]) -> Iterator[None]:
    """Pass every warning to `say` while the context lasts: its text, and a traceback or "".

    The traceback of an exception at the same place of the user's code is passed once.
    """
    handler, logger = _Notices(log), logging.getLogger("remuda")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Notices(logging.Handler):
    def __init__(self, log: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._places = log, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        notice = notice_of(record)
        is_new = notice.place not in self._places
        if notice.place:
            self._places.add(notice.place)
        if is_new or not notice.is_once:
            self._say(f"warning: {notice.text}", notice.traceback if is_new else "")
