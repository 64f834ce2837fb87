"""Replay writers with minutes of failures: the rate of the other workers, learning, and memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from flaky import learns_nearly_as_fast
from processes import children_of
from soaking import Soak
from test_async_long import MOCK, this_and_who_acts_for_all
from test_async_runs import _nothing_is_left as _nothing_is_left
from test_async_runs import workers_below
from writing import Setup

import remuda
from remuda.config.replay_presets import CARTPOLE

pytestmark = pytest.mark.long


@pytest.mark.parametrize("hurt", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "hung"])
@pytest.mark.parametrize("act", ["workers", "central"])
def test_other_writers_keep_nine_tenths_of_their_rate(act: str, hurt: Any) -> None:
    """R1, R4. The envs sleep, so that no worker waits for a core."""
    in_peace = beside_it = 0
    settings: dict[str, Any] = {"envs": {"kwargs": MOCK, "step_timeout": 1.0, "max_worker_restarts": 100}}
    settings |= {"sampler": {"envs": 4, "workers": 4, "inference": act}, "replay": {"ratio": None}}
    with Setup("Remuda/Mock-v0", **settings) as setup:

        def count(seconds: float) -> list[int]:
            before, end = setup.replay.ring.real.copy(), time.monotonic() + seconds
            setup.wait(lambda: time.monotonic() >= end)
            return sorted((setup.replay.ring.real - before).tolist())

        for _ in range(8):
            count(1.0)
            in_peace += sum(count(3.0)) * 3 // 4
            sampler = psutil.Process(setup.writers._worker_pool.workers[0].pid)
            stepping = [child for child in sampler.children(recursive=True) if not children_of(child)]
            hurt(stepping[0] if act == "central" else sampler)
            beside_it += sum(count(3.0)[1:])  # without the writer that was hurt: it has written the fewest
        # On a busy machine, workers that lose their core for a second are replaced, too.
        assert setup.writers.restarts() >= 8
        assert sum(setup.writers._worker_stats.lost) == (8 if act == "workers" else 0)
    print(f"{act}: {beside_it / in_peace:.1%} of their rate")
    assert beside_it >= 0.9 * in_peace


@pytest.mark.timeout(3600)
def test_training_survives_envs_that_fail_randomly(tmp_path: Path) -> None:
    def run(seed: int, chances: dict[str, float], watch: Any) -> None:
        # A user's own env has no preset. This env is CartPole, so it gets the preset of CartPole.
        options: dict[str, Any] = {group: dict(values) for group, values in CARTPOLE.items() if group != "run"}
        options["sampler"]["workers"] = 2
        options |= {"envs": {"kwargs": chances, "max_worker_restarts": 1000}, "eval": {"episodes": 0}}
        names: dict[str, Any] = {"scheme": "async", "steps": 200_000, "seed": seed, "quiet": True}
        out = tmp_path / f"{seed}-{chances['step']}"
        remuda.train("dqn", "own_things:flaky_cartpole", out=out, callbacks=watch, **names, **options)

    learns_nearly_as_fast(run)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", ["workers", "central"])
def test_ten_thousand_updates_with_a_sampler_killed_every_thirty_seconds(tmp_path: Path, act: str) -> None:
    """R24. With central inference, the env workers are killed, and the inference server is checked for leaks."""
    soak = Soak(workers_below, this_and_who_acts_for_all)
    remuda.train(
        "dqn",
        "Acrobot-v1",
        scheme="async",
        steps=100_000_000,
        out=tmp_path / "run",
        quiet=True,
        callbacks=soak,
        algo={"learning_starts": 500, "batch_size": 32},
        replay={"capacity": 5000, "ratio": 1.0},  # full long before the first measurement
        sampler={"envs": 8, "workers": 2, "inference": act},
        eval={"episodes": 0},
        checkpoint={"every": 200_000},
        log={"every": 50_000},
    )
    soak.check()
