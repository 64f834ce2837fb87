"""What replays over a ring have in common: what is due, rows of other processes, cutting, saving and loading."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remuda.data import Batch, Rollout, Steps, map_tree
from remuda.errors import ConfigError
from remuda.replay.returns import return_range
from remuda.replay.ring import LOOK_SECONDS, NO_LIMIT, Index, NothingToDraw, Ring
from remuda.replay.ring_files import RingFiles

MOST_ATTEMPTS = (
    1000  # to draw rows that are real and whole; if one in a hundred is, 256 of them fail once in 100 cases
)

HASTY_ATTEMPTS = 10


class RingReplay(ABC):
    """Base of replays whose rows are in a ring; each says how it draws, and what else it must save.

    Real steps after the warm-up earn `ratio` learned rows each. With `is_shared`, rows are appended by other
    processes: `follow` takes note of them, a batch some of whose rows were overwritten while it was put together is
    drawn again, and `batches` gives `most_per_round` at a time, so that weights are published in between. A ratio of
    None makes updates always due; `lead` is by how many steps writers may be ahead of what is learned from them,
    0 by any number.
    """

    rows_per_batch: int  # that are learned from
    gamma: float
    shows_returns = False  # whether the run's first batch carries the range of discounted returns stored by then

    def __init__(
        self,
        ring: Ring,
        batch_size: int,
        ratio: float | None,
        warm_up: int,
        seed: int,
        is_shared: bool,
        most_per_round: int | None,
        lead: int,
    ) -> None:
        self.ring, self.batch_size, self.ratio, self.warm_up, self.seed = ring, batch_size, ratio, warm_up, seed
        self.is_shared, self.most_per_round, self.lead = is_shared, most_per_round, lead
        self.draws, self.steps, self.credit, self.redrawn = 0, 0, 0.0, 0
        self._again = 0  # draws of which nothing came
        self._unsettled, self._earned = 0, 0.0  # followed in a round that is not over; what they are owed
        self._files: RingFiles | None = None
        if is_shared:
            ring.limit[0] = 0  # nobody writes before it is said how much is wanted: `follow`
        self._begin_here()

    def _begin_here(self) -> None:
        """What is in the ring now is known."""
        self._real, self._shown = int(self.ring.real.sum()), self.ring.written.copy()

    @property
    def fds(self) -> list[int]:
        """With these another process can write to it."""
        return self.ring.fds

    @abstractmethod
    def _take_note(self) -> None:
        """Of what was appended since the last time: of all that is kept beside rows."""

    @abstractmethod
    def _gather(self) -> Batch:
        """Draw and copy."""

    @abstractmethod
    def _torn(self, batch: Batch) -> int:
        """How many of its rows or sequences were not whole while they were copied."""

    @abstractmethod
    def can_draw(self) -> bool: ...

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """All but the ring's rows."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then."""

    # --- what is due ---

    def sync(self, left: int | None = None) -> int:
        """Take note of what others have appended; returns how many of these rows were real.

        `left` is how many real rows are still wanted, of those that were not counted before this call: once they are
        there writers wait. None: any number.
        """
        self._take_note()
        fresh, credit = int(self.ring.real.sum()) - self._real, self.credit
        self._owe(fresh)
        self._unsettled += fresh
        self._earned += self.credit - credit
        limit = NO_LIMIT if left is None else self._real + max(0, left - fresh)
        if self.is_throttled and self.can_draw():  # else who waited would wait for ever
            assert self.ratio is not None
            limit = min(limit, self._real - int(min(self.credit / self.ratio, NO_LIMIT // 4)) + self.lead)
        self.ring.limit[0] = limit
        return fresh

    def commit(self) -> None:
        """A round is over, and what was followed in it is part of the run. Of one that is cut short a checkpoint has
        the rows, and leaves them to be followed again: only then a run counts them."""
        self._unsettled, self._earned = 0, 0.0

    @property
    def is_throttled(self) -> bool:
        """Whether writers wait for who learns from what they write."""
        return bool(self.lead) and self.ratio is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Others append nothing but what they have begun: nobody learns from it meanwhile."""
        before, self.ring.limit[0] = int(self.ring.limit[0]), 0
        try:
            yield
        finally:
            self.ring.limit[0] = before

    def _owe(self, real: int) -> None:
        """Only what comes after the warm-up, and while something can be drawn, is owed updates."""
        if self.ratio is not None and self.can_draw():
            self.credit += self.ratio * min(real, max(0, self.steps + real - self.warm_up))
        self.steps += real
        self._real += real

    @property
    def is_due(self) -> bool:
        """Whether there is a batch to be learned from now."""
        is_earned = self.steps > self.warm_up if self.ratio is None else self.credit >= self.rows_per_batch
        return is_earned and self.can_draw()

    def batches(self) -> Iterator[Batch]:
        for _ in itertools.count() if self.most_per_round is None else range(self.most_per_round):
            if not self.is_due:
                return
            returns = return_range(self.ring, self.gamma) if self.shows_returns and self.draws == 0 else None
            try:
                batch = self.draw()
            except NothingToDraw:
                if not self.is_shared:
                    raise
                return  # overwritten since it was looked at
            if self.ratio is not None:
                self.credit -= self.rows_per_batch
            yield batch if returns is None else replace(batch, returns=returns)

    def draw(self) -> Batch:
        batch = self._gather()
        for attempt in range(MOST_ATTEMPTS if self.is_shared else 0):
            torn = self._torn(batch)
            if not torn:
                return batch
            if attempt > HASTY_ATTEMPTS:
                time.sleep(LOOK_SECONDS)  # a writer that has lost its core must come to an end
            self.redrawn += torn
            self._again += 1
            self._take_note()
            batch = self._gather()
        if self.is_shared:
            raise ConfigError(
                f"rows were overwritten while they were read, {MOST_ATTEMPTS} times in a row: raise replay.capacity."
            )
        return batch

    def metrics(self) -> dict[str, float]:
        """Drawn rows for every real step after the warm-up, so far; rows or sequences that were torn."""
        drawn = (self.draws - self._again) * self.rows_per_batch
        return {"replay/ratio": drawn / max(1, self.steps - self.warm_up), "replay/redrawn": float(self.redrawn)}

    def fresh(self) -> Iterator[Rollout]:
        """Yield observations and masks of the rows that writers appended since the last call, by group."""
        ring = self.ring
        for group in range(ring.groups):
            first, end = max(int(self._shown[group]), ring.oldest(group)), int(ring.look(group))
            self._shown[group] = end
            for parts in ring.observed(group, first, end) if end > first else ():
                obs, mask = map_tree(torch.from_numpy, parts)
                yield Rollout(Steps(obs, None, None, None, mask, None, None), None)

    # --- writers that begin anew ---

    def cut(self) -> None:
        """Envs begin anew: what comes next does not follow what came last. Again, nothing happens."""
        for group in range(self.ring.groups):
            self._cut_group(group)
        self._take_note()

    def _cut_group(self, group: int) -> None:
        columns, written = self.ring.columns(group), int(self.ring.look(group))
        env: Index = np.arange(columns.start, columns.stop)
        if written and self.ring.is_real(np.full(len(env), written - 1), env).any():
            self.ring.cut(self.ring.obs(np.full(len(env), written), env), group)

    def on_writer_lost(self, group: int) -> int:
        """The process that wrote these envs' rows is dead: where another may begin. From any thread: only the ring
        is touched."""
        with self.ring.taking_over():
            self.ring.abandon(group)
            self._cut_group(group)
        return int(self.ring.written[group])

    # --- checkpoints ---

    def _counts(self) -> dict[str, Any]:
        return {
            "draws": self.draws,
            "again": self._again,
            "redrawn": self.redrawn,
            "steps": self.steps - self._unsettled,
            "credit": self.credit - self._earned,
            "unseen": int(self.ring.real.sum()) - self._real + self._unsettled,
        }

    def _set_counts(self, state: Mapping[str, Any]) -> None:
        self.draws, self.steps, self.credit = state["draws"], state["steps"], state["credit"]
        self._again, self.redrawn = state["again"], state["redrawn"]
        self._real -= state["unseen"]  # real rows that were there and not counted yet
        self.commit()

    def save(self, directory: Path) -> dict[str, Any]:
        """Rows since the last time go to files in the directory; the rest is returned, with the names of all."""
        if self._files is None or self._files.directory != directory:
            self._files = RingFiles(directory)
        with self.ring.pause_writers():
            rows = self._files.write(self.ring)
            self._take_note()
            return {"rows": rows, "files": list(self._files.files), "replay": self.get_state()}

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        self._files = RingFiles(directory)
        self._files.read(self.ring, state["rows"])
        self._begin_here()
        self.set_state(state["replay"])

    def close(self) -> None:
        self.ring.close()
