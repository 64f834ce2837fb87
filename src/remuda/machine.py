"""Facts about this machine, and settings of the process."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt, from malloc.h


def usable_cores() -> int:
    """Return the number of cores that this process may run on; containers and taskset often allow only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Return how many bytes this process can still allocate within the limits of the machine and the container."""
    found = [sys.maxsize]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # ValueError: memory.max contains the word "max" if there is no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, limit - used))
    return min(found)


def has_compiler() -> bool:
    """Return whether the C++ compiler that torch.compile would use is installed."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


def keep_memory() -> None:
    """Let this process keep the large blocks that it frees, instead of returning them to the system.

    Every minibatch of images needs tens of megabytes. If they were returned to the system after each minibatch, the
    kernel would fill the same pages with zeros again and again. The setting (`mallopt`, in glibc only) applies to the
    whole process until it ends. The command `remuda train` and worker processes call this function. The function
    `remuda.train` does not, because it runs in the user's own process. Call `remuda.keep_memory()` yourself if your
    process may keep freed blocks of up to 1 GiB each.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Older versions of glibc refuse thresholds above 32 MiB.
        if mallopt(MMAP_THRESHOLD, 1 << 30) or mallopt(MMAP_THRESHOLD, 32 << 20):
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Return a context manager. Until its exit, garbage collections skip all objects that existed at its entry.

    Most of these objects belong to imported modules and never become garbage, but every full collection would visit
    them. If the program has already called `gc.freeze`, it manages its garbage collection itself, and the context
    manager does nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
