"""R3: envs that fail randomly, and by how much learning may be slower for it.

def run(seed, chances, watch): ...          # trains own_things:flaky_cartpole, with watch as a callback
learns_nearly_as_fast(run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CLEAN, FLAKY = {"step": 0.0, "reset": 0.0}, {"step": 5e-4, "reset": 5e-3}
GOAL, WINDOW, MOST = 400.0, 20, 1.3
# By a seed's luck some need twice the steps of others: where the first seeds say no, more decide together with them.
SEEDS = (range(1, 8), range(8, 22))
Watch = Callable[[Any], bool]


def learns_nearly_as_fast(run: Callable[[int, dict[str, float], Watch], Any]) -> None:
    """CartPole reaches 400 within 1.3 x the number of steps that it takes where no env fails: medians over seeds."""
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
    # Of all of them: a seed that is quick may have met few.
    assert sum(restarts for _, restarts in flaky) > 5 * len(flaky)
    assert ratio <= MOST


def steps_to_goal(
    run: Callable[[int, dict[str, float], Watch], Any], seed: int, chances: dict[str, float]
) -> tuple[float, int]:
    """Return the env steps until the policy was good (or infinity) and the number of envs rebuilt on the way.

    An episode of length L is reported only if no step of it failed, which has the probability (1 - p)^L: long
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
