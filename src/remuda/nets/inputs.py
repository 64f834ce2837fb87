"""Observations as rollouts store them to the float32 that nets take, leaf by leaf.

    inputs = Inputs(space, normalize=True)
    net = make_net(inputs.shapes)
    features = net(inputs(obs))                 # obs [N, ...]: a tensor, or a named array tuple of them
    inputs.update(obs)                          # once per rollout: statistics of what is standardised

What becomes of a leaf:

| space | input |
|---|---|
| discrete | one-hot [N, n] |
| multidiscrete | one-hots side by side [N, sum(sizes)] |
| multibinary | 0 and 1 [N, k] |
| box of ints or bools with three axes: an image | divided by the box's `high`, where that is a bound above 1 |
| any other box | as it is, or standardised by running statistics if `normalize` |

With `center`, the mean of each image is taken away from it: on a plain background a net then sees little but what is
drawn on it, and not a grey that switches half of its units on and half of them off whatever happens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.core import Space
from remuda.data import leaves, map_tree
from remuda.nets.conv import is_channels_first
from remuda.nets.normalize import Standardize

Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a leaf, or by the dotted path of every leaf


class Inputs(nn.Module):
    """One LeafInput for each leaf of the space, applied to trees of the space's structure."""

    def __init__(self, space: Space, normalize: bool = False, center: bool = False) -> None:
        super().__init__()
        tree = space.tree(lambda path, leaf: LeafInput(leaf, normalize, center))
        self.leaf_inputs = nn.ModuleList(leaf for _, leaf in leaves(tree))  # a tuple alone would not register them
        self.tree = (tree,)  # wrapped: a single module would be registered twice
        self.shapes: Shapes = tree.shape if space.is_leaf else {path: leaf.shape for path, leaf in leaves(tree)}

    @property
    def has_statistics(self) -> bool:
        return any(leaf.standardize is not None for _, leaf in leaves(self.tree))

    def update(self, obs: Any) -> None:
        """Merge rows [N, ...] into the statistics."""
        map_tree(lambda leaf, rows: leaf.update(rows), self.tree[0], obs)

    def arrange(self, obs: Any) -> Any:
        """The same numbers [..., *shape], laid out in memory as `forward` needs them: once for all epochs."""
        return map_tree(lambda leaf, rows: leaf.arrange(rows), self.tree[0], obs)

    def forward(self, obs: Any) -> Any:
        return map_tree(lambda leaf, rows: leaf(rows), self.tree[0], obs)


class LeafInput(nn.Module):
    """Rows [N, *space.shape] of one leaf to float32 [N, *shape]."""

    offsets: Tensor  # multidiscrete: where the one-hot of each number begins
    high: Tensor  # images: what to divide by

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

    def update(self, rows: Tensor) -> None:
        if self.standardize is not None:
            self.standardize.update(rows.float())

    def arrange(self, obs: Tensor) -> Tensor:
        """Channels side by side, as large nets want them: moved as bytes, a quarter of what floats would be."""
        if not self.is_channels_first or obs.movedim(-3, -1).is_contiguous():
            return obs
        return torch.stack(obs.unbind(-3), -1).movedim(-1, -3)  # in half the time of contiguous()

    def forward(self, obs: Tensor) -> Tensor:
        if self.kind == "discrete":
            return F.one_hot(obs, self.n).float()
        if self.kind == "multidiscrete":
            places = obs.flatten(1).long() + self.offsets
            return torch.zeros(len(obs), *self.shape, device=obs.device).scatter_(1, places, 1.0)
        if self.kind == "multibinary":
            return obs.flatten(1).float()
        if self.is_image:  # scaled by what a pixel can be, not by what was seen
            pixels = self.arrange(obs).float().div_(self.high)
            return pixels - pixels.mean((1, 2, 3), keepdim=True) if self.center else pixels
        obs = obs.float()
        if self.standardize is not None:
            obs = self.standardize(obs)
        return obs


def is_image(space: Space) -> bool:
    """A box of ints or bools with three axes; floats may be anything, and are standardised like the rest."""
    return space.kind == "box" and len(space.shape) == 3 and not np.issubdtype(np.dtype(space.dtype), np.floating)


def image_bound(space: Space) -> NDArray[np.float32]:
    """The largest value of each pixel, 1 where none above 1 is known; a single number if all have the same."""
    assert space.high is not None
    high = space.high.astype(np.float64)
    is_bound = high > 1
    if np.dtype(space.dtype).itemsize > 2:  # a wide integer without a bound comes with about the largest of its type
        is_bound &= high < np.iinfo(space.dtype).max - 2.0
    bound = np.where(is_bound, high, 1.0).astype(np.float32)
    return bound.reshape(-1)[:1].reshape(()) if (bound == bound.flat[0]).all() else bound
