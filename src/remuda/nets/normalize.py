"""Running mean and variance of rows, and a module that standardizes observations with them.

    standardize = Standardize((8,))
    features = net(standardize(obs))            # sampling and learning: the statistics do not change
    standardize.update(rollout_obs)             # once per rollout, after its gradients

Statistics are torch buffers, so they are saved and published with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn


class Moments(NamedTuple):
    """Number, mean and variance of some rows, all float64. If `size` is 0, `mean` and `var` have no meaning."""

    size: Tensor
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Return the moments of rows [N, *shape]."""
        rows = rows.double()
        mean, var = (rows.mean(0), rows.var(0, unbiased=False)) if len(rows) else (rows.sum(0), rows.sum(0))
        return cls(torch.tensor(float(len(rows)), dtype=torch.float64), mean, var)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors with the keys `prefix`.size, .mean and .var, for a dict of statistics."""
        return {f"{prefix}.{name}": value for name, value in self._asdict().items()}

    @classmethod
    def find(cls, statistics: Mapping[str, Tensor], prefix: str) -> Self:
        """Return the moments that are stored in `statistics` under the keys of `named(prefix)`."""
        return cls(*(statistics[f"{prefix}.{name}"] for name in cls._fields))


class RunningMoments(nn.Module):
    """Mean and variance of all rows that were merged so far.

    Both stay on the CPU, where rollouts are, even if the networks move to another device. Both are float64, which
    Apple's GPUs do not support.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self

    def update(self, rows: Tensor) -> None:
        """Merge rows [N, *shape] into the mean and the variance."""
        self.merge(Moments.of(rows))

    @torch.no_grad()
    def merge(self, new: Moments) -> None:
        """Merge the moments of new rows by Chan's parallel formula, which is exact however the rows are batched."""
        if new.size == 0:
            return
        count = self.count + new.size
        delta = new.mean - self.mean
        spread = self.var * self.count + new.var * new.size
        self.var.copy_((spread + delta.square() * self.count * new.size / count) / count)
        self.mean.add_(delta * new.size / count)
        self.count.copy_(count)


class Standardize(nn.Module):
    """Scale observations to mean 0 and standard deviation 1 by running statistics, and clip them to +-`clip`.

    Only `update` and `merge` change the statistics. These methods also store the mean as `shift` and the inverse
    standard deviation as `scale`, both float32, so that `forward` takes three calls of torch instead of seven.
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
        self.merge(Moments.of(rows))

    def merge(self, new: Moments) -> None:
        """Merge the moments of new rows into the statistics, and compute `shift` and `scale` again."""
        self.moments.merge(new)
        self.shift.copy_(self.moments.mean)
        self.scale.copy_((self.moments.var + 1e-8).rsqrt())

    def forward(self, obs: Tensor) -> Tensor:
        return ((obs - self.shift) * self.scale).clamp_(-self.clip, self.clip)
