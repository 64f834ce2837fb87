"""Helpers for tests that wait for processes to end. On a busy machine even SIGKILL takes a moment."""

import time
from collections.abc import Callable, Iterable

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: it only waits to be reaped by its parent or by process 1."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(processes: Iterable[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process, or an empty list if it has ended in the meantime."""
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def find(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those of the processes that still exist."""
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def wait_for(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
