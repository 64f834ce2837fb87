"""Parts of value-based losses: the Huber loss, value rescaling, and the projection of return distributions."""

from __future__ import annotations

import torch
from torch import Tensor


def huber(error: Tensor, delta: float) -> Tensor:
    """Return the Huber loss of each error: half its square up to `delta`, and a line of slope `delta` beyond."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def rescale(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Return h(x) of arXiv 1805.11593. It grows like a square root, so that networks can fit returns of any scale."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + epsilon * x


def unscale(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Return the inverse of `rescale`."""
    # With e = epsilon, the usual expression (sqrt(1 + 4 e y) - 1) / (2 e) loses half of its digits to cancellation if
    # e y is small. The mathematically equal expression 2 y / (sqrt(1 + 4 e y) + 1) has no cancellation.
    y = x.abs() + 1 + epsilon
    root = 2 * y / ((1 + 4 * epsilon * y).sqrt() + 1)
    return x.sign() * (root.square() - 1)


def project(p: Tensor, r: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """Project the distribution of r + discount * Z onto the evenly spaced support of Z (1707.06887, Algorithm 1).

    p [N, atoms] holds the probabilities of Z on `support` [atoms]; r and discount are [N]. The probability of each
    shifted atom is divided between the two nearest atoms of the support: the nearer of the two gets more. An atom
    that is shifted beyond an end of the support gives all its probability to that end.
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
