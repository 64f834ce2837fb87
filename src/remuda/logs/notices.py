"""Warnings of the package, such as of replaced workers, become lines of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def warnings_go_to(say: Callable[[str], None]) -> Iterator[None]:
    """While it lasts."""
    handler, logger = _Notices(say), logging.getLogger("remuda")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Notices(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"warning: {record.getMessage()}")
