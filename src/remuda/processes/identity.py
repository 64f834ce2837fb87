"""Identities of machines and processes that stay unique when pids are reused, and in containers.

    pidfd = open_process(pid, started)      # None if it has ended, even if another process got its pid
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

Two containers on one machine have the same boot id and often the same host name and pids, so a pid identifies a
process only together with the pid namespace. Functions that read /proc return "" or 0 if the system has no /proc, or
if the process has ended.
"""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Return a text that is equal in two processes if both run on the same machine, in the same pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine booted."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def state_of(pid: int) -> str:
    """Return the state of a process as one letter: T or t if it is stopped, Z or X if it has ended."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, which may contain any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def open_process(pid: int, started: int) -> int | None:
    """Return a pidfd of the process with this pid and start time; None if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # The start time is read after pidfd_open. If it is `started`, the pidfd belongs to the wanted process, and not to
    # one that got the same pid later.
    if start_time(pid) == started:
        return pidfd
    os.close(pidfd)
    return None
