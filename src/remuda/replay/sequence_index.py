"""Sequences in a replay ring: the recurrent states at which sequences begin, and an index for drawing sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import NumpyArray, SharedArrays, Tree, leaves, map_tree
from remuda.replay.counters import GroupCounters, Index, Layout
from remuda.replay.priorities import SumTree
from remuda.replay.ring import Ring
from remuda.replay.states import RecurrentStatesState, SequenceIndexState

PriorityFunction = Callable[[NDArray[np.float32]], NDArray[np.float64]]


class RecurrentStates:
    """Recurrent states and the numbers of the rows that follow them, in memory that other processes may write to.

        states = RecurrentStates(ring, example, interval=40)
        states.store(state, group)                     # the group's state [B] before its next row
        attached = RecurrentStates(ring, example, interval=40, fd=states.memory.fd)

    The states of each group are numbered in the order in which they are stored, and a number is never used again.
    """

    def __init__(
        self, ring: Ring, example: Tree, interval: int, fd: int | None = None, has_td_error: bool = False
    ) -> None:
        """Allocate memory, or attach to the memory with descriptor `fd`.

        States are at least `interval` rows apart. With `has_td_error`, writers also compute the TD error of each
        sequence (`set_td_error`).
        """
        self.ring, self.interval = ring, interval
        # There is room for every state whose following row can be in the ring, and for one more state. Otherwise a
        # new state, which is stored before its following row, might overwrite the oldest state while the row that
        # follows the oldest state is still in the ring.
        self.room = -(-(ring.capacity - 1) // interval) + 1
        layout: Layout = {
            f"state.{path}": ((self.room, ring.envs, *x.shape[1:]), str(np.asarray(x).dtype))
            for path, x in leaves(example)
        }
        layout["row"] = ((self.room, ring.groups), "int64")
        layout |= dict.fromkeys(("stored", "td_errors"), ((ring.groups,), "int64"))
        if has_td_error:
            layout["error"] = ((self.room, ring.envs), "float32")
        self.memory = SharedArrays(layout, fd)
        names = iter([path for path, _ in leaves(example)])
        self.states = map_tree(lambda _: self.memory[f"state.{next(names)}"], example)
        self.row = self.memory["row"]  # number of the row that follows each state, [room, groups]
        self.td_error = self.memory["error"] if has_td_error else None
        self.counters = GroupCounters(self.memory["stored"], self.memory["td_errors"], has_td_error)

    def store(self, state: Tree, group: int = 0) -> None:
        """Store the state before the next row, unless another state was stored less than `interval` rows ago."""
        number, row = int(self.counters.written[group]), int(self.ring.written[group])
        if number and row < self.row[(number - 1) % self.room, group] + self.interval:
            return
        place, columns = number % self.room, self.ring.columns(group)

        def write(states: NumpyArray, new: torch.Tensor) -> None:
            own = states[place, columns]
            if new.shape != own.shape:  # numpy might broadcast a state that lacks an axis
                raise ValueError(f"a state {tuple(new.shape)} was added, its example said {own.shape}.")
            own[...] = new.numpy()

        map_tree(write, self.states, state)
        self.row[place, group] = row
        self.counters.publish(group, number + 1)

    def set_td_error(self, group: int, number: int, error: NDArray[np.float32] | float) -> None:
        """Store the TD errors of a group's B sequences that begin at state `number`: B values or one for all.

        NaN marks an unknown error.
        """
        assert self.td_error is not None
        self.td_error[number % self.room, self.ring.columns(group)] = error
        self.counters.publish_td_errors(group, number + 1)

    def waive_td_error(self, group: int) -> None:
        """Store NaN for all missing TD errors of a group, so that readers do not wait for them any longer."""
        if self.td_error is not None:
            for number in self.counters.without_td_error(group):
                self.set_td_error(group, number, np.nan)

    def get_state(self) -> RecurrentStatesState:
        """Return a copy of all states. Counters are copied first, so that they count no state that was not copied."""
        stored = self.counters.written.copy()
        self.counters.fence()
        row = self.row.copy()
        states = {path: array.copy() for path, array in leaves(self.states)}
        return {"states": states, "row": row, "stored": stored, "interval": self.interval}

    def set_state(self, state: RecurrentStatesState) -> None:
        for path, array in leaves(self.states):
            array[...] = state["states"][path]
        self.row[:] = state["row"]
        self.counters.written[:], self.counters.td_errors[:] = state["stored"], 0
        for group in range(self.ring.groups):
            self.waive_td_error(group)


class SequenceIndex:
    """An index of the sequences that can be drawn, with their priorities.

        index = SequenceIndex(states, burn_in=40, length=80, priority_of=priority_of)
        index.sync()                                   # after every change of the ring
        number, env, probability = index.draw(uniform)

    A sequence is identified by an env and the number of the state at which it begins. The `length` rows after the
    burn-in are its learned rows. A sequence can be drawn from the time when its last learned row is written until its
    first row is overwritten. If writers compute TD errors, its TD error must have been stored, too. A sequence whose
    learned rows are all reset rows is never drawn.
    """

    def __init__(self, states: RecurrentStates, burn_in: int, length: int, priority_of: PriorityFunction) -> None:
        """Create an empty index; `priority_of` maps TD errors to priorities."""
        self.states, self.ring, self.room, self.priority_of = states, states.ring, states.room, priority_of
        self.burn_in, self.length = burn_in, length
        self.tree = SumTree(self.room * self.ring.envs)
        self.largest = 1.0  # the largest of all priorities so far
        groups = self.ring.groups
        self.row = np.zeros((self.room, groups), np.int64)  # copies of `states.row`, which writers may overwrite
        # For each env, sequences `first[env]` to `complete[group of env] - 1` can be drawn.
        self.complete = np.zeros(groups, np.int64)
        self.first = np.zeros(self.ring.envs, np.int64)

    def sync(self) -> None:
        """Give a priority to sequences that were completed since the last call, and remove overwritten sequences."""
        self._drop_overwritten()
        for group in range(self.ring.groups):
            self._add_completed(group)
        self._drop_overwritten()

    def _add_completed(self, group: int) -> None:
        end, columns = self.ring.counters.published(group), self.ring.columns(group)
        usable, env = self.states.counters.usable(group), np.arange(columns.start, columns.stop)
        # Skip states that newer states have overwritten, which happens if this method is called too rarely.
        self.complete[group] = max(self.complete[group], self.states.counters.published(group) - self.room + 1)
        while self.complete[group] < usable:
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
        """Return priorities for new sequences: from the TD error if it is known, else the largest priority so far."""
        if self.states.td_error is None:
            return self.largest
        error = self.states.td_error[number % self.room, columns]
        found = np.where(np.isnan(error), self.largest, self.priority_of(error))
        self.largest = max(self.largest, float(found.max()))
        return found

    def _drop_overwritten(self) -> None:
        """Remove the sequences whose first row is overwritten.

        The oldest rows and frames are overwritten first. A sequence is therefore intact as long as its first row is
        intact, and the oldest sequence of an env is overwritten first. Frames of some envs may be overwritten before
        those of other envs in the same group, so every env has its own `first`.
        """
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
        """Draw N sequences by priority, from N numbers in [0, 1); return state numbers, envs and probabilities."""
        total = self.tree.total
        leaf = self.tree.find((np.arange(len(uniform)) + uniform) * (total / len(uniform)))
        place, env = np.divmod(leaf, self.ring.envs)
        newest = self.complete[env // self.ring.width] - 1
        return newest - (newest - place) % self.room, env, self.tree[leaf] / total

    def row_of(self, number: Index, env: Index) -> Index:
        """Return the number of the first row of each sequence."""
        row: Index = self.row[number % self.room, env // self.ring.width]
        return row

    def set_priority(self, number: Index, env: Index, priority: NDArray[np.float64]) -> None:
        """Set the priorities of sequences drawn earlier, except for sequences that can no longer be drawn."""
        kept = number >= self.first[env]
        self.tree[self._leaf(number[kept], env[kept])] = priority[kept]
        self.largest = max(self.largest, float(priority[kept].max(initial=0.0)))

    def get_state(self) -> SequenceIndexState:
        return {
            "row": self.row.copy(),
            "complete": self.complete.copy(),
            "first": self.first.copy(),
            "largest": self.largest,
            "tree": self.tree.get_state(),
            "states": self.states.get_state(),
        }

    def set_state(self, state: SequenceIndexState) -> None:
        self.states.set_state(state["states"])
        self.row[:], self.complete[:], self.first[:] = state["row"], state["complete"], state["first"]
        self.tree.set_state(state["tree"])
        self.largest = state["largest"]

    def _leaf(self, number: Index | int, env: Index) -> Index:
        return number % self.room * self.ring.envs + env
