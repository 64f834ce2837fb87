"""Replay of whole sequences, for recurrent agents (R2D2; the state is stored, then burnt in).

    replay = Sequences(ring, agent.initial_state(1), batch_size=32, ratio=1, warm_up=10_000, n_step=5, gamma=0.997,
                       seed=1, burn_in=40, length=80, interval=40, priorities=0.9)
    replay.add(batch)                              # [T, B] of fresh rows, and the state [B] before the first of them
    for batch in replay.batches():                 # what is due: `ratio` learned rows for every real step
        features, _ = agent.unroll(batch.steps.obs, batch.state, resets(batch.steps.mask))
        learned = batch.steps[burn_in : burn_in + length]                         # [length, S]
        bootstrap = values.gather(0, batch.targets.row)                           # values [R, S] of all rows
        replay.feedback(batch.key, priority)                                      # [S], one for each sequence

Of S sequences drawn, the R = burn_in + length + n_step rows are these:

    0 .. burn_in                 warm the state up that was stored before row 0, and are not learned from
    burn_in .. burn_in + length  are learned: `targets` [length, S] are returns over n steps, what the value after
                                 them is multiplied by, and in which of the R rows that value is found
    the last n_step              are there to be bootstrapped from; those that are not written yet have mask False,
                                 zeros, and the newest observation

States are stored once per rollout, not once per row: sequences begin where rollouts began. What is drawn is a
function of (seed, number of the draw): nothing random has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import ArrayTuple, Batch, Steps, leaves, map_tree
from remuda.errors import ConfigError
from remuda.randomness import Purpose, keyed_generator
from remuda.replay.ring import Index, NothingToDraw, Ring, Row
from remuda.replay.ring_replay import RingReplay
from remuda.replay.sequence_index import RecurrentStates, SequenceIndex
from remuda.replay.transitions import as_row


class SequenceReturns(ArrayTuple):
    """Of every learned row: rewards to come, what the value after them is multiplied by, and where that is found."""

    reward: Any
    discount: Any
    row: Any  # int64, counted from the first of the R rows; never beyond a reset row


class SequenceReplay(RingReplay):
    """Draws whole sequences.

    `state_example` is a state of any number of envs, as `initial_state` gives it. `interval` is how many rows there
    are between two stored states at the least (None: as many as the first rollout has), so that short rollouts need
    not store a state each. `priorities` is the power alpha of 1511.05952; with None all are as likely.

    Steps before the warm-up is over, and those of any time when nothing can be drawn, earn nothing: no updates pile
    up that would then come all at once.
    """

    def __init__(
        self,
        ring: Ring,
        state_example: Any,
        *,
        batch_size: int,
        ratio: float | None,
        warm_up: int,
        n_step: int,
        gamma: float,
        seed: int,
        burn_in: int,
        length: int,
        interval: int | None = None,
        priorities: float | None = None,
        epsilon: float = 1e-6,
        is_shared: bool = False,
        most_per_round: int | None = None,
        lead: int = 0,
        has_td_error: bool = False,
    ) -> None:
        """Where others write, the interval is theirs: they store a state with each of their rollouts, and may judge
        what they wrote (judging.py)."""
        _check(ring, n_step, burn_in, length, interval)
        super().__init__(ring, batch_size, ratio, warm_up, seed, is_shared, most_per_round, lead)
        self.state_example, self.alpha, self.epsilon = state_example, priorities, epsilon
        self.n_step, self.gamma, self.rows_per_batch = n_step, gamma, batch_size * length
        self.burn_in, self.length, self.interval = burn_in, length, interval
        self.has_td_error = has_td_error
        # Their room depends on the first rollout, unless it is known.
        self.sequence_index = self._make_sequence_index(interval) if is_shared and interval is not None else None

    @property
    def fds(self) -> list[int]:
        """With these another process can write to it."""
        return (
            self.ring.fds if self.sequence_index is None else [*self.ring.fds, self.sequence_index.states.memory.fd]
        )

    def add(self, batch: Batch) -> None:
        if batch.state is None:
            raise ValueError("the batch has no recurrent state: of agents without memory draw rows, with Experience.")
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.sequence_index is None:
            self.sequence_index = self._make_sequence_index(len(rows.mask))
        self.sequence_index.states.store(batch.state)
        self.ring.append(rows, next_obs)
        self._owe(int(rows.mask.sum()))

    def _make_sequence_index(self, T: int) -> SequenceIndex:
        kept, rows = self.ring.capacity - 1, self.burn_in + self.length
        # After an add, every start is a multiple of T rows back.
        if kept // T * T < rows:
            raise ConfigError(
                f"rollouts of {T} rows never leave a whole sequence of burn_in + length = {rows} rows in a ring that "
                f"keeps {kept}: make the replay larger, or rollouts shorter."
            )
        states = RecurrentStates(self.ring, self.state_example, self.interval or T, has_td_error=self.has_td_error)
        return SequenceIndex(states, self.burn_in, self.length, self._priority_of)

    def _priority_of(self, error: NDArray[Any]) -> NDArray[np.float64]:
        priority: NDArray[np.float64] = (np.abs(error.astype(np.float64)) + self.epsilon) ** (self.alpha or 0.0)
        return priority

    def _take_note(self) -> None:
        if self.sequence_index is not None:
            self.sequence_index.follow_ring()

    def can_draw(self) -> bool:
        """Whether there is any whole sequence with a real row."""
        self._take_note()
        return self.sequence_index is not None and self.sequence_index.tree.total > 0

    def _gather(self) -> Batch:
        if self.sequence_index is None or not self.can_draw():
            raise NothingToDraw(
                f"no sequence can be drawn: none of {self.burn_in + self.length} rows is stored whole."
            )
        rng = keyed_generator(Purpose.REPLAY, self.seed, self.draws)
        self.draws += 1
        number, env, probability = self.sequence_index.draw(rng.random(self.batch_size))
        weight = None
        if self.alpha is not None:
            weight = torch.from_numpy((probability.min() / probability).astype(np.float32))
        start = self.sequence_index.row_of(number, env)
        place = number % self.sequence_index.room
        state = map_tree(lambda x: torch.from_numpy(x[place, env]), self.sequence_index.states.states)
        lengths = (self.burn_in, self.length, self.n_step)
        steps, targets = sequence_rows(self.ring, start, env, *lengths, self.gamma)
        return Batch(steps, targets, state, weight=weight, key=np.stack([number, env], -1))

    def _torn(self, batch: Batch) -> int:
        assert self.sequence_index is not None
        number, env = batch.key.T
        return int(np.count_nonzero(~self.ring.is_stored(self.sequence_index.row_of(number, env), env)))

    def feedback(self, key: Any, priority: Any) -> None:
        """The error of each sequence that was drawn."""
        if self.sequence_index is not None and self.alpha is not None and priority is not None:
            self.sequence_index.follow_ring()  # it may have been cut since
            number, env = key.T
            self.sequence_index.set_priority(number, env, self._priority_of(priority.detach().numpy()))

    def get_state(self) -> dict[str, Any]:
        sequence_index = None if self.sequence_index is None else self.sequence_index.get_state()
        return {**self._counts(), "starts": sequence_index}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then: what is drawn next is the same, bit by bit."""
        sequence_index = state["starts"]
        if sequence_index is None:
            self.sequence_index = None if not self.is_shared else self.sequence_index
        else:
            if self.sequence_index is None:
                self.sequence_index = self._make_sequence_index(sequence_index["states"]["interval"])
            self.sequence_index.set_state(sequence_index)
        self._set_counts(state)

    def on_writer_lost(self, group: int) -> int:
        if self.sequence_index is not None:
            self.sequence_index.states.forgo_judgement(group)
        return super().on_writer_lost(group)

    def close(self) -> None:
        super().close()
        if self.sequence_index is not None:
            self.sequence_index.states.memory.close()


def sequence_rows(
    ring: Ring, start: Index, env: Index, burn_in: int, length: int, n_step: int, gamma: float
) -> tuple[Steps, SequenceReturns]:
    """Rows [R, S] from the start of each, and targets [length, S]; beyond the newest row there is what was seen after
    it, and nothing else."""
    row = start + np.arange(burn_in + length + n_step)[:, None]
    newest = ring.look(env // ring.width)
    taken = ring.take(np.minimum(row, newest).reshape(-1), np.broadcast_to(env, row.shape).reshape(-1))
    rows: Row = map_tree(lambda x: x.reshape(*row.shape, *x.shape[1:]), taken)
    for _, part in leaves(rows.replace(obs=None)):
        part[row >= newest] = 0  # all but an observation that lies there is left of an old row
    learned = row[burn_in : burn_in + length]
    of_each = [np.broadcast_to(x, learned.shape).reshape(-1) for x in (learned, env, newest)]
    found = ring.n_steps(of_each[0], of_each[1], n_step, gamma, of_each[2])
    reward, discount, bootstrap = (part.reshape(learned.shape) for part in found)
    targets = SequenceReturns(reward, discount, bootstrap - start)
    steps = Steps(*map_tree(torch.from_numpy, rows), None, None)
    return steps, map_tree(torch.from_numpy, targets)


def _check(ring: Ring, n_step: int, burn_in: int, length: int, interval: int | None) -> None:
    if burn_in < 0 or min(n_step, length, 1 if interval is None else interval) < 1:
        raise ConfigError(
            f"burn_in={burn_in}, length={length}, n_step={n_step}, interval={interval}: "
            "all are at least 1, but for burn_in, which may be 0."
        )
    if n_step > length:
        raise ConfigError(f"n_step={n_step} is more than length={length}: use {length} or less, or longer sequences.")
    rows = burn_in + length + n_step
    if rows > ring.capacity - 1:
        raise ConfigError(
            f"sequences of burn_in + length + n_step = {rows} rows do not fit into a ring that keeps "
            f"{ring.capacity - 1} of each env: make the replay larger, or sequences shorter."
        )
