"""Test what training changes in the user's process: the allocator of the C library, and garbage collection."""

import sys

import prestarted
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
def test_only_the_command_and_keep_memory_configure_the_allocator(action, count, tmp_path):
    code = CALL.format(action=action)
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = prestarted.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == count


@pytest.mark.parametrize("frozen_before", [False, True])
def test_objects_are_frozen_during_a_training_unless_the_process_has_frozen_some(frozen_before, tmp_path):
    """The training runs in a new process, because conftest.py freezes the objects of this one."""
    code = f"""
import gc, sys
import remuda
gc.freeze() if {frozen_before} else gc.unfreeze()
before, seen = gc.get_freeze_count(), []
remuda.train("a2c", "CartPole-v1", steps=16, out=sys.argv[1], quiet=True, eval={{"episodes": 0}},
             callbacks=[lambda round: seen.append(gc.get_freeze_count())])
print(before, max(seen), gc.get_freeze_count())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = prestarted.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.splitlines()[-1].split())
    if frozen_before:  # the count decreases when frozen objects are freed
        assert before >= during >= after > 1_000
    else:
        assert before == after == 0
        assert during > 10_000
