"""Build the exploration of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remuda.config.algo_base import AlgoOptions
from remuda.config.run_config import RunConfig
from remuda.learning.schedules import parse_schedule
from remuda.sampling.exploration import Exploration

HARDLY = 1e-9  # a probability above 0, but so small that no random action occurs


def make_exploration(config: RunConfig) -> Exploration:
    """Return the `Exploration` of all envs of a run, as a function of the row number.

    Schedules need the progress of the run. It is estimated from the row number as if there were no reset rows.
    """
    options, envs = config.algo_options, config.sampler.envs
    random_rows = -(-options.random_steps // envs)
    if options.epsilon_greedy is None:
        return Exploration(None, random_rows)
    return Exploration(epsilons(options, envs, config.steps), random_rows)


def epsilons(options: AlgoOptions, envs: int, steps: int) -> Callable[[int], Tensor]:
    """Return a function that maps a row number to the probability of a random action in each env [B].

    With `algo.epsilon_power` above 0, the probabilities are log-spaced over all envs, as in Ape-X (arXiv 1803.00933).
    """
    assert options.epsilon_greedy is not None
    epsilon, power = options.epsilon_greedy
    schedule = parse_schedule(epsilon, "algo.epsilon")
    powers = 1 + power * torch.arange(envs) / max(1, envs - 1)
    # A probability of exactly 0 would switch off the weight noise with which noisy nets explore.
    return lambda row: torch.pow(schedule(min(1.0, row * envs / steps)), powers).clamp(min=HARDLY)
