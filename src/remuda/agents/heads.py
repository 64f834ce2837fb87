"""The policy head, which maps features to a distribution over actions of any space.

head = PolicyHead(action, width)
policy = head(features)                        # [..., F] -> distribution with the same leading axes
action = policy.choose(noise, explore)         # a tensor; for a Dict or Tuple space, a named array tuple of tensors
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from remuda.core import Space
from remuda.data import ArrayTuple, namedarraytuple
from remuda.maths import Bernoulli, Categorical, Distribution, Gaussian, Joint, MultiCategorical

NoiseParts = tuple[tuple[Literal["uniform", "normal"], int], ...]


class PolicyOutput(ArrayTuple):
    """Outputs of the policy that are stored with each row: log-probability of the action, and value."""

    log_prob: Tensor
    value: Tensor


class PolicyHead(nn.Module):
    """One linear layer whose outputs are divided among the leaves of the action space; Box actions are flattened."""

    def __init__(self, action: Space, width: int, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.action = action
        leaves = [leaf for _, leaf in action.leaves()]
        self.linear = nn.Linear(width, sum(num_outputs(leaf) for leaf in leaves))
        deviations = sum(num_outputs(leaf) for leaf in leaves if leaf.kind == "box")
        self.log_std = nn.Parameter(torch.full((deviations,), log_std_init)) if deviations else None
        self.noise: NoiseParts = tuple(noise_of(leaf) for leaf in leaves)

    def forward(self, features: Tensor) -> Distribution:
        outputs: Tensor = self.linear(features)
        if self.action.is_leaf:
            return self._leaf(self.action, outputs, self.log_std)
        policy, _, _ = self._branch(self.action, outputs, 0, 0)
        return policy

    def _branch(self, space: Space, outputs: Tensor, start: int, first_std: int) -> tuple[Joint, int, int]:
        """Return the distribution of a Dict or Tuple `space`, and the positions where its outputs and log_stds end.

        The outputs of `space` begin at position `start` of `outputs`. The log_stds of `space` begin at position
        `first_std` of `self.log_std`.
        """
        parts: list[Distribution] = []
        widths = []
        for entry in space.entries.values():
            if entry.is_leaf:
                end = start + num_outputs(entry)
                is_box = entry.kind == "box"
                last_std = first_std + (end - start if is_box else 0)
                log_std = self.log_std[first_std:last_std] if is_box and self.log_std is not None else None
                parts.append(self._leaf(entry, outputs[..., start:end], log_std))
                start, first_std = end, last_std
            else:
                part, start, first_std = self._branch(entry, outputs, start, first_std)
                parts.append(part)
            widths.append(sum(noise_of(leaf)[1] for _, leaf in entry.leaves()))
        return Joint(namedarraytuple("Entries", tuple(space.entries)), parts, widths), start, first_std

    @staticmethod
    def _leaf(space: Space, outputs: Tensor, log_std: Tensor | None) -> Distribution:
        if space.kind == "discrete":
            return Categorical(outputs)
        if space.kind == "multidiscrete":
            assert space.sizes is not None
            return MultiCategorical(outputs, tuple(space.sizes.reshape(-1).tolist()))
        if space.kind == "multibinary":
            return Bernoulli(outputs)
        assert log_std is not None
        return Gaussian(outputs, log_std)


def num_outputs(leaf: Space) -> int:
    """Return the number of network outputs for a leaf of the action space."""
    if leaf.kind == "discrete":
        return leaf.n
    if leaf.kind == "multidiscrete":
        assert leaf.sizes is not None
        return int(leaf.sizes.sum())
    return math.prod(leaf.shape)


def noise_of(leaf: Space) -> tuple[Literal["uniform", "normal"], int]:
    """Return the kind of random numbers from which an action of this leaf is sampled, and how many it needs."""
    if leaf.kind == "box":
        return "normal", math.prod(leaf.shape)
    return "uniform", math.prod(leaf.shape)  # the shape of a discrete leaf is (), whose product is 1
