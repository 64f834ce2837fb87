"""The base class of replays over a ring: it decides when batches are due, counts rows, and saves checkpoints."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remuda.data import Batch, Rollout, Steps, map_tree
from remuda.errors import ConfigError
from remuda.replay.counters import POLL_SECONDS, ReplayCounters
from remuda.replay.ring import NothingToDraw, Ring
from remuda.replay.ring_files import RingFiles

# Maximum number of attempts to draw rows that are real (not reset rows) and intact. Even if only one row in a hundred
# qualifies, this number suffices for 99% of all batches of 256 rows.
MAX_ATTEMPTS = 1000
EAGER_ATTEMPTS = 10  # number of attempts after which `draw` sleeps before each further attempt


class RingReplay(ABC):
    """Base class of replays whose rows are in a ring; subclasses define how to draw and what to save besides rows.

    Every real step (row with mask True) after the first `warm_up` steps earns `ratio` rows to draw. If `ratio` is
    None, a batch is due at any time after the warm-up.

    With `is_shared`, rows are appended by other processes, and `sync` counts these rows. A batch is drawn again if
    some of its rows were overwritten while they were copied. A call of `batches` yields at most
    `max_batches_per_round` batches, so that weights are published between rounds. With a ratio and `max_lead` above
    0, writers wait once they are `max_lead` steps ahead of the draws.
    """

    gamma: float
    needs_saving = True
    part = 0  # index of the part of the run whose rows this replay stores (remuda.parts)
    reports_returns = False  # whether the run's first batch carries the `return_range` of all stored rows

    def __init__(
        self,
        ring: Ring,
        batch_size: int,
        rows_per_batch: int,  # number of rows that are learned from in each batch
        ratio: float | None,
        warm_up: int,
        seed: int,
        is_shared: bool,
        max_batches_per_round: int | None,
        max_lead: int,
    ) -> None:
        self.ring, self.batch_size, self.seed, self.is_shared = ring, batch_size, seed, is_shared
        self.max_batches_per_round = max_batches_per_round
        self.counters = ReplayCounters(ring.counters, ratio, warm_up, rows_per_batch, max_lead)
        self._files: RingFiles | None = None
        if is_shared:
            ring.counters.limit[0] = 0  # writers wait until the first `sync`

    @property
    def fds(self) -> list[int]:
        """File descriptors with which another process can write to this replay."""
        return self.ring.fds

    @property
    def steps(self) -> int:
        """Number of real steps that were counted so far."""
        return self.counters.steps

    @abstractmethod
    def _sync_rows(self) -> None:
        """Update the priorities or the index of sequences for rows that were appended since the last call."""

    @abstractmethod
    def _draw_once(self) -> Batch:
        """Draw a batch and copy its rows."""

    @abstractmethod
    def _count_torn(self, batch: Batch) -> int:
        """Return how many rows or sequences of a batch were overwritten while they were copied."""

    @abstractmethod
    def can_draw(self) -> bool: ...

    @abstractmethod
    def get_state(self) -> dict[str, object]:
        """Return the state of the replay, without the rows of the ring."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state, so that later draws are those of the saved replay. Restore the rows of the ring first."""

    # --- counting steps, and drawing the batches that are due ---

    def add(self, batch: Batch) -> None:
        self.count_steps(*self.append(batch))

    @abstractmethod
    def append(self, batch: Batch) -> tuple[int, bool]:
        """Store rows; return how many of them are real steps, and whether there is anything to draw."""

    def count_steps(self, steps: int, can_draw: bool) -> None:
        """Count `steps` real steps, which were stored in this replay or in the replays of other parts of the run."""
        self.counters.add_steps(steps, can_draw)

    @property
    def num_due(self) -> int:
        """Number of batches that are due now, the same in all parts of a run; `ratio` must not be None."""
        return self.counters.num_due

    def set_part(self, part: int, parts: int) -> None:
        """Let this replay store part number `part` of a run with `parts` parts; call this before the first draw.

        Draws then use random numbers of this part. Steps of all parts earn credit, and all parts draw at the same
        time, so each batch of this replay costs `parts` times as much credit.
        """
        self.counters.rows_per_batch *= parts
        self.part = part

    def sync(self, left: int | None = None) -> int:
        """Count the rows that other processes have appended, and return how many of them are real steps.

        `left` is the number of real steps that the run still needs, including those that this call returns. Writers
        wait once they have written that many steps. None sets no such limit.
        """
        self._sync_rows()
        new = self.counters.add_written_steps(self.can_draw)
        self.counters.set_limit(None if left is None else left - new, self.can_draw)
        return new

    def commit(self) -> None:
        """End a round. Checkpoints that are saved from now on include the steps that `sync` counted in the round.

        A checkpoint in the middle of a round stores the round's rows as not counted, and the resumed run counts them.
        """
        self.counters.commit()

    @property
    def is_throttled(self) -> bool:
        """Whether writers have to wait when the learner falls too far behind."""
        return self.counters.is_throttled

    def paused(self) -> AbstractContextManager[None]:
        """Make writers wait until the context ends. Rollouts already begun are still appended."""
        return self.counters.paused()

    @property
    def is_due(self) -> bool:
        """Whether `batches` would yield a batch."""
        return self.counters.is_due and self.can_draw()

    def batches(self) -> Iterator[Batch]:
        for _ in itertools.count() if self.max_batches_per_round is None else range(self.max_batches_per_round):
            if not self.is_due:
                return
            is_first = self.reports_returns and self.counters.draws == 0
            returns = return_range(self.ring, self.gamma) if is_first else None
            try:
                batch = self.draw()
            except NothingToDraw:
                if not self.is_shared:
                    raise
                return  # all rows that could be drawn were overwritten after the check of `is_due`
            self.counters.spend()
            yield batch if returns is None else replace(batch, returns=returns)

    def draw(self) -> Batch:
        """Draw one batch, whether it is due or not."""
        batch = self._draw_once()
        for attempt in range(MAX_ATTEMPTS if self.is_shared else 0):
            torn = self._count_torn(batch)
            if not torn:
                return batch
            if attempt > EAGER_ATTEMPTS:
                time.sleep(POLL_SECONDS)  # lets a writer that was preempted complete its rows
            self.counters.waste_draw(torn)
            self._sync_rows()
            batch = self._draw_once()
        if self.is_shared:
            raise ConfigError(
                f"rows were overwritten while they were read, {MAX_ATTEMPTS} times in a row: raise replay.capacity."
            )
        return batch

    def metrics(self) -> dict[str, float]:
        return self.counters.metrics()

    def new_observations(self) -> Iterator[Rollout]:
        """Yield rollouts that hold only the observations and masks of rows appended since the last call."""
        for group in range(self.ring.groups):
            rows = self.counters.take_unobserved(group)
            for parts in self.ring.observed(group, rows) if rows else ():
                obs, mask = map_tree(torch.from_numpy, parts)
                yield Rollout(Steps(obs, None, None, None, mask, None, None), None)

    # --- ending episodes whose envs or writers are replaced ---

    def cut(self) -> None:
        """End all episodes as truncations, because the envs start new episodes. A second call changes nothing."""
        for group in range(self.ring.groups):
            self._cut_group(group)
        self._sync_rows()

    def _cut_group(self, group: int) -> None:
        columns, written = self.ring.columns(group), self.ring.counters.published(group)
        env = np.arange(columns.start, columns.stop)
        if written and self.ring.is_real(np.full(len(env), written - 1), env).any():
            self.ring.cut(self.ring.obs(np.full(len(env), written), env), group)

    def on_writer_lost(self, group: int) -> int:
        """Turn a dead writer's begun rows into reset rows, end its episodes, and return the group's next row number.

        Any thread may call this, because it changes only shared memory (inside `takeover`), and no other state.
        """
        with self.ring.counters.takeover():
            self.ring.abandon(group)
            self._cut_group(group)
        return int(self.ring.written[group])

    # --- checkpoints ---

    def save(self, directory: Path) -> dict[str, object]:
        """Write all rows that no file holds yet; return the names of all files and the state besides rows."""
        if self._files is None or self._files.directory != directory:
            self._files = RingFiles(directory)
        with self.ring.counters.pause_writers():
            rows = self._files.write(self.ring)
            self._sync_rows()
            return {"rows": rows, "files": list(self._files.files), "replay": self.get_state()}

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        self._files = RingFiles(directory)
        self._files.read(self.ring, state["rows"])
        self.counters.start_here()
        self.set_state(state["replay"])

    def close(self) -> None:
        self.ring.close()


def return_range(ring: Ring, gamma: float) -> tuple[float, float, float]:
    """Return the smallest and largest discounted return of all stored real rows, and the return of the mean reward.

    The range always includes 0. Returns end with the episode or with the newest row, without a bootstrap. The return
    of the mean reward is the discounted sum of this reward over infinitely many steps, or 0 if gamma is 1.
    """
    low, high, total, count = 0.0, 0.0, 0.0, 0
    for group in range(ring.groups):
        columns, first, end = ring.columns(group), ring.counters.oldest(group), ring.counters.published(group)
        if first >= end:
            continue
        places = np.arange(first, end) % ring.capacity
        reward, discount, mask = (x[places, columns] for x in (ring.rows.reward, ring.rows.discount, ring.rows.mask))
        following = np.zeros(reward.shape[1])
        for t in reversed(range(len(reward))):
            following = np.where(mask[t], reward[t] + gamma * discount[t] * following, 0.0)
            low, high = min(low, float(following.min())), max(high, float(following.max()))
        total, count = total + float(reward[mask].sum(dtype=np.float64)), count + int(np.count_nonzero(mask))
    steady = total / max(1, count) / (1 - gamma) if gamma < 1 else 0.0
    return low, high, steady
