"""Samplers that write to a replay, for minutes: the rate of who is not hurt, learning beside failures, memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from feeding import Setup
from soaking import Soak
from test_async_long import MOCK
from test_async_runs import _nothing_is_left as _nothing_is_left
from test_async_runs import workers_below

import remuda
from remuda.recipes.value_presets import CARTPOLE

pytestmark = pytest.mark.long


@pytest.mark.parametrize("hurt", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "hung"])
def test_the_others_keep_nine_tenths_of_their_rate(hurt: Any) -> None:
    """R1, R4. Envs that sleep, so that nobody waits for a core."""
    in_peace = beside_it = 0
    settings: dict[str, Any] = {"envs": {"kwargs": MOCK, "step_timeout": 1.0, "max_worker_restarts": 100}}
    with Setup("Remuda/Mock-v0", **settings, sampler={"envs": 4, "workers": 4}, replay={"ratio": None}) as setup:

        def count(seconds: float) -> list[int]:
            before, end = setup.replay.ring.real.copy(), time.monotonic() + seconds
            setup.wait(lambda: time.monotonic() >= end)
            return sorted((setup.replay.ring.real - before).tolist())

        for _ in range(8):
            count(1.0)
            in_peace += sum(count(3.0)) * 3 // 4
            hurt(psutil.Process(setup.feed._crew.members[0].pid))
            beside_it += sum(count(3.0)[1:])  # whoever was hurt has written the fewest
        assert sum(setup.feed._news.lost) == 8
    print(f"{beside_it / in_peace:.1%} of their rate")
    assert beside_it >= 0.9 * in_peace


def steps_to_400(path: Path, seed: int, chances: dict[str, float]) -> tuple[int, int]:
    """Env steps until the last 20 episodes had a mean of 400, and how many envs were rebuilt on the way."""
    returns: list[float] = []
    reached: list[tuple[int, int]] = []

    def watch(round: Any) -> bool:
        returns.extend(episode.values["ep_rew"] for episode in round.episodes)
        if len(returns) >= 20 and np.mean(returns[-20:]) >= 400:
            reached.append((round.progress.steps, round.progress.restarts))
        return bool(reached)

    # An env of one's own has no preset; this one is CartPole.
    options: dict[str, Any] = {group: dict(values) for group, values in CARTPOLE.items() if group != "run"}
    options["sampler"]["workers"] = 2
    options |= {"envs": {"kwargs": chances, "max_worker_restarts": 1000}, "eval": {"episodes": 0}}
    names: dict[str, Any] = {"scheme": "async", "steps": 200_000, "seed": seed, "out": path, "quiet": True}
    remuda.train("dqn", "own_things:flaky_cartpole", callbacks=watch, **names, **options)
    return reached[0] if reached else (200_000, 0)


@pytest.mark.timeout(3600)
def test_training_survives_envs_that_fail_by_chance(tmp_path: Path) -> None:
    """R3. 5e-4 per step and 5e-3 per reset: CartPole still reaches 400 within 1.3 x the clean number of steps."""
    seeds = range(1, 6)
    clean = [steps_to_400(tmp_path / f"clean-{seed}", seed, {"step": 0.0, "reset": 0.0}) for seed in seeds]
    flaky = [steps_to_400(tmp_path / f"flaky-{seed}", seed, {"step": 5e-4, "reset": 5e-3}) for seed in seeds]
    print("clean", clean, "flaky", flaky)
    assert all(restarts > 5 for _, restarts in flaky)
    assert np.median([steps for steps, _ in flaky]) <= 1.3 * np.median([steps for steps, _ in clean])


@pytest.mark.timeout(3600)
def test_ten_thousand_updates_with_a_sampler_killed_every_thirty_seconds(tmp_path: Path) -> None:
    """R24."""
    soak = Soak(workers_below)
    remuda.train(
        "dqn",
        "Acrobot-v1",
        scheme="async",
        steps=100_000_000,
        out=tmp_path / "run",
        quiet=True,
        callbacks=soak,
        algo={"learning_starts": 500, "batch_size": 32},
        replay={"capacity": 5000, "ratio": 1.0},  # full long before the first look that counts
        sampler={"envs": 8, "workers": 2},
        eval={"episodes": 0},
        checkpoint={"every": 200_000},
        log={"every": 50_000},
    )
    soak.check()
