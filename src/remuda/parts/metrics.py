"""Metrics of a round of a run that is divided into parts: they are those of the whole run, not those of one part.

    metrics = [PartMetrics() for part in group.local]
    metrics[0].add(values, weight)                 # the same for the other parts; `weight`: the part's number of rows
    parts = group.gather([each.take() for each in metrics])
    merge(parts, pooled={"explained_variance": ExplainedVariance}, added=["loss"])          # {name: value}

For every update, each metric is merged over the parts. The merged value is the largest value if the metric's name
ends in `_max`, the sum if the name is in `added`, and otherwise the mean weighted by the parts' numbers of rows. The
result is the mean of the merged values of all updates, as in a run that is not divided. Metrics in `pooled` have one
value per round instead. Their `pool` method computes it from the rows of all parts (`core.PooledMetric`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
from torch import Tensor

from remuda.core import PooledMetric
from remuda.devices import to_cpu


class PartMetrics:
    """The metrics of one part since the last call of `take`."""

    def __init__(self) -> None:
        self.pooled: dict[str, PooledMetric] = {}
        self._weights: list[float] = []  # the weight of each call of `add`
        # For each metric, pairs (index of a call of `add`, value).
        self._values: dict[str, list[tuple[int, Tensor | float]]] = {}

    def add(self, values: Mapping[str, SupportsFloat], weight: float) -> None:
        """Add the metrics of one update; `weight` is the part's number of rows, which may be 0.

        `add` must be called equally often for all parts. A PooledMetric replaces an earlier one of the same name.
        """
        for name, value in values.items():
            if isinstance(value, PooledMetric):
                self.pooled[name] = value
            else:
                number = value if isinstance(value, Tensor) else float(value)
                self._values.setdefault(name, []).append((len(self._weights), number))
        self._weights.append(weight)

    def take(self) -> dict[str, Any]:
        """Return everything that was added, as plain values and arrays for `merge`, and forget it."""
        message = {
            "weights": np.array(self._weights),
            "pooled": {name: list(metric.numbers()) for name, metric in self.pooled.items()},
            "values": {
                name: [np.array([index for index, _ in pairs]), numbers_on_cpu([value for _, value in pairs])]
                for name, pairs in self._values.items()
            },
        }
        self.pooled, self._weights, self._values = {}, [], {}
        return message


def merge(
    parts: Sequence[Mapping[str, Any]], pooled: Mapping[str, type[PooledMetric]], added: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of the whole run, given the results of `PartMetrics.take` for all parts.

    `pooled` maps the names of pooled metrics to their classes. Metrics named in `added` are sums over the parts.
    """
    names = dict.fromkeys(name for part in parts for name in part["values"])
    found = {name: _merge_one(name, parts, name in added) for name in names}
    for name, kind in pooled.items():
        found[name] = float(kind.pool([part["pooled"][name] for part in parts if name in part["pooled"]]))
    return found


def _merge_one(name: str, parts: Sequence[Mapping[str, Any]], is_added: bool) -> float:
    """Return one metric, without values of weight 0, which may be NaN; return NaN if nothing is left."""
    is_largest, count = name.endswith("_max"), len(parts[0]["weights"])
    total, weight = np.full(count, -math.inf if is_largest else 0.0), np.zeros(count)
    for part in parts:
        if name not in part["values"]:
            continue
        index, values = part["values"][name]
        own = part["weights"][index]
        index, values, own = index[own > 0], values[own > 0], own[own > 0]
        weight[index] += own
        if is_largest:
            total[index] = np.maximum(total[index], values)
        else:
            total[index] += values if is_added else values * own
    merged = (total if is_largest or is_added else total / np.maximum(weight, np.finfo(float).tiny))[weight > 0]
    return float(merged.mean()) if len(merged) else math.nan


def numbers_on_cpu(values: Sequence[Tensor | float]) -> np.ndarray[Any, Any]:
    """Return numbers, or scalar tensors on one device, as a float64 array; wait for the device at most once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values):
        return cast(Tensor, to_cpu(torch.stack(tensors))).double().numpy()
    return np.array([float(value) for value in values])
