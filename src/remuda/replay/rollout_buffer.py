"""The replay of on-policy algorithms: each rollout is used for a few epochs and then discarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from remuda.data import Array, Batch
from remuda.randomness import Purpose, keyed_generator


class RolloutBuffer:
    """A buffer for the newest rollout [T, B], which is yielded in `num_epochs` passes of shuffled minibatches.

    For agents without memory, masked rows are left out, and the real rows are shuffled one by one. They are split as
    evenly as possible into T * B / batch_size minibatches, so that the number of updates per rollout does not depend
    on where episodes end. For recurrent agents, whose batches have a state, a minibatch consists of the whole
    sequences of batch_size / T envs, masked rows included.

    With `whole`, the minibatches of all agents consist of whole sequences. Then `batch_size` is the largest number of
    sequences in a minibatch, and all minibatches have nearly the same size.

    The shuffled order is a function of (seed, round, epoch), so no random state has to be saved to resume.
    """

    needs_saving = False  # the buffer is empty between two rounds
    part = 0  # index of the part of the run whose rollouts this buffer takes (remuda.parts)

    def __init__(
        self, num_epochs: int, batch_size: int | None, seed: int, first_round: int = 0, whole: bool = False
    ) -> None:
        """Create a buffer; a batch_size of None means the whole rollout."""
        self.num_epochs, self.batch_size, self.seed, self.whole = num_epochs, batch_size, seed, whole
        self.round = first_round
        self._batch: Batch | None = None

    def add(self, batch: Batch) -> None:
        self._batch = batch
        self.round += 1

    def append(self, batch: Batch) -> tuple[int, bool]:
        """Add a rollout; return its number of real steps, and whether anything can be drawn, which is always True."""
        self.add(batch)
        return int(batch.steps.mask.sum()), True

    def set_part(self, part: int, parts: int) -> None:
        """Take the rollouts of part number `part`; every part of a run shuffles with random numbers of its own."""
        self.part = part

    def count_steps(self, steps: int, can_draw: bool) -> None:
        """Do nothing, because the number of batches does not depend on the number of steps."""

    @property
    def num_due(self) -> int:
        """Largest number of batches that `batches` yields now. It does not depend on where episodes end."""
        if self._batch is None:
            return 0
        T, B = self._batch.steps.mask.shape
        is_whole = self.whole or self._batch.state is not None
        return self.num_epochs * (-(-B // self._num_columns(T, B)) if is_whole else self._num_minibatches(T * B))

    def _num_minibatches(self, rows: int) -> int:
        return max(1, rows // (self.batch_size or rows))

    def _num_columns(self, T: int, B: int) -> int:
        """Return the number of whole sequences in a minibatch."""
        return B if self.batch_size is None else self.batch_size if self.whole else self.batch_size // T

    def batches(self) -> Iterator[Batch]:
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        if not bool(batch.steps.mask.any()):
            return
        is_whole = self.whole or batch.state is not None
        yield from self._sequences(batch) if is_whole else self._rows(batch.flatten())

    def _rows(self, flat: Batch) -> Iterator[Batch]:
        mask = flat.steps.mask
        real = mask.nonzero().squeeze(-1)
        num_minibatches = min(self._num_minibatches(len(mask)), len(real))
        if num_minibatches == 1:  # a single minibatch needs no shuffling
            whole = flat if len(real) == len(mask) else flat.rows(real)
            for _ in range(self.num_epochs):
                yield whole
            return
        bounds = np.linspace(0, len(real), num_minibatches + 1).astype(int).tolist()
        for epoch in range(self.num_epochs):
            # Rows are gathered once per epoch; minibatches are slices of the result.
            shuffled = flat.rows(real[self._order(epoch, len(real))])
            for start, end in pairwise(bounds):
                yield shuffled.rows(slice(start, end))

    def _sequences(self, batch: Batch) -> Iterator[Batch]:
        T, B = batch.steps.mask.shape
        num_minibatches = -(-B // self._num_columns(T, B))
        bounds = np.linspace(0, B, num_minibatches + 1).astype(int).tolist()
        for epoch in range(self.num_epochs):
            order = self._order(epoch, B)
            for start, end in pairwise(bounds):
                part = batch if num_minibatches == 1 else batch.columns(order[start:end])
                if bool(part.steps.mask.any()):
                    yield part

    def _order(self, epoch: int, count: int) -> Tensor:
        draw = keyed_generator(Purpose.MINIBATCHES, self.seed, epoch, self.round, self.part)
        return torch.from_numpy(draw.permutation(count))

    def feedback(self, key: Array, priority: Tensor | None) -> None:
        """Ignore priorities, because all rows are used equally often."""

    def cut(self) -> None:
        """Do nothing when envs start new episodes, because no sequence spans two rollouts."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing, because samplers wait by themselves until there is room for another rollout."""
        yield

    def save(self, directory: Path) -> None:
        """Save nothing, because the buffer is empty between two rounds."""

    def load(self, directory: Path, state: Mapping[str, object]) -> None:
        """Load nothing, because nothing was saved."""

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
