"""Start Python programs as forks of a template process that has imported torch, gymnasium and remuda.

    done = prestarted.run([sys.executable, "-m", "remuda", "algos"], capture_output=True, text=True)
    process = prestarted.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)

These imports take two seconds of CPU time in a new interpreter; a fork takes some milliseconds. A fork is a real
process and a child of its caller, with its own standard streams, arguments, environment, working directory, signals
and exit code. What it cannot show is the start of an interpreter: imports, and what Python and the C libraries read
from the environment when they start. Tests of that use `subprocess`.

The module has the names of `subprocess` that remuda.processes.fork_server uses: conftest.py puts it in that place, so
that fork servers are forked as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import io
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from types import ModuleType
from typing import Any
from unittest import mock

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "Template", "TimeoutExpired", "run", "use"]

SIGNATURE = inspect.signature(subprocess.Popen._execute_child)
SIMPLE = {  # the values that a fork needs of some parameters of Popen
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "restore_signals": True,
    "process_group": -1,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
}
READ_BY_PYTHON = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC", "GLIBC")  # variables that are read when a program starts
LONGEST = 1 << 19  # bytes of a request, which holds an environment
ARGUMENT_SPACE = 4096  # bytes that the arguments of a process may take in its command line
SET_CHILD_SUBREAPER = 36  # of prctl
# The code runs at the top of the process, as that of any program: its errors and its exit are handled by Python.
COMMAND = (
    "import sys; path = sys.path[:]; sys.path[:] = sys.argv[2].split(':'); from prestarted import main; "
    "main(int(sys.argv[1]), path)()"
)
HIGH_FD = 500  # file descriptors are received above this number, so that they do not get in the way of one another


@dataclass(frozen=True)
class Request:
    """A process to start. File descriptors are sent along; the new process has them under the numbers of `fds`."""

    arguments: list[str]  # without the interpreter
    cwd: str
    environment: dict[str, str]
    fds: list[int]
    is_leader: bool  # of a new session


@dataclass
class Template:
    """The process that is forked, as seen by the process that started it."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    environment: dict[str, str]
    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        path = list(filter(None, sys.path))
        # The padding makes room for the arguments of the forked processes, see `show_arguments`.
        command = [sys.executable, "-c", COMMAND, str(theirs.fileno()), os.pathsep.join(path), "-" * ARGUMENT_SPACE]
        # Without threads of numpy, the template has a single one, so that a fork of it is safe.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        return cls(process, ours, environment)

    def fork(self, request: Request, sources: Sequence[int]) -> int:
        """Start a process with these file descriptors as a child of this process, and return its pid."""
        with self.lock:
            # The new process is a grandchild of the template. When the child in between ends, the new process becomes
            # a child of its nearest ancestor that collects orphans: this one.
            prctl(SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.link, [pickle.dumps(request)], list(sources))
                answer = self.link.recv(64)
            finally:
                prctl(SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise OSError("the template process is gone")
        return int(answer)

    def can_start(self, request: Request) -> bool:
        others = {name for name, value in request.environment.items() if self.environment.get(name) != value}
        others -= {"PYTHONPATH", "PYTHONUNBUFFERED"}
        return os.getpid() == self.owner and not any(name.startswith(READ_BY_PYTHON) for name in others)

    def end(self) -> None:
        self.link.close()
        self.process.wait(60)


class Reserve:
    """A fork of a forked process that waits to become the first fork server which that process starts.

    It is forked before the process has threads, after which a fork would not be safe.
    """

    def __init__(self, path: list[str]) -> None:
        self.request: Request | None = None
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            request, fds = receive(theirs)
            if request is None:
                os._exit(0)
            theirs.close()
            become(request, fds, path)  # and return as this process, whose code the caller runs
            self.request = request
        else:
            theirs.close()

    def fork(self, request: Request, sources: Sequence[int]) -> int:
        socket.send_fds(self.link, [pickle.dumps(request)], list(sources))
        self.link.close()
        use(None)
        return self.pid

    def can_start(self, request: Request) -> bool:
        return request.arguments[0] == "-c" and "fork_server" in request.arguments[1]


_used: Template | Reserve | None = None


def use(template: Template | Reserve | None) -> None:
    """Fork from this template in this process, or start new interpreters if it is None."""
    global _used
    _used = template


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that is forked from the template, if its program is this Python interpreter."""

    def _execute_child(self, *arguments: Any, **settings: Any) -> None:
        bound = SIGNATURE.bind(self, *arguments, **settings).arguments
        request, template = _request_of(bound), _used
        if template is None or request is None or not template.can_start(request):
            super()._execute_child(*arguments, **settings)  # type: ignore[misc]
            return
        ends = [bound["p2cread"], bound["c2pwrite"], bound["errwrite"]]
        sources = [number if end == -1 else end for number, end in enumerate(ends)] + request.fds[3:]
        fork = lambda *_: template.fork(request, sources)  # noqa: E731
        with mock.patch.multiple(subprocess, _fork_exec=fork, _USE_POSIX_SPAWN=False):
            super()._execute_child(*arguments, **settings)  # type: ignore[misc]


def run(command: Sequence[Any], *, timeout: float, **settings: Any) -> CompletedProcess[Any]:
    """Do what `subprocess.run` does, in a fork of the template."""
    check, text = settings.pop("check", False), settings.pop("input", None)
    if settings.pop("capture_output", False):
        settings |= {"stdout": PIPE, "stderr": PIPE}
    if text is not None:
        settings["stdin"] = PIPE
    with Popen(command, **settings) as process:
        try:
            out, error = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(command, process.returncode, out, error)
    if check:
        done.check_returncode()
    return done


def _request_of(bound: dict[str, Any]) -> Request | None:
    """Return the request for a process that subprocess.Popen would start, or None if it must start it itself."""
    arguments, environment = bound["args"], bound["env"]
    if any(bound[name] != value for name, value in SIMPLE.items() if name in bound):
        return None
    if isinstance(arguments, (str, bytes, os.PathLike)) or bound.get("executable") not in (None, arguments[0]):
        return None
    words = [os.fsdecode(word) for word in arguments]
    if len(words) < 2 or words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
        return None
    if words[1] == "-m" and words[2].split(".")[0] != "remuda":
        return None
    environment = dict(os.environ if environment is None else environment)
    cwd = os.path.abspath(os.fsdecode(bound["cwd"] or "."))
    return Request(words[1:], cwd, environment, [0, 1, 2, *bound["pass_fds"]], bound["start_new_session"])


# --- in the template and its forks ----------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise OSError("prctl failed")


def receive(link: socket.socket) -> tuple[Request | None, list[int]]:
    """Receive a request and its file descriptors; the request is None if the other process has ended."""
    data, fds, _, _ = socket.recv_fds(link, LONGEST, 64)
    return (pickle.loads(data) if data else None), fds


def serve(link: socket.socket, path: list[str]) -> Request | None:
    """Fork a process for each request. Return the request in these processes, and None at the end of the template."""
    while True:
        request, fds = receive(link)
        if request is None:
            return None
        may_start, starts = os.pipe()
        forked, forks = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(forks, str(pid).encode())
                os._exit(0)
            os.close(starts)
            os.read(may_start, 1)  # until this process has its final parent
            for fd in (may_start, forked, forks):
                os.close(fd)
            link.close()
            become(request, fds, path)
            return request
        os.waitpid(between, 0)
        answer = os.read(forked, 64)
        for fd in (may_start, starts, forked, forks, *fds):
            os.close(fd)
        link.send(answer)


def become(request: Request, fds: list[int], path: list[str]) -> None:
    """Give this process what a new interpreter has: files, environment, path, streams and signals.

    It obeys SIGINT, even if a shell made the tests ignore it because they run in the background.
    """
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if request.is_leader:
        os.setsid()
    os.chdir(request.cwd)
    old = dict(os.environ)
    for name in old.keys() - request.environment.keys():
        del os.environ[name]
    os.environ.update(request.environment)
    folders = request.environment.get("PYTHONPATH", "")
    sys.path[:] = [*(os.path.abspath(folder) for folder in folders.split(os.pathsep) if folders), *path]
    importlib.invalidate_caches()
    is_unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open_stream(number, getattr(sys, name), is_unbuffered))
        setattr(sys, f"__{name}__", getattr(sys, name))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = request.environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()
    sys.orig_argv[:] = [sys.executable, *request.arguments]
    show_arguments(sys.orig_argv)


def open_stream(number: int, before: Any, is_unbuffered: bool) -> Any:
    """Open a standard stream as Python does at its start, except that the file descriptor stays open at its end."""
    raw = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(raw), encoding=before.encoding, errors=before.errors)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
        write_through=is_unbuffered,
    )


def show_arguments(words: list[str]) -> None:
    """Write the arguments to where the system reads the command line of this process."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    line = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def program_of(arguments: list[str]) -> Callable[[], object]:
    """Set sys.argv, sys.path[0] and __main__ as Python does for these arguments, and return what runs their code."""
    kind, rest = arguments[0], arguments[1:]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = ["-m", *rest[1:]]
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    module = ModuleType("__main__")
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        sys.argv[:] = arguments
        module.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    sys.modules["__main__"] = module
    return lambda: exec(code, module.__dict__)


_code: Any = None  # the exit code of this process, once known


def run_and_leave(program: Callable[[], object]) -> None:
    global _code
    try:
        program()
        _code = 0
    except SystemExit as exit:
        _code = 0 if exit.code is None else exit.code
        raise
    except Exception:
        _code = 1
        raise


def leave() -> None:
    """End this process, except that imported modules are not torn down object by object.

    This takes 0.2 s, because the memory of the template is copied for it.
    """
    with contextlib.suppress(Exception):  # of a closed pipe, which Python reports itself
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if isinstance(_code, int):
            os._exit(_code & 0xFF)


def import_everything() -> None:
    import gymnasium.envs.classic_control  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import remuda

    for found in pkgutil.walk_packages(remuda.__path__, "remuda."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)


def reserve_if_needed(arguments: list[str], path: list[str]) -> Request | None:
    """Reserve a process for the fork server of a run with workers. Return a request in that process only."""
    if {"parallel", "async", "replicas"} & set(arguments):
        reserve = Reserve(path)
        if reserve.request is not None:
            return reserve.request
        use(reserve)
        sys.modules["remuda.processes.fork_server"].subprocess = sys.modules[__name__]
    return None


def main(fd: int, path: list[str]) -> Callable[[], object]:
    """Serve until the caller closes the link. Return what a process has to do, in that process."""
    atexit.register(leave)  # as the first function, which is called as the last one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings(action="ignore"):
        import_everything()
    gc.collect()
    gc.freeze()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [folder for folder in path if folder and folder not in given]  # those of the interpreter itself
    request = serve(socket.socket(fileno=fd), path)
    if request is None:
        return lambda: run_and_leave(lambda: None)
    request = reserve_if_needed(request.arguments, path) or request
    program = program_of(request.arguments)
    return lambda: run_and_leave(program)
