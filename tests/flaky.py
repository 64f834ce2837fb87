"""Requirement R3: a bound on how much slower an agent may learn if its envs fail randomly.

def run(seed, chances, watch): ...          # trains own_things:flaky_cartpole, with watch as a callback
learns_nearly_as_fast(run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CLEAN, FLAKY = {"step": 0.0, "reset": 0.0}, {"step": 5e-4, "reset": 5e-3}
GOAL, WINDOW, MOST = 400.0, 20, 1.3
# Some seeds need twice the steps of others. If the ratio over the first seeds is too large, more seeds are added.
SEEDS = (range(1, 8), range(8, 22))
Watch = Callable[[Any], bool]


def learns_nearly_as_fast(run: Callable[[int, dict[str, float], Watch], Any]) -> None:
    """Assert that flaky CartPole reaches a return of 400 within 1.3 x the steps of clean CartPole (medians)."""
    clean: list[tuple[float, int]] = []
    flaky: list[tuple[float, int]] = []
    ratio = np.inf
    for seeds in SEEDS:
        clean += [steps_to_goal(run, seed, CLEAN) for seed in seeds]
        flaky += [steps_to_goal(run, seed, FLAKY) for seed in seeds]
        ratio = np.median([steps for steps, _ in flaky]) / np.median([steps for steps, _ in clean])
        print(f"ratio {ratio:.2f}, clean {clean}, flaky {flaky}")
        if ratio <= MOST:
            break
    assert all(restarts == 0 for _, restarts in clean)
    # This is a sum over all seeds, because a seed that learns quickly may have few restarts.
    assert sum(restarts for _, restarts in flaky) > 5 * len(flaky)
    assert ratio <= MOST


def steps_to_goal(
    run: Callable[[int, dict[str, float], Watch], Any], seed: int, chances: dict[str, float]
) -> tuple[float, int]:
    """Return the env steps until the policy reached GOAL (or infinity) and the number of envs rebuilt until then.

    An episode of length L is reported only if none of its steps failed. This has the probability (1 - p)^L, so long
    episodes are under-represented. Each reported return is therefore weighted by the inverse of that probability,
    which makes the weighted mean an unbiased measure of the policy in both envs.
    """
    returns: list[float] = []
    weights: list[float] = []
    restarts, steps = 0, np.inf

    def watch(round: Any) -> bool:
        nonlocal restarts, steps
        returns.extend(episode.values["ep_rew"] for episode in round.episodes)
        weights.extend((1.0 - chances["step"]) ** -episode.values["ep_len"] for episode in round.episodes)
        restarts = round.progress.restarts
        if len(returns) >= WINDOW and np.average(returns[-WINDOW:], weights=weights[-WINDOW:]) >= GOAL:
            steps = round.progress.steps
        return bool(np.isfinite(steps))

    run(seed, chances, watch)
    return steps, restarts
