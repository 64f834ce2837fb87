"""What this machine allows; every part may ask."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt, in malloc.h


def usable_cores() -> int:
    """Cores that this process may run on: containers and taskset often allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, or of the container that it is in."""
    found = [sys.maxsize]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, limit - used))
    return min(found)


def has_compiler() -> bool:
    """The one for C++ that torch.compile would take."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


def keep_memory() -> None:
    """Let this process keep large blocks that it frees, instead of giving them back and asking for them anew.

    Every minibatch of images needs the same tens of megabytes, and each time the kernel would fill them with zeros
    page by page. Only glibc can be asked, and it stays so until the process ends.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(MMAP_THRESHOLD, 1 << 30) or mallopt(MMAP_THRESHOLD, 32 << 20):  # older ones allow no more
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
