"""Action distributions. Sampling is a function of noise that the caller provides.

    distribution = Categorical(head(features))                 # or the class that fits the action space
    action = distribution.choose(noise, explore)               # for sampling; the mode where explore is 0
    ratio = (distribution.log_prob(action) - old_log_prob).exp()   # for learning
    loss = -entropy_coef * distribution.rows(mask).entropy().mean()

The sampler derives the noise of each env and row from the run's seed, so an action depends neither on the process nor
on the batch in which it is computed. Nothing here uses a random generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from remuda.core import TensorTree
from remuda.data import ArrayTuple

LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """The action distributions of a batch of rows. In shapes, `...` stands for the leading axes of the rows."""

    def sample(self, noise: Tensor) -> Any: ...
    def mode(self) -> Any: ...
    def log_prob(self, action: Any) -> Tensor: ...  # [...]: the sum over the parts of each row's action
    def entropy(self) -> Tensor: ...  # [...]: the sum over the parts of an action
    def kl(self, other: Self) -> Tensor: ...  # [...]: KL(self || other), the sum over the parts of an action
    def rows(self, index: Tensor) -> Self: ...  # selects rows by a mask or an index of the leading axes

    def perplexity(self) -> Tensor:
        return self.entropy().exp()

    def choose(self, noise: Tensor, explore: Tensor | None = None) -> TensorTree:
        """Return samples where `explore` [...] is not 0, and modes elsewhere; only samples if `explore` is None."""
        sample: Tensor = self.sample(noise)
        if explore is None:
            return sample
        axes = (1,) * (sample.dim() - explore.dim())
        return torch.where(explore.bool().reshape(explore.shape + axes), sample, self.mode())


class Categorical(Distribution):
    """Categorical distribution over n actions, from logits [..., n]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = torch.log_softmax(logits, dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Evaluate the inverse cumulative distribution at uniform noise [..., 1], 0 <= noise < 1."""
        cumulative = self.logits.exp().cumsum(-1)
        # Rounding may leave the last sum below 1. The noise is scaled by this sum, because noise above the sum would
        # select an action that does not exist.
        return (cumulative <= noise * cumulative[..., -1:]).sum(-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        # The logit of probability 0 is -inf. It is clamped, so that the product is 0 and not NaN.
        return -(self.logits.exp() * self.logits.clamp(min=-1e9)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        probability = self.logits.exp()
        # An action of probability 0 adds 0, even where the logit of `other` is -inf.
        return (probability * (self.logits - other.logits).masked_fill(probability == 0, 0.0)).sum(-1)

    def rows(self, index: Tensor) -> Self:
        part = copy(self)  # copied, because the constructor would normalize the logits again
        part.logits = self.logits[index]
        return part


class MultiCategorical(Distribution):
    """k independent choices, the i-th among sizes[i] options, from logits [..., sum(sizes)].

    Actions are int64 [..., k].

    All choices are computed as one Categorical [..., k, max(sizes)], padded with logits of -inf. The number of torch
    calls therefore does not grow with k, except in the constructor if sizes differ.
    """

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        if len(set(sizes)) == 1:
            logits = logits.reshape(*logits.shape[:-1], len(sizes), sizes[0])
        else:
            widest, parts = max(sizes), torch.split(logits, list(sizes), -1)
            padded = [F.pad(part, (0, widest - part.shape[-1]), value=-math.inf) for part in parts]
            logits = torch.stack(padded, -2)
        self.each = Categorical(logits)

    def sample(self, noise: Tensor) -> Tensor:
        """Sample from uniform noise [..., k], one number for each choice."""
        return self.each.sample(noise.unsqueeze(-1))

    def mode(self) -> Tensor:
        return self.each.mode()

    def log_prob(self, action: Tensor) -> Tensor:
        return self.each.log_prob(action.long()).sum(-1)

    def entropy(self) -> Tensor:
        return self.each.entropy().sum(-1)

    def kl(self, other: Self) -> Tensor:
        return self.each.kl(other.each).sum(-1)

    def rows(self, index: Tensor) -> Self:
        part = copy(self)
        part.each = self.each.rows(index)
        return part


class Bernoulli(MultiCategorical):
    """k independent bits, from the logits [..., k] of the bits being 1; actions are int8 [..., k]."""

    def __init__(self, logits: Tensor) -> None:
        both = torch.stack([torch.zeros_like(logits), logits], -1)
        super().__init__(both.flatten(-2), (2,) * logits.shape[-1])

    def sample(self, noise: Tensor) -> Tensor:
        """Return bits that are 1 where the uniform noise [..., k] is at least the probability that the bit is 0."""
        return super().sample(noise).to(torch.int8)

    def mode(self) -> Tensor:
        return super().mode().to(torch.int8)


class Gaussian(Distribution):
    """Independent normal distributions, from mean and log_std [..., d]; actions may exceed the env's bounds."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, noise: Tensor) -> Tensor:
        """Shift and scale standard normal noise [..., d]."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + LOG_SQRT_2_PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + LOG_SQRT_2_PI).sum(-1).expand(self.mean.shape[:-1])

    def kl(self, other: Self) -> Tensor:
        ratio = (2 * (self.log_std - other.log_std)).exp()
        distance = ((self.mean - other.mean) * (-other.log_std).exp()).square()
        return (0.5 * (ratio + distance - 1) + other.log_std - self.log_std).sum(-1)

    def rows(self, index: Tensor) -> Self:
        part = copy(self)
        part.mean = self.mean[index]
        if self.log_std.dim() > 1:  # a log_std that all rows share has only one axis
            part.log_std = self.log_std.expand_as(self.mean)[index]
        return part


class SquashedGaussian:
    """Normal distributions passed through tanh (arXiv 1801.01290), from mean and log_std [..., d].

    Actions are between -1 and 1. The entropy has no closed form; estimate it by the mean of -log_prob over samples.

    The density of a = tanh(u) is the density of u divided by 1 - tanh(u)^2. The logarithm of this divisor is computed
    as 2 (log 2 - u - softplus(-2 u)), because the direct form is log 0 wherever tanh rounds to 1.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, noise: Tensor) -> Tensor:
        """Shift, scale and squash standard normal noise [..., d]."""
        return (self.mean + self.log_std.exp() * noise).tanh()

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and log-densities.

        Both are computed from the normal sample u, because u = atanh(action) would be inexact near -1 and 1.
        """
        u = self.mean + self.log_std.exp() * noise
        log_prob = -(0.5 * noise.square() + self.log_std + LOG_SQRT_2_PI + self._log_slope(u)).sum(-1)
        return u.tanh(), log_prob

    @staticmethod
    def _log_slope(u: Tensor) -> Tensor:
        return 2 * (math.log(2.0) - u - F.softplus(-2 * u))

    def mode(self) -> Tensor:
        """Return tanh(mean), the action of a greedy policy."""
        return self.mean.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-densities of actions from -1 to 1; actions at a bound are first moved slightly inside."""
        u = action.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        z = (u - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + LOG_SQRT_2_PI + self._log_slope(u)).sum(-1)


class Joint(Distribution):
    """Independent distributions, one for each field of the named array tuple `type_`; an action is such a tuple.

        Joint(Move, [Categorical(turn), Gaussian(speed, log_std)], (1, 2)).sample(noise)    # Move(turn, speed)

    Part i takes the next widths[i] columns of the noise [..., sum(widths)]. A part may be a Joint itself.
    """

    def __init__(self, type_: type[ArrayTuple], parts: Sequence[Distribution], widths: Sequence[int]) -> None:
        self.type, self.parts, self.widths = type_, tuple(parts), list(widths)

    def sample(self, noise: Tensor) -> ArrayTuple:
        return self.choose(noise)

    def choose(self, noise: Tensor, explore: Tensor | None = None) -> ArrayTuple:
        noises = torch.split(noise, self.widths, -1)
        return self.type(*(part.choose(own, explore) for part, own in zip(self.parts, noises, strict=True)))

    def mode(self) -> ArrayTuple:
        return self.type(*(part.mode() for part in self.parts))

    def log_prob(self, action: ArrayTuple) -> Tensor:
        return _sum([part.log_prob(own) for part, own in zip(self.parts, action, strict=True)])

    def entropy(self) -> Tensor:
        return _sum([part.entropy() for part in self.parts])

    def kl(self, other: Self) -> Tensor:
        return _sum([mine.kl(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True)])

    def rows(self, index: Tensor) -> Self:
        part = copy(self)
        part.parts = tuple(inner.rows(index) for inner in self.parts)
        return part


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
