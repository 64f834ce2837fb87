"""Errors of fresh experience, found by who sampled it: what is surprising is drawn sooner (Ape-X, R2D2).

    judge = TransitionPriority(ring, group=1, n_step=3, gamma=0.99, error_of=error_of)    # error_of(batch) -> [N]
    ring.append(rows, last_obs, group=1)
    judge.look()                                   # of all that was appended since; a reader waits for that

Rows are judged over the rewards that are there: the newest over fewer than n. Sequences are judged once all of their
rows are written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import Batch, map_tree
from remuda.replay.ring import Ring
from remuda.replay.ring_index import RingIndex
from remuda.replay.sequence_index import RecurrentStates
from remuda.replay.sequences import sequence_rows
from remuda.replay.transitions import batch_of_rows

ErrorOf = Callable[[Batch], torch.Tensor]


class TransitionPriority:
    """Of the rows of one group."""

    def __init__(self, ring: Ring, group: int, n_step: int, gamma: float, td_error: ErrorOf) -> None:
        self.ring, self.group, self.n_step, self.td_error = ring, group, n_step, td_error
        self._places, self._gamma = RingIndex(ring), np.array(gamma, np.float32)

    def look(self) -> None:
        ring, columns = self.ring, self.ring.columns(self.group)
        first, end = max(int(ring.td_errors[self.group]), ring.oldest(self.group)), int(ring.written[self.group])
        row, env = np.meshgrid(np.arange(first, end), np.arange(columns.start, columns.stop), indexing="ij")
        key = np.stack([row.reshape(-1), env.reshape(-1)], -1)
        place = self._places.of(key)
        mask = torch.from_numpy(self._places.rows.mask.take(place))
        error = self.td_error(batch_of_rows(self._places, place, key, self.n_step, self._gamma, mask))
        ring.set_td_error(self.group, first, known(error).reshape(row.shape))


class SequencePriority:
    """Of the sequences of one group."""

    def __init__(
        self, states: RecurrentStates, group: int, lengths: tuple[int, int, int], gamma: float, td_error: ErrorOf
    ) -> None:
        """`lengths` are burn_in, length and n_step."""
        self.states, self.group, self.lengths, self.gamma, self.td_error = states, group, lengths, gamma, td_error

    def look(self) -> None:
        states, ring, columns = self.states, self.states.ring, self.states.ring.columns(self.group)
        env, (burn_in, length, _) = np.arange(columns.start, columns.stop), self.lengths
        for number in range(int(states.td_errors[self.group]), int(states.stored[self.group])):
            place = number % states.room
            row = int(states.row[place, self.group])
            if row + burn_in + length > ring.written[self.group]:
                return
            steps, targets = sequence_rows(ring, np.full(len(env), row), env, *self.lengths, self.gamma)
            state = map_tree(lambda x: torch.from_numpy(x[place, columns].copy()), states.states)  # noqa: B023
            error = self.td_error(Batch(steps, targets, state))
            states.set_td_error(self.group, number, known(error))


def known(error: torch.Tensor) -> NDArray[np.float32]:
    """NaN where it is not finite: a net that is about to diverge says nothing of how to draw."""
    found: NDArray[np.float32] = torch.where(error.isfinite(), error, torch.nan).numpy()
    return found
