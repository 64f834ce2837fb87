"""Replay of whole sequences for recurrent agents (R2D2: stored state and burn-in).

    replay = SequenceReplay(ring, agent.initial_state(1), batch_size=32, ratio=1, warm_up=10_000, n_step=5,
                            gamma=0.997, seed=1, burn_in=40, length=80, interval=40, priorities=0.9)
    replay.add(batch)                              # [T, B] new rows, and the state [B] before the first of them
    for batch in replay.batches():                 # batches that are due: `ratio` learned rows for every real step
        features, _ = agent.unroll(batch.steps.obs, batch.state, resets(batch.steps.mask))
        learned = batch.steps[burn_in : burn_in + length]                         # [length, S]
        values = ...                                                              # [R, S], computed from `features`
        bootstrap = values.gather(0, batch.targets.row)                           # [length, S]
        replay.feedback(batch.key, td_error)                                      # [S], one error for each sequence

Each of the S sequences of a batch has R = burn_in + length + n_step rows:

    the first burn_in rows    update the state that was stored before row 0, and are not learned from
    the next length rows      are learned from; for each of these rows, `targets` [length, S] hold the n-step return,
                              the index (in R) of the row to bootstrap from, and the factor of that row's value
    the last n_step rows      serve as bootstraps; a row that is not written yet has the observation after the newest
                              row, mask False, and zeros in all other fields

States are stored at most once per rollout, so sequences begin where rollouts began. A draw is a function of (seed,
number of the draw), so no random state has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import Array, ArrayTuple, Batch, Steps, Tree, leaves, map_tree
from remuda.errors import ConfigError
from remuda.randomness import Purpose, keyed_generator
from remuda.replay.counters import Index
from remuda.replay.ring import NothingToDraw, Ring, Row
from remuda.replay.ring_replay import RingReplay
from remuda.replay.sequence_index import RecurrentStates, SequenceIndex
from remuda.replay.transitions import TDErrorFunction, as_row, finite_or_nan


class SequenceReturns(ArrayTuple):
    """Targets of the rows that are learned from.

    `reward` is the discounted sum of up to n rewards, and `discount` is the factor of the value of row `row`.
    """

    reward: Array
    discount: Array
    row: Array  # int64: index in the sequence of the row whose value is the bootstrap; at most the next reset row


class SequenceReplay(RingReplay):
    """Replay that draws whole sequences.

    `state_example` is a state of any number of envs, as the agent's `initial_state` returns it. `interval` is the
    least number of rows between two stored states, or None for the length of the first rollout. No state is stored
    for a rollout that begins less than `interval` rows after the newest stored state. `priorities` is the power alpha
    of arXiv 1511.05952; with None, all sequences are equally likely.

    Steps of the warm-up earn no updates, and neither do steps that are counted while no sequence can be drawn.
    Otherwise updates would accumulate, and many would be due at once.
    """

    def __init__(
        self,
        ring: Ring,
        state_example: Tree,
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
        max_batches_per_round: int | None = None,
        max_lead: int = 0,
        has_td_error: bool = False,
    ) -> None:
        """Create a replay over `ring`.

        With `is_shared`, other processes write to the ring and store a state with each rollout, so `interval` must be
        the length of a rollout. With `has_td_error`, they also compute TD errors of sequences (`SequencePriority`).
        """
        _check(ring, n_step, burn_in, length, interval)
        super().__init__(
            ring, batch_size, batch_size * length, ratio, warm_up, seed, is_shared, max_batches_per_round, max_lead
        )
        self.state_example, self.alpha, self.epsilon = state_example, priorities, epsilon
        self.n_step, self.gamma, self.burn_in, self.length, self.interval = n_step, gamma, burn_in, length, interval
        self.has_td_error = has_td_error
        # With is_shared, `interval` is the rollout length, which determines the size of the index. Otherwise the
        # first call of `append` makes the index.
        self.sequence_index = self._make_sequence_index(interval) if is_shared and interval is not None else None

    @property
    def fds(self) -> list[int]:
        states = [] if self.sequence_index is None else [self.sequence_index.states.memory.fd]
        return [*self.ring.fds, *states]

    def append(self, batch: Batch) -> tuple[int, bool]:
        if batch.state is None:
            raise ValueError("the batch has no recurrent state: for agents without memory use TransitionReplay.")
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.sequence_index is None:
            self.sequence_index = self._make_sequence_index(len(rows.mask))
        self.sequence_index.states.store(batch.state)
        self.ring.append(rows, next_obs)
        return int(rows.mask.sum()), self.can_draw()

    def _make_sequence_index(self, T: int) -> SequenceIndex:
        kept, rows = self.ring.capacity - 1, self.burn_in + self.length
        # Sequences begin T, 2 T, ... rows before the next row, so only the newest `kept // T * T` rows are of use.
        if kept // T * T < rows:
            raise ConfigError(
                f"rollouts of {T} rows never leave a whole sequence of burn_in + length = {rows} rows in a ring that "
                f"keeps {kept}: make the replay larger, or rollouts shorter."
            )
        states = RecurrentStates(self.ring, self.state_example, self.interval or T, has_td_error=self.has_td_error)
        return SequenceIndex(states, self.burn_in, self.length, self._priority_of)

    def _priority_of(self, error: NDArray[np.float32]) -> NDArray[np.float64]:
        priority: NDArray[np.float64] = (np.abs(error.astype(np.float64)) + self.epsilon) ** (self.alpha or 0.0)
        return priority

    def _sync_rows(self) -> None:
        if self.sequence_index is not None:
            self.sequence_index.sync()

    def can_draw(self) -> bool:
        """Return whether there is a sequence that can be drawn (see `SequenceIndex`)."""
        self._sync_rows()
        return self.sequence_index is not None and self.sequence_index.tree.total > 0

    def _draw_once(self) -> Batch:
        if self.sequence_index is None or not self.can_draw():
            raise NothingToDraw(
                f"no sequence can be drawn: none of {self.burn_in + self.length} rows is stored whole."
            )
        rng = keyed_generator(Purpose.REPLAY, self.seed, self.counters.draws, part=self.part)
        self.counters.count_draw()
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

    def _count_torn(self, batch: Batch) -> int:
        assert self.sequence_index is not None
        number, env = batch.key.T
        return int(np.count_nonzero(~self.ring.is_stored(self.sequence_index.row_of(number, env), env)))

    def feedback(self, key: Index, priority: torch.Tensor | None) -> None:
        """Set the priorities of drawn sequences from `priority`, which holds their absolute TD errors."""
        if self.sequence_index is not None and self.alpha is not None and priority is not None:
            self.sequence_index.sync()  # `cut` may have appended rows since the draw
            number, env = key.T
            self.sequence_index.set_priority(number, env, self._priority_of(priority.detach().numpy()))

    def get_state(self) -> dict[str, object]:
        sequence_index = None if self.sequence_index is None else self.sequence_index.get_state()
        return {**self.counters.get_state(), "starts": sequence_index}

    def set_state(self, state: Mapping[str, Any]) -> None:
        sequence_index = state["starts"]
        if sequence_index is None:
            self.sequence_index = None if not self.is_shared else self.sequence_index
        else:
            if self.sequence_index is None:
                self.sequence_index = self._make_sequence_index(sequence_index["states"]["interval"])
            self.sequence_index.set_state(sequence_index)
        self.counters.set_state(state)

    def on_writer_lost(self, group: int) -> int:
        if self.sequence_index is not None:
            self.sequence_index.states.waive_td_error(group)
        return super().on_writer_lost(group)

    def close(self) -> None:
        super().close()
        if self.sequence_index is not None:
            self.sequence_index.states.memory.close()


class SequencePriority:
    """Computes TD errors of the sequences of one group, in the process that writes their rows."""

    def __init__(
        self,
        states: RecurrentStates,
        group: int,
        lengths: tuple[int, int, int],
        gamma: float,
        td_error: TDErrorFunction,
    ) -> None:
        """`lengths` are burn_in, length and n_step; `td_error` maps a batch of S sequences to errors [S]."""
        self.states, self.group, self.lengths, self.gamma, self.td_error = states, group, lengths, gamma, td_error

    def update(self) -> None:
        """Compute and store the missing TD errors of complete sequences."""
        states, ring, columns = self.states, self.states.ring, self.states.ring.columns(self.group)
        env, (burn_in, length, _) = np.arange(columns.start, columns.stop), self.lengths
        for number in states.counters.without_td_error(self.group):
            place = number % states.room
            row = int(states.row[place, self.group])
            if row + burn_in + length > ring.written[self.group]:
                return
            steps, targets = sequence_rows(ring, np.full(len(env), row), env, *self.lengths, self.gamma)
            state = map_tree(lambda x: torch.from_numpy(x[place, columns].copy()), states.states)  # noqa: B023
            error = self.td_error(Batch(steps, targets, state))
            states.set_td_error(self.group, number, finite_or_nan(error))


def sequence_rows(
    ring: Ring, start: Index, env: Index, burn_in: int, length: int, n_step: int, gamma: float
) -> tuple[Steps, SequenceReturns]:
    """Return the rows [R, S] of S sequences, and the targets [length, S] of the rows that are learned from.

    Sequence s begins at row number `start[s]` of env `env[s]`; R is burn_in + length + n_step. Where a sequence
    reaches beyond the newest row of the ring, `obs` is the observation after that row, and all other fields are 0.
    """
    row = start + np.arange(burn_in + length + n_step)[:, None]
    newest = ring.counters.published(env // ring.width)
    taken = ring.take(np.minimum(row, newest).reshape(-1), np.broadcast_to(env, row.shape).reshape(-1))
    rows: Row = map_tree(lambda x: x.reshape(*row.shape, *x.shape[1:]), taken)
    for _, part in leaves(rows.replace(obs=None)):
        part[row >= newest] = 0  # `row` may exceed the newest row; then only `obs` is valid, and other fields are old
    learned = row[burn_in : burn_in + length]
    flat = [np.broadcast_to(x, learned.shape).reshape(-1) for x in (learned, env, newest)]
    found = ring.n_steps(flat[0], flat[1], n_step, gamma, flat[2])
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
