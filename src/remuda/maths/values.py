"""Pieces of value-based losses: targets over a window of rewards, distributions over returns, rescaled values."""

from __future__ import annotations

import torch
from torch import Tensor


def huber(error: Tensor, delta: float) -> Tensor:
    """Half the square near zero, of slope `delta` beyond; element by element."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def rescale(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """h(x) of 1805.11593: about the root of large values, so that one net fits returns of any size."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + epsilon * x


def unscale(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """The inverse of `rescale`."""
    # sqrt(1 + 4 e y) - 1 of small y loses half its digits in float32: 4 e y / (sqrt(1 + 4 e y) + 1) does not.
    y = x.abs() + 1 + epsilon
    root = 2 * y / ((1 + 4 * epsilon * y).sqrt() + 1)
    return x.sign() * (root.square() - 1)


def project(p: Tensor, r: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """The distribution of r + discount * Z on the evenly spaced support of Z, Algorithm 1 of 1707.06887.

    p is [N, atoms] over `support` [atoms]; each shifted atom's probability is shared by its two neighbours in
    proportion to their nearness, and atoms beyond either end are moved to it.
    """
    low, high, last = support[0], support[-1], len(support) - 1
    shifted = (r.unsqueeze(-1) + discount.unsqueeze(-1) * support).clamp(low, high)
    place = ((shifted - low) / (high - low) * last).clamp(0, last)
    below = place.floor().clamp(max=last - 1)
    above_share = place - below
    index = below.long()
    out = torch.zeros_like(p)
    out.scatter_add_(-1, index, p * (1 - above_share))
    out.scatter_add_(-1, index + 1, p * above_share)
    return out
