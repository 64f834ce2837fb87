"""Sums of priorities, so that a draw in proportion to them costs about the same however many there are.

    tree = SumTree(1_000_000)
    tree[index] = priority                     # arrays; of a place that is named twice, the last counts
    index = tree.find(mass)                    # the places where running sums pass each mass in [0, tree.total)

Not twenty levels of two but two: groups of places, of which running sums are kept, and a list of what each group adds
up to. Thousands of numbers are added up in less time than it takes to call for it a few times more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

WIDTH = 64  # of a group: of 64, 128 and 256 the fastest for a million places

Index = NDArray[np.int64]
Sums = NDArray[np.float64]


class SumTree:
    """Priorities of `capacity` places, all 0 at first."""

    def __init__(self, capacity: int) -> None:
        groups = -(-capacity // WIDTH)
        self.capacity = capacity
        self._places = np.zeros(groups * WIDTH)
        self._rows = self._places.reshape(groups, WIDTH)
        self._sums = np.zeros((groups, WIDTH))  # running ones, group by group
        self._totals = np.zeros(groups)

    @property
    def total(self) -> float:
        return float(self._totals.sum())

    def __len__(self) -> int:
        return self.capacity

    def __getitem__(self, index: Any) -> Sums:
        found: Sums = self._places[: self.capacity][index]
        return found

    def __setitem__(self, index: Any, priority: Any) -> None:
        if not np.all(np.asarray(priority) >= 0):  # NaN is not either
            raise ValueError("a priority is negative or not a number")
        index = np.atleast_1d(np.arange(self.capacity)[index] if isinstance(index, slice) else index)
        self._places[index] = priority
        group = index // WIDTH
        if len(group) > WIDTH and group[-1] - group[0] < len(group) // 2:  # neighbours: few groups, each once
            group = np.unique(group)
        # Sums are taken anew and never corrected, so that no error adds up over millions of changes.
        sums = running_sums(self._rows.take(group, 0))
        self._sums[group] = sums
        self._totals[group] = sums[:, -1]

    def find(self, mass: Sums) -> Index:
        ends = running_sums(self._totals)
        group = ends.searchsorted(mass, "right")
        np.minimum(group, ends.searchsorted(ends[-1]), out=group)  # beyond the end: the last that adds anything
        totals = self._totals[group]
        # Rounding may leave a mass beyond the end of its group: it belongs to the last place that has a priority.
        left = np.minimum(np.maximum(mass - (ends[group] - totals), 0.0), np.nextafter(totals, 0.0))
        rows, left = torch.from_numpy(self._sums.take(group, 0)), left[:, None]
        found: Index = group * WIDTH + torch.searchsorted(rows, torch.from_numpy(left), right=True).numpy()[:, 0]
        return found


def running_sums(x: Sums) -> Sums:
    """Along the last axis: torch takes a fifth of numpy's time."""
    found: Sums = torch.from_numpy(x).cumsum(-1).numpy()
    return found
