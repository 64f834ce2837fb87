"""Compare hand-written gradients with those of autograd during a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from remuda.core import Clock
from remuda.data import Batch, map_tree
from remuda.learning.gradients import Gradients

logger = logging.getLogger("remuda.fast")

GradientFunction = Callable[[Batch, Clock], Gradients | None]
Groups = dict[str, Tensor]  # the gradient of each parameter group, as one vector

RECHECK_AFTER = 10  # number of updates until the next comparison after Agreement.UNKNOWN
RELATIVE, SMALLEST = 1e-3, 1e-6  # relative and absolute tolerance for rounding
SMALLEST_SCALAR = 1e-4  # replaces SMALLEST if a gradient is a single number, whose terms may cancel (SAC's alpha)
# If gradients differ, autograd computes its gradient again from targets perturbed by the fraction PERTURBATION. The
# difference counts as rounding if its excess over the tolerance is at most NOISE_FACTOR times the change that the
# perturbation causes in autograd's gradient.
PERTURBATION, NOISE_FACTOR = 1e-6, 10.0


class CheckedGradients:
    """Hand-written gradients that are dropped, with one warning, when they disagree with autograd.

    The gradients are compared in the first update of a process, and again whenever the number of updates has doubled.
    """

    def __init__(self, name: str, compute: GradientFunction, end: Callable[[], None] = lambda: None) -> None:
        """`name` is the algorithm's name. `compute` returns hand-written gradients, and `end` ends its threads."""
        self._name = name
        self.compute: GradientFunction | None = compute  # None once the gradients have disagreed
        self._end = end
        self._compare_at = 0  # compare again once the number of updates (`clock.version`) is at least this

    def gradients(self, batch: Batch, clock: Clock, exact: Callable[[Batch], Gradients]) -> Gradients | None:
        """Return the gradients of a batch, or None if the caller must compute them by autograd with `exact`."""
        if self.compute is None:
            return None
        found = self.compute(batch, clock)
        if found is None or not self._agrees(found, batch, clock, exact):
            return None
        return found

    def close(self) -> None:
        self._end()

    def _agrees(self, found: Gradients, batch: Batch, clock: Clock, exact: Callable[[Batch], Gradients]) -> bool:
        if clock.version < self._compare_at:
            return True
        agreement = compare(found.groups, exact(batch).groups, batch, lambda batch: exact(batch).groups)
        self._compare_at = 2 * max(clock.version, 1)
        if agreement is Agreement.UNKNOWN:
            self._compare_at = clock.version + RECHECK_AFTER
        if agreement is Agreement.DIFFERENT:
            self.compute = None
            logger.warning("%s: fast-path gradient disagrees with autograd; falling back to autograd.", self._name)
        return agreement is not Agreement.DIFFERENT


class Agreement(Enum):
    """Result of comparing two gradients of one batch."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"  # this batch amplifies rounding errors so much that even correct gradients may differ


def compare(found: Groups, exact: Groups, batch: Batch, gradient: Callable[[Batch], Groups]) -> Agreement:
    """Compare the hand-written gradient `found` with `exact`, the result of gradient(batch), which uses autograd.

    If the two differ, compute gradient(batch) again with targets that are perturbed by about their rounding error. If
    the perturbation explains the difference, the result is UNKNOWN. This happens, for example, when all advantages
    are nearly equal: standardizing them leaves only rounding errors.
    """
    if {name: x.shape for name, x in exact.items()} != {name: x.shape for name, x in found.items()}:
        return Agreement.DIFFERENT
    finite = {name: vector for name, vector in exact.items() if bool(vector.isfinite().all())}
    excess = {name: float((found[name] - vector).norm()) - tolerance(vector) for name, vector in finite.items()}
    if all(size <= 0 for size in excess.values()):
        return Agreement.SAME
    perturbed = gradient(replace(batch, targets=map_tree(perturb, batch.targets)))
    noise = {name: float((perturbed[name] - vector).norm()) for name, vector in finite.items()}
    is_explained = all(size <= NOISE_FACTOR * noise[name] for name, size in excess.items())
    return Agreement.UNKNOWN if is_explained else Agreement.DIFFERENT


def tolerance(vector: Tensor) -> float:
    return RELATIVE * float(vector.norm()) + (SMALLEST if len(vector) > 1 else SMALLEST_SCALAR)


def perturb(x: Tensor) -> Tensor:
    """Return `x` with all numbers changed by the fraction PERTURBATION, alternately up and down."""
    if not x.is_floating_point():
        return x
    signs = 1.0 - 2.0 * (torch.arange(x.numel(), device=x.device) % 2)
    return x * (1.0 + PERTURBATION * signs.reshape(x.shape))
