"""A missing resource ends in one sentence with a remedy and exit code 2, or the run works without it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import prestarted
import pytest

TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--steps", "1000", "--quiet", "--eval.episodes", "0"]
PROGRAM = """
import ctypes, os, resource, subprocess, sys
from remuda.cli import main
{before}
code = main(sys.argv[1:])
sys.exit(code + 100 * os.path.exists(sys.argv[-1]))
"""
# A mount in a namespace of its own, which other processes do not see
MOUNT = """
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", {options!r}, "tmpfs", {place!r}]):
    subprocess.run(["mount", *words], check=True)
"""


def train(before: str, *arguments: str) -> tuple[int, str]:
    """Train after these lines of Python; return the exit code, plus 100 if the run exists, and the errors."""
    command = [sys.executable, "-c", PROGRAM.format(before=before), *TRAIN, *arguments]
    done = prestarted.run(command, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stderr


def check_sentence(code: int, said: str, words: str) -> None:
    assert words in said
    assert said.count("\n") == 1
    assert code == 2


def test_few_descriptors_give_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    """The command is started in a new interpreter, which needs descriptors too."""
    words = [sys.executable, "-m", "remuda", *TRAIN, "--scheme", "parallel", "--sampler.envs", "16"]
    command = f"ulimit -n 24; {shlex.join(words)} --sampler.workers 8 --out {tmp_path}/run"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=110)
    check_sentence(done.returncode, done.stderr, "ulimit -n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("before", "name"),
    [("open('file', 'w').close()", "file/run"), ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", "run")],
    ids=["below a file", "no room for a file"],
)
def test_directory_that_cannot_be_written_gives_one_sentence_and_exit_code_2(
    before: str, name: str, tmp_path: Path
) -> None:
    code, said = train(f"os.chdir({str(tmp_path)!r}); {before}", "--out", name)
    check_sentence(code, said, "choose a directory of your own with --out")
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
    code, said = train(MOUNT.format(options=disk, place=str(tmp_path)), "--out", f"{tmp_path}/run")
    assert said.count("\n") == 1, said
    assert all(word in said for word in words), said
    assert "PosixPath" not in said
    assert code == (102 if is_kept else 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small /dev/shm")
def test_shared_memory_does_not_use_dev_shm(tmp_path: Path) -> None:
    mounted = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "bash", "-c", mounted], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    arguments = ["--scheme", "parallel", "--sampler.inference", "workers", "--out", str(tmp_path / "run")]
    code, said = train(MOUNT.format(options="size=4k", place="/dev/shm"), *arguments)
    assert code == 100, said
