"""Test that a forked process has what a new interpreter has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prestarted
import pytest

PROGRAM = """
import json, os, resource, signal, sys
streams = [sys.stdout, sys.stderr]
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv[1:]],
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "main": [__name__, sys.modules["__main__"].__dict__ is globals(), globals().get("__file__")],
    "command line": open("/proc/self/cmdline").read().rstrip("\\0"),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "streams": [[each.line_buffering, each.write_through, each.errors, each.encoding] for each in streams],
    "signals": [str(signal.getsignal(number)) for number in (2, 13, 15, 17)],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
    "umask": os.umask(0),
}))
"""


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Let new interpreters obey SIGINT, which a shell makes the programs ignore that it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env": {"PATH": "", "PYTHONPATH": "there:/elsewhere"}},
        {"env": {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}, "start_new_session": True},
    ],
    ids=["defaults", "own environment", "own session"],
)
@pytest.mark.parametrize("kind", ["code", "script"])
def test_a_fork_has_what_a_new_interpreter_has(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    command = [sys.executable, *({"code": ["-c", PROGRAM], "script": [str(script)]}[kind]), "a", "b c"]
    settings = {**settings, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    new, fork = (json.loads(run(command, **settings).stdout) for run in (subprocess.run, prestarted.run))
    for name in new.keys() | fork.keys():
        if name == "environment":  # a new interpreter adds the first by itself, a library in this process the others
            for variable in ("LC_CTYPE", "COLUMNS", "LINES"):
                new[name].pop(variable, None)
                fork[name].pop(variable, None)
        assert fork[name] == new[name], name


@pytest.mark.parametrize(
    "code",
    ["pass", "raise SystemExit(3)", "raise SystemExit('a sentence')", "1 / 0", "import os; os._exit(7)",
     "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
     "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
     "import atexit, threading, time; atexit.register(print, 'last'); "
     "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); print('first')"],
)  # fmt: skip
def test_a_fork_ends_like_a_new_interpreter(code: str) -> None:
    command = [sys.executable, "-c", code]
    ends = [run(command, capture_output=True, text=True, timeout=60) for run in (subprocess.run, prestarted.run)]
    new, fork = ((end.returncode, end.stdout, end.stderr.splitlines()[-1:]) for end in ends)
    assert fork == new


def test_a_fork_receives_descriptors_input_and_signals() -> None:
    read, write = os.pipe()
    code = f"import os, sys, time; os.write({write}, sys.stdin.buffer.readline()); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with prestarted.Popen(command, stdin=prestarted.PIPE, pass_fds=[write]) as process:
        os.close(write)
        process.stdin.write(b"a line\n")
        process.stdin.flush()
        assert os.read(read, 100) == b"a line\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    os.close(read)
