"""Random numbers with which agents act: functions of seed, env and row numbers, and thus equal in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from remuda.randomness import Purpose, keyed_generator


class Noise:
    """Random numbers for each env and row.

    `envs` holds the indices of the envs among all envs of the run, so that workers and ranks draw the numbers that
    one process would draw. For each entry (kind, width) of `parts`, each row of each env gets `width` random numbers
    of this kind.
    """

    def __init__(
        self,
        seed: int,
        envs: Sequence[int],
        parts: Sequence[tuple[Literal["uniform", "normal"], int]],
        purpose: Purpose = Purpose.EXPLORATION,
    ) -> None:
        self.seed, self.envs, self.parts, self.purpose = seed, envs, parts, purpose

    def rows(self, first: int, count: int) -> Tensor:
        """Return noise [count, B, width] for B envs in the `count` rows from row number `first` on.

        `width` is the sum of the widths of all parts. The key of a generator is the seed, the index of the env in the
        run, and `first`, so the noise of a row also depends on the row at which the call starts.
        """
        out = np.empty((count, len(self.envs), sum(width for _, width in self.parts)), dtype=np.float32)
        for column, env in enumerate(self.envs):
            draw = keyed_generator(self.purpose, self.seed, env, first)
            start = 0
            for kind, width in self.parts:
                numbers = draw.random if kind == "uniform" else draw.standard_normal
                out[:, column, start : start + width] = numbers((count, width), dtype=np.float32)
                start += width
        return torch.from_numpy(out)
