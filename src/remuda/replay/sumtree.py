"""Sums of priorities, so that a draw in proportion to them costs about the same however many there are.

    tree = SumTree(1_000_000)
    tree[index] = priority                     # arrays; of a place that is named twice, the last counts
    index = tree.find(mass)                    # the places where running sums pass each mass in [0, tree.total)

Not twenty levels of two but three: groups of 16 places, blocks of 16 groups, and running sums over all blocks. A call
of numpy takes two microseconds, in which it adds up a thousand numbers: few calls count for more than few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

WIDTH = 16  # of a group and of a block: two cache lines; their flags are two bytes
MANY = 1000  # places at once, from which on it is worth to look for groups that are the same

Index = NDArray[np.int64]
Sums = NDArray[np.float64]


class SumTree:
    """Priorities of `capacity` places, all 0 at first."""

    def __init__(self, capacity: int) -> None:
        # One block more than is used: a mass beyond the end is looked for there, and not found.
        blocks = -(-capacity // WIDTH**2) + 1
        self.capacity = capacity
        self._places, self._groups = _zeros(blocks * WIDTH**2), _zeros(blocks * WIDTH)
        self._rows_of_places, self._rows_of_groups = self._places.reshape(-1, WIDTH), self._groups.reshape(-1, WIDTH)
        self._blocks, self._begins = _zeros(blocks), _zeros(blocks)
        self._ends = self._begins[1:]
        self._end_tensor = torch.from_numpy(self._ends)  # made once: 3 us
        self._is_added_up = True
        self._search = _Search(0)

    @property
    def total(self) -> float:
        return float(self._add_up()[-1])

    def __len__(self) -> int:
        return self.capacity

    def __getitem__(self, index: Any) -> Sums:
        found: Sums = self._places[: self.capacity][index]
        return found

    def __setitem__(self, index: Any, priority: Any) -> None:
        priority = np.asarray(priority, np.float64)
        bad = priority[~((priority >= 0) & (priority < np.inf))]
        if bad.size:
            raise ValueError(f"a priority is {bad.flat[0]}: none is negative or not a number, and all are finite.")
        self.put(np.atleast_1d(np.arange(self.capacity)[index] if isinstance(index, slice) else index), priority)

    def put(self, index: Index, priority: Any) -> None:
        """tree[index] = priority, of priorities that are known to be finite and not negative."""
        self._places[index] = priority
        group = index // SIXTEEN
        if len(group) > MANY and group[-1] - group[0] < len(group) // 2:  # neighbours: few groups, each once
            group = np.unique(group)
        # Sums are taken anew and never corrected, so that no error adds up over millions of changes. A product with
        # ones takes 3 us, a sum over rows 10.
        self._groups[group] = self._rows_of_places.take(group, 0).dot(ONES)
        block = group // SIXTEEN
        self._blocks[block] = self._rows_of_groups.take(block, 0).dot(ONES)
        self._is_added_up = False

    def find(self, mass: Sums) -> Index:
        return self._find(mass)[0]

    def draw(self, position: Sums) -> tuple[Index, Sums]:
        """Places and their priorities, by positions in all of them that go from 0 to how many are drawn."""
        return self._find(position * (self._add_up()[-1] / len(position)))

    def _searching(self, count: int) -> _Search:
        if len(self._search.row) != count:
            self._search = _Search(count)
        return self._search

    def _find(self, mass: Sums) -> tuple[Index, Sums]:
        begins, search = self._add_up(), self._searching(len(mass))
        block = self._ends.searchsorted(mass, "right")
        number = search.pick(self._rows_of_groups, block, mass - begins.take(block))
        block *= SIXTEEN
        group = block + number
        left = self._groups.take(group) - search.beyond(number)
        place = search.pick(self._rows_of_places, group, left)
        group *= SIXTEEN
        place += group
        priority = self._places.take(place)
        if len(place) and not priority[priority.argmin()] > 0:
            place = self._nearest_with_priority(place)
            priority = self._places.take(place)
        return place, priority

    def _add_up(self) -> Sums:
        """What all blocks before each add up to; before the last, the total."""
        if not self._is_added_up:
            self._ends[:] = self._blocks[:-1]
            self._end_tensor.cumsum_(0)
            self._is_added_up = True
        return self._begins

    def _nearest_with_priority(self, place: Index) -> Index:
        """Rounding may leave a mass beyond the end of its row: it belongs to the last place that has a priority."""
        some = np.flatnonzero(self._places)
        if len(some) == 0:
            raise ValueError("there is nothing to find: no place has a priority above 0.")
        found: Index = some[np.maximum(some.searchsorted(place, "right") - 1, 0)]
        return found

    def get_state(self) -> dict[str, Any]:
        """Sums too: among other rows, a row's may have other last bits."""
        return {"places": self[:].copy(), "groups": self._groups.copy(), "blocks": self._blocks.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """What is found is then the same, bit by bit."""
        if len(state["places"]) != self.capacity:
            raise ValueError(f"the state is of {len(state['places'])} places, and this tree has {self.capacity}.")
        self._places[: self.capacity] = state["places"]
        self._groups[:], self._blocks[:] = state["groups"], state["blocks"]
        self._is_added_up = False


class _Search:
    """Picks numbers from rows; its arrays are kept, because to make them takes as long as to fill them."""

    def __init__(self, count: int) -> None:
        self.row = np.arange(0, count * WIDTH, WIDTH)
        self._sums, self._flags = np.empty((count, WIDTH)), np.empty((count, WIDTH), bool)
        self._first, self._flat, self._tensor = self._sums[:, 0], self._sums.reshape(-1), torch.from_numpy(self._sums)

    def pick(self, rows: Sums, row: Index, mass: Sums) -> Index:
        """The number in each of these rows with which running sums pass the mass, or the last."""
        rows.take(row, 0, self._sums, "clip")
        # To take the mass off beforehand and compare with 0 is a third of comparing all sums with a column of masses.
        np.subtract(self._first, mass, self._first)
        self._tensor.cumsum_(1)  # a third of numpy's time
        np.less_equal(self._sums, ZERO, self._flags)
        return NUMBER_SET.take(np.packbits(self._flags).view(np.uint16))

    def beyond(self, number: Index) -> Sums:
        """By how much the running sums pass the mass."""
        return self._flat.take(self.row + number)


def _numbers_of_flags() -> Index:
    """How many of 16 flags are set, at most 15, by the two bytes they are packed into; set ones come first."""
    flags = np.tril(np.ones((WIDTH + 1, WIDTH), bool), -1)
    numbers = np.zeros(1 << WIDTH, np.int64)
    numbers[np.packbits(flags).view(np.uint16)] = np.minimum(np.arange(WIDTH + 1), WIDTH - 1)
    return numbers


NUMBER_SET = _numbers_of_flags()  # 7 us, where adding up flags takes 20
ONES = np.ones(WIDTH)
# Of a number of Python, numpy makes an array with each call, 0.5 us.
SIXTEEN, ZERO = np.array(WIDTH), np.array(0.0)


def _zeros(size: int) -> Sums:
    """Beginning with a cache line."""
    zeros = np.zeros(size + 7)
    first = -zeros.ctypes.data % 64 // zeros.itemsize
    return zeros[first : first + size]
