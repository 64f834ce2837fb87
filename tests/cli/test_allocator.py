"""Only processes that Remuda owns change the allocator of the C library."""

import subprocess
import sys

import pytest

CALL = """
import sys
import remuda
import remuda.machine as machine
calls = []
machine.keep_memory = lambda: calls.append(1)
{action}
print(len(calls))
"""
TRAIN = "remuda.train('a2c', 'CartPole-v1', steps=16, out=sys.argv[1], quiet=True, eval={'episodes': 0})"
COMMAND = """
from remuda.cli import main
arguments = "train a2c --env CartPole-v1 --steps 16 --quiet --eval.episodes 0 --out".split()
main([*arguments, sys.argv[1]])
"""


@pytest.mark.parametrize(("action", "count"), [(TRAIN, "0"), (COMMAND, "1"), ("remuda.keep_memory()", "1")])
def test_who_calls_mallopt(action, count, tmp_path):
    code = CALL.format(action=action)
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == count
