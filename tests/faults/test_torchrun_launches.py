"""Runs that torchrun starts again: only the run of this launch is continued, and only one directory is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = {
    "env": "CartPole-v1",
    "scheme": {"name": "replicas"},
    "sampler": {"envs": 4},
    "algo": {"n_steps": 32, "batch_size": 64},
    "eval": {"episodes": 0},
    "checkpoint": {"every": 128},
    "quiet": True,
}


def run_script(folder: Path, text: str, max_restarts: int) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder` with two ranks."""
    (folder / "script.py").write_text(text)
    command = [*TORCHRUN, "--max-restarts", str(max_restarts), "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_a_run_that_this_launch_has_not_started_is_refused_in_every_start(tmp_path):
    """The second start must not continue a run that the first start has refused."""
    before = f"import remuda\nremuda.train('ppo', out='run', steps=128, **{ {**OPTIONS, 'scheme': 'serial'}!r})\n"
    (tmp_path / "before.py").write_text(before)
    subprocess.run([sys.executable, "before.py"], cwd=tmp_path, check=True, timeout=120)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    done = run_script(
        tmp_path, f"import remuda\nremuda.train('ppo', out='run', steps=1024, **{OPTIONS!r})\n", max_restarts=1
    )
    assert done.returncode != 0
    assert done.stderr.count("out=run already holds a run: continue it with remuda train --resume run") >= 2
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == kept


@pytest.mark.long
@pytest.mark.parametrize("gamma", [0.99, 0.9])
def test_the_run_of_this_launch_is_continued_in_the_same_directory(tmp_path, gamma):
    """Without `out`, the directory is named after the launch. Other options in the second start are refused."""
    text = f"""
import os, signal, remuda

is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
options = {OPTIONS!r}
options["algo"]["gamma"] = 0.99 if is_first else {gamma}

def kill(round):
    if is_first and round.progress.rounds == 5:
        os.kill(os.getpid(), signal.SIGKILL)

remuda.train("ppo", steps=1280, callbacks=kill, **options)
"""
    done = run_script(tmp_path, text, max_restarts=1)
    (path,) = [path for path in (tmp_path / "runs").iterdir() if path.name != "latest"]
    assert path.name.startswith("ppo-CartPole-v1-0-torchrun-")
    if gamma == 0.99:
        assert done.returncode == 0, done.stderr
        assert json.loads((path / "result.json").read_text())["status"] == "complete"
        assert (path / "log.txt").read_text().count("resumed from step-") == 1
    else:
        assert done.returncode != 0
        found = f"out=runs/{path.name} already holds a run with another options.algo.gamma (0.99 there, 0.9 here)"
        assert found in done.stderr
        assert not (path / "result.json").exists()
