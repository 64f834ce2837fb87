"""A single-threaded process that has imported the workers' module and forks workers on request.

    server = ForkServer("package.worker")
    pid = server.fork([link.fileno(), *bell.fds, *parent_bell.fds])    # takes 5 ms; the worker runs the module's main
    ...
    print(server.exit_reason(pid))                                     # "was killed by SIGKILL"
    server.close()

The fork server of multiprocessing is not suitable: it imports the user's main module, notices the death of its parent
only through an open pipe, and is shared by the whole program. A fork server that is started here belongs to one
ForkServer object and ends when this object is closed or the program ends. All its workers end with the fork server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from remuda.processes.links import Link, die_with_parent

START_SECONDS = 120.0  # time limit for the server's imports, which take 0.2 s to 2 s, or far longer from a busy disk
FORK_SECONDS = 20.0
LEAVE_SECONDS = 1.0
EXIT_REASON_SECONDS = 5.0
DEATH_SECONDS = 20.0  # time limit for a process to end after SIGKILL; on a busy machine this takes a while
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# The server replaces sys.path before it imports anything else, because Python puts the working directory first on the
# path. A file of the user in that directory may have the name of a module of the standard library.
COMMAND = (
    "import sys; sys.path[:] = sys.argv[5:]; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from remuda.processes.fork_server import main; main(sys.argv[1], *map(int, sys.argv[2:5]))"
)


class ForkFailed(Exception):
    """The system refused to create a process; the server and its workers keep running."""


class ForkServer:
    """Starts a fork server process, sends it requests, and ends it."""

    def __init__(self, module: str) -> None:
        self._link, theirs = Link.pair()
        path = [os.path.abspath(folder) for folder in sys.path]  # '' means the working directory; make it absolute
        # A process that calls die_with_parent ends with the thread that created it. A server that was created by
        # another thread than the main one must outlive that thread, so it ends only when its link closes.
        is_tied = int(threading.current_thread() is threading.main_thread())
        fd = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, module, str(fd), str(os.getpid()), str(is_tied), *path],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env={**os.environ, **ONE_THREAD},
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        self._statuses: dict[int, int] = {}  # wait status (see `os.waitpid`) of each dead worker, by pid
        self._seconds = START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker that receives these file descriptors, and return its pid.

        Raises ForkFailed if the system refuses to create a process, and OSError or EOFError if the server is gone or
        does not answer in time.
        """
        self._link.send({"do": "fork"}, fds=fds)
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            if self._link.wait(deadline - time.monotonic()):
                for pid in self._read():
                    self._seconds = FORK_SECONDS
                    return pid
        raise TimeoutError(f"fork server (pid {self.pid}) silent for {self._seconds:g} s")

    def _read(self) -> list[int]:
        """Read the server's messages; record the wait statuses of dead workers and return the pids of new ones.

        Raises ForkFailed if the server reports a failed fork, and EOFError if the server is gone.
        """
        messages, _ = self._link.receive()
        forked, failed = [], None
        for message in messages:
            if "status" in message:
                self._statuses[message["pid"]] = message["status"]
            elif "failed" in message:
                failed = message["failed"]
            else:
                forked.append(message["pid"])
        if failed is not None:
            raise ForkFailed(failed)
        if self._link.has_ended and not forked:
            raise EOFError("the fork server is gone")
        return forked

    def exit_reason(self, pid: int, seconds: float = EXIT_REASON_SECONDS) -> str:
        """Return a phrase that says how a worker ended; wait up to `seconds` for the report of the fork server."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            while pid not in self._statuses and self._link.wait(deadline - time.monotonic()):
                self._read()
        if pid not in self._statuses:
            return "was lost with its fork server" if self._link.has_ended else "was lost"
        code = os.waitstatus_to_exitcode(self._statuses[pid])
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def close(self) -> None:
        """End the server process and reap it; workers that still run are killed."""
        self._link.close()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(DEATH_SECONDS)


def main(module: str, fd: int, parent: int, is_tied: int) -> None:
    """Run the server: fork workers on request and report their deaths, until the parent closes the link."""
    if is_tied:
        die_with_parent(parent)
    stay_when_terminated()
    link = Link.from_fd(fd)
    worker = importlib.import_module(module)  # imported once, and shared by all forked workers

    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only signals with a handler wake the poll below
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    with contextlib.suppress(OSError):  # raised if the parent is gone
        while not link.has_ended:
            poll.poll()  # needs no time-out, because the link closes and ends the wait when the parent is gone
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _report_deaths(link)
            messages, fds = link.receive()
            if messages:  # holds exactly one message, because the parent waits for each answer
                try:
                    answer: dict[str, int | str] = {"pid": _fork(worker.main, fds, [link.fileno(), woken, waker])}
                except OSError as error:
                    answer = {"failed": str(error)}
                link.send(answer)
                for fd in fds:
                    os.close(fd)


def stay_when_terminated() -> None:
    """Ignore SIGTERM in this process, but not in processes that it forks or programs that it starts.

    Programs such as timeout, systemd and Slurm send SIGTERM to a whole process group. The parent process handles this
    signal and decides when its workers end.
    """
    global _has_fork_hooks
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not SIG_IGN, which started programs would inherit
    if not _has_fork_hooks:
        # Python drops signals that arrive while it sets up a forked process, so SIGTERM is blocked during a fork.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
            after_in_parent=_unblock_sigterm,
            after_in_child=_obey_sigterm,
        )
        _has_fork_hooks = True


_has_fork_hooks = False  # True once this process, or a process that forked it, called `os.register_at_fork`


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _obey_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()


def _report_deaths(link: Link) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        link.send({"pid": pid, "status": status})


def _fork(work: Callable[[Sequence[int]], int], fds: list[int], foreign: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(server)
        stay_when_terminated()
        for fd in foreign:
            os.close(fd)
        code = work(fds)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)  # without this, the worker would return into the server's loop
