"""Which rows are drawn: the random numbers of every draw, and rows in proportion to their error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.randomness import Purpose, keyed_generator
from remuda.replay.ring import Index, NothingToDraw, Ring
from remuda.replay.ring_index import NONE, RingIndex
from remuda.replay.sumtree import SumTree


class Numbers:
    """Random numbers for every draw, a function of (seed, draw).

    They are made for many draws at once: to make a generator takes 13 us, as long as to make a draw's numbers.
    """

    DRAWS = 64

    def __init__(self, seed: int, count: int, in_parts: bool) -> None:
        self._seed, self._count, self._block, self._numbers = seed, count, -1, np.zeros((0, count))
        self._parts = np.arange(count) if in_parts else np.zeros(count)

    def of(self, draw: int, attempt: int = 0) -> NDArray[np.float64]:
        """Return numbers in [0, 1), others for every attempt; in parts, one in each of [0, 1), [1, 2) and so on."""
        if attempt:
            again = keyed_generator(Purpose.REPLAY, self._seed, draw, attempt)
            return again.random(self._count) + self._parts
        block, number = divmod(draw, self.DRAWS)
        if block != self._block:
            many = keyed_generator(Purpose.REPLAY, self._seed, block)
            self._numbers = many.random((self.DRAWS, self._count)) + self._parts
            self._block = block
        found: NDArray[np.float64] = self._numbers[number]
        return found


class Priorities:
    """Rows in proportion to their error to the power of alpha (1511.05952); a fresh row as likely as any."""

    def __init__(self, ring: Ring, alpha: float, epsilon: float = 1e-6, is_shared: bool = False) -> None:
        self.ring, self.alpha, self.epsilon = ring, alpha, epsilon
        self.tree, self.largest = SumTree(ring.capacity * ring.envs), 1.0
        self.places = RingIndex(ring, is_shared)
        self._drawn = (NONE, NONE, b"")

    def append(self, first: int, mask: Any, group: int = 0, priority: Any = None, known: Any = True) -> None:
        """Of rows [T, B] that are written from `first` on, and of the place after them, which then holds no row.

        `priority` are their errors, where they are `known` already.
        """
        T, width = mask.shape
        row, env = np.divmod(np.arange((T + 1) * width), width)
        key = np.stack([row + first, env + group * width], -1)
        fresh, largest = np.zeros((T + 1, width)), self.largest
        fresh[:T][mask] = largest
        if priority is not None:
            given = mask & known
            fresh[:T][given], largest = self._raised(np.asarray(priority)[given])
        newest = slice(-(self.ring.capacity) * width, None)
        self.tree.put(self.places.of(key[newest]), fresh.reshape(-1)[newest])
        self.largest = max(self.largest, largest)

    def append_each(self, row: Index, env: Index, mask: NDArray[np.bool_]) -> None:
        """Set the priorities of one new row [N] of each of N envs; the place after it then holds no row."""
        key = np.stack([np.concatenate([row, row + 1]), np.concatenate([env, env])], -1)
        self.tree.put(self.places.of(key), np.concatenate([mask * self.largest, np.zeros(len(row))]))

    def sync(self, group: int, seen: int) -> int:
        """Take note of rows that another process appended after `seen`; returns how far it has come."""
        end, ring = self.ring.noticed(group), self.ring
        first = max(seen, ring.oldest(group))
        if first < end:
            places = np.arange(first, end) % ring.capacity
            mask, error = ring.rows.mask[places, ring.columns(group)], None
            if ring.error is not None:
                error = ring.error[places, ring.columns(group)]
            self.append(first, mask, group, error, known=True if error is None else ~np.isnan(error))
        if (written := int(ring.written[group])) > end:  # what lay there has no priority any more, what came not yet
            columns = ring.columns(group)
            row, env = np.meshgrid(np.arange(end, written), np.arange(columns.start, columns.stop), indexing="ij")
            key = np.stack([row.reshape(-1), env.reshape(-1)], -1)[-ring.capacity * ring.width :]
            self.tree.put(self.places.of(key), 0.0)
        return end

    def draw(self, numbers: Numbers, draw: int) -> tuple[Index, Index, NDArray[np.float64]]:
        """Places, keys and priorities, one in each of as many equal parts of all that they add up to."""
        for attempt in itertools.count():
            if not self.tree.total > 0:
                raise NothingToDraw("there is nothing to draw: no row has a priority above 0.")
            place, priority = self.tree.draw(numbers.of(draw, attempt))
            key, gone = self.places.keys(place)
            if len(gone) == 0:
                break
            self.tree.put(place[gone], 0.0)  # rows whose frames are gone before they are
        self._drawn = (key, place, self.ring.written.tobytes())
        return place, key, priority

    def feedback(self, key: Index, error: NDArray[Any]) -> None:
        """Errors of rows drawn earlier; those that were overwritten since are left alone."""
        priority, largest = self._raised(error)
        drawn, place, written = self._drawn
        if key is not drawn or written != self.ring.written.tobytes():  # 15 us, and not of the last draw
            gone = self.places.gone(key)
            if len(gone):
                key, priority = np.delete(key, gone, 0), np.delete(priority, gone)
                largest = float(priority.max(initial=0.0))
            place = self.places.of(key)
        self.tree.put(place, priority.astype(np.float64))  # to write float32 there takes twice as long
        self.largest = max(self.largest, largest)

    def _raised(self, error: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """To the power of alpha; and the largest."""
        if len(error) == 0:
            return error, 0.0
        smallest = error[error.argmin()]
        if not smallest >= 0:  # NaN is not either
            raise ValueError(f"a priority of {smallest} was given: priorities are finite and not negative.")
        priority = (error + self.epsilon) ** self.alpha
        largest = float(priority[priority.argmax()])
        if not largest < np.inf:
            raise ValueError(f"a priority of {error.max()} was given: to the power {self.alpha}, it is not finite.")
        return priority, largest

    def get_state(self) -> dict[str, Any]:
        return {"tree": self.tree.get_state(), "largest": self.largest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.tree.set_state(state["tree"])
        self.largest = state["largest"]
