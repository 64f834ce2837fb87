"""Refuse configurations whose rollouts, batches or networks cannot fit into memory, before anything is allocated."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from remuda.config.run_config import RunConfig
from remuda.core import Space
from remuda.envs import EnvInfo
from remuda.errors import ConfigError
from remuda.machine import free_memory

USABLE = 0.9  # fraction of the free memory that a rollout, a batch or a net may need
WEIGHT_BYTES = 16  # bytes of one weight: a float32 with its gradient and the two moments of Adam


def refuse_large_sizes(config: RunConfig, info: EnvInfo) -> None:
    """Raise ConfigError if a rollout, a batch or the net needs more than the fraction USABLE of the free memory.

    The needed memory is estimated by lower bounds, so every run that is refused would indeed exceed this fraction.
    build/replay.py checks the replay's size.
    """
    options: Any = config.algo_options
    row_bytes = space_bytes(info.observation) + space_bytes(info.action) + 16
    rows = options.rows_per_round * config.sampler.envs
    rows_option = "n_steps" if hasattr(options, "n_steps") else "train_freq"
    described = f"algo.{rows_option}={options.rows_per_round} with sampler.envs={config.sampler.envs}"
    _refuse(rows * row_bytes, f"a rollout of {rows} rows ({described})")
    if options.data == "replay":
        sequence = max(1, config.replay.sequence)
        batch = options.batch_size * sequence
        _refuse(batch * row_bytes, f"a batch of {batch} rows (algo.batch_size={options.batch_size})")
    agent, widths = config.agent, config.agent.hidden
    weights = sum(first * second for first, second in pairwise(widths)) * WEIGHT_BYTES
    _refuse(weights, f"a net with agent.hidden={','.join(map(str, widths))}")
    if agent.core is not None:
        _refuse(3 * agent.core_size**2 * WEIGHT_BYTES, f"a net with agent.core_size={agent.core_size}")


def space_bytes(space: Space) -> int:
    """Return the number of bytes of one observation or action."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for _, leaf in space.leaves())


def _refuse(needed: int, what: str) -> None:
    free = free_memory()
    if needed > USABLE * free:
        raise ConfigError(
            f"{what} takes {needed / 1e9:.1f} GB, more than {100 * USABLE:.0f} % of the {free / 1e9:.1f} GB of "
            "free memory: use smaller values."
        )
