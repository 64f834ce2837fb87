"""Random numbers that are a function of the seed and their place in a run; checkpoints save no generator states.

    draw = keyed_generator(Purpose.EXPLORATION, seed, env, row)     # numbers for `env` from `row` on
    draw.random(8)

Two calls that differ in any argument return independent streams. Seeds of environments come from `core.derive_seed`,
because environments have their own generators.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The purposes of random numbers. Changing the value of a member changes the results of runs.

    The comment on each member states what `keyed_generator` takes as `key` and `position` for this purpose.
    """

    EXPLORATION = 0  # key: the env; position: the row
    RANDOM_ACTIONS = 1  # random actions before learning starts; key and position as for EXPLORATION
    EVALUATION = 2  # key and position as for EXPLORATION
    MINIBATCHES = 3  # key: the epoch; position: the round
    REPLAY = 4  # key: the number of the draw or block of draws; position: the number of the attempt, from 0
    LOSSES = 5  # key: the number of updates so far


def keyed_generator(purpose: Purpose, seed: int, key: int, position: int = 0, part: int = 0) -> np.random.Generator:
    """Return the generator that belongs to these arguments, which must be below 2**64.

    `part` is the index of a part of the run (remuda.parts). Philox is a function of its key and of a counter of four
    64-bit words. Drawing numbers increments the first word. The other three words start as `part`, `purpose` and
    `position`, and change only after 2**64 draws, so two generators cannot overlap before that.
    """
    return np.random.Generator(np.random.Philox(key=[seed, key], counter=[0, part, int(purpose), position]))
