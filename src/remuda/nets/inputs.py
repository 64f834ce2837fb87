"""Conversion of stored observations to the float32 inputs of networks, leaf by leaf.

    inputs = Inputs(space, normalize=True)
    net = make_net(inputs.shapes)
    features = net(inputs(obs))                 # obs [N, ...]: a tensor, or a named array tuple of tensors
    inputs.update(obs)                          # once per rollout: updates running statistics

A leaf of the observation space becomes:

| space | input |
|---|---|
| discrete | one-hot [N, n] |
| multidiscrete | concatenated one-hots [N, sum(sizes)] |
| multibinary | 0 and 1 [N, k] |
| box of ints or bools with three axes: an image | divided by the box's upper bound (see `image_bound`) |
| any other box | unchanged, or standardized by running statistics if `normalize` |

With `center`, each image's mean is subtracted from its pixels. If the background is plain, the network then sees
mainly the objects, and not a constant gray that saturates half of its units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.core import Space, TensorTree
from remuda.data import Tree, leaves, map_tree
from remuda.nets.conv import is_channels_first
from remuda.nets.normalize import Moments, Standardize

Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]  # shape of the only leaf, or {dotted path: shape} of all leaves


class Inputs(nn.Module):
    """One LeafInput for each leaf of the observation space, applied to observations leaf by leaf."""

    def __init__(self, space: Space, normalize: bool = False, center: bool = False) -> None:
        super().__init__()
        tree = space.tree(lambda path, leaf: LeafInput(leaf, normalize, center))
        # A ModuleList registers the modules. The tree may be a named tuple, in which torch would not register them.
        self.leaf_inputs = nn.ModuleList(leaf for _, leaf in leaves(tree))
        self.tree = (tree,)  # a tuple, because a tree with one leaf is a module that torch would register again
        self._is_vector = space.kind == "box" and space.dtype == "float32" and len(space.shape) == 1
        self.shapes: Shapes = tree.shape if space.is_leaf else {path: leaf.shape for path, leaf in leaves(tree)}

    @property
    def has_statistics(self) -> bool:
        return any(leaf.standardize is not None for _, leaf in leaves(self.tree))

    @property
    def is_identity(self) -> bool:
        """Whether observations are returned as they are: float32 vectors without running statistics."""
        return self._is_vector and not self.has_statistics

    def update(self, obs: TensorTree) -> None:
        """Merge rows [N, ...] into the running statistics."""
        self.absorb(self.statistics(obs))

    def statistics(self, obs: TensorTree) -> dict[str, Tensor]:
        """Return the moments of rows [N, ...] for each leaf with running statistics, as a dict for `absorb`."""
        found: dict[str, Tensor] = {}
        for (path, leaf), (_, rows) in zip(leaves(self.tree[0]), leaves(obs), strict=True):
            if leaf.standardize is not None:
                found |= Moments.of(rows.float()).named(f"obs.{path}")
        return found

    def absorb(self, statistics: Mapping[str, Tensor]) -> None:
        """Merge the result of `statistics`, which another process may have computed, into the running statistics."""
        for path, leaf in leaves(self.tree[0]):
            if leaf.standardize is not None:
                leaf.standardize.merge(Moments.find(statistics, f"obs.{path}"))

    def arrange(self, obs: TensorTree) -> Tree:
        """Return `obs` in the memory layout that `forward` needs, so that not every epoch has to convert it."""
        return map_tree(lambda leaf, rows: leaf.arrange(rows), self.tree[0], obs)

    def forward(self, obs: TensorTree) -> Tree:
        return map_tree(lambda leaf, rows: leaf(rows), self.tree[0], obs)


class LeafInput(nn.Module):
    """Convert rows [N, *space.shape] of one leaf to float32 [N, *shape]."""

    offsets: Tensor  # for multidiscrete leaves: where the one-hot of each number begins
    high: Tensor  # for images: the divisor

    def __init__(self, space: Space, normalize: bool, center: bool) -> None:
        super().__init__()
        self.center = center
        self.kind, self.n, self.shape = space.kind, space.n, space.shape
        self.is_image = is_image(space)
        self.is_channels_first = self.is_image and is_channels_first(space.shape)
        self.standardize: Standardize | None = None
        if space.kind == "discrete":
            self.shape = (space.n,)
        elif space.kind == "multidiscrete":
            assert space.sizes is not None
            sizes = torch.as_tensor(np.asarray(space.sizes, np.int64).reshape(-1))
            self.shape = (int(sizes.sum()),)
            self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        elif space.kind == "multibinary":
            self.shape = (math.prod(space.shape),)
        elif self.is_image:
            self.register_buffer("high", torch.as_tensor(image_bound(space)), persistent=False)
        elif normalize:
            self.standardize = Standardize(space.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Accept checkpoints of version 0.1, in which `standardize` was spelled `standardise`."""
        old, new = f"{prefix}standardise.", f"{prefix}standardize."
        for name in [name for name in state_dict if name.startswith(old)]:
            state_dict[new + name.removeprefix(old)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def arrange(self, obs: Tensor) -> Tensor:
        """Store the channels of images last in memory. Pixels are not yet float32, so copying costs less."""
        if not self.is_channels_first or obs.movedim(-3, -1).is_contiguous():
            return obs
        return torch.stack(obs.unbind(-3), -1).movedim(-1, -3)  # takes half the time of contiguous()

    def forward(self, obs: Tensor) -> Tensor:
        if self.kind == "discrete":
            return F.one_hot(obs, self.n).float()
        if self.kind == "multidiscrete":
            index = obs.flatten(1).long() + self.offsets
            return torch.zeros(len(obs), *self.shape, device=obs.device).scatter_(1, index, 1.0)
        if self.kind == "multibinary":
            return obs.flatten(1).float()
        if self.is_image:  # divide by the upper bound of the space, whatever values occur
            pixels = self.arrange(obs).float().div_(self.high)
            return pixels - pixels.mean((1, 2, 3), keepdim=True) if self.center else pixels
        obs = obs.float()
        if self.standardize is not None:
            obs = self.standardize(obs)
        return obs


def is_image(space: Space) -> bool:
    """Return whether a space is an image: a box of ints or bools with three axes. Floats may hold any other data."""
    return space.kind == "box" and len(space.shape) == 3 and not np.issubdtype(np.dtype(space.dtype), np.floating)


def image_bound(space: Space) -> NDArray[np.float32]:
    """Return the upper bound of each pixel as an array of the image's shape, with 1 where no bound above 1 is known.

    If all pixels have the same bound, return a 0-dimensional array that holds this bound.
    """
    assert space.high is not None
    high = space.high.astype(np.float64)
    is_bound = high > 1
    if np.dtype(space.dtype).itemsize > 2:
        # A `high` near the maximum of a wide integer type means that the space is unbounded.
        is_bound &= high < np.iinfo(space.dtype).max - 2.0
    bound = np.where(is_bound, high, 1.0).astype(np.float32)
    return bound.reshape(-1)[:1].reshape(()) if (bound == bound.flat[0]).all() else bound
