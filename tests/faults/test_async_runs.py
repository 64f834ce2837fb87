"""Asynchronous runs that are stopped, killed, resumed or delayed, or whose gradients are not finite."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import all_gone, wait_for
from test_signals import family, has_trained, start, stop

import remuda
from remuda.cli import main
from remuda.core import derive_seed
from remuda.errors import TrainingError
from remuda.learning.checkpoint import load_newest
from remuda.runs.signals import STOPPING

FORMS: dict[str, dict[str, Any]] = {
    "workers": {"envs": 8, "workers": 2, "inference": "workers"},
    "central": {"envs": 8, "workers": 2, "inference": "central"},
}
INTERVAL = 5120  # steps between two checkpoints; two lines of metrics are at least half as many apart


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    shared, children = set(os.listdir("/dev/shm")), set(psutil.Process().children(recursive=True))
    yield
    wait_for(lambda: all_gone(list(set(psutil.Process().children(recursive=True)) - children)), 5)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("remuda-")] == []
    assert set(os.listdir("/dev/shm")) <= shared


def running(path: Path, form: str, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start an IMPALA run with this place of inference, and wait until it trains."""
    sampler = [text for name, value in FORMS[form].items() for text in (f"--sampler.{name}", str(value))]
    every = ["--log.every", str(INTERVAL // 2)]
    return begun(path, *sampler, *every, *arguments, algo="impala")


@contextmanager
def begun(path: Path, *arguments: str, algo: str) -> Iterator[subprocess.Popen[str]]:
    """Start an asynchronous run from the command line, wait until it trains, and yield its process."""
    process = start(path, "--scheme", "async", *arguments, algo=algo)
    try:
        wait_for(lambda: has_trained(path), 120)
        yield process
    finally:
        if process.poll() is None:  # the test has failed
            process.kill()
            process.communicate()


def train(path: Path, form: str, callback: Any, scheme: dict[str, Any] | None = None, **options: Any) -> Any:
    """Run the same training in this process."""
    settings: dict[str, Any] = {"steps": 10_000_000, "quiet": True, "eval": {"episodes": 0}, **options}
    names = {"name": "async", **(scheme or {})}
    env = settings.pop("env", "CartPole-v1")
    sampler = {**FORMS[form], **settings.pop("sampler", {})}
    return remuda.train("impala", env, scheme=names, out=path, callbacks=callback, sampler=sampler, **settings)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


# --- R8, R20, R21: SIGKILL, stop signals, lost workers --------------------------------------------------------------


@pytest.mark.parametrize("form", [pytest.param("workers", marks=pytest.mark.long), "central"])
def test_sigkill_leaves_no_orphan_and_loses_at_most_one_checkpoint_interval(form: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with running(path, form, "--checkpoint.every", str(INTERVAL)) as process:
        wait_for((path / "checkpoints/latest").exists)
        time.sleep(random.Random(form).random())
        members = family(process)
        process.kill()
        process.communicate(timeout=10)
    wait_for(lambda: all_gone(members), 2)
    logged, saved = lines(path)[-1]["time/total_timesteps"], load_newest(path / "checkpoints").step
    # A round has 8 x 20 rows, and a checkpoint is written while the next round runs.
    assert saved >= logged - INTERVAL - 2 * 160
    end = str(saved + 600)
    assert main(["train", "--resume", str(path), "--steps", end, "--quiet", "--eval.episodes", "0"]) == 0
    steps = [line["time/total_timesteps"] for line in lines(path)]
    assert steps == sorted(set(steps)), "the log must not repeat steps"
    assert json.loads((path / "result.json").read_text())["status"] == "complete"


@pytest.mark.parametrize(
    ("form", "number"),
    [
        ("workers", signal.SIGTERM),
        pytest.param("central", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("workers", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("central", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_one_signal_leaves_a_resumable_checkpoint(form: str, number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with running(path, form, "--checkpoint.every", "0") as process:
        members = family(process)
        assert len(members) == (4 if form == "workers" else 6), "the run and all processes below it"
        out, err = stop(process, number)
    assert process.returncode == 128 + number, err
    assert err == f"{number.name}: {STOPPING}\n"
    assert f"remuda train --resume {path}" in out
    wait_for(lambda: all_gone(members), 2)
    result = json.loads((path / "result.json").read_text())
    assert result["status"] == f"stopped by {number.name}"
    assert load_newest(path / "checkpoints").step == result["steps"] > 0


@pytest.mark.parametrize("form", [pytest.param("workers", marks=pytest.mark.long), "central"])
def test_two_signals_stop_at_once(form: str, tmp_path: Path) -> None:
    with running(tmp_path / "run", form) as process:
        interrupt_twice(process)


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    members = family(process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two signals in a row could be delivered as one
    # Usually the run is still stopping when the second signal arrives. If it has just ended, the interpreter is
    # exiting, and the signal ends it by its default action; shells report both as 130.
    process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)
    wait_for(lambda: all_gone(members), 2)


def test_killed_env_worker_of_inference_server_is_logged_and_counted(tmp_path: Path) -> None:
    """The worker is a grandchild of the run, whose log must still report the loss."""
    path, killed = tmp_path / "run", []

    def watch(round: Any) -> bool:
        if round.progress.rounds == 10:
            killed.append(kill_one(workers_below(psutil.Process()), random.Random(1)))
        return bool(round.progress.restarts)

    run = train(path, "central", watch, log={"every": 160})
    assert run.result["steps"] > 0
    assert f"(pid {killed[0]}) was killed by SIGKILL; it is replaced." in (path / "log.txt").read_text()
    assert lines(path)[-1]["rollout/restarts"] in (0.0, 4.0), "half of the envs lived in that worker"


def workers_below(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes that step envs.

    They are forked, so they have the command line of their parent, and they have no children.
    """
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not child.children() and child.cmdline() == child.parent().cmdline():
                found.append(child)
    return found


def kill_one(processes: list[psutil.Process], chance: random.Random) -> int:
    victim = chance.choice(processes)
    victim.kill()
    return int(victim.pid)


# --- R6: gradients that are not finite ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["workers", pytest.param("central", marks=pytest.mark.long)])
def test_non_finite_gradients_are_skipped_and_end_the_run_after_ten(form: str, tmp_path: Path) -> None:
    seen: list[tuple[int, list[torch.Tensor]]] = []  # skipped updates, parameters

    def spoil(round: Any) -> bool:
        learner = round.learner
        if round.progress.rounds == 3:
            losses = learner.algorithm.losses
            learner.algorithm.losses = lambda batch, clock: nan_losses(losses(batch, clock))
        if round.progress.rounds >= 3:
            seen.append((learner.skipped, [vector.clone() for vector in learner.vectors.values()]))
        return False

    sentence = r"gradients were not finite in 10 updates in a row after update 3 .*: lower the learning rate"
    with pytest.raises(TrainingError, match=sentence) as caught:
        train(tmp_path / "run", form, spoil, log={"every": 160})
    assert "\n" not in str(caught.value)
    assert [skipped for skipped, _ in seen] == list(range(10)), "the tenth must end the run"
    for _, vectors in seen:
        assert all(map(torch.equal, vectors, seen[0][1]))
    assert lines(tmp_path / "run")[-1]["train/skipped_updates"] > 0


def nan_losses(losses: Any) -> Any:
    return replace(losses, groups={name: loss * float("nan") for name, loss in losses.groups.items()})


# --- R25: a delayed learner -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["workers", pytest.param("central", marks=pytest.mark.long)])
def test_sleeping_learner_finds_at_most_its_slots_and_no_stale_rollout(form: str, tmp_path: Path) -> None:
    """One env is so slow that its rollouts are too old when they are ready, and are dropped."""
    max_lag, rounds, slots = 1, 60, []

    def sleep(round: Any) -> bool:
        slots.append(round.metrics["async/slots_free"] + round.metrics["async/slots_full"])
        if round.progress.rounds == 20:
            time.sleep(3.0)
        return bool(round.progress.rounds >= rounds)

    slow = {"seconds": 0.02, "only_seed": derive_seed(0, 0)}
    options = {"env": "own_things:slow", "envs": {"kwargs": slow}, "log": {"every": 1}, "algo": {"batch_size": 4}}
    train(tmp_path / "run", form, sleep, {"max_lag": max_lag}, sampler={"workers": 4}, **options)
    found = lines(tmp_path / "run")
    assert len(found) == rounds
    lags = [line["lag/collect_to_gradient_max"] for line in found]
    assert max(lags) == max_lag, lags
    assert max(slots) <= (max_lag + 1) * 2, "two slots per round, for the rounds that max_lag allows"
    dropped = [line["rollout/dropped"] for line in found]
    assert dropped == sorted(dropped)
    assert dropped[-1] > 0
