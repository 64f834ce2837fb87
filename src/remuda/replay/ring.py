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

Envs may be appended in groups, each at its own pace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remuda.data import ArrayTuple, SharedArrays, leaves, map_tree

Index = NDArray[np.int64]


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


class Ring:
    """Rows [capacity, B]; of each group of envs all but one can be drawn."""

    def __init__(self, example: Row, capacity: int, envs: int, groups: int = 1) -> None:
        """`example` is a row of one env, as arrays of its shape and dtype."""
        self.capacity, self.envs, self.groups, self.width = capacity, envs, groups, envs // groups
        self._names = [path for path, _ in leaves(example)]
        layout = {path: ((capacity, envs, *array.shape), str(array.dtype)) for path, array in leaves(example)}
        self._memory = SharedArrays({**layout, "written": ((groups,), "int64")})
        names = iter(self._names)
        self.rows = map_tree(lambda _: self._memory[next(names)], example)
        self.written = self._memory["written"]  # rows that each group was ever given

    @property
    def stored(self) -> Index:
        """Rows of each group that can be drawn."""
        found: Index = np.minimum(self.written, self.capacity - 1)
        return found

    @property
    def count(self) -> int:
        """Of all envs, reset rows included."""
        return int(self.stored.sum()) * self.width

    def append(self, rows: Row, last_obs: Any, group: int = 0) -> None:
        """[T, B of the group] after what is there; of more than fit only the newest are kept."""
        T = len(rows.mask)
        start = int(self.written[group])
        skipped = max(0, T - self.capacity + 1)
        columns = slice(group * self.width, (group + 1) * self.width)
        if skipped:
            self._leave_out(columns)
        for first, last in self._pieces(start + skipped, start + T):
            place = first % self.capacity
            self._write(slice(place, place + last - first), columns, rows[first - start : last - start])
        self._write_obs((start + T) % self.capacity, columns, last_obs)
        self.written[group] = start + T

    def cut(self, last_obs: Any, group: int = 0) -> None:
        """All episodes of a group end here, neither terminated nor continued: what comes next is another's."""
        blank = map_tree(lambda x: np.zeros((1, self.width, *x.shape[2:]), x.dtype), self.rows.replace(obs=None))
        obs = map_tree(lambda x: np.asarray(x)[None], last_obs)
        self.append(blank.replace(obs=obs, discount=np.ones_like(blank.discount)), last_obs, group)

    def _pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """Rows first to last without the jump from the ring's end to its beginning."""
        turn = (first // self.capacity + 1) * self.capacity
        return [(first, last)] if last <= turn else [(first, turn), (turn, last)]

    def _write(self, places: slice, columns: slice, rows: Row) -> None:
        self.rows[places, columns] = rows

    def _write_obs(self, place: int, columns: slice, obs: Any) -> None:
        self.rows.obs[place, columns] = obs

    def _leave_out(self, columns: slice) -> None:
        """Rows were too many to be kept: what is written next does not follow what is there."""

    def at(self, index: Index) -> tuple[Index, Index]:
        """Row and env of the index-th of `count` rows, from the oldest."""
        if self.groups == 1:
            row, env = np.divmod(index, self.envs)
            return row + self.oldest(0), env
        ends = (self.stored * self.width).cumsum()
        group = ends.searchsorted(index, "right")
        row, env = np.divmod(index - (ends[group] - self.stored[group] * self.width), self.width)
        return row + self.written[group] - self.stored[group], env + group * self.width

    def oldest(self, group: int) -> int:
        """The first row of a group that can be drawn."""
        return int(self.written[group] - self.stored[group])

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Whether a row can still be drawn."""
        group = env // self.width
        found: NDArray[np.bool_] = (row < self.written[group]) & (row >= self.written[group] - self.stored[group])
        return found

    def is_real(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Of stored rows: whether an action was taken there."""
        found: NDArray[np.bool_] = self.rows.mask[row % self.capacity, env]
        return found

    def take(self, row: Index, env: Index) -> Row:
        """These rows, copied."""
        place = row % self.capacity
        rest = map_tree(lambda x: x[place, env], self.rows.replace(obs=None))
        taken: Row = rest.replace(obs=self.obs(row, env))
        return taken

    def obs(self, row: Index, env: Index) -> Any:
        """What was seen in these rows, or after the newest."""
        place = row % self.capacity
        return map_tree(lambda x: x[place, env], self.rows.obs)

    def n_steps(self, row: Index, env: Index, n: int, gamma: float) -> NSteps:
        """From real rows on: over fewer than n rewards where the episode ends, or where the newest row is passed."""
        reward, discount = np.zeros(len(row), np.float32), np.ones(len(row), np.float32)
        end = self.written[env // self.width]
        at, goes_on = row, np.ones(len(row), bool)
        for _ in range(n):
            place = at % self.capacity
            goes_on = goes_on & (at < end) & self.rows.mask[place, env]
            reward += np.where(goes_on, discount * self.rows.reward[place, env], 0)
            discount *= np.where(goes_on, np.float32(gamma) * self.rows.discount[place, env], 1)
            at = at + goes_on
            goes_on = goes_on & (discount > 0)
        return NSteps(reward, discount, at)

    def close(self) -> None:
        self._memory.close()
