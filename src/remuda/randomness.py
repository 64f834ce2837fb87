"""Random numbers as a function of where they are used, so that a checkpoint has no generator states to save.

    draw = keyed_generator(Purpose.EXPLORATION, seed, env, row)     # numbers for `env` from `row` on
    draw.random(8)

Two calls that differ in any argument return independent streams. Seeds of environments come from `core.derive_seed`,
because environments have their own generators.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What random numbers are used for. Changing a value changes the results of every run."""

    EXPLORATION = 0  # key: env, position: row
    RANDOM_ACTIONS = 1  # before learning starts; key: env, position: row
    EVALUATION = 2  # key: env, position: row
    MINIBATCHES = 3  # key: epoch, position: round
    REPLAY = 4  # key: index of the draw or of a block of draws; position: index of the attempt
    LOSSES = 5  # key: update


def keyed_generator(purpose: Purpose, seed: int, key: int, position: int = 0) -> np.random.Generator:
    """Return a generator for one use; all arguments are below 2**64.

    Philox is a function of its key and a counter of four words. Each draw increments the first word; only 2**128
    draws would change `purpose` and `position`.
    """
    return np.random.Generator(np.random.Philox(key=[seed, key], counter=[0, 0, int(purpose), position]))
