"""Random numbers as a function of where they are used, so that a checkpoint has no generator states to save.

    draw = keyed_generator(Purpose.EXPLORATION, seed, env, row)     # numbers for `env` from `row` on
    draw.random(8)

Two calls that differ in any argument give streams that share no numbers. Seeds of environments are not made here but
by `core.env_seed`: envs have generators of their own, of another kind.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What random numbers are used for. The values are part of every run: changing one changes all its results."""

    EXPLORATION = 0  # key: env, position: row
    RANDOM_ACTIONS = 1  # before learning starts; key: env, position: row
    EVALUATION = 2  # key: env, position: row
    MINIBATCHES = 3  # key: epoch, position: round
    REPLAY = 4  # key: draw or block of draws, position: attempt
    LOSSES = 5  # key: update


def keyed_generator(purpose: Purpose, seed: int, key: int, position: int = 0) -> np.random.Generator:
    """Return a generator for one use; all arguments are below 2**64.

    Philox is a function of its key and a counter of four words. Drawing counts up the first word; 2**128 draws would
    have to be made before `purpose` and `position` changed.
    """
    return np.random.Generator(np.random.Philox(key=[seed, key], counter=[0, 0, int(purpose), position]))
