"""Exploration noise keyed by (seed, env, row): the same for an env whoever samples it, and nothing to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor


class Noise:
    """Uniform or standard normal numbers for each env and row: of each part its kind and width, side by side."""

    def __init__(
        self, seed: int, envs: Sequence[int], parts: Sequence[tuple[Literal["uniform", "normal"], int]]
    ) -> None:
        self.seed, self.envs, self.parts = seed, envs, parts

    def rows(self, first: int, count: int) -> Tensor:
        """[count, B, width] for the rows from `first` on; a block is a function of where it starts."""
        out = np.empty((count, len(self.envs), sum(width for _, width in self.parts)), dtype=np.float32)
        for column, env in enumerate(self.envs):
            # The high word of Philox's counter is the first row: blocks of different rollouts never overlap.
            draw = np.random.Generator(np.random.Philox(key=[self.seed, env], counter=[0, 0, 0, first]))
            start = 0
            for kind, width in self.parts:
                numbers = draw.random if kind == "uniform" else draw.standard_normal
                out[:, column, start : start + width] = numbers((count, width), dtype=np.float32)
                start += width
        return torch.from_numpy(out)
