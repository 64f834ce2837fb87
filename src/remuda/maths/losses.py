"""Parts of actor-critic losses, as functions of tensors with one entry per row."""

from __future__ import annotations

import torch
from torch import Tensor

# Upper bound of log-ratios in rows whose advantage is not negative. Such a row has gradient 0 above the clip range.
# Without the bound, exp of a log-ratio above 88.7 would overflow in float32, and the backward pass would multiply the
# gradient 0 by infinity, which is NaN.
MAX_LOG_RATIO = 60.0
ROUNDING = 1e-6  # float32 numbers count as equal if their std is at most this fraction of their mean


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return PPO's clipped surrogate as a loss (Eq. 7 of 1707.06347): the negated mean over rows.

    In rows with a negative advantage, the loss grows without bound as the ratio grows. If the loss overflows, the
    gradient is not finite, and the learner skips the update.
    """
    ratio = torch.minimum(log_ratio, torch.where(advantage >= 0, MAX_LOG_RATIO, torch.inf)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def value_loss(value: Tensor, target: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    """Return the mean squared error of `value`.

    If `clip` and `old_value` are given, the error of each row is the larger of two errors: that of `value`, and that
    of `value` after clipping to +-`clip` around `old_value`. Clipping therefore never reduces the loss.
    """
    error = (value - target).square()
    if clip is None or old_value is None:
        return error.mean()
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(error, (clipped - target).square()).mean()


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Estimate KL(old || new) by the k3 estimator, which is never negative (http://joschu.net/blog/kl-approx.html).

    `log_ratio` is log(new(a) / old(a)) for actions a that the old policy sampled.
    """
    return (log_ratio.expm1() - log_ratio).mean()


def standardized(x: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale x to mean 0 and standard deviation 1; a single row is returned as it is.

    If all rows are equal except for rounding, the result is 0, because dividing rounding errors by their standard
    deviation would turn them into a signal.
    """
    if x.numel() < 2:
        return x
    mean, deviation = x.mean(), x.std()
    scaled = (x - mean) / (deviation + epsilon)
    return torch.where(deviation <= ROUNDING * mean.abs(), torch.zeros_like(x), scaled)  # NaN in x stays NaN
