"""A process that forks workers: it has their module loaded, and never runs a thread.

    server = ForkServer("remuda.envs.worker")
    pid = server.fork([link.fileno(), *bell.fds, *parent_bell.fds])    # 5 ms; the worker runs that module's main
    ...
    print(server.fate(pid))                                            # "was killed by SIGKILL"
    server.close()

Not multiprocessing's: that one loads the user's main module, knows no death of its parent but by an open pipe, and is
one for the whole program. This one belongs to whoever made it and ends with it, and every worker ends with this one.
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

START_SECONDS = 120.0  # importing numpy and gymnasium takes 0.4 s, torch 2 s, on a cold and busy disk far longer
FORK_SECONDS = 20.0
LEAVE_SECONDS = 1.0
FATE_SECONDS = 5.0
DEATH_SECONDS = 20.0  # after SIGKILL: not even that is obeyed without a core
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# -c and not -m: the folder that -m would put first on the path may hide modules of the standard library
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = sys.argv[5:]; "
    "from remuda.processes.fork_server import main; main(sys.argv[1], *map(int, sys.argv[2:5]))"
)


class ForkFailed(Exception):
    """The system allows no process more; the server and all that it has forked live on."""


class ForkServer:
    """The parent's side: owns the process."""

    def __init__(self, module: str) -> None:
        self._link, theirs = Link.pair()
        path = [os.path.abspath(folder) for folder in sys.path]  # '' is the working directory
        # tied to a thread's life, see die_with_parent: where that is not the main one, the link's end must do
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
        self._fates: dict[int, int] = {}
        self._seconds = START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, fds: Sequence[int]) -> int:
        """The pid of a new worker that holds these descriptors.

        Raises ForkFailed where the system has no room for it, and OSError or EOFError if the server is gone.
        """
        self._link.send("fork", fds=fds)
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            if self._link.wait(deadline - time.monotonic()):
                for pid in self._read():
                    self._seconds = FORK_SECONDS
                    return pid
        raise TimeoutError(f"fork server (pid {self.pid}) silent for {self._seconds:g} s")

    def _read(self) -> list[int]:
        """Note who died, return who was forked."""
        messages, _ = self._link.receive()
        forked, failed = [], None
        for message in messages:
            if "status" in message:
                self._fates[message["pid"]] = message["status"]
            elif "failed" in message:
                failed = message["failed"]
            else:
                forked.append(message["pid"])
        if failed is not None:
            raise ForkFailed(failed)
        if self._link.has_ended and not forked:
            raise EOFError("the fork server is gone")
        return forked

    def exit_reason(self, pid: int, seconds: float = FATE_SECONDS) -> str:
        """How this worker died, as a phrase; waits so long for a server that has no core at the moment."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            while pid not in self._fates and self._link.wait(deadline - time.monotonic()):
                self._read()
        if pid not in self._fates:
            return "was lost with its fork server" if self._link.has_ended else "was lost"
        code = os.waitstatus_to_exitcode(self._fates[pid])
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def close(self) -> None:
        """Let it leave, and reap it; every worker that is left dies with it."""
        self._link.close()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(DEATH_SECONDS)


def main(module: str, fd: int, parent: int, is_tied: int) -> None:
    """The server's side: fork on request and report deaths until the link ends."""
    if is_tied:
        die_with_parent(parent)
    stay_when_terminated()
    link = Link.from_fd(fd)
    worker = importlib.import_module(module)  # loaded here once, shared by all that are forked

    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only so that the wakeup descriptor hears of it
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    with contextlib.suppress(OSError):  # the parent is gone: nobody is left to report to
        while not link.has_ended:
            poll.poll()  # the parent owns this wait: its end is the end of the link
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _report_deaths(link)
            messages, fds = link.receive()
            if messages:  # one: the next request comes after the answer
                try:
                    answer: dict[str, int | str] = {"pid": _fork(worker.main, fds, [link.fileno(), woken, waker])}
                except OSError as error:
                    answer = {"failed": str(error)}
                link.send(answer)
                for fd in fds:
                    os.close(fd)


def stay_when_terminated() -> None:
    """SIGTERM often goes to a whole group of processes (timeout, systemd, Slurm): it is for the run to say when its
    workers leave. What an env starts is not concerned."""
    me = os.getpid()

    def stay(number: int, frame: object) -> None:
        if os.getpid() != me:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stay)


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
        os._exit(code)  # never back into the server's loop
