"""What tests ask of processes that are about to end: on a busy machine even SIGKILL takes a moment."""

import time
from collections.abc import Callable, Iterable

import psutil


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: it only waits for its parent, or whoever runs as process 1, to take note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(processes: Iterable[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """None, if it has ended while somebody was looking."""
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def find(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of them that are still there."""
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def wait_for(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
