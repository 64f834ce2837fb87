"""Asynchronous sampling with minutes of failures: the rate of the other workers, learning, and leaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from flaky import learns_nearly_as_fast
from processes import children_of
from soaking import Soak
from test_async import FORMS, SEED, steppers, streaming
from test_async_runs import train, workers_below
from test_sampler_workers import one_server as one_server
from test_sampler_workers import server as server

pytestmark = pytest.mark.long

MOCK = {"observation": {"box": [3]}, "action": {"discrete": 4}, "seconds": 0.01, "wait": "sleep"}


# --- R1, R4: the other workers --------------------------------------------------------------------------------------


def rate_of_others(form: str, hurt: Callable[[psutil.Process], None], times: int = 8, seconds: float = 3.0) -> float:
    """Return the rate of three workers while the fourth is hurt and replaced, divided by their normal rate."""
    in_peace = beside_it = 0
    limits = {"step_timeout": 1.0, "env": ("Remuda/Mock-v0", MOCK)}
    with streaming(form, num_envs=4, workers=4, T=10, per_round=1, **limits) as queue:
        queue.start(SEED)

        def count(seconds: float) -> list[int]:
            counts, end = [0] * 4, time.monotonic() + seconds
            while time.monotonic() < end:
                counts[int(queue.take(7, lambda: False).envs[0])] += 1
                queue.release(7)
            return counts

        for _ in range(times):
            count(1.0)
            in_peace += sum(count(seconds)) * 3 // 4
            hurt(steppers(form, queue)[0])
            counts = sorted(count(seconds))
            beside_it += sum(counts[1:])  # without the worker that was hurt: it has filled the fewest
            assert queue.restarts() > 0
    return beside_it / in_peace


@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize("hurt", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "hung"])
@pytest.mark.parametrize("form", FORMS)
def test_other_workers_keep_nine_tenths_of_their_rate(form: str, hurt: Any) -> None:
    """The envs sleep, so that no worker waits for a core. A suspended process cannot react to anything."""
    rate = rate_of_others(form, hurt)
    print(f"{form}: {rate:.1%} of their rate")
    assert rate >= 0.9


# --- R3: envs that raise --------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_training_survives_envs_that_fail_randomly(form: str, tmp_path: Path) -> None:
    def run(seed: int, chances: dict[str, float], watch: Any) -> None:
        options: dict[str, Any] = {"env": "own_things:flaky_cartpole", "envs": {"kwargs": chances}}
        out = tmp_path / f"{seed}-{chances['step']}"
        train(out, form, watch, steps=400_000, seed=seed, algo={"learning_rate": "1e-3"}, **options)

    learns_nearly_as_fast(run)


# --- R24: soak ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_ten_thousand_updates_with_a_worker_killed_every_thirty_seconds(form: str, tmp_path: Path) -> None:
    soak = Soak(workers_below, this_and_who_acts_for_all)
    # Few lines of metrics: the values that a line averages are kept in memory until it is written.
    options = {"algo": {"n_steps": 8, "batch_size": 8}, "checkpoint": {"every": 20_000}, "log": {"every": 10_000}}
    train(tmp_path / "run", form, soak, steps=100_000_000, env="Acrobot-v1", **options)
    soak.check()


def this_and_who_acts_for_all(me: psutil.Process) -> list[psutil.Process]:
    """Return this process and the inference server, which outlives its env workers.

    The inference server is the child of a fork server that has a fork server of its own.
    """
    return [me, *(child for one in me.children() for child in children_of(one) if children_of(child))]
