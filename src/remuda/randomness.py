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
    """What random numbers are used for. Changing a value changes the results of every run.

    Comments state which `key` and `position` of `keyed_generator` belong to each purpose.
    """

    EXPLORATION = 0  # the key is the env, and the position the row
    RANDOM_ACTIONS = 1  # before learning starts; key and position as for exploration
    EVALUATION = 2  # key and position as for exploration
    MINIBATCHES = 3  # the key is the epoch, and the position the round
    REPLAY = 4  # the key is the number of a draw or of a block of draws, and the position that of the attempt
    LOSSES = 5  # the key is the number of updates so far


def keyed_generator(purpose: Purpose, seed: int, key: int, position: int = 0) -> np.random.Generator:
    """Return a generator for one use; all arguments are below 2**64.

    Philox is a function of its key and a counter of four words. Each draw increments the first word and carries
    into the second. `purpose` and `position` are the last two words, so they change only after 2**128 draws.
    """
    return np.random.Generator(np.random.Philox(key=[seed, key], counter=[0, 0, int(purpose), position]))
