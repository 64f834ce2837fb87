"""Test shell completion as a shell uses it: the line is in the environment, the completions on file descriptor 8."""

import os
import subprocess
import sys

import pytest

from remuda.cli import COMMANDS
from remuda.registry import algorithm_names

PROGRAM = """
import os, sys
os.dup2({pipe}, 8)
os.dup2({pipe}, 9)
from remuda.cli import main
sys.argv = ["remuda"]
main()
"""


def complete(line: str) -> list[str]:
    """Return the completions that the shell would offer at the end of `line`."""
    read, write = os.pipe()
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONWARNINGS": "ignore",
    }
    code = PROGRAM.format(pipe=write) + "\nassert False, 'completion must exit'"
    done = subprocess.run([sys.executable, "-c", code], env=environment, pass_fds=(write,), capture_output=True)
    os.close(write)
    with os.fdopen(read) as answers:
        offered = answers.read()
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == b""
    return [word.strip() for word in offered.splitlines()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("remuda ", [*COMMANDS]),
        ("remuda tr", ["train"]),
        ("remuda --v", ["--version"]),
        ("remuda train ", algorithm_names()),
        ("remuda train d", ["ddpg", "dqn"]),
        ("remuda train ppo --scheme ", ["serial", "parallel", "async", "replicas"]),
        ("remuda train ppo --scheme p", ["parallel"]),
        ("remuda train ppo --algo.n_", ["--algo.n_steps", "--algo.n_epochs"]),
        ("remuda train a2c --algo.n_", ["--algo.n_steps"]),
        ("remuda train dqn --agent.shar", []),  # an option that dqn does not use
        ("remuda train ppo --env CartPole-v1 --agent.shar", ["--agent.shared"]),
        ("remuda train ppo --agent.shared ", ["true", "false"]),
        ("remuda train ppo --agent.core ", ["lstm", "gru"]),
        ("remuda train ppo --help s", ["sampler", "scheme"]),
        ("remuda train ppo --env Acrob", ["Acrobot-v1"]),
        ("remuda train ppo --sampler.act", []),  # a name of 0.1
        ("remuda eval runs/x --ep", ["--episodes"]),
        ("remuda bench s", ["sampler"]),
        ("remuda trian ", []),
    ],
)
def test_offered_completions(line, offered):
    assert complete(line) == offered


def test_paths_are_completed(tmp_path):
    (tmp_path / "a-run").mkdir()
    assert complete(f"remuda eval {tmp_path}/a-") == [f"{tmp_path}/a-run/"]


def test_completion_does_not_load_torch_or_gymnasium():
    """Importing them would be too slow, because the shell waits for the completions."""
    code = PROGRAM.format(pipe=2) + "\n"
    line = "remuda train ppo --algo.n_"
    environment = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "--algo.n_steps" in done.stderr
    assert "| remuda.cli.completion" in done.stderr.replace("  ", " ").replace("  ", " ")
    assert "torch" not in done.stderr
    assert "gymnasium" not in done.stderr
