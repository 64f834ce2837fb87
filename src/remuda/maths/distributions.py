"""Policies as distributions. Sampling is a function of noise that comes from outside.

The sampler draws the noise of env b at row t from (seed, b, t) alone, so an action does not depend on which
process or in what company it was computed, and nothing here touches a random generator.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    def sample(self, noise: Tensor) -> Tensor: ...
    def mode(self) -> Tensor: ...
    def log_prob(self, action: Tensor) -> Tensor: ...
    def entropy(self) -> Tensor: ...


class Categorical:
    """Over n actions, from logits [..., n]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = torch.log_softmax(logits, dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Inverse of the cumulative distribution at uniform noise [..., 1], 0 <= noise < 1."""
        cumulative = self.logits.exp().cumsum(-1)
        # Rounding may leave the last sum below the noise: scaled by it, no action of probability 0 is ever drawn.
        return (cumulative <= noise * cumulative[..., -1:]).sum(-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        # A probability of 0 has logit -inf; its term is 0, not NaN.
        return -(self.logits.exp() * self.logits.clamp(min=-1e9)).sum(-1)

    def perplexity(self) -> Tensor:
        return self.entropy().exp()

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other)."""
        probability = self.logits.exp()
        # An action that is never taken adds 0, also where the other's logit is -inf.
        return (probability * (self.logits - other.logits).masked_fill(probability == 0, 0.0)).sum(-1)


class Gaussian:
    """Independent normals, from mean and log_std [..., d]; actions are not squashed (envs clip them)."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, noise: Tensor) -> Tensor:
        """Standard normal noise [..., d], shifted and scaled."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + LOG_SQRT_2_PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + LOG_SQRT_2_PI).sum(-1).expand(self.mean.shape[:-1])

    def perplexity(self) -> Tensor:
        return self.entropy().exp()

    def kl(self, other: Gaussian) -> Tensor:
        """KL(self || other)."""
        ratio = (2 * (self.log_std - other.log_std)).exp()
        distance = ((self.mean - other.mean) * (-other.log_std).exp()).square()
        return (0.5 * (ratio + distance - 1) + other.log_std - self.log_std).sum(-1)
