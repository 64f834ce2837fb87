"""Where sequences of a replay begin: recurrent states beside the rows of a ring, and which of them can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import Fence, SharedArrays, leaves, map_tree
from remuda.replay.ring import Index, Ring
from remuda.replay.sumtree import SumTree


class RecurrentStates:
    """Recurrent states that were stored, and the rows before which they belong, in memory that others may write to.

        states = States(ring, example, interval=40)
        states.store(state, group)                     # [B of a group], before its next row; then ring.append
        theirs = States(ring, example, interval=40, fd=states.fd)

    States of each group are numbered from the first that was ever stored, so a number never means another.
    """

    def __init__(
        self, ring: Ring, example: Any, interval: int, fd: int | None = None, has_td_error: bool = False
    ) -> None:
        """With `has_td_error`, writers also say how large the error of each sequence is (`judge`)."""
        self.ring, self.interval = ring, interval
        # As many as can have their first row in the ring, and one that is stored before its rows are: when it is
        # written, the first row of what lies in its place is no longer in the ring.
        self.room = -(-(ring.capacity - 1) // interval) + 1
        layout: Any = {
            f"state.{path}": ((self.room, ring.envs, *x.shape[1:]), str(np.asarray(x).dtype))
            for path, x in leaves(example)
        }
        layout |= {"row": ((self.room, ring.groups), "int64")}
        layout |= dict.fromkeys(("stored", "td_errors"), ((ring.groups,), "int64"))
        layout |= {"error": ((self.room, ring.envs), "float32")} if has_td_error else {}
        self.memory = SharedArrays(layout, fd)
        names = iter([path for path, _ in leaves(example)])
        self.states = map_tree(lambda _: self.memory[f"state.{next(names)}"], example)
        self.row, self.stored = self.memory["row"], self.memory["stored"]  # of each group
        self.error = self.memory["error"] if has_td_error else None
        self._fence = Fence()  # what is said to be there is there
        self.td_errors = self.memory[
            "td_errors"
        ]  # per group, states whose sequences have a known TD error, where wanted

    def store(self, state: Any, group: int = 0) -> None:
        """The state before the next row, unless the one before it is nearer than the interval."""
        number, row, columns = int(self.stored[group]), int(self.ring.written[group]), self.ring.columns(group)
        if number and row < self.row[(number - 1) % self.room, group] + self.interval:
            return
        place = number % self.room

        def write(states: NDArray[Any], fresh: torch.Tensor) -> None:
            own = states[place, columns]
            if fresh.shape != own.shape:  # numpy might repeat it along the axis that is missing
                raise ValueError(f"a state {tuple(fresh.shape)} was added, its example said {own.shape}.")
            own[...] = fresh.numpy()

        map_tree(write, self.states, state)
        self.row[place, group] = row
        self._fence()
        self.stored[group] = number + 1

    def set_td_error(self, group: int, number: int, error: NDArray[np.float32] | float) -> None:
        """Errors [B of the group] of the sequences from one state on; NaN where none is known."""
        assert self.error is not None
        self.error[number % self.room, self.ring.columns(group)] = error
        self._fence()
        self.td_errors[group] = number + 1

    def noticed(self, group: int) -> int:
        """Return how many states of a group a reader may use; these may be read afterwards."""
        return self._look(self.stored if self.error is None else self.td_errors, group)

    def look(self, group: int) -> int:
        """Return how many states of a group were ever stored; these may be read afterwards."""
        return self._look(self.stored, group)

    def _look(self, counts: NDArray[Any], group: int) -> int:
        count = int(counts[group])
        self._fence()
        return count

    def forgo_judgement(self, group: int) -> None:
        """Of sequences that nobody will judge any more."""
        if self.error is not None:
            for number in range(int(self.td_errors[group]), int(self.stored[group])):
                self.set_td_error(group, number, np.nan)

    def get_state(self) -> dict[str, Any]:
        """Copy the counters before the states: a state that is stored meanwhile is not counted by the copy."""
        stored = self.stored.copy()
        self._fence()
        row = self.row.copy()
        states = {path: array.copy() for path, array in leaves(self.states)}
        return {"states": states, "row": row, "stored": stored, "interval": self.interval}

    def set_state(self, state: Mapping[str, Any]) -> None:
        for path, array in leaves(self.states):
            array[...] = state["states"][path]
        self.row[:], self.stored[:] = state["row"], state["stored"]
        self.td_errors[:] = 0
        for group in range(self.ring.groups):
            self.forgo_judgement(group)


class SequenceIndex:
    """Where sequences begin that can be drawn, and how likely each is.

        starts = Starts(states, burn_in=40, length=80)
        starts.follow_ring()                           # what can be drawn now; after every change of the ring
        number, env, probability = starts.draw(uniform)

    A sequence is a state and an env. Its priority is 0 until its last row is written, from when its first row is
    overwritten, and if none of its learned rows is real: what has a priority can be drawn.
    """

    def __init__(
        self,
        states: RecurrentStates,
        burn_in: int,
        length: int,
        priority_of: Callable[[NDArray[Any]], NDArray[np.float64]],
    ) -> None:
        """`priority_of` errors."""
        self.states, self.ring, self.room, self.priority_of = states, states.ring, states.room, priority_of
        self.burn_in, self.length = burn_in, length
        self.tree = SumTree(self.room * self.ring.envs)
        self.largest = 1.0  # of all priorities so far
        groups = self.ring.groups
        self.row = np.zeros((self.room, groups), np.int64)  # of states that are complete, as they were then
        self.complete = np.zeros(groups, np.int64)  # states of each group whose rows are all written
        self.first = np.zeros(self.ring.envs, np.int64)  # of each env, the oldest whose rows are all still there

    @property
    def stored(self) -> int:
        """States that were stored, of all groups."""
        return int(self.states.stored.sum())

    def follow_ring(self) -> None:
        """Give a priority to what was completed since, and take it from what was overwritten."""
        self._let_go()
        for group in range(self.ring.groups):
            self._complete_group(group)
        self._let_go()

    def _complete_group(self, group: int) -> None:
        end, columns = int(self.ring.look(group)), self.ring.columns(group)
        stored, env = self.states.noticed(group), np.arange(columns.start, columns.stop)
        # A reader that looks too seldom finds newer states in the place of some.
        self.complete[group] = max(self.complete[group], self.states.look(group) - self.room + 1)
        while self.complete[group] < stored:
            number = int(self.complete[group])
            row = int(self.states.row[number % self.room, group])
            learned = row + self.burn_in + np.arange(self.length)
            if learned[-1] >= end:
                break
            has_real = self.ring.is_real(learned[:, None], env).any(0)
            self.tree[self._leaf(number, env)] = np.where(has_real, self._initial_priority(number, columns), 0.0)
            self.row[number % self.room, group] = row
            self.first[env] = np.maximum(self.first[env], number - self.room + 1)
            self.complete[group] += 1

    def _initial_priority(self, number: int, columns: slice) -> NDArray[np.float64] | float:
        """Of sequences that were never drawn: by the error that their writer found, or as likely as any."""
        if self.states.error is None:
            return self.largest
        error = self.states.error[number % self.room, columns]
        found = np.where(np.isnan(error), self.largest, self.priority_of(error))
        self.largest = max(self.largest, float(found.max()))
        return found

    def _let_go(self) -> None:
        """Rows go oldest first, and so do frames: the first row answers for all of a sequence, and a start for all
        after it. Each env moves at its own pace: where episodes are short, frames may go before rows do."""
        group = np.arange(self.ring.envs) // self.ring.width
        while True:
            env = np.flatnonzero(self.first < self.complete[group])
            row = self.row[self.first[env] % self.room, env // self.ring.width]
            env = env[~self.ring.is_stored(row, env)]
            if len(env) == 0:
                return
            self.tree[self._leaf(self.first[env], env)] = 0.0
            self.first[env] += 1

    def draw(self, uniform: NDArray[np.float64]) -> tuple[Index, Index, NDArray[np.float64]]:
        """Numbers, envs and probabilities, one in each of as many equal parts of the mass."""
        total = self.tree.total
        leaf = self.tree.find((np.arange(len(uniform)) + uniform) * (total / len(uniform)))
        place, env = np.divmod(leaf, self.ring.envs)
        newest = self.complete[env // self.ring.width] - 1
        return newest - (newest - place) % self.room, env, self.tree[leaf] / total

    def row_of(self, number: Index, env: Index) -> Index:
        row: Index = self.row[number % self.room, env // self.ring.width]
        return row

    def set_priority(self, number: Index, env: Index, priority: NDArray[np.float64]) -> None:
        """Of sequences drawn earlier; those that can no longer be drawn are left alone."""
        kept = number >= self.first[env]
        self.tree[self._leaf(number[kept], env[kept])] = priority[kept]
        self.largest = max(self.largest, float(priority[kept].max(initial=0.0)))

    def get_state(self) -> dict[str, Any]:
        own = {name: getattr(self, name).copy() for name in ("row", "complete", "first")}
        return {**own, "largest": self.largest, "tree": self.tree.get_state(), "states": self.states.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.states.set_state(state["states"])
        for name in ("row", "complete", "first"):
            getattr(self, name)[:] = state[name]
        self.tree.set_state(state["tree"])
        self.largest = state["largest"]

    def _leaf(self, number: Index | int, env: Index) -> Index:
        return number % self.room * self.ring.envs + env
