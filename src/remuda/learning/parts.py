"""Gradients of a batch of sequences in parts, at the same time: each thread takes some columns.

Torch's own threads share every product and wait for each other after it: beside processes that are busy too, one that
has lost its core holds up the rest. Parts wait for each other once in an update.
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


class Parts:
    """So many threads; close it."""

    def __init__(self, count: int, reduction: Literal["sum", "mean"]) -> None:
        self.count, self.reduction = count, reduction  # a sum, or a mean over real rows
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="remuda-gradients")

    def gradients(self, of: Callable[[Batch], Gradients], batch: Batch) -> Gradients:
        """What `of` says of the whole batch, from what it says of parts."""
        columns = batch.steps.mask.shape[1]
        bounds = [part * columns // self.count for part in range(self.count + 1)]
        parts = [batch.columns(slice(first, last)) for first, last in pairwise(bounds) if first < last]
        rows = [float(part.steps.mask.sum()) for part in parts]
        parts, rows = (
            [part for part, count in zip(parts, rows, strict=True) if count],
            [count for count in rows if count],
        )
        if not parts:
            return of(batch)
        found = list(self._pool.map(of, parts))
        shares = [count / sum(rows) for count in rows]
        weights = [1.0] * len(parts) if self.reduction == "sum" else shares
        pieces = {}
        for name, first in found[0].pieces.items():
            pieces[name] = total = torch._foreach_mul(first, weights[0])
            for weight, part in zip(weights[1:], found[1:], strict=True):
                torch._foreach_add_(total, part.pieces[name], alpha=weight)
        metrics: dict[str, Tensor | float] = {}
        for name in found[0].metrics:
            of_parts = weights if name.endswith("loss") else shares
            metrics[name] = sum(weight * part.metrics[name] for weight, part in zip(of_parts, found, strict=True))
        return replace(found[0], pieces=pieces, metrics=metrics, stop=any(part.stop for part in found))

    def close(self) -> None:
        self._pool.shutdown()
