"""Replay writers that are killed, hang or fail: rows continue or restart, and none is torn or repeated.

The envs count their steps, so that the replay shows which rows were repeated, skipped or mixed up.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lasting import shared_server
from processes import all_gone, children_of, wait_for
from test_async_runs import _nothing_is_left as _nothing_is_left
from test_async_runs import begun, interrupt_twice, lines, nan_losses
from test_sampler_workers import FORBIDDEN
from test_signals import family, stop
from writing import COUNTING, Setup, check_rows

import remuda
from remuda.cli import main
from remuda.errors import EnvError, TrainingError, WorkerError
from remuda.learning.checkpoint import load_newest

INTERVAL = 8000  # steps between two checkpoints


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    with shared_server("remuda.build.workers"):
        yield


def counting(**options: Any) -> dict[str, Any]:
    """Return the options of a run whose counting envs may misbehave."""
    kwargs = {"lengths": [3, 5, 2], **options.pop("kwargs", {})}
    return {**COUNTING, **options, "envs": {"kwargs": kwargs, **options.get("envs", {})}}


def kill(setup: Setup, worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(setup.writers._worker_pool.workers[worker].pid, signal.SIGKILL)


def test_one_of_eight_writers_killed_twenty_times_at_random_moments() -> None:
    rng = random.Random(1)
    settings = counting(sampler={"envs": 16, "workers": 8}, replay={**COUNTING["replay"], "capacity": 400_000})
    with Setup("counting:make", **settings) as setup:
        real = setup.replay.ring.real
        for _ in range(20):
            worker = rng.randrange(8)
            before = real.copy()
            setup.wait(lambda: (real > before + 10).all())  # noqa: B023  (used at once)
            time.sleep(0.05 * rng.random())
            kill(setup, worker)
        before = real.copy()
        setup.wait(lambda: (real > before + 50).all())
        assert sum(setup.writers._worker_stats.lost) >= 15, "some were killed twice before they were back"
        assert setup.writers.restarts() == 2 * sum(setup.writers._worker_stats.lost)
    assert check_rows(setup.replay) <= 40


def test_inference_server_and_its_env_workers_killed_at_random_moments() -> None:
    rng = random.Random(2)
    settings = counting(
        sampler={"envs": 8, "workers": 4, "inference": "central"},
        replay={**COUNTING["replay"], "capacity": 400_000},
        envs={"max_worker_restarts": 100},
    )
    with Setup("counting:make", **settings) as setup:
        real, pool = setup.replay.ring.real, setup.writers._worker_pool
        killed = 0
        for number in range(12):
            before = real.copy()
            setup.wait(lambda: (real > before + 10).all())  # noqa: B023  (used at once)
            time.sleep(0.05 * rng.random())
            if number % 4 == 3:
                kill(setup, 0)
                continue
            told = setup.writers.restarts()
            children = psutil.Process(pool.workers[0].pid).children(recursive=True)
            rng.choice([child for child in children if not children_of(child)]).kill()
            killed += 1
            setup.wait(lambda: setup.writers.restarts() == told + 2)  # noqa: B023
        before = real.copy()
        setup.wait(lambda: (real > before + 50).all())
        assert setup.writers._worker_stats.lost == [3]
        assert setup.writers.restarts() == 8 * 3 + 2 * killed, "8 envs of the server, 2 of each worker"
    assert check_rows(setup.replay) <= 8 * 3 + 2 * killed


def test_all_writers_killed_at_once() -> None:
    with Setup("counting:make", **counting(sampler={"envs": 8, "workers": 4})) as setup:
        real = setup.replay.ring.real
        setup.wait(lambda: (real > 50).all())
        for worker in range(4):
            kill(setup, worker)
        before = real.copy()
        setup.wait(lambda: (real > before + 50).all())
        assert setup.writers._worker_stats.lost == [1] * 4
    assert check_rows(setup.replay) <= 8


def test_writer_killed_repeatedly_ends_in_one_error_that_names_it() -> None:
    with Setup("counting:make", **counting(envs={"max_worker_restarts": 3})) as setup:

        def is_over() -> bool:
            kill(setup, 0)
            return False

        with pytest.raises(WorkerError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL, more than 3 times"):
            setup.wait(is_over)


def test_hung_env_does_not_delay_other_groups_of_the_inference_server(tmp_path: Path) -> None:
    once = {"fault": "hold", "at": 60, "once": str(tmp_path / "once")}
    sampler = {**COUNTING["sampler"], "inference": "central"}
    with Setup("counting:make", **counting(kwargs=once, envs={"step_timeout": 4.0}, sampler=sampler)) as setup:
        real = setup.replay.ring.real
        setup.wait((tmp_path / "once").exists)
        before = real.copy()
        setup.wait(lambda: setup.writers.restarts() >= 2)
        assert (real > before + 100).sum() >= 1, "the other group must continue"
        before = real.copy()
        setup.wait(lambda: (real > before + 50).all())
        assert setup.writers._worker_stats.lost == [0], "only the env worker must be replaced"
    check_rows(setup.replay)


def test_hung_writer_is_replaced_while_the_others_continue(tmp_path: Path) -> None:
    once = {"fault": "hold", "at": 60, "once": str(tmp_path / "once")}
    with Setup("counting:make", **counting(kwargs=once, envs={"step_timeout": 4.0})) as setup:
        real = setup.replay.ring.real
        setup.wait((tmp_path / "once").exists)
        before = real.copy()
        setup.wait(lambda: sum(setup.writers._worker_stats.lost) >= 1)
        (lost,) = np.flatnonzero(setup.writers._worker_stats.lost)
        assert real[1 - lost] > before[1 - lost] + 100
        before = real.copy()
        setup.wait(lambda: (real > before + 50).all())
    check_rows(setup.replay)


@pytest.mark.parametrize("act", ["workers", "central"])
def test_paused_writers_are_not_mistaken_for_lost(act: str) -> None:
    """Writers are paused like this while a large replay is saved to a slow disk."""
    sampler = {**COUNTING["sampler"], "inference": act}
    with Setup("counting:make", **counting(envs={"step_timeout": 3.0}, sampler=sampler)) as setup:
        real = setup.replay.ring.real
        setup.wait(lambda: (real > 50).all())
        with setup.replay.ring.counters.pause_writers():
            before = real.copy()
            time.sleep(5.0)
            assert (real == before).all()
        setup.wait(lambda: (real > before + 50).all())
        assert sum(setup.writers._worker_stats.lost) == setup.writers.restarts() == 0
    assert check_rows(setup.replay) == 0


@pytest.mark.parametrize("act", ["workers", "central"])
@pytest.mark.parametrize("fault", FORBIDDEN)
def test_data_that_violates_its_space_is_reported_and_never_stored(fault: str, act: str) -> None:
    sampler = {**COUNTING["sampler"], "inference": act}
    with Setup("counting:make", **counting(kwargs={"fault": fault, "at": 40}, sampler=sampler)) as setup:
        named = r"^env \d+ of counting:make \(seed \d+, step \d+ of its episode \d+\)"
        with pytest.raises(EnvError, match=named) as caught:
            setup.wait(lambda: False)
        assert re.search(FORBIDDEN[fault], str(caught.value))
        ring = setup.replay.ring
        for group in range(ring.groups):
            rows = ring.rows[: int(ring.written[group]), ring.columns(group)]
            assert np.isfinite(rows.obs).all()
            assert np.isfinite(rows.reward).all()


# --- whole runs -----------------------------------------------------------------------------------------------------


def running(path: Path, *arguments: str) -> contextlib.AbstractContextManager[Any]:
    sizes = ["--sampler.envs", "8", "--sampler.workers", "2", "--algo.learning_starts", "200", "--log.every", "500"]
    return begun(path, *sizes, *arguments, algo="dqn")


def test_sigkill_leaves_no_orphan_and_loses_at_most_one_checkpoint_interval(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with running(path, "--checkpoint.every", str(INTERVAL)) as process:
        wait_for((path / "checkpoints/latest").exists)
        time.sleep(random.Random(3).random())
        members = family(process)
        process.kill()
        process.communicate(timeout=10)
    wait_for(lambda: all_gone(members), 2)
    logged, saved = lines(path)[-1]["time/total_timesteps"], load_newest(path / "checkpoints").step
    assert saved >= logged - INTERVAL - 500
    end = str(saved + 1000)
    assert main(["train", "--resume", str(path), "--steps", end, "--quiet", "--eval.episodes", "0"]) == 0
    steps = [line["time/total_timesteps"] for line in lines(path)]
    assert steps == sorted(set(steps)), "the log must not repeat steps"


def test_one_signal_leaves_a_resumable_checkpoint_with_its_replay(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with running(path, "--checkpoint.every", "0", "--eval.cpu_fraction", "0.2") as process:
        members = family(process)
        assert len(members) >= 6, "the run, two fork servers, two samplers and an evaluator"
        out, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert f"remuda train --resume {path}" in out
    wait_for(lambda: all_gone(members), 2)
    result = json.loads((path / "result.json").read_text())
    found = load_newest(path / "checkpoints")
    assert found.step == result["steps"] > 0
    assert "replay" in found.blobs


def test_two_signals_stop_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "run") as process:
        interrupt_twice(process)


def test_non_finite_gradients_are_skipped_and_end_the_run_after_ten(tmp_path: Path) -> None:
    """R6. Samplers continue, and some rounds have no update, so the same count may be seen more than once."""
    seen: list[tuple[int, int, list[torch.Tensor]]] = []  # updates, skipped updates, parameters

    def spoil(round: Any) -> bool:
        learner = round.learner
        if learner.version >= 3 and not seen:
            losses = learner.algorithm.losses
            learner.algorithm.losses = lambda batch, clock: nan_losses(losses(batch, clock))
        if learner.version >= 3:
            seen.append((learner.version, learner.skipped, [v.clone() for v in learner.vectors.values()]))
        return False

    sentence = r"gradients were not finite in 10 updates in a row after update \d+ .*: lower the learning rate"
    settings: dict[str, Any] = {"sampler": {"envs": 8, "workers": 2}, "eval": {"episodes": 0}, "log": {"every": 8}}
    with pytest.raises(TrainingError, match=sentence):
        remuda.train(
            "dqn",
            "CartPole-v1",
            scheme={"name": "async", "publish_every": 1},
            steps=10_000_000,
            out=tmp_path / "run",
            quiet=True,
            callbacks=spoil,
            **settings,
        )
    assert {skipped for _, skipped, _ in seen} == set(range(10)), "the tenth must end the run"
    for version, _, vectors in seen:
        assert version == seen[0][0]
        assert all(map(torch.equal, vectors, seen[0][2]))


def test_samplers_wait_for_a_sleeping_learner(tmp_path: Path) -> None:
    """With a replay, samplers may be ahead of the learner by a limited number of steps."""
    seen: list[tuple[int, int]] = []

    def sleep_once(round: Any) -> bool:
        ring = round.replay.ring
        if len(seen) == 0 and round.progress.steps > 1000:
            time.sleep(3.0)
            seen.append((round.progress.steps, int(ring.real.sum())))
        return bool(round.progress.steps > 4000)

    remuda.train(
        "dqn",
        "CartPole-v1",
        scheme="async",
        steps=10_000_000,
        out=tmp_path / "run",
        quiet=True,
        callbacks=sleep_once,
        eval={"episodes": 0},
        sampler={"envs": 8, "workers": 2},
    )
    ((steps, written),) = seen
    assert steps <= written <= steps + 500
