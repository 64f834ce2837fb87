"""A missing resource ends in one sentence with a remedy and exit code 2, or the run works without it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = f"{sys.executable} -m remuda train ppo --env CartPole-v1 --steps 1000 --quiet --eval.episodes 0"


def shell(script: str) -> tuple[int, str, float]:
    start = time.monotonic()
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, time.monotonic() - start


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            f"ulimit -n 24; {TRAIN} --scheme parallel --sampler.envs 16 --sampler.workers 8 --out PLACE/run",
            "ulimit -n",
        ),
        (f"touch PLACE/file; {TRAIN} --out PLACE/file/run", "choose a directory of your own with --out"),
        (f"ulimit -f 0; {TRAIN} --out PLACE/run", "choose a directory of your own with --out"),
    ],
    ids=["few descriptors", "below a file", "no room for a file"],
)
def test_missing_resource_prints_one_sentence_and_exits_with_code_2(script: str, words: str, tmp_path: Path) -> None:
    code, said, seconds = shell(script.replace("PLACE", str(tmp_path)))
    assert words in said
    assert said.count("\n") == 1
    assert code == 2
    assert seconds < 20  # 3 on a machine that is not busy
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize(
    ("disk", "words", "is_kept"),
    [
        ("nr_inodes=2", ["run cannot be written (No space left on device)", "choose another directory"], False),
        ("nr_inodes=9", ["run/metrics.jsonl: No space left on device", "free some space"], False),
        ("size=12k", ["what was learned could not be saved", "make room", "--resume"], True),
    ],
    ids=["no directory", "no metrics", "no checkpoint"],
)
def test_disk_that_is_full_from_the_start(disk: str, words: list[str], is_kept: bool, tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o {disk} tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-m", "bash", "-c", mounted], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    run = f"{TRAIN} --out {tmp_path}/run; code=$?; test -e {tmp_path}/run && code=$((100 + code)); exit $code"
    code, said, _ = shell(f"unshare -m bash -c '{mounted}; {run}'")
    assert said.count("\n") == 1, said
    assert all(word in said for word in words), said
    assert "PosixPath" not in said
    assert code == (102 if is_kept else 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small /dev/shm")
def test_shared_memory_does_not_use_dev_shm(tmp_path: Path) -> None:
    mounted = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "bash", "-c", mounted], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    run = f"{TRAIN} --scheme parallel --sampler.inference workers --out {tmp_path}/run"
    code, said, _ = shell(f"unshare -m bash -c '{mounted}; {run}'")
    assert code == 0, said
