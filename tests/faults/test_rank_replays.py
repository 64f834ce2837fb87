"""Replays of several ranks whose files cannot be written or read."""

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
from launching import launch
from processes import wait_for
from test_ranks import await_checkpoint, rank_processes, start

import remuda
from remuda.build import ranks as build_ranks
from remuda.learning.checkpoint import list_checkpoints, load_newest

SAC = {"algo": "sac", "env": "Pendulum-v1"}
NO_LIMIT = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_full_disk_of_one_rank_loses_checkpoints_but_does_not_stop_training(tmp_path, rank):
    """A limit for the size of files takes the place of a full disk; it is lifted later."""
    path = tmp_path / "run"
    process = start(path, "--checkpoint.keep", "all", "--replay.ratio", "1", **SAC)
    await_checkpoint(process, path)
    member = rank_processes(process)[rank]
    member.rlimit(psutil.RLIMIT_FSIZE, (3_000, psutil.RLIM_INFINITY))
    sentence = re.compile(
        r"warning: no checkpoint was written at [0-9,]+ steps \((.*)\[Errno 27\] File too large\): make room"
    )
    wait_for(lambda: process.poll() is not None or sentence.search((path / "log.txt").read_text()), 120)
    assert process.poll() is None, process.communicate()[1]
    found = sentence.search((path / "log.txt").read_text())
    assert found is not None
    assert found[1] == ("" if rank == 0 else f"rank 1 (pid {member.pid} on {found[1].split()[-1]} ")
    member.rlimit(psutil.RLIMIT_FSIZE, NO_LIMIT)
    count = len(list_checkpoints(path / "checkpoints"))
    wait_for(lambda: process.poll() is not None or len(list_checkpoints(path / "checkpoints")) > count + 1, 120)
    assert process.poll() is None, process.communicate()[1]
    process.terminate()
    process.communicate(timeout=120)
    assert load_newest(path / "checkpoints").step == json.loads((path / "result.json").read_text())["steps"]


def train_three_checkpoints(path: Path) -> list[Path]:
    """Return the paths of three checkpoints of a run of two ranks with a replay, oldest first."""
    remuda.train(
        "sac",
        "Pendulum-v1",
        steps=600,
        out=path,
        quiet=True,
        scheme={"name": "replicas", "ranks": 2},
        sampler={"envs": 4},
        algo={"learning_starts": 100, "batch_size": 16},
        replay={"ratio": 1.0},
        checkpoint={"every": 200, "keep": "all"},
        eval={"episodes": 0},
        agent={"hidden": [8]},
    )
    return list_checkpoints(path / "checkpoints")


def damage_newest(checkpoints: list[Path], part: int) -> None:
    """Change bytes in the files of a part that only the newest checkpoint needs."""
    newest, before = (json.loads((path / "manifest.json").read_text())["replay"] for path in checkpoints[:-3:-1])
    (name,) = [name for name in set(newest) - set(before) if name.startswith(f"part-{part}/")]
    file = checkpoints[0].parent / "replay" / name
    data = bytearray(file.read_bytes())
    data[:64] = bytes(64)
    file.write_bytes(data)


@pytest.mark.parametrize("part", [0, 1])
def test_damaged_replay_of_one_rank_falls_back_to_the_checkpoint_before(tmp_path, part, shared_servers, monkeypatch):
    monkeypatch.setattr(build_ranks, "ForkServer", shared_servers)  # a new server would import torch for seconds
    checkpoints = train_three_checkpoints(tmp_path / "run")
    damage_newest(checkpoints, part)
    resumed = remuda.resume(tmp_path / "run", steps=800, quiet=True)
    assert resumed.result["status"] == "complete"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"resumed from {checkpoints[-2].name}:" in log
    assert f"/replay/part-{part}/" in log
    assert ("warning: rank 1 (pid " in log) == (part == 1)


SCRIPT = """
import os
import sys
from remuda.cli import main

os.chdir(sys.argv[1 + int(os.environ["RANK"])])
sys.exit(main(["train", *sys.argv[3:], "--out", "/proc/self/cwd/run"]))
"""


@pytest.mark.parametrize(("algo", "is_refused"), [("sac", True), ("ppo", False)])
def test_run_directory_that_another_rank_does_not_see_is_refused_with_a_replay(tmp_path, algo, is_refused):
    """Each rank finds another directory at the path of the run, as on hosts without a common file system."""
    for name in ("host-0", "host-1"):
        (tmp_path / name).mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    command += [str(tmp_path / "host-0"), str(tmp_path / "host-1"), algo, "--env", "Pendulum-v1", "--steps", "512"]
    command += ["--scheme", "replicas", "--sampler.envs", "2", "--eval.episodes", "0", "--quiet"]
    command += (
        ["--algo.learning_starts", "400", "--algo.batch_size", "8"]
        if algo == "sac"
        else ["--algo.n_steps", "64", "--algo.batch_size", "64"]
    )
    codes, printed = launch(2, command, tmp_path / "log.txt")
    assert any(codes) == is_refused, printed
    if is_refused:
        assert re.search(r"remuda: rank 1 \(pid \d+ on \S+\): the directory /proc/self/cwd/run/checkpoints/", printed)
        assert "is not visible here" in printed
        assert "choose a directory with --out that all hosts share." in printed
    else:
        assert load_newest(tmp_path / "host-0" / "run" / "checkpoints").step >= 512
    assert (tmp_path / "host-0" / "run").exists() != is_refused
    assert not (tmp_path / "host-1" / "run").exists()


SLOW_SCRIPT = """
import os
import signal
import sys
import time

import remuda
from remuda.build import ranks
from remuda.parts import PartedReplay, group
from remuda.runs import signals

ranks.STOP_SECONDS, signals.PATIENCE_SECONDS, group.ANSWER_SECONDS = 0.5, 0.1, float(sys.argv[2])
save, saved = PartedReplay._save_part, []


def save_slowly(part, replay, directory):
    saved.append(part)
    if part == 1 and len(saved) > 1:  # the first checkpoint is written in time
        time.sleep(3.0)
    return save(part, replay, directory)


def stop_later(round):
    if round.progress.steps == 300:
        os.kill(os.getpid(), signal.SIGINT)


PartedReplay._save_part = staticmethod(save_slowly)
remuda.train(
    "sac",
    "Pendulum-v1",
    steps=100_000,
    out=sys.argv[1],
    scheme={"name": "replicas"},
    sampler={"envs": 2},
    algo={"learning_starts": 100, "batch_size": 8},
    checkpoint={"every": 200},
    eval={"episodes": 0},
    agent={"hidden": [8]},
    callbacks=stop_later,
)
"""


@pytest.mark.parametrize("seconds", [60.0, pytest.param(1.0, marks=pytest.mark.long)])
def test_checkpoint_at_a_stop_waits_for_slow_ranks_and_is_complete_or_absent(tmp_path, seconds):
    """The time for a round to end after a signal does not limit the saving, which has a limit of its own."""
    path, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SLOW_SCRIPT)
    _, printed = launch(2, [sys.executable, str(script), str(path), str(seconds)], tmp_path / "log.txt")
    result, step = json.loads((path / "result.json").read_text()), load_newest(path / "checkpoints").step
    if seconds == 60.0:
        assert result["status"] == "stopped by SIGINT", printed
        assert step == result["steps"] == 300
    else:
        assert result["status"] == "failed"
        assert re.fullmatch(
            r"rank 1 \(pid \d+ on \S+\) did not save its part of the run within 1 s of the stop request: the last "
            r"checkpoint is kept\.",
            result["error"],
        )
        assert step == 200
