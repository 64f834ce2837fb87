"""Running statistics of observations, and their use to standardize observations.

    standardize = Standardize((8,))
    features = net(standardize(obs))            # sampling and learning: the statistics do not change
    standardize.update(rollout_obs)             # once per rollout, after its gradients

Statistics are torch buffers, so they are saved and published with the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, updated batch by batch."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Merge rows [N, *shape] by Chan's parallel formula, which is exact for any split into batches."""
        if len(rows) == 0:
            return
        rows = rows.double()
        count = self.count + len(rows)
        delta = rows.mean(0) - self.mean
        spread = self.var * self.count + rows.var(0, unbiased=False) * len(rows)
        self.var.copy_((spread + delta.square() * self.count * len(rows) / count) / count)
        self.mean.add_(delta * len(rows) / count)
        self.count.copy_(count)


class Standardize(nn.Module):
    """Scale observations to mean 0 and standard deviation 1 by running statistics, and clip them to +-`clip`.

    Statistics do not change while sampling and learning; `update` merges new rows once per rollout. A float32 shift
    and scale are stored as well, so that `forward` takes two calls of torch instead of seven.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        self.moments = RunningMoments(shape)
        self.clip = clip
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def update(self, rows: Tensor) -> None:
        self.moments.update(rows)
        self.shift.copy_(self.moments.mean)
        self.scale.copy_((self.moments.var + 1e-8).rsqrt())

    def forward(self, obs: Tensor) -> Tensor:
        return ((obs - self.shift) * self.scale).clamp_(-self.clip, self.clip)
