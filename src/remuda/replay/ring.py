"""The ring: the newest rows of every env in shared memory, where new rows overwrite the oldest ones.

    ring = Ring(example, capacity=100_000, envs=8)         # room for `capacity` - 1 rows of each env, like `example`
    ring.append(rows, next_obs)                            # rows [T, B], and the observations [B] after the last row
    row, env = ring.counters.locate(np.array([17, 40]))    # rows 17 and 40 of all stored rows, oldest first
    found = ring.n_steps(row, env, n=3, gamma=0.99)        # return, product of discounts, row to bootstrap from
    obs = ring.obs(found.row, env)

Rows are numbered in the order in which they are appended, and a number is never used again. A reset row (the masked
row after the end of an episode) is stored like any other row, because a truncated episode bootstraps from the reset
row's observation. The observation after the newest row is also stored, so that the newest row can be drawn at once.
This observation takes the place of one row, so the ring holds `capacity - 1` rows of each env.

The rows of each group of envs may be appended by a process of its own, independently of the other groups:

    ring = Ring(example, capacity=100_000, envs=8, groups=2)
    attached = Ring(example, capacity=100_000, envs=8, groups=2, fds=ring.fds)    # uses the memory of `ring`
    attached.append(rows, next_obs, group=1)

Each group has one writer, and there are no locks. A reader either pauses the writers, or it copies rows and then
checks that they were not overwritten meanwhile (`is_stored`). `RowCounters` describes the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import Array, ArrayTuple, NumpyArray, SharedArrays, Tree, leaves, map_tree
from remuda.replay.counters import Index, RowCounters


class Row(ArrayTuple):
    """A stored row: the fields of `Steps` except `policy` and `version`, which describe the policy that acted."""

    obs: Tree
    action: Tree
    reward: Array
    discount: Array  # 0 where the episode terminated with this row
    mask: Array  # False on a reset row


class NSteps(NamedTuple):
    """The n-step returns of several rows, one array entry for each row."""

    reward: NDArray[np.float32]  # discounted sum of up to n rewards
    discount: NDArray[np.float32]  # factor of the bootstrap value; 0 after a termination
    row: Index  # number of the row with the observation to bootstrap from


class Span(NamedTuple):
    """Rows `first` to `last - 1` of a group, and the frames that they use if frames are stored apart from rows."""

    group: int
    first: int
    last: int
    frames: Index  # [envs of the group, 2]: begin and end of each env's frames; empty if rows hold whole observations


class NothingToDraw(ValueError):
    """No row or sequence can be drawn; this may be temporary if other processes write to the ring."""


class Ring:
    """The newest `capacity - 1` rows of each env, in shared memory; envs are divided into groups of equal size."""

    def __init__(
        self,
        example: Row,
        capacity: int,
        envs: int,
        groups: int = 1,
        fds: Sequence[int] | None = None,
        has_td_error: bool = False,
    ) -> None:
        """Allocate a ring, or attach to the memory of an existing ring by its `fds`.

        `example` is one row of one env, and defines shapes and dtypes. With `has_td_error`, writers also compute the
        TD error of each row (`set_td_error`).
        """
        self.capacity, self.envs, self.groups, self.width = capacity, envs, groups, envs // groups
        self._names = [path for path, _ in leaves(example)]
        layout = {path: ((capacity, envs, *array.shape), str(array.dtype)) for path, array in leaves(example)}
        if has_td_error:
            layout["error"] = ((capacity, envs), "float32")
        self._memory = SharedArrays({**layout, **RowCounters.layout(groups)}, fds[0] if fds else None)
        self.counters = RowCounters(self._memory, capacity, self.width, has_td_error, is_new=not fds)
        names = iter(self._names)
        self.rows = map_tree(lambda _: self._memory[next(names)], example)
        self.flat_rows = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), self.rows)
        self.td_error = self._memory["error"] if has_td_error else None

    @property
    def fds(self) -> list[int]:
        """File descriptors with which another process attaches to the memory of this ring."""
        return [memory.fd for memory in self.memory]

    @property
    def written(self) -> Index:
        """Number of rows that were ever written to each group."""
        return self.counters.written

    @property
    def real(self) -> Index:
        """Number of real steps that were written to each group since this memory was created."""
        return self.counters.real

    def columns(self, group: int) -> slice:
        """Return the envs of a group, as a slice."""
        return slice(group * self.width, (group + 1) * self.width)

    # --- writing ---

    def append(self, rows: Row, next_obs: Tree, group: int = 0) -> None:
        """Append rows [T, B] of a group's B envs, and the observations [B] after them.

        If T is larger than the ring, store only the newest rows.
        """
        T, columns = len(rows.mask), self.columns(group)
        start = self.counters.begin(group, T)
        skipped = max(0, T - self.capacity + 1)
        if skipped:
            self._mark_gap(columns)
        for places, first in unbroken(start + skipped, start + T, self.capacity):
            taken = slice(first - start, first - start + places.stop - places.start)
            self._write(places, columns, rows[taken])
        self._write_obs((start + T) % self.capacity, columns, next_obs)
        self.counters.finish(group, start + T, int(np.count_nonzero(rows.mask)))

    def append_each(self, rows: Row, next_obs: Tree, env: Index) -> Index:
        """Append one row to each of N envs and return the row numbers; every env must be a group of its own."""

        def write(row: Index) -> None:
            self.rows[row % self.capacity, env] = rows
            self.rows.obs[(row + 1) % self.capacity, env] = next_obs

        return self.counters.append_each(env, rows.mask, write)

    def set_td_error(self, group: int, first: int, error: NDArray[np.float32]) -> None:
        """Store the TD errors [T, B] of a group's rows from row number `first` on; NaN marks an unknown error."""
        assert self.td_error is not None
        self.td_error[np.arange(first, first + len(error)) % self.capacity, self.columns(group)] = error
        self.counters.publish_td_errors(group, first + len(error))

    def waive_td_error(self, group: int) -> None:
        """Store NaN for all missing TD errors of a group, so that readers do not wait for them any longer."""
        if self.td_error is not None:
            rows = self.counters.without_td_error(group)
            self.set_td_error(group, rows.start, np.full((len(rows), self.width), np.nan, np.float32))

    def cut(self, next_obs: Tree, group: int = 0) -> None:
        """End all episodes of a group as truncations, by appending a reset row with the observations `next_obs`."""
        blank = map_tree(lambda x: np.zeros((1, self.width, *x.shape[2:]), x.dtype), self.rows.replace(obs=None))
        obs = map_tree(lambda x: np.asarray(x)[None], next_obs)
        self.append(blank.replace(obs=obs, discount=np.ones_like(blank.discount)), next_obs, group)

    def abandon(self, group: int) -> None:
        """Turn the rows that a lost writer has begun but not completed into reset rows, at which n-step returns end.

        Older rows whose places the begun rows have taken can no longer be drawn. Call this method inside
        `counters.takeover`.
        """
        begun, columns = self.counters.begun_rows(group), self.columns(group)
        start, end = begun.start, begun.stop
        seen = map_tree(lambda x: x[start % self.capacity, columns].copy(), self.rows.obs)  # obs after the newest row
        self.rows.obs[end % self.capacity, columns] = seen  # the observation after the begun rows
        for places, _ in unbroken(max(start, end - self.capacity + 1), end, self.capacity):
            for _, array in leaves(self.rows.replace(obs=None, discount=None)):
                array[places, columns] = 0
            self.rows.discount[places, columns] = 1
            self.rows.obs[places, columns] = seen
        self._mark_gap(columns)
        self.counters.publish(group, end)
        self.waive_td_error(group)

    def _write(self, places: slice, columns: slice, rows: Row) -> None:
        self.rows[places, columns] = rows

    def _write_obs(self, place: int, columns: slice, obs: Tree) -> None:
        self.rows.obs[place, columns] = obs

    def _mark_gap(self, columns: slice) -> None:
        """Record that the rows just before the next row are missing.

        A plain ring records nothing. Rings whose observations depend on earlier rows override this method.
        """

    # --- reading ---

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Return whether each row can still be drawn. If it can, a copy of it made before this call is intact."""
        return self.counters.is_stored(row, env)

    def is_real(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Return the mask of each stored row: True for real rows, False for reset rows."""
        found: NDArray[np.bool_] = self.rows.mask[row % self.capacity, env]
        return found

    def take(self, row: Index, env: Index) -> Row:
        """Return copies of the rows with numbers `row` of the envs `env`."""
        place = self.place(row, env)
        rest = map_tree(lambda x: x.take(place, 0), self.flat_rows.replace(obs=None))
        taken: Row = rest.replace(obs=self.obs(row, env))
        return taken

    def obs(self, row: Index, env: Index) -> Tree:
        """Return copies of observations of rows; row number `written` gives the observation after the newest row."""
        place = self.place(row, env)
        return map_tree(lambda x: x.take(place, 0), self.flat_rows.obs)

    def observed(self, group: int, rows: range) -> Iterator[tuple[Tree, NDArray[np.bool_]]]:
        """Yield views of the observations and masks [T, B] of the rows of a group with the numbers `rows`.

        Rows that continue at the start of the ring's memory are yielded in two parts, other rows in one.
        """
        for places, _ in unbroken(rows.start, rows.stop, self.capacity):
            yield self.rows.obs[places, self.columns(group)], self.rows.mask[places, self.columns(group)]

    def place(self, row: Index, env: Index) -> Index:
        """Return the indices of rows in `flat_rows`. Indexing with them is faster than with pairs of row and env."""
        place: Index = row % self.capacity * self.envs + env
        return place

    def n_steps(self, row: Index, env: Index, n: int, gamma: float, end: Index | None = None) -> NSteps:
        """Return n-step returns of real rows (rows with mask True).

        A return has fewer than n rewards if the episode or the written rows end earlier. `end` holds, for each row,
        the number of rows written to the row's group; None reads the current numbers.
        """
        reward, discount = np.zeros(len(row), np.float32), np.ones(len(row), np.float32)
        end = self.counters.published(env // self.width) if end is None else end
        at, goes_on = row, np.ones(len(row), bool)
        for _ in range(n):
            place = self.place(at, env)
            goes_on = goes_on & (at < end) & self.flat_rows.mask.take(place)
            reward += np.where(goes_on, discount * self.flat_rows.reward.take(place), 0)
            discount *= np.where(goes_on, np.float32(gamma) * self.flat_rows.discount.take(place), 1)
            at = at + goes_on
            goes_on = goes_on & (discount > 0)
        return NSteps(reward, discount, at)

    # --- saving (see ring_files.py) ---

    @property
    def memory(self) -> list[SharedArrays]:
        """All blocks of shared memory that the ring consists of."""
        return [self._memory]

    def layout(self) -> dict[str, int | str]:
        """Return the sizes, shapes and dtypes that a ring must have to load the files of this ring."""
        arrays = {name: self._memory[name] for name in self._names}
        sizes = {"capacity": self.capacity, "envs": self.envs, "groups": self.groups}
        return {**sizes, **{name: f"{array.dtype.str}{list(array.shape)}" for name, array in arrays.items()}}

    def span(self, group: int, first: int, last: int) -> Span:
        """Return the `Span` of rows `first` to `last - 1`; it has no frames, because rows hold whole observations."""
        return Span(group, first, last, np.zeros((0, 2), np.int64))

    def views(self, span: Span) -> list[NumpyArray]:
        """Return views of the memory of a span, with time as first axis; raise ValueError if the span is invalid."""
        rows = span.last - span.first
        if not (0 <= span.group < self.groups and span.first >= 0 and 0 <= rows < self.capacity):
            raise ValueError(f"rows {span.first} to {span.last} of group {span.group} have no place")
        columns, places = self.columns(span.group), unbroken(span.first, span.last, self.capacity)
        return [self._memory[name][place, columns] for name in self._names for place, _ in places]

    def get_tail(self) -> dict[str, object]:
        """Return copies of the data outside of rows: row counts, and the observation after each env's newest row."""
        place = np.repeat(self.written % self.capacity, self.width)
        seen = [x[place, np.arange(self.envs)] for _, x in leaves(self.rows.obs)]
        return {"written": self.written.copy(), "obs": seen}

    def set_tail(self, tail: Mapping[str, Any]) -> None:
        """Restore the result of `get_tail`, after all rows were restored; raise ValueError if it is not valid."""
        if (tail["written"] < 0).any():
            raise ValueError("rows cannot be fewer than none")
        place = np.repeat(tail["written"] % self.capacity, self.width)
        for (_, x), seen in zip(leaves(self.rows.obs), tail["obs"], strict=True):
            x[place, np.arange(self.envs)] = seen
        self.counters.reset(tail["written"])

    def clear(self) -> None:
        """Forget all rows."""
        self.counters.reset()

    def close(self) -> None:
        self._memory.close()


class RingIndex:
    """Access to the rows of a ring by keys [N, 2], which are pairs of row number and env, or by places [N].

    A place is an index into `flat_rows`: (row * envs + env) % (capacity * envs). Reading 256 scattered observations
    with np.take and places takes 16 us, a quarter of the time of x[row, env].
    """

    NONE: Index = np.zeros(0, np.int64)

    def __init__(self, ring: Ring, is_shared: bool = False) -> None:
        self.ring, self.rows = ring, ring.flat_rows
        self.is_shared = is_shared  # whether other processes may write to the ring at any time
        # These are arrays, because numpy would convert a Python number in every call, which takes 0.5 us.
        self._envs, self._num_places = np.array(ring.envs), np.array(ring.envs * ring.capacity)
        # Both flags are True for a plain Ring, which stores whole observations. They are False for a FrameRing, which
        # stores frames, and may overwrite frames before the rows that need them.
        self._stores_obs, self._loses_rows_only = type(ring).obs is Ring.obs, type(ring).is_stored is Ring.is_stored

    def place(self, key: Index) -> Index:
        place: Index = key[:, 0] * self._envs
        place += key[:, 1]
        place %= self._num_places
        return place

    def newest_keys(self, place: Index) -> tuple[Index, Index]:
        """Return the key of the newest row at each place, and the indices of keys whose rows cannot be drawn."""
        ring, counters = self.ring, self.ring.counters
        written = counters.published(place % ring.envs // ring.width) if ring.groups > 1 else counters.published(0)
        oldest = (written - ring.capacity) * ring.envs
        age = place - oldest
        age %= self._num_places
        key = self._key(age + oldest)
        # Of the last `capacity` rows of an env, a plain Ring lacks the oldest: its place holds the observation after
        # the newest row. If no other process writes, a check is needed only if such a row (age < envs) was drawn.
        # Using argmin takes a third of the time of min.
        is_quick = self._loses_rows_only and not self.is_shared
        return key, self.NONE if is_quick and age[age.argmin()] >= ring.envs else self.overwritten(key)

    def at(self, share: NDArray[np.float64]) -> tuple[Index, Index]:
        """Return places and keys of rows; a `share` in [0, 1) is a relative position among all stored rows."""
        ring, counters = self.ring, self.ring.counters
        written = counters.published(0)
        stored = written - counters.oldest(0)
        if stored == 0 and not counters.count:
            raise NothingToDraw("there is nothing to draw: no row was added yet.")
        if ring.groups > 1:
            key = np.stack(counters.locate((share * counters.count).astype(np.int64)), -1)
            return self.place(key), key
        number = (share * (stored * ring.envs)).astype(np.int64)  # this is 10 us faster than `locate`
        number += (written - stored) * ring.envs
        return number % self._num_places, self._key(number)

    def _key(self, number: Index) -> Index:
        """Return the keys of rows, where `number` is row * envs + env. Each column of the keys is contiguous."""
        key = np.empty((2, len(number)), np.int64)
        np.divmod(number, self._envs, key[0], key[1])
        return key.T

    def overwritten(self, key: Index) -> Index:
        """Return the indices of the keys whose rows can no longer be drawn."""
        return np.flatnonzero(~self.ring.is_stored(key[:, 0], key[:, 1]))

    def not_drawable(self, place: Index, key: Index) -> Index:
        """Return the indices of the keys whose rows are reset rows or can no longer be drawn."""
        is_real = self.rows.mask.take(place)
        if self.is_shared or not self._loses_rows_only:
            is_real &= self.ring.is_stored(key[:, 0], key[:, 1])
        return np.flatnonzero(~is_real)

    def count_torn(self, key: Index) -> int:
        """Return how many rows of a drawn batch were overwritten while they were copied, or are reset rows."""
        # The mask is read before the call of `is_stored`. If read later, it might be the mask of a newer row.
        is_real = self.rows.mask.take(self.place(key))
        # A key refers to the first row of an n-step return: if that row is still stored, so are the rows after it.
        is_whole = self.ring.is_stored(key[:, 0], key[:, 1]) & is_real
        return len(key) - int(np.count_nonzero(is_whole))

    def obs(self, place: Index, row: Index, env: Index) -> Tree:
        if self._stores_obs:
            return take(self.rows.obs, place)
        return map_tree(torch.from_numpy, self.ring.obs(row, env))


def take(rows: Tree, place: Index) -> Tree:
    """Return copies of rows as tensors; places beyond the end of the ring's memory continue at its start."""
    if type(rows) is np.ndarray:
        return torch.from_numpy(rows.take(place, 0, None, "wrap"))
    return map_tree(lambda x: torch.from_numpy(x.take(place, 0, None, "wrap")), rows)


def unbroken(first: int, last: int, room: int) -> list[tuple[slice, int]]:
    """Split rows `first` to `last - 1` where a ring of `room` rows wraps around.

    Return for each part the slice of its places in the ring, and the number of its first row.
    """
    turn = (first // room + 1) * room
    parts = [(first, last)] if last <= turn else [(first, turn), (turn, last)]
    return [(slice(a % room, a % room + b - a), a) for a, b in parts]
