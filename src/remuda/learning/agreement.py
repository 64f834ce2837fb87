"""Whether the gradient of a fast path is that of its losses, as autograd finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from remuda.data import Batch, map_tree

Groups = dict[str, Tensor]  # the gradient of each group of parameters, as one vector
RELATIVE, SMALLEST = 1e-3, 1e-6  # differences that summing in another order makes
SMALLEST_ALONE = 1e-4  # of a single number, which may be a sum that cancels, as SAC's alpha gradient does
# Targets are moved by this share of themselves; a difference may be this many times what the move changes.
NOISE_SHARE, NOISE_TIMES = 1e-6, 10.0


class Agreement(Enum):
    """What comparing two gradients of one batch shows."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"  # the batch amplifies rounding so much that any two gradients of it differ


def compare(found: Groups, exact: Groups, batch: Batch, gradient: Callable[[Batch], Groups]) -> Agreement:
    """Compare a fast-path gradient with `exact`, which is gradient(batch) by autograd.

    Where they differ, gradient(batch) is computed again from targets that are moved by about their rounding. If that
    changes it as much, the batch decides nothing. An example are advantages that are all nearly the same: divided by
    their deviation, what is left of them is rounding.
    """
    if {name: x.shape for name, x in exact.items()} != {name: x.shape for name, x in found.items()}:
        return Agreement.DIFFERENT
    finite = {name: vector for name, vector in exact.items() if bool(vector.isfinite().all())}
    excess = {name: float((found[name] - vector).norm()) - tolerance(vector) for name, vector in finite.items()}
    if all(size <= 0 for size in excess.values()):
        return Agreement.SAME
    moved = gradient(replace(batch, targets=map_tree(with_rounding, batch.targets)))
    noise = {name: float((moved[name] - vector).norm()) for name, vector in finite.items()}
    is_explained = all(size <= NOISE_TIMES * noise[name] for name, size in excess.items())
    return Agreement.UNKNOWN if is_explained else Agreement.DIFFERENT


def tolerance(vector: Tensor) -> float:
    return RELATIVE * float(vector.norm()) + (SMALLEST if len(vector) > 1 else SMALLEST_ALONE)


def with_rounding(x: Any) -> Any:
    """Every other number a little larger, and the rest a little smaller."""
    if not x.is_floating_point():
        return x
    signs = 1.0 - 2.0 * (torch.arange(x.numel(), device=x.device) % 2)
    return x * (1.0 + NOISE_SHARE * signs.reshape(x.shape))
