"""Test the live view on a pseudo-terminal, the plain lines in a pipe, and what happens if either is closed."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time

import pytest

from remuda.logs import Terminal, where_time_went
from remuda.logs import terminal as module

METRICS = {
    "rollout/ep_rew_mean": 312.42, "rollout/ep_rew_std": 88.1, "rollout/ep_len_mean": 311.6, "time/fps": 12431.0,
    "rollout/restarts": 2.0,
}  # fmt: skip

PROGRAM = """
    import sys, threading, time
    from remuda.logs import Terminal
    terminal = Terminal(total_steps=1000, title="ppo CartPole-v1")
    for step in range(0, 1001, 100):
        terminal.update({"rollout/ep_rew_mean": 312.42, "rollout/ep_rew_std": 88.1, "rollout/ep_len_mean": 311.6,
                         "time/fps": 12431.0, "rollout/restarts": 2.0}, step)
        time.sleep(0.03)
        if step == 500:
            terminal.update({"eval/mean_reward": 450.0, "eval/std_reward": 1.5, "eval/steps": 450.0}, 500)
            terminal.note("[bold]checkpoint[/bold] saved")
            print("a print of somebody else")
    terminal.close()
    terminal.close()
    print("after", threading.active_count(), type(sys.stdout).__name__)
"""


def on_a_terminal(program: str, columns: int, rows: int = 24, hang_up_after: str | None = None) -> tuple[int, str]:
    """Return exit code and output of `program` on a pseudo-terminal of that size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(slave)
    output, deadline = b"", time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 0.5)[0]:
                continue
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: no process has the terminal open any longer
                break
            output += data
            if hang_up_after is not None and hang_up_after.encode() in output:
                break
    finally:
        os.close(master)
        try:
            code = child.wait(timeout=10)
        finally:
            child.kill()
    return code, output.decode()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("columns", [100, 40, 12])
def test_live_view_runs_and_ends_cleanly(columns: int) -> None:
    code, output = on_a_terminal(PROGRAM, columns)
    text = without_escapes(output)
    assert code == 0, text
    assert "after 1 TextIOWrapper" in text
    assert "Traceback" not in text
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") >= 0  # the cursor is visible again
    lines = [line.rstrip() for line in text.replace("\r", "\n").split("\n")]
    assert max(len(line) for line in lines if not line.startswith(("[bold]", "a print", "after"))) <= columns
    if columns == 100:
        assert "[bold]checkpoint[/bold] saved" in lines
        assert "a print of somebody else" in lines
        last = text[text.rfind("ppo CartPole-v1") :]
        assert "100 %  1,000 / 1,000" in last
        assert "return 312.4 ± 88.1   length 312   12,431 steps/s   0:00 left   eval 450 ± 1.5 at 450" in last
        assert "restarts 2" in last
    if columns == 40:
        assert "return 312.4 ± 88.1" in text
        assert "12,431 steps/s" in text
        assert any(line.startswith("━") and line.endswith("100 %  1,000 / 1,000") for line in lines)


def test_live_view_draws_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    terminal = Terminal(1000, "t", plain=False, file=io.StringIO())
    draws = []
    assert terminal._live is not None
    monkeypatch.setattr(terminal._live, "refresh", lambda: draws.append(now[0]))
    for step in range(100):
        now[0] += 0.05
        terminal.update({}, step)
    assert 15 <= len(draws) <= 21  # five seconds
    terminal.close()


def test_live_view_needs_no_thread() -> None:
    before = set(threading.enumerate())
    with Terminal(10, "t", plain=False, file=io.StringIO()):
        assert set(threading.enumerate()) <= before


def test_live_view_replaces_only_streams_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)  # not a terminal, as with 2> FILE
    with Terminal(10, "t", plain=False):
        assert sys.stdout is not stdout
        assert sys.stderr is stderr
    assert sys.stdout is stdout
    with Terminal(10, "t", plain=False, file=io.StringIO()):
        assert sys.stdout is stdout


def test_a_terminal_that_hangs_up_does_not_stop_the_run(tmp_path: object) -> None:
    done = f"{tmp_path}/done"
    program = f"""
        import signal, sys, time
        from remuda.logs import Terminal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)         # as under nohup
        terminal = Terminal(total_steps=30, title="a title")
        for step in range(30):
            terminal.update({{"rollout/ep_rew_mean": 1.0}}, step)
            time.sleep(0.05)
        print("still here")
        terminal.note("note")
        terminal.close()
        print("still here", flush=True)
        open({done!r}, "w").write("whole run")
    """
    code, _ = on_a_terminal(program, 80, hang_up_after="a title")
    assert code == 0
    with open(done) as file:
        assert file.read() == "whole run"


# --- output to a pipe or file ---------------------------------------------------------------------------------


def test_output_to_a_pipe_is_plain_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=20, check=True
    )
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "[bold]checkpoint[/bold] saved" in lines
    steps = [line for line in lines if " of 1,000 steps" in line]
    assert [int(line.split()[0].replace(",", "")) for line in steps] == list(range(0, 1001, 100))
    assert re.fullmatch(
        r"1,000 of 1,000 steps \(100 %\)  return 312\.4 ± 88\.1  length 312  12,431 steps/s  0:00 left"
        r"  eval 450 ± 1\.5 at 450  restarts 2",
        steps[-1],
    )


def test_lines_are_printed_every_five_seconds_or_tenth_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with Terminal(1_000_000, "t", plain=True, file=file) as terminal:
        for step in range(1, 22):  # one step per second, which is far less than a tenth of the run
            terminal.update(METRICS, step)
            now[0] += 1.0
        terminal.update(METRICS, 250_000)  # more than a tenth at once
        terminal.update(METRICS, 250_001)
    steps = [int(line.split()[0].replace(",", "")) for line in file.getvalue().splitlines()]
    assert steps == [1, 6, 11, 16, 21, 250_000, 250_001]


def test_lines_are_printed_once_and_only_after_an_update() -> None:
    file = io.StringIO()
    with Terminal(100, "t", plain=True, file=file) as terminal:
        terminal.update(METRICS, 100)
    assert file.getvalue().count("\n") == 1
    file = io.StringIO()
    Terminal(100, "t", plain=True, file=file).close()
    assert file.getvalue() == ""


def test_nan_is_not_shown_and_the_time_left_uses_the_rate_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    terminal = Terminal(1000, "t", plain=True, start_steps=500, file=file)
    now[0] = 10.0
    terminal.update({"rollout/ep_rew_mean": float("nan"), "time/fps": float("inf")}, 600)
    assert file.getvalue() == "600 of 1,000 steps (60 %)  0:40 left\n"


def test_the_time_left_follows_the_recent_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    terminal = Terminal(100_000, "t", plain=True, file=io.StringIO())
    steps = 0
    for _ in range(600):  # ten minutes with 100 steps/s
        now[0] += 1.0
        terminal.update({}, steps := steps + 100)
    assert terminal.parts() == ["6:40 left"]
    for _ in range(40):  # then the env is ten times slower
        now[0] += 1.0
        terminal.update({}, steps := steps + 10)
    assert terminal.parts() == ["1:06:00 left"]  # 39,600 steps at 10 steps/s; the average rate would give 6:59
    assert len(terminal._rates) < 100


def test_the_time_left_is_shown_if_rounds_are_longer_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    terminal = Terminal(10_000, "t", plain=True, file=io.StringIO())
    now[0] = 50.0
    terminal.begin("sampling")  # the 50 seconds of startup do not count for the rate
    for steps in (1000, 2000, 3000):
        now[0] += 100.0
        terminal.update({}, steps)
    assert terminal.parts() == ["11:40 left"]


def test_the_view_is_redrawn_during_a_long_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    terminal = Terminal(100_000, "t", plain=False, file=file)
    terminal.begin("sampling and learning from the first 2,048 steps")
    shown = []
    for _ in range(500):  # polls a hundred times per second, for five seconds
        now[0] += 0.01
        before = file.tell()
        terminal.tick()
        if file.tell() > before:
            shown.append(without_escapes(file.getvalue()[before:]))
    assert 5 <= len(shown) <= 11
    for second in (2, 3, 4):
        assert any(f"from the first 2,048 steps: 0:0{second} so far" in view for view in shown)
    before = file.tell()
    now[0] += 1.0
    terminal.update({"time/fps": 10.0}, 2048)
    assert "so far" not in without_escapes(file.getvalue()[before:])
    terminal.close()
    before = file.tell()
    now[0] += 100.0
    terminal.tick()
    assert file.tell() == before, "a closed view is not drawn again"


def test_a_long_rollout_prints_few_lines_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    terminal = Terminal(100_000, "t", plain=True, file=file)
    terminal.begin("sampling and learning from the first 2,048 steps")
    for _ in range(1300):
        now[0] += 0.1
        terminal.tick()
    what = "0 of 100,000 steps (0 %)  sampling and learning from the first 2,048 steps"
    assert file.getvalue().splitlines() == [f"{what}: 0:05 so far", f"{what}: 1:05 so far", f"{what}: 2:05 so far"]


def test_a_closed_pipe_does_not_stop_the_run() -> None:
    program = """
        import os, sys, time
        from remuda.logs import Terminal
        terminal = Terminal(total_steps=100, title="t")
        for step in range(0, 101):
            terminal.update({"rollout/ep_rew_mean": 1.0}, step)
            time.sleep(0.01)
        print("more")
        terminal.close()
        os.write(2, b"whole run")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()  # as `| head -1` does
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=20) == 0
    assert errors == b"whole run"


def test_ascii_output_replaces_other_characters() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with Terminal(10, "t", plain=True, file=file) as terminal:
        terminal.update(METRICS, 10)
    assert b"return 312.4 +- 88.1" in raw.getvalue()


def test_a_closed_file_raises_no_error() -> None:
    file = io.StringIO()
    terminal = Terminal(10, "t", file=file)
    file.close()
    terminal.update(METRICS, 10)
    terminal.note("note")
    terminal.close()


# --- shares of the time ---------------------------------------------------------------------------------------


def test_time_shares_add_up_to_100_percent() -> None:
    line = where_time_went({"env": 1.0, "inference": 1.0, "update": 1.0})
    assert line == "time: env 34 %, inference 33 %, update 33 %"
    line = where_time_went({"other": 1, "plotting": 2, "evaluation": 3, "wait": 4, "env": 90, "update": 0.0})
    assert line == "time: env 90 %, waiting 4 %, evaluation 3 %, plotting 2 %, other 1 %"


def test_time_shares_without_measured_times() -> None:
    assert where_time_went({}) == where_time_went({"env": 0.0}) == "time: nothing measured"
