"""Test the output of commands to a pipe that is closed, and to a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
from test_commands import QUICK, start

from remuda.cli import main


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["--help"], ["train", "ppo", "--help"], ["algos"]], ids=" ".join)
def test_a_closed_pipe_gives_no_traceback(tmp_path, arguments, buffered):
    """This is the worst case of `remuda ... | head -1`, in which no output is read at all."""
    environment = {} if buffered else {"PYTHONUNBUFFERED": "1"}
    process = start(
        *arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 1)
    assert error == ""


def test_a_run_continues_if_its_pipe_is_closed(tmp_path, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody_reads:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        assert main(["train", "ppo", "--env", "CartPole-v1", *QUICK, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "complete"
    assert capsys.readouterr().err == ""


def test_live_view_on_a_terminal(tmp_path):
    """On a pseudo-terminal of 100 columns, the progress bar moves and the terminal's settings are restored."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    arguments = ["train", "ppo", "--env", "CartPole-v1", *QUICK, "--steps", "3_000", "--out", "run"]
    environment = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    process = start(*arguments, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    text = b""
    try:
        while chunk := read_from(ours, process, theirs):
            text += chunk
        assert process.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
    shown = text.decode()
    assert "Traceback" not in shown
    assert "ppo CartPole-v1 serial" in shown
    percents = [int(value) for value in re.findall(r"(\d+) %  [\d,]+ / 3,000", shown)]
    assert percents == sorted(percents)
    assert len(set(percents)) >= 2
    assert percents[-1] == 100
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden and shown once"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert plain.rstrip().splitlines()[-1].startswith("complete: ")


def read_from(descriptor, process, theirs) -> bytes:
    """Return the next output, or nothing if the process has ended and all output was read."""
    for _ in range(600):
        if select.select([descriptor], [], [], 0.1)[0]:
            return os.read(descriptor, 65536)
        if process.poll() is not None:
            return b""
    raise AssertionError("silent for a minute")


def test_a_game_without_frame_skip_gives_a_warning_in_output_and_log(tmp_path, capsys):
    small = ["--steps", "8", "--sampler.envs", "1", "--algo.n_steps", "8", "--algo.batch_size", "8"]
    out = ["--eval.episodes", "0", "--out", str(tmp_path / "run")]
    assert main(["train", "ppo", "--env", "PongNoFrameskip-v4", *small, *out]) == 0
    assert capsys.readouterr().out.count("use --envs.frame_skip 4.") == 1
    assert "use --envs.frame_skip 4." in (tmp_path / "run" / "log.txt").read_text()
