"""The ring: the newest rows of every env in shared memory, oldest overwritten first.

    ring = Ring(example, capacity=100_000, envs=8)         # rows of each env, in the shape of one row of `example`
    ring.append(steps, last_obs)                           # [T, B] of any T, and what comes after its last row
    row, env = ring.at(np.array([17, 40]))                 # the 17th and 40th of ring.count rows, oldest first
    found = ring.n_steps(row, env, n=3, gamma=0.99)        # return, product of discounts, row to bootstrap from
    obs = ring.obs(found.row, env)

Rows are numbered from the first that was ever appended, so a number never means another row: whoever holds one of a
row that was overwritten can tell. A reset row is kept like any other (its observation is what a truncated episode is
bootstrapped from); what follows the newest row lies in the place of the oldest, which is therefore not used: the
newest row can be drawn at once.

Envs may be appended in groups, each at its own pace, and each by a process of its own:

    theirs = Ring(example, capacity=100_000, envs=8, groups=2, fds=ring.fds)      # the same memory
    theirs.append(steps, last_obs, group=1)

A group has one writer and no lock. The writer announces how far it will write (`begun`), then how far it has written
(`written`); a reader checks after reading that its rows were still stored (`is_stored`), or holds writers (`still`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remuda.data import ArrayTuple, Fence, SharedArrays, leaves, map_tree
from remuda.errors import WorkerError

Index = NDArray[np.int64]
HOLD_SECONDS = 30.0  # after which a writer that does not stop is an error
LOOK_SECONDS = 0.001
NO_LIMIT = np.iinfo(np.int64).max


class Row(ArrayTuple):
    """What is kept of every row; of `Steps` all that does not depend on the policy that acted."""

    obs: Any
    action: Any
    reward: Any
    discount: Any  # 0 where the episode terminated with this row
    mask: Any  # False on a reset row


class NSteps(NamedTuple):
    """Of each row: what the next n rewards add up to, and what the value after them is multiplied by."""

    reward: NDArray[np.float32]
    discount: NDArray[np.float32]  # gamma ** k, or 0 beyond the end of an episode
    row: Index  # whose observation the value is taken of


class Span(NamedTuple):
    """Rows `first` to `last` of a group, and the frames that are theirs where frames are kept apart."""

    group: int
    first: int
    last: int
    frames: Index  # [envs of the group, 2], from and to; none where observations are kept whole


class NothingToDraw(ValueError):
    """No row or sequence is whole: if others write, not yet again."""


class Ring:
    """Rows [capacity, B]; of each group of envs all but one can be drawn."""

    def __init__(
        self,
        example: Row,
        capacity: int,
        envs: int,
        groups: int = 1,
        fds: Sequence[int] | None = None,
        has_td_error: bool = False,
    ) -> None:
        """`example` is a row of one env, as arrays of its shape and dtype; `fds` are those of a ring like this.

        With `has_td_error`, writers also say how large the error of each row is (`judge`).
        """
        self.capacity, self.envs, self.groups, self.width = capacity, envs, groups, envs // groups
        self._names = [path for path, _ in leaves(example)]
        layout = {path: ((capacity, envs, *array.shape), str(array.dtype)) for path, array in leaves(example)}
        counts: Any = dict.fromkeys(("written", "begun", "real", "td_errors"), ((groups,), "int64"))
        counts |= {"error": ((capacity, envs), "float32")} if has_td_error else {}
        self._memory = SharedArrays(
            {**layout, **counts, "is_held": ((1,), "int64"), "limit": ((1,), "int64")}, fds[0] if fds else None
        )
        names = iter(self._names)
        self.rows = map_tree(lambda _: self._memory[next(names)], example)
        self._flat = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), self.rows)
        self.written = self._memory["written"]  # rows that each group was ever given
        self.begun = self._memory["begun"]  # and those that are being written
        self.real = self._memory["real"]  # of the rows that were given since this memory is there, the real ones
        self.error = self._memory["error"] if has_td_error else None
        self.td_errors = self._memory["td_errors"]  # rows of each group whose error is known, where it is wanted
        self._is_held = self._memory["is_held"]
        self._peace = threading.RLock()  # of threads of this process: while somebody has peace, nobody takes over
        self._takes_over = False
        self.hold_seconds = HOLD_SECONDS
        self.limit = self._memory["limit"]  # of all real rows, which writers should not pass
        if not fds:
            self.limit[0] = NO_LIMIT
        self._fence = Fence()
        self.while_held: Callable[[], object] = lambda: None  # what a writer does, again and again, while it is held

    @property
    def fds(self) -> list[int]:
        """With these another process makes a ring over the same memory."""
        return [memory.fd for memory in self.memory]

    @property
    def stored(self) -> Index:
        """Rows of each group that can be drawn."""
        found: Index = np.maximum(self.written - np.maximum(self.begun - self.capacity + 1, 0), 0)
        return found

    @property
    def count(self) -> int:
        """Of all envs, reset rows included."""
        return int(self.stored.sum()) * self.width

    def append(self, rows: Row, next_obs: Any, group: int = 0) -> None:
        """[T, B of the group] after what is there; of more than fit only the newest are kept."""
        T = len(rows.mask)
        start = int(self.written[group])
        skipped = max(0, T - self.capacity + 1)
        columns = self.columns(group)
        self._begin(group, start, start + T)
        if skipped:
            self._leave_out(columns)
        for places, first in unbroken(start + skipped, start + T, self.capacity):
            taken = slice(first - start, first - start + places.stop - places.start)
            self._write(places, columns, rows[taken])
        self._write_obs((start + T) % self.capacity, columns, next_obs)
        self.real[group] += np.count_nonzero(rows.mask)
        self._fence()
        self.written[group] = start + T

    def append_each(self, rows: Row, next_obs: Any, env: Index) -> None:
        """Append one row [N] and what comes after it to each of N envs; the ring has one group per env, and no writer
        but this process."""
        at = self.written[env]
        self.begun[env] = at + 1
        self.rows[at % self.capacity, env] = rows
        self.rows.obs[(at + 1) % self.capacity, env] = next_obs
        self.real[env] += rows.mask
        self.written[env] = at + 1

    def _begin(self, group: int, start: int, end: int) -> None:
        """Say that rows up to `end` are about to be written, once nobody holds the writers."""
        if self._takes_over:
            self.begun[group] = end
            self._fence()
            return
        while True:
            while self._is_held[0]:
                self.while_held()
                time.sleep(LOOK_SECONDS)
            self.begun[group] = end
            self._fence()  # what was said must be seen before it is looked whether somebody holds
            if not self._is_held[0]:
                return
            self.begun[group] = start

    @contextmanager
    def pause_writers(self) -> Iterator[None]:
        """Nothing is written while it lasts: writers finish what they began, and wait."""
        self._is_held[0] = 1
        try:
            deadline = time.monotonic() + self.hold_seconds
            self._fence()
            while (self.begun != self.written).any():
                if time.monotonic() > deadline:
                    groups = np.flatnonzero(self.begun != self.written).tolist()
                    raise WorkerError(
                        f"writers of groups {groups} of the replay did not stop within {self.hold_seconds:g} s: look "
                        "whether they hang, or whether the machine swaps."
                    )
                time.sleep(LOOK_SECONDS)
            with self._peace:  # from here on all was written: whoever is abandoned later has begun nothing
                self._fence()
                yield
        finally:
            self._fence()
            self._is_held[0] = 0

    def set_td_error(self, group: int, first: int, error: NDArray[np.float32]) -> None:
        """Errors [T, B of the group] of rows that were appended; NaN where none is known."""
        assert self.error is not None
        self.error[np.arange(first, first + len(error)) % self.capacity, self.columns(group)] = error
        self._fence()
        self.td_errors[group] = first + len(error)

    def noticed(self, group: int) -> int:
        """Return how many rows of a group a reader may take note of; see `look`."""
        end = int(self.td_errors[group] if self.error is not None else self.written[group])
        self._fence()
        return end

    def look(self, group: Any) -> Any:
        """Return how many rows these groups were given, a number or [N]; rows up to there may be read afterwards."""
        # Without the fence, processors other than x86 may read rows before the counter, as they were before.
        written = self.written[group]
        self._fence()
        return written

    def may_write(self) -> bool:
        """Whether writers have not reached the limit that a reader set for them."""
        return int(self.real.sum()) < int(self.limit[0])

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """For this process to write in place of dead ones, also while it holds the others: it is who must see to it
        that what the dead have begun comes to an end. Nobody has peace meanwhile."""
        with self._peace:
            self._takes_over = True
            try:
                yield
            finally:
                self._takes_over = False

    def abandon(self, group: int) -> None:
        """Its writer is gone. What it had begun may lie over older rows already, so these stay lost: in their place
        are reset rows, at which returns and sequences stop."""
        with self._peace:
            self._abandon(group)

    def _abandon(self, group: int) -> None:
        start, end, columns = int(self.look(group)), int(self.begun[group]), self.columns(group)
        seen = map_tree(lambda x: x[start % self.capacity, columns].copy(), self.rows.obs)  # whole, whoever wrote it
        self.rows.obs[end % self.capacity, columns] = seen  # for whoever is lost next, in its first rows
        for places, _ in unbroken(max(start, end - self.capacity + 1), end, self.capacity):
            for _, array in leaves(self.rows.replace(obs=None, discount=None)):
                array[places, columns] = 0
            self.rows.discount[places, columns] = 1
            self.rows.obs[places, columns] = seen
        self._leave_out(columns)
        self._fence()
        self.written[group] = end
        self.forgo_judgement(group)

    def forgo_judgement(self, group: int) -> None:
        """Of rows that nobody will judge any more."""
        if self.error is not None:
            first = max(int(self.td_errors[group]), self.oldest(group))
            unknown = np.full((int(self.written[group]) - first, self.width), np.nan, np.float32)
            self.set_td_error(group, first, unknown)

    def cut(self, next_obs: Any, group: int = 0) -> None:
        """All episodes of a group end here, neither terminated nor continued: what comes next is another's."""
        blank = map_tree(lambda x: np.zeros((1, self.width, *x.shape[2:]), x.dtype), self.rows.replace(obs=None))
        obs = map_tree(lambda x: np.asarray(x)[None], next_obs)
        self.append(blank.replace(obs=obs, discount=np.ones_like(blank.discount)), next_obs, group)

    def columns(self, group: int) -> slice:
        """The envs of a group."""
        return slice(group * self.width, (group + 1) * self.width)

    def _write(self, places: slice, columns: slice, rows: Row) -> None:
        self.rows[places, columns] = rows

    def _write_obs(self, place: int, columns: slice, obs: Any) -> None:
        self.rows.obs[place, columns] = obs

    def _leave_out(self, columns: slice) -> None:
        """What is written next does not follow what is there: rows were too many to be kept, or were given up."""

    def at(self, index: Index) -> tuple[Index, Index]:
        """Row and env of the index-th of `count` rows, from the oldest."""
        if self.groups == 1:
            row, env = np.divmod(index, self.envs)
            return row + self.oldest(0), env
        stored, written = self.stored, self.written.copy()  # once: others may be writing
        self._fence()  # rows are read next, see `look`
        ends = (stored * self.width).cumsum()
        index = np.minimum(index, ends[-1] - 1)  # there may be fewer by now than there were
        group = ends.searchsorted(index, "right")
        row, env = np.divmod(index - (ends[group] - stored[group] * self.width), self.width)
        return row + written[group] - stored[group], env + group * self.width

    def oldest(self, group: int) -> int:
        """The first row of a group that can be drawn."""
        return max(0, int(self.begun[group]) - self.capacity + 1)

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Whether a row can still be drawn, and what was taken of it before this call was whole."""
        self._fence()
        group = env // self.width
        found: NDArray[np.bool_] = (row < self.written[group]) & (row > self.begun[group] - self.capacity)
        self._fence()
        return found

    def is_real(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Of stored rows: whether an action was taken there."""
        found: NDArray[np.bool_] = self.rows.mask[row % self.capacity, env]
        return found

    def take(self, row: Index, env: Index) -> Row:
        """These rows, copied."""
        place = self._place(row, env)
        rest = map_tree(lambda x: x.take(place, 0), self._flat.replace(obs=None))
        taken: Row = rest.replace(obs=self.obs(row, env))
        return taken

    def obs(self, row: Index, env: Index) -> Any:
        """What was seen in these rows, or after the newest."""
        place = self._place(row, env)
        return map_tree(lambda x: x.take(place, 0), self._flat.obs)

    def observed(self, group: int, first: int, end: int) -> Iterator[tuple[Any, NDArray[np.bool_]]]:
        """Yield observations and masks [T, B of the group] of a group's rows, as views, in one or two parts."""
        for places, _ in unbroken(first, end, self.capacity):
            yield self.rows.obs[places, self.columns(group)], self.rows.mask[places, self.columns(group)]

    def _place(self, row: Index, env: Index) -> Index:
        """Of rows in `_flat`: to take them by one number costs a third of what it costs by two."""
        place: Index = row % self.capacity * self.envs + env
        return place

    def n_steps(self, row: Index, env: Index, n: int, gamma: float, end: Index | None = None) -> NSteps:
        """From real rows on: over fewer than n rewards where the episode ends, or where the newest row is passed.

        `end` is how far the group of each had come, where somebody has looked already.
        """
        reward, discount = np.zeros(len(row), np.float32), np.ones(len(row), np.float32)
        end = self.look(env // self.width) if end is None else end
        at, goes_on = row, np.ones(len(row), bool)
        for _ in range(n):
            place = self._place(at, env)
            goes_on = goes_on & (at < end) & self._flat.mask.take(place)
            reward += np.where(goes_on, discount * self._flat.reward.take(place), 0)
            discount *= np.where(goes_on, np.float32(gamma) * self._flat.discount.take(place), 1)
            at = at + goes_on
            goes_on = goes_on & (discount > 0)
        return NSteps(reward, discount, at)

    # --- for whoever saves it (see saving.py) ---

    @property
    def memory(self) -> list[SharedArrays]:
        """All that it lies in."""
        return [self._memory]

    def layout(self) -> dict[str, Any]:
        """What another ring must have in common with this one for its bytes to mean the same."""
        arrays = {name: self._memory[name] for name in self._names}
        sizes = {"capacity": self.capacity, "envs": self.envs, "groups": self.groups}
        return {**sizes, **{name: f"{array.dtype.str}{list(array.shape)}" for name, array in arrays.items()}}

    def span(self, group: int, first: int, last: int) -> Span:
        """Of stored rows: where everything lies that is needed to draw them."""
        return Span(group, first, last, np.zeros((0, 2), np.int64))

    def views(self, span: Span) -> list[NDArray[Any]]:
        """The memory of these rows, as arrays whose first axis is time; ValueError if there cannot be such rows."""
        rows = span.last - span.first
        if not (0 <= span.group < self.groups and span.first >= 0 and 0 <= rows < self.capacity):
            raise ValueError(f"rows {span.first} to {span.last} of group {span.group} have no place")
        columns, places = self.columns(span.group), unbroken(span.first, span.last, self.capacity)
        return [self._memory[name][place, columns] for name in self._names for place, _ in places]

    def get_tail(self) -> dict[str, Any]:
        """The counters, and what is there but is no row yet: a copy, and small."""
        place = np.repeat(self.written % self.capacity, self.width)
        seen = [x[place, np.arange(self.envs)] for _, x in leaves(self.rows.obs)]
        return {"written": self.written.copy(), "obs": seen}

    def set_tail(self, tail: Mapping[str, Any]) -> None:
        """Once the rows are there; ValueError where it is another ring's."""
        if (tail["written"] < 0).any():
            raise ValueError("rows cannot be fewer than none")
        place = np.repeat(tail["written"] % self.capacity, self.width)
        for (_, x), seen in zip(leaves(self.rows.obs), tail["obs"], strict=True):
            x[place, np.arange(self.envs)] = seen
        self.written[:] = self.begun[:] = self.td_errors[:] = tail["written"]

    def clear(self) -> None:
        """As if no row had ever been given."""
        self.written[:] = self.begun[:] = self.td_errors[:] = 0

    def close(self) -> None:
        self._memory.close()


def unbroken(first: int, last: int, room: int) -> list[tuple[slice, int]]:
    """Places of first to last in a ring, cut where it jumps from its end to its beginning; and the first of each."""
    turn = (first // room + 1) * room
    parts = [(first, last)] if last <= turn else [(first, turn), (turn, last)]
    return [(slice(a % room, a % room + b - a), a) for a, b in parts]
