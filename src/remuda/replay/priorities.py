"""Prioritized sampling from a replay: a sum tree, the priorities of rows, and the random numbers of every draw.

    tree = SumTree(1_000_000)
    tree[index] = priority                     # two arrays; if an index occurs twice, its last value is kept
    index = tree.find(mass)                    # where the running sum of priorities passes each mass

One numpy call takes two microseconds, the time of a thousand additions, so the number of calls matters most. The tree
therefore has only three levels: groups of 16 priorities, blocks of 16 groups, and running sums over all blocks. A
binary tree over a million priorities would have twenty levels. These groups are not related to groups of envs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from remuda.randomness import Purpose, keyed_generator
from remuda.replay.counters import Index
from remuda.replay.ring import NothingToDraw, Ring, RingIndex
from remuda.replay.states import PrioritiesState, SumTreeState

WIDTH = 16  # entries in a group or block: 16 float64 numbers fill two cache lines, 16 packed flags fill two bytes
MANY = 1000  # for fewer indices than this, removing duplicate groups costs more time than it saves

Floats = NDArray[np.float64]
Errors = NDArray[np.floating[Any]]


class DrawNumbers:
    """Uniform random numbers for every draw, as a function of (seed, number of the draw).

    The numbers of many draws are generated at once, because creating a generator takes 13 us, as much time as
    generating the numbers of one draw.
    """

    DRAWS = 64

    def __init__(self, seed: int, count: int, is_stratified: bool, part: int = 0) -> None:
        """Provide `count` numbers per draw: all are in [0, 1), or if `is_stratified`, number i is in [i, i + 1).

        Each `part` of a run (remuda.parts) gets different numbers.
        """
        self._part = part
        self._seed, self._count, self._block, self._numbers = seed, count, -1, np.zeros((0, count))
        self._offset = np.arange(count) if is_stratified else np.zeros(count)

    def of(self, draw: int, attempt: int = 0) -> Floats:
        """Return the [count] numbers of a draw; each `attempt` at the same draw gets different numbers."""
        if attempt:
            again = keyed_generator(Purpose.REPLAY, self._seed, draw, attempt, self._part)
            return again.random(self._count) + self._offset
        block, number = divmod(draw, self.DRAWS)
        if block != self._block:
            many = keyed_generator(Purpose.REPLAY, self._seed, block, part=self._part)
            self._numbers = many.random((self.DRAWS, self._count)) + self._offset
            self._block = block
        found: Floats = self._numbers[number]
        return found


class Priorities:
    """Priorities (|TD error| + epsilon) ** alpha of the rows of a ring (arXiv 1511.05952).

    A new row has the largest priority so far, unless its TD error is known.
    """

    def __init__(self, ring: Ring, alpha: float, epsilon: float = 1e-6, is_shared: bool = False) -> None:
        self.ring, self.alpha, self.epsilon = ring, alpha, epsilon
        self.tree, self.largest = SumTree(ring.capacity * ring.envs), 1.0
        self.index = RingIndex(ring, is_shared)
        # Keys and places of the last draw, and the bytes of `ring.written` at the time of the draw.
        self._last_draw = (RingIndex.NONE, RingIndex.NONE, b"")

    def append(
        self,
        first: int,
        mask: NDArray[np.bool_],
        group: int = 0,
        td_error: Errors | None = None,
        is_known: NDArray[np.bool_] | bool = True,
    ) -> None:
        """Set the priorities of the new rows [T, B] that begin at row number `first`, and of the place after them.

        Reset rows get priority 0, and so does the place after the rows, which holds only an observation. `td_error`
        [T, B] holds absolute TD errors, which are used where `is_known` is True.
        """
        T, width = mask.shape
        row, env = np.divmod(np.arange((T + 1) * width), width)
        key = np.stack([row + first, env + group * width], -1)
        priority, largest = np.zeros((T + 1, width)), self.largest
        priority[:T][mask] = largest
        if td_error is not None:
            given = mask & is_known
            priority[:T][given], largest = self._from_error(np.asarray(td_error)[given])
        newest = slice(-(self.ring.capacity) * width, None)
        self.tree.put(self.index.place(key[newest]), priority.reshape(-1)[newest])
        self.largest = max(self.largest, largest)

    def append_each(self, row: Index, env: Index, mask: NDArray[np.bool_]) -> None:
        """Set the priorities of N new rows of N different envs, and give priority 0 to the place after each row."""
        key = np.stack([np.concatenate([row, row + 1]), np.concatenate([env, env])], -1)
        self.tree.put(self.index.place(key), np.concatenate([mask * self.largest, np.zeros(len(row))]))

    def sync(self, group: int, rows: range) -> None:
        """Set the priorities of a group's `rows` (row numbers), which another process has appended."""
        ring, columns = self.ring, self.ring.columns(group)
        if rows:
            places = np.arange(rows.start, rows.stop) % ring.capacity
            mask = ring.rows.mask[places, columns]
            if ring.td_error is None:
                self.append(rows.start, mask, group)
            else:
                error = ring.td_error[places, columns]
                self.append(rows.start, mask, group, error, is_known=~np.isnan(error))
        # Rows after `rows` have no TD error yet or were written meanwhile. Set priority 0 so that none is drawn.
        if (written := int(ring.written[group])) > rows.stop:
            pending = np.arange(rows.stop, written)
            row, env = np.meshgrid(pending, np.arange(columns.start, columns.stop), indexing="ij")
            key = np.stack([row.reshape(-1), env.reshape(-1)], -1)[-ring.capacity * ring.width :]
            self.tree.put(self.index.place(key), 0.0)

    def draw(self, numbers: DrawNumbers, draw: int) -> tuple[Index, Index, Floats]:
        """Draw N rows by priority; return places and keys (see `RingIndex`), and priorities.

        `numbers` must be stratified: each of N equal shares of the total priority yields one row. Raises
        NothingToDraw if no row has a priority above 0.
        """
        for attempt in itertools.count():
            if not self.tree.total > 0:
                raise NothingToDraw("there is nothing to draw: no row has a priority above 0.")
            place, priority = self.tree.draw(numbers.of(draw, attempt))
            key, overwritten = self.index.newest_keys(place)
            if len(overwritten) == 0:
                break
            self.tree.put(place[overwritten], 0.0)  # so that the next attempt does not draw these rows again
        self._last_draw = (key, place, self.ring.written.tobytes())
        return place, key, priority

    def feedback(self, key: Index, td_error: Errors) -> None:
        """Set the priorities of drawn rows from their absolute TD errors; skip rows overwritten since the draw."""
        priority, largest = self._from_error(td_error)
        drawn, place, written = self._last_draw
        # The check for overwritten rows takes 15 us. It is skipped for the last draw if no row was written since.
        if key is not drawn or written != self.ring.written.tobytes():
            overwritten = self.index.overwritten(key)
            if len(overwritten):
                key, priority = np.delete(key, overwritten, 0), np.delete(priority, overwritten)
                largest = float(priority.max(initial=0.0))
            place = self.index.place(key)
        self.tree.put(place, priority.astype(np.float64))  # writing float32 to the tree takes twice as long
        self.largest = max(self.largest, largest)

    def _from_error(self, error: Errors) -> tuple[Errors, float]:
        """Return the priorities for absolute TD errors, and the largest of these priorities."""
        if len(error) == 0:
            return error, 0.0
        smallest = error[error.argmin()]
        if not smallest >= 0:  # this is also true for NaN
            raise ValueError(f"a priority of {smallest} was given: priorities are finite and not negative.")
        priority: Errors = (error + self.epsilon) ** self.alpha
        largest = float(priority[priority.argmax()])
        if not largest < np.inf:
            raise ValueError(f"a priority of {error.max()} was given: to the power {self.alpha}, it is not finite.")
        return priority, largest

    def get_state(self) -> PrioritiesState:
        return {"tree": self.tree.get_state(), "largest": self.largest}

    def set_state(self, state: PrioritiesState) -> None:
        self.tree.set_state(state["tree"])
        self.largest = state["largest"]


class SumTree:
    """A sum tree over the priorities of `capacity` places; all priorities are 0 at first."""

    def __init__(self, capacity: int) -> None:
        # There is one more block than needed. A search ends in this block if rounding puts a mass beyond the total.
        blocks = -(-capacity // WIDTH**2) + 1
        self.capacity = capacity
        self._places, self._groups = _aligned_zeros(blocks * WIDTH**2), _aligned_zeros(blocks * WIDTH)
        self._rows_of_places, self._rows_of_groups = self._places.reshape(-1, WIDTH), self._groups.reshape(-1, WIDTH)
        self._blocks, self._starts = _aligned_zeros(blocks), _aligned_zeros(blocks)
        self._ends = self._starts[1:]
        self._end_tensor = torch.from_numpy(self._ends)  # created once, because creating it takes 3 us
        self._is_added_up = True
        self._search = _Search(0)

    @property
    def total(self) -> float:
        return float(self._add_up()[-1])

    def __len__(self) -> int:
        return self.capacity

    def __getitem__(self, index: Index | slice | int) -> Floats:
        found: Floats = self._places[: self.capacity][index]
        return found

    def __setitem__(self, index: Index | slice | int, priority: ArrayLike) -> None:
        priority = np.asarray(priority, np.float64)
        bad = priority[~((priority >= 0) & (priority < np.inf))]
        if bad.size:
            raise ValueError(f"a priority is {bad.flat[0]}: none is negative or not a number, and all are finite.")
        self.put(np.atleast_1d(np.arange(self.capacity)[index] if isinstance(index, slice) else index), priority)

    def put(self, index: Index, priority: Floats | float) -> None:
        """Set priorities without checking that they are finite and not negative."""
        self._places[index] = priority
        group = index // SIXTEEN
        # Neighboring indices often share a group. Remove duplicates, to compute the sum of each group only once.
        if len(group) > MANY and group[-1] - group[0] < len(group) // 2:
            group = np.unique(group)
        # Each sum is added up again instead of being updated by a difference, so that rounding errors do not
        # accumulate over millions of changes. The dot product with ones takes 3 us, `sum(1)` takes 10 us.
        self._groups[group] = self._rows_of_places.take(group, 0).dot(ONES)
        block = group // SIXTEEN
        self._blocks[block] = self._rows_of_groups.take(block, 0).dot(ONES)
        self._is_added_up = False

    def find(self, mass: Floats) -> Index:
        return self._find(mass)[0]

    def draw(self, position: Floats) -> tuple[Index, Floats]:
        """Return places and their priorities for N positions in [0, N), which are scaled to the total mass."""
        return self._find(position * (self._add_up()[-1] / len(position)))

    def _search_for(self, count: int) -> _Search:
        if len(self._search.row) != count:
            self._search = _Search(count)
        return self._search

    def _find(self, mass: Floats) -> tuple[Index, Floats]:
        starts, search = self._add_up(), self._search_for(len(mass))
        block = self._ends.searchsorted(mass, "right")
        number = search.pick(self._rows_of_groups, block, mass - starts.take(block))
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

    def _add_up(self) -> Floats:
        """Return for each block the sum of all blocks before it; the last entry is the total."""
        if not self._is_added_up:
            self._ends[:] = self._blocks[:-1]
            self._end_tensor.cumsum_(0)
            self._is_added_up = True
        return self._starts

    def _nearest_with_priority(self, place: Index) -> Index:
        """Move places whose priority is 0 back to the nearest place whose priority is above 0.

        This is needed where rounding has put a mass slightly too far.
        """
        some = np.flatnonzero(self._places)
        if len(some) == 0:
            raise ValueError("there is nothing to find: no place has a priority above 0.")
        found: Index = some[np.maximum(some.searchsorted(place, "right") - 1, 0)]
        return found

    def get_state(self) -> SumTreeState:
        """Return the priorities and also their sums, because sums computed again may be rounded differently."""
        return {"places": self[:].copy(), "groups": self._groups.copy(), "blocks": self._blocks.copy()}

    def set_state(self, state: SumTreeState) -> None:
        """Restore a state, so that `find` returns exactly the same places for the same masses."""
        if len(state["places"]) != self.capacity:
            raise ValueError(f"the state is of {len(state['places'])} places, and this tree has {self.capacity}.")
        self._places[: self.capacity] = state["places"]
        self._groups[:], self._blocks[:] = state["groups"], state["blocks"]
        self._is_added_up = False


class _Search:
    """A search in `count` rows of 16 numbers. Its arrays are reused, because allocating them is slow."""

    def __init__(self, count: int) -> None:
        self.row = np.arange(0, count * WIDTH, WIDTH)
        self._sums, self._flags = np.empty((count, WIDTH)), np.empty((count, WIDTH), bool)
        self._first, self._flat, self._tensor = self._sums[:, 0], self._sums.reshape(-1), torch.from_numpy(self._sums)

    def pick(self, rows: Floats, row: Index, mass: Floats) -> Index:
        """Return the first index at which the running sum of each row of `rows[row]` exceeds the row's `mass`.

        The index is 15 for a row whose running sum never exceeds its mass.
        """
        rows.take(row, 0, self._sums, "clip")
        # Subtracting the mass first and comparing with 0 is three times as fast as comparing the sums with masses.
        np.subtract(self._first, mass, self._first)
        self._tensor.cumsum_(1)  # cumsum of torch takes a third of the time of numpy's
        np.less_equal(self._sums, ZERO, self._flags)
        return NUM_FLAGS.take(np.packbits(self._flags).view(np.uint16))

    def beyond(self, number: Index) -> Floats:
        """Return, for each row of the last `pick`, by how much the running sum at index `number` exceeds the mass."""
        return self._flat.take(self.row + number)


def _count_flags() -> Index:
    """Return a table that maps 16 flags, packed into a uint16, to the number of flags that are set, at most 15.

    Only patterns in which all set flags come first have an entry. A flag is set while a running sum is at most the
    mass, and running sums never decrease.
    """
    flags = np.tril(np.ones((WIDTH + 1, WIDTH), bool), -1)
    numbers = np.zeros(1 << WIDTH, np.int64)
    numbers[np.packbits(flags).view(np.uint16)] = np.minimum(np.arange(WIDTH + 1), WIDTH - 1)
    return numbers


NUM_FLAGS = _count_flags()  # looking up the number takes 7 us, adding up the flags takes 20 us
ONES = np.ones(WIDTH)
# These are arrays, because numpy would convert a Python number in every call, which takes 0.5 us.
SIXTEEN, ZERO = np.array(WIDTH), np.array(0.0)


def _aligned_zeros(size: int) -> Floats:
    """Return float64 zeros whose memory begins at a cache line."""
    zeros = np.zeros(size + 7)
    first = -zeros.ctypes.data % 64 // zeros.itemsize
    return zeros[first : first + size]
