"""Exploration noise keyed by (seed, env, row): the same for an env whoever samples it, and nothing to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor


class Noise:
    """Uniform or standard normal numbers of the given width for each env and row."""

    def __init__(self, seed: int, envs: Sequence[int], kind: Literal["uniform", "normal"], width: int) -> None:
        self.seed, self.envs, self.kind, self.width = seed, envs, kind, width

    def rows(self, first: int, count: int) -> Tensor:
        """[count, B, width] for the rows from `first` on; a block is a function of where it starts."""
        out = np.empty((count, len(self.envs), self.width), dtype=np.float32)
        for column, env in enumerate(self.envs):
            # The high word of Philox's counter is the first row: blocks of different rollouts never overlap.
            draw = np.random.Generator(np.random.Philox(key=[self.seed, env], counter=[0, 0, 0, first]))
            if self.kind == "uniform":
                out[:, column] = draw.random((count, self.width), dtype=np.float32)
            else:
                out[:, column] = draw.standard_normal((count, self.width), dtype=np.float32)
        return torch.from_numpy(out)
