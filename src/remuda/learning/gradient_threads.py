"""Compute gradients of a batch of sequences with several threads, each of which takes some of the sequences.

Torch's own threads share every matrix product and wait for each other after each product. If other processes are
busy, a thread that loses its core therefore delays the other threads. The threads of this module wait for each other
only once per update.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from remuda.data import Batch
from remuda.learning.gradients import Gradients


class GradientThreads:
    """A pool of `count` threads that share the work of computing gradients; call `close` at the end."""

    def __init__(self, count: int, reduction: Literal["sum", "mean"]) -> None:
        """`reduction` states whether the loss is a sum or a mean over the rows of a batch whose mask is True."""
        self.count, self.reduction = count, reduction
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="remuda-gradients")

    def gradients(self, compute: Callable[[Batch], Gradients], batch: Batch) -> Gradients:
        """Return the gradients of a batch. Several threads call `compute`, each with a part of the batch."""
        columns = batch.steps.mask.shape[1]
        bounds = [part * columns // self.count for part in range(self.count + 1)]
        parts = [batch.columns(slice(first, last)) for first, last in pairwise(bounds) if first < last]
        rows = [float(part.steps.mask.sum()) for part in parts]
        parts, rows = (
            [part for part, count in zip(parts, rows, strict=True) if count],
            [count for count in rows if count],
        )
        if not parts:
            return compute(batch)
        found = list(self._pool.map(compute, parts))
        fractions = [count / sum(rows) for count in rows]
        weights = [1.0] * len(parts) if self.reduction == "sum" else fractions
        pieces = {}
        for name, first in found[0].pieces.items():
            pieces[name] = total = torch._foreach_mul(first, weights[0])
            for weight, part in zip(weights[1:], found[1:], strict=True):
                torch._foreach_add_(total, part.pieces[name], alpha=weight)
        metrics: dict[str, Tensor | float] = {}
        for name in found[0].metrics:
            part_weights = weights if name.endswith("loss") else fractions
            metrics[name] = sum(w * part.metrics[name] for w, part in zip(part_weights, found, strict=True))
        return replace(found[0], pieces=pieces, metrics=metrics, stop=any(part.stop for part in found))

    def close(self) -> None:
        self._pool.shutdown()
