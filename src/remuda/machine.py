"""What this machine allows; every part may ask."""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt, in malloc.h


def usable_cores() -> int:
    """Cores that this process may run on: containers and taskset often allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_compiler() -> bool:
    """One for C++, as torch.compile needs."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "c++", "clang++"))


def keep_memory() -> None:
    """Let this process keep large blocks that it frees, instead of giving them back and asking for them anew.

    Every minibatch of images needs the same tens of megabytes, and each time the kernel would fill them with zeros
    page by page: without that an update of Nature's net took 5 to 20 % less. Only glibc can be asked.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, 1 << 30)
        mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
