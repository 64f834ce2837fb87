"""All counters of a replay: what writers have written, what a reader may read, and how many rows are due to be drawn.

The rows of a group of envs are numbered 0, 1, 2, ... in the order in which they are appended, and a row keeps its
number. The number of rows that were ever written to a group is therefore also the number of the group's next row.

    GroupCounters    how many items (such as recurrent states) the writer of each group has stored
    RowCounters      how many rows the writer of each group has begun and completed; flags that make all writers wait
    ReplayCounters   how many steps and draws a reader has counted, and how many rows are due to be drawn

Processes share no locks, because a lock would stay locked if its holder died. A group's counters are changed by its
writer (a sampler) or, once the writer has died, by the reader (the learner). Memory fences keep accesses in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from remuda.data import Fence, SharedArrays
from remuda.errors import WorkerError

Index = NDArray[np.int64]
Layout = dict[str, tuple[tuple[int, ...], str]]
PAUSE_TIMEOUT = 30.0  # seconds that a reader waits for writers to stop before it raises an error
POLL_SECONDS = 0.001
NO_LIMIT = int(np.iinfo(np.int64).max)


class GroupCounters:
    """Counters of items (rows or recurrent states), one entry per group. Each group has a single writer.

    - `written` counts complete items. A writer stores an item, issues a memory fence, and then counts the item. A
      reader calls `published`, which reads the counter and then issues a fence.
    - `td_errors` counts the items whose TD error is stored; an unknown error is stored as NaN. If writers compute TD
      errors (`has_td_error`), a reader uses only these items, whose initial priorities it derives from the errors.
    """

    def __init__(self, written: Index, td_errors: Index, has_td_error: bool) -> None:
        self.written, self.td_errors, self.has_td_error = written, td_errors, has_td_error
        self.fence: Callable[[], None] = Fence()

    @overload
    def published(self, group: int) -> int: ...
    @overload
    def published(self, group: Index) -> Index: ...
    def published(self, group: int | Index) -> int | Index:
        """Return how many items of a group, or of each of several groups, are complete and may be read."""
        # Without the fence, processors other than x86 may read an item before the counter, and get stale data.
        written = self.written[group]
        self.fence()
        return int(written) if isinstance(group, int) else written

    def usable(self, group: int) -> int:
        """Return how many items of a group a reader may use: those with a TD error if `has_td_error`, else all."""
        count = int(self.td_errors[group] if self.has_td_error else self.written[group])
        self.fence()
        return count

    def publish(self, group: int, count: int) -> None:
        """Set a group's number of written items to `count`; the items must have been stored before."""
        self.fence()
        self.written[group] = count

    def publish_td_errors(self, group: int, count: int) -> None:
        """Set a group's number of items with a TD error to `count`; the errors must have been stored before."""
        self.fence()
        self.td_errors[group] = count

    def without_td_error(self, group: int) -> range:
        """Return the numbers of a group's written items for which no TD error is stored."""
        return range(int(self.td_errors[group]), int(self.written[group]))


class RowCounters(GroupCounters):
    """Counters of the rows of each group of a ring, in memory that all processes share.

    The writer of a group changes four counters. If the writer dies, the reader changes them instead (`takeover`):

    - `begun`: number of rows that the writer has announced. The writer increases it before it stores the rows, so a
      reader can tell that row `begun - capacity` and all earlier rows may have been overwritten.
    - `written` and `td_errors`: see `GroupCounters`.
    - `real`: number of real steps (mask True), over all envs of the group, written since this memory was created.

    The reader sets `is_paused` and `limit`: writers wait while `is_paused` is 1, or while the sum of `real` over all
    groups is at least `limit`.

    At any moment, in every process, and for every group:

    - `td_errors <= written <= begun`, and `written == begun` between two appends;
    - the rows from `oldest` = max(0, begun - capacity + 1) to `written - 1` are stored and intact. One place of the
      ring holds no row, because it holds the observation after the newest row;
    - inside `pause_writers`, no process stores rows or changes `written`, except through `takeover` in the same
      thread. A writer that is about to wait may increase `begun` for a moment before it restores the old value.
    """

    def __init__(self, memory: SharedArrays, capacity: int, width: int, has_td_error: bool, is_new: bool) -> None:
        """Use the arrays in `memory` that the method `layout` describes. Each group has `width` envs."""
        super().__init__(memory["written"], memory["td_errors"], has_td_error)
        self.capacity, self.width, self.groups = capacity, width, len(self.written)
        self.begun, self.real, self.limit = memory["begun"], memory["real"], memory["limit"]
        self._is_paused = memory["is_paused"]
        self.pause_timeout = PAUSE_TIMEOUT
        self.while_paused: Callable[[], object] = lambda: None  # called repeatedly by a writer that is paused
        # Held during a pause and during a takeover, so that a takeover in another thread waits for the pause to end.
        self._pause_lock = threading.RLock()
        self._ignores_pause = False
        if is_new:
            self.limit[0] = NO_LIMIT

    @staticmethod
    def layout(groups: int) -> Layout:
        per_group = dict.fromkeys(("written", "begun", "real", "td_errors"), ((groups,), "int64"))
        return {**per_group, "is_paused": ((1,), "int64"), "limit": ((1,), "int64")}

    # --- what is stored ---

    @property
    def stored(self) -> Index:
        """For each group, the number of intact rows of each of its envs, as an array [groups]."""
        found: Index = np.maximum(self.written - np.maximum(self.begun - self.capacity + 1, 0), 0)
        return found

    @property
    def count(self) -> int:
        """Number of stored rows of all envs, reset rows included."""
        return int(self.stored.sum()) * self.width

    @property
    def total_real(self) -> int:
        return int(self.real.sum())

    def oldest(self, group: int) -> int:
        """Return the row number of a group's oldest intact row."""
        return max(0, int(self.begun[group]) - self.capacity + 1)

    def oldest_written(self, group: int) -> int:
        """Return the number of a group's oldest row during a pause; ignore rows that are only announced."""
        return max(0, int(self.written[group]) - self.capacity + 1)

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        """Return whether each row is still stored. If it is, a copy of the row made before this call is intact."""
        self.fence()
        group = env // self.width
        found: NDArray[np.bool_] = (row < self.written[group]) & (row > self.begun[group] - self.capacity)
        self.fence()
        return found

    def locate(self, index: Index) -> tuple[Index, Index]:
        """Return row numbers and envs at positions `index` among all stored rows, ordered by group, row and env."""
        if self.groups == 1:
            row, env = np.divmod(index, self.width)
            return row + self.oldest(0), env
        stored, written = self.stored, self.written.copy()  # copies, because writers may change the counters
        self.fence()  # the counters must be read before the rows; see `published`
        ends = (stored * self.width).cumsum()
        index = np.minimum(index, ends[-1] - 1)  # rows may have been overwritten since the caller read `count`
        group = ends.searchsorted(index, "right")
        row, env = np.divmod(index - (ends[group] - stored[group] * self.width), self.width)
        return row + written[group] - stored[group], env + group * self.width

    def without_td_error(self, group: int) -> range:
        return range(max(int(self.td_errors[group]), self.oldest(group)), int(self.written[group]))

    # --- for writers ---

    def may_write(self) -> bool:
        """Return whether the total of real steps is below the reader's `limit`, so that writers may append rows."""
        return self.total_real < int(self.limit[0])

    def begin(self, group: int, rows: int) -> int:
        """Wait while writers are paused, announce `rows` rows of a group, and return the first row's number."""
        start = int(self.written[group])
        end = start + rows
        if self._ignores_pause:
            self.begun[group] = end
            self.fence()
            return start
        while True:
            while self._is_paused[0]:
                self.while_paused()
                time.sleep(POLL_SECONDS)
            self.begun[group] = end
            self.fence()  # the announcement must be visible before `_is_paused` is read again
            if not self._is_paused[0]:
                return start
            self.begun[group] = start

    def finish(self, group: int, end: int, real: int) -> None:
        """Count all announced rows before row number `end` as written, and their `real` real steps over all envs."""
        self.real[group] += real
        self.publish(group, end)

    def append_each(self, env: Index, mask: NDArray[np.bool_], write: Callable[[Index], None]) -> Index:
        """Announce one row for each env in `env`, store them with `write(numbers)`, and return their row numbers.

        Every env must be a group of its own, and this process must be the only writer.
        """
        row: Index = self.written[env]
        self.begun[env] = row + 1
        write(row)
        self.real[env] += mask
        self.written[env] = row + 1
        return row

    # --- for the reader ---

    @contextmanager
    def pause_writers(self) -> Iterator[None]:
        """Suspend all writers: they complete the rows that they have begun, and wait until the context ends."""
        self._is_paused[0] = 1
        try:
            deadline = time.monotonic() + self.pause_timeout
            self.fence()
            while (self.begun != self.written).any():
                if time.monotonic() > deadline:
                    groups = np.flatnonzero(self.begun != self.written).tolist()
                    raise WorkerError(
                        f"writers of groups {groups} of the replay did not stop within {self.pause_timeout:g} s: "
                        "check whether they hang, or whether the machine swaps."
                    )
                time.sleep(POLL_SECONDS)
            with self._pause_lock:  # not held during the wait above, in which `takeover` may need the lock
                self.fence()
                yield
        finally:
            self.fence()
            self._is_paused[0] = 0

    @contextmanager
    def takeover(self) -> Iterator[None]:
        """Let this process write in place of dead writers, even during a pause of all writers.

        `pause_writers` waits until all begun rows are complete, and only a takeover completes rows that a dead writer
        has begun. While a takeover lasts, no other thread of this process enters the body of `pause_writers`.
        """
        with self._pause_lock:
            self._ignores_pause = True
            try:
                yield
            finally:
                self._ignores_pause = False

    def begun_rows(self, group: int) -> range:
        """Return the row numbers that the writer of a group has announced but not completed."""
        return range(self.published(group), int(self.begun[group]))

    def reset(self, written: Index | int = 0) -> None:
        """Set the number of rows that were ever written to each group, and treat all these rows as complete."""
        self.written[:] = self.begun[:] = self.td_errors[:] = written


class ReplayCounters:
    """Counters of one reader of a ring: steps, draws, and the number of rows that are due to be drawn.

    - `steps`: number of real steps that were counted over the whole run.
    - `credit`: number of rows that are due to be drawn. Each real step after the first `warm_up` steps earns `ratio`
      rows, if anything can be drawn when the step is counted. Each batch costs `rows_per_batch` rows. With a ratio of
      None, batches are always due after the warm-up.
    - `draws`: number of draws so far, which determines the random numbers of the next draw.
    - `wasted_draws`: number of draws that had to be repeated, because some of their rows or sequences were
      overwritten while they were copied. `torn_rows` is the number of these rows or sequences.
    - `prioritized`: number of rows of each group that have a priority.
    - `observed`: number of rows of each group that `take_unobserved` has returned, for observation statistics.

    Steps and credit are provisional until `commit`. A checkpoint in the middle of a round stores the rows of that
    round as not counted, and the resumed run counts them. With a ratio and `max_lead` above 0, writers wait once they
    are `max_lead` steps ahead of the draws.
    """

    def __init__(
        self, rows: RowCounters, ratio: float | None, warm_up: int, rows_per_batch: int, max_lead: int
    ) -> None:
        self.rows, self.ratio, self.warm_up, self.max_lead = rows, ratio, warm_up, max_lead
        self.rows_per_batch = rows_per_batch
        self.steps, self.credit, self.draws, self.wasted_draws, self.torn_rows = 0, 0.0, 0, 0, 0
        self._new_steps, self._new_credit = 0, 0.0  # steps and credit since the last `commit`
        self.start_here()

    def start_here(self) -> None:
        """Treat all rows written so far as processed: steps counted, observations passed on, and priorities set."""
        self._counted = self.rows.total_real
        self.observed, self.prioritized = self.rows.written.copy(), self.rows.written.copy()

    def uncounted(self) -> int:
        """Return the number of real steps that were written but not counted yet."""
        return self.rows.total_real - self._counted

    def add_steps(self, real: int, can_draw: bool) -> None:
        """Count `real` real steps. They earn credit only after the warm-up, and only if `can_draw` is True."""
        if self.ratio is not None and can_draw:
            self.credit += self.ratio * min(real, max(0, self.steps + real - self.warm_up))
        self.steps += real
        self._counted += real

    def add_written_steps(self, can_draw: Callable[[], bool]) -> int:
        """Count the real steps that other processes have written since the last call, and return their number."""
        real, credit = self.uncounted(), self.credit
        self.add_steps(real, can_draw())
        self._new_steps += real
        self._new_credit += self.credit - credit
        return real

    def commit(self) -> None:
        """Make the steps and the credit counted so far final, so that checkpoints include them."""
        self._new_steps, self._new_credit = 0, 0.0

    @property
    def is_throttled(self) -> bool:
        """Whether writers have to wait when the learner falls too far behind."""
        return bool(self.max_lead) and self.ratio is not None

    def set_limit(self, left: int | None, can_draw: Callable[[], bool]) -> None:
        """Let writers add `left` steps to those counted so far (None: any number), or fewer if they are throttled."""
        limit = NO_LIMIT if left is None else self._counted + max(0, left)
        if self.is_throttled and can_draw():  # writers are not throttled while nothing can be drawn
            assert self.ratio is not None
            unlearned = int(min(self.credit / self.ratio, NO_LIMIT // 4))
            limit = min(limit, self._counted - unlearned + self.max_lead)
        self.rows.limit[0] = limit

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make `may_write` return False until the context ends. Rollouts already begun are still appended."""
        before, self.rows.limit[0] = int(self.rows.limit[0]), 0
        try:
            yield
        finally:
            self.rows.limit[0] = before

    @property
    def is_due(self) -> bool:
        """Whether there is enough credit for a batch; with a ratio of None, whether the warm-up is over."""
        return self.steps > self.warm_up if self.ratio is None else self.credit >= self.rows_per_batch

    @property
    def num_due(self) -> int:
        """Number of batches for which there is enough credit; the ratio must not be None."""
        count, credit = 0, self.credit
        while credit >= self.rows_per_batch:  # subtracts as `spend` does, because a division would round differently
            count, credit = count + 1, credit - self.rows_per_batch
        return count

    def spend(self) -> None:
        """Subtract one batch from the credit."""
        if self.ratio is not None:
            self.credit -= self.rows_per_batch

    def count_draw(self) -> None:
        self.draws += 1

    def waste_draw(self, torn: int) -> None:
        """Count a draw that has to be repeated, because `torn` of its rows or sequences were overwritten."""
        self.torn_rows += torn
        self.wasted_draws += 1

    def metrics(self) -> dict[str, float]:
        """Return the number of drawn rows per real step after the warm-up, and `torn_rows`."""
        drawn = (self.draws - self.wasted_draws) * self.rows_per_batch
        return {"replay/ratio": drawn / max(1, self.steps - self.warm_up), "replay/redrawn": float(self.torn_rows)}

    def take_unobserved(self, group: int) -> range:
        """Return the row numbers of a group's rows that were written since the last call and are still stored."""
        first, end = max(int(self.observed[group]), self.rows.oldest(group)), self.rows.published(group)
        self.observed[group] = end
        return range(first, end)

    def without_priority(self, group: int) -> range:
        """Return the row numbers of a group's usable rows that have no priority yet."""
        end = self.rows.usable(group)
        return range(max(int(self.prioritized[group]), self.rows.oldest(group)), end)

    def mark_prioritized(self, group: int | slice, end: int | Index) -> None:
        """Record that all rows of a group before row number `end` have a priority."""
        self.prioritized[group] = end

    # --- checkpoints; the keys of the state are part of the file format ---

    def get_state(self) -> dict[str, object]:
        return {
            "draws": self.draws,
            "again": self.wasted_draws,
            "redrawn": self.torn_rows,
            "steps": self.steps - self._new_steps,
            "credit": self.credit - self._new_credit,
            "unseen": self.uncounted() + self._new_steps,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state; before this, the caller restores the rows saved with the state and calls `start_here`."""
        self.draws, self.steps, self.credit = state["draws"], state["steps"], state["credit"]
        self.wasted_draws, self.torn_rows = state["again"], state["redrawn"]
        self._counted -= state["unseen"]
        self.commit()
