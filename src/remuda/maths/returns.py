"""Returns and advantages of rollouts [T, B], in which reset rows are masked (see remuda.data.rollout).

The inputs r_t, discount_t and mask_t are [T, B]. v [T + 1, B] holds the value of every row's observation and of the
observation after the last row. A truncated episode bootstraps from the reset row that follows it, which holds the
episode's final observation. The last row of a terminated episode has discount 0. The end of the rollout bootstraps
from v[T].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor


def _check(r_t: Tensor, discount_t: Tensor, mask_t: Tensor, v: Tensor) -> None:
    if r_t.dim() != 2:
        raise ValueError(f"rewards have shape {tuple(r_t.shape)}: they must be [T, B]")
    T, B = r_t.shape
    if discount_t.shape != (T, B) or mask_t.shape != (T, B) or v.shape != (T + 1, B):
        raise ValueError(
            f"rewards are {tuple(r_t.shape)}, so discounts {tuple(discount_t.shape)} and masks "
            f"{tuple(mask_t.shape)} must be the same and values {tuple(v.shape)} one row longer"
        )


def gae(r_t: Tensor, discount_t: Tensor, mask_t: Tensor, v: Tensor, gamma: float, lambda_: float) -> Tensor:
    """Return generalized advantage estimates [T, B] (GAE, arXiv 1506.02438); they are 0 on reset rows."""
    _check(r_t, discount_t, mask_t, v)
    mask = mask_t.to(v.dtype)
    continues = gamma * mask * discount_t
    delta_t = mask * (r_t - v[:-1]) + continues * v[1:]
    decay_t = lambda_ * continues
    # The loop over rows is in numpy, because a call of torch takes longer than the arithmetic of one row.
    delta, decay = delta_t.cpu().numpy(), decay_t.cpu().numpy()
    advantage = np.empty_like(delta)
    acc = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        acc = delta[t] + decay[t] * acc
        advantage[t] = acc
    return torch.from_numpy(advantage).to(v.device)


def discounted_returns(r_t: Tensor, discount_t: Tensor, mask_t: Tensor, v: Tensor, gamma: float) -> Tensor:
    """Return Monte-Carlo returns [T, B], bootstrapped only at truncations and the rollout's end.

    In reset rows, the return is the value v_t.
    """
    _check(r_t, discount_t, mask_t, v)
    returns = torch.empty_like(v[:-1])
    g_tp1 = v[-1]
    for t in reversed(range(len(r_t))):
        g_tp1 = torch.where(mask_t[t].bool(), r_t[t] + gamma * discount_t[t] * g_tp1, v[t])
        returns[t] = g_tp1
    return returns


def n_step_returns(r_t: Tensor, discount_t: Tensor, mask_t: Tensor, v: Tensor, gamma: float, n: int) -> Tensor:
    """Return n-step returns [T, B]: the discounted sum of the next n rewards and of the value after these rewards.

    Where the episode or the rollout ends sooner, the sum has fewer than n rewards. In reset rows, the return is v_t.
    """
    _check(r_t, discount_t, mask_t, v)
    if n < 1:
        raise ValueError(f"n={n}: an n-step return takes at least one reward")
    returns = v
    for _ in range(n):
        one_more = torch.where(mask_t.bool(), r_t + gamma * discount_t * returns[1:], v[:-1])
        returns = torch.cat([one_more, v[-1:]])
    return returns[:-1]


class ExplainedVariance:
    """The metric 1 - Var[target - prediction] / Var[target], which can be pooled over several sets of rows.

    Its value, given by float(), is 1 for a perfect prediction, 0 for a constant prediction, and NaN if all targets
    are equal. `core.PooledMetric` describes pooling.
    """

    def __init__(self, moments: Tensor) -> None:
        """`moments` [3, 2] holds number of rows, mean and sum of squared deviations, of target and error.

        The error is target - prediction.
        """
        self._moments = moments

    @classmethod
    def of(cls, prediction: Tensor, target: Tensor) -> Self:
        both = torch.stack([target, target - prediction], -1).double()
        mean = both.sum(0) / max(1, len(both))
        return cls(torch.stack([torch.full_like(mean, len(both)), mean, (both - mean).square().sum(0)]))

    @classmethod
    def pool(cls, numbers: Sequence[Sequence[float]]) -> Self:
        count, mean, squares = torch.tensor(numbers, dtype=torch.float64).view(-1, 3, 2).unbind(1)
        center = (count * mean).sum(0) / count.sum(0).clamp(min=1)
        return cls(torch.stack([count.sum(0), center, (squares + count * (mean - center).square()).sum(0)]))

    def numbers(self) -> list[float]:
        return [float(number) for number in self._moments.flatten()]

    def __float__(self) -> float:
        target, error = self._moments[2].tolist()
        return 1.0 - error / target if target > 0.0 else math.nan
