"""Identities of processes and machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import wait_for

from remuda.processes.identity import machine_id, open_process, parent_of, start_time, state_of


def test_machine_is_the_same_for_other_processes_of_this_pid_namespace() -> None:
    code = "from remuda.processes.identity import machine_id; print(machine_id())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == machine_id() != ""


def test_machine_differs_in_another_pid_namespace() -> None:
    """As in two containers on one machine, which share the boot id."""
    code = "from remuda.processes.identity import machine_id; print(machine_id())"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no program unshare")
    if done.returncode:
        pytest.skip(f"namespaces cannot be created here: {done.stderr}")
    assert done.stdout.strip() not in ("", machine_id())
    assert done.stdout.split("-")[:5] == machine_id().split("-")[:5], "the boot id"


def test_process_is_opened_only_if_it_is_the_one_that_was_meant() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = start_time(process.pid)
        assert started > start_time(os.getpid()) > 0
        assert parent_of(process.pid) == os.getpid()
        pidfd = open_process(process.pid, started)
        assert pidfd is not None
        assert open_process(process.pid, started - 1) is None, "an earlier process with the same pid"
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(process.pid) == "T")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        assert process.wait(30) == -signal.SIGKILL
        assert open_process(process.pid, started) is None
        assert (start_time(process.pid), parent_of(process.pid), state_of(process.pid)) == (0, 0, "")
    finally:
        process.kill()


def test_own_start_time_is_in_the_past() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert start_time(os.getpid()) / ticks < time.clock_gettime(time.CLOCK_BOOTTIME)
