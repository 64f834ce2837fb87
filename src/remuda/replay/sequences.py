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

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import ArrayTuple, Batch, Steps, leaves, map_tree
from remuda.errors import ConfigError
from remuda.replay.experience import as_row
from remuda.replay.ring import Index, Ring, Row
from remuda.replay.stored import Stored
from remuda.replay.sumtree import SumTree


class SequenceReturns(ArrayTuple):
    """Of every learned row: rewards to come, what the value after them is multiplied by, and where that is found."""

    reward: Any
    discount: Any
    row: Any  # int64, counted from the first of the R rows; never beyond a reset row


class Starts:
    """States that were stored, the rows before which they belong, and how likely each sequence from there is.

        starts = Starts(ring, example, interval=40, burn_in=40, length=80)
        starts.store(state, row)                       # of the next row; then ring.append
        starts.follow_ring()                           # what can be drawn now; after every change of the ring
        number, env, probability = starts.draw(uniform)

    Starts are numbered from the first that was ever stored, so a number never means another. A sequence is a start
    and an env. Its priority is 0 until its last row is written, from when its first row is overwritten, and if none
    of its learned rows is real: what has a priority can be drawn.
    """

    def __init__(self, ring: Ring, example: Any, interval: int, burn_in: int, length: int) -> None:
        self.ring, self.interval, self.burn_in, self.length = ring, interval, burn_in, length
        # As many as can have their first row in the ring, and one that is stored before its rows are: what lies in
        # its place has long been let go.
        self.room = -(-(ring.capacity - 1) // interval) + 1
        self.states = map_tree(lambda x: np.zeros((self.room, ring.envs, *x.shape[1:]), np.asarray(x).dtype), example)
        self.row = np.zeros(self.room, np.int64)
        self.tree = SumTree(self.room * ring.envs)
        self.largest = 1.0  # of all priorities so far
        self.stored = 0  # starts ever stored
        self.complete = 0  # of these, those whose rows are all written
        self.first = np.zeros(ring.envs, np.int64)  # of each env, the oldest whose rows are all still there

    def store(self, state: Any, row: int) -> None:
        """The state [B] before a row, unless the start before it is nearer than the interval."""
        if self.stored and row < self.row[(self.stored - 1) % self.room] + self.interval:
            return
        place = self.stored % self.room

        def write(states: NDArray[Any], fresh: torch.Tensor) -> None:
            if fresh.shape != states.shape[1:]:  # numpy might repeat it along the axis that is missing
                raise ValueError(f"a state {tuple(fresh.shape)} was added, its example said {states.shape[1:]}.")
            states[place] = fresh.numpy()

        map_tree(write, self.states, state)
        self.row[place] = row
        self.stored += 1

    def follow_ring(self) -> None:
        """Give a priority to what was completed since, and take it from what was overwritten."""
        end = self.ring.written[0]
        env = np.arange(self.ring.envs)
        while self.complete < self.stored:
            learned = self.row[self.complete % self.room] + self.burn_in + np.arange(self.length)
            if learned[-1] >= end:
                break
            has_real = self.ring.is_real(learned[:, None], env).any(0)
            self.tree[self._leaf(self.complete, env)] = np.where(has_real, self.largest, 0.0)
            self.complete += 1
        # Rows go oldest first, and so do frames: the first row answers for all of a sequence, and a start for all
        # after it. Each env moves at its own pace: where episodes are short, frames may go before rows do.
        while True:
            env = np.flatnonzero(self.first < self.complete)
            env = env[~self.ring.is_stored(self.row[self.first[env] % self.room], env)]
            if len(env) == 0:
                return
            self.tree[self._leaf(self.first[env], env)] = 0.0
            self.first[env] += 1

    def draw(self, uniform: NDArray[np.float64]) -> tuple[Index, Index, NDArray[np.float64]]:
        """Starts, envs and probabilities, one in each of as many equal parts of the mass."""
        total = self.tree.total
        leaf = self.tree.find((np.arange(len(uniform)) + uniform) * (total / len(uniform)))
        place, env = np.divmod(leaf, self.ring.envs)
        number = self.stored - 1 - (self.stored - 1 - place) % self.room
        return number, env, self.tree[leaf] / total

    def set_priority(self, number: Index, env: Index, priority: NDArray[np.float64]) -> None:
        """Of sequences drawn earlier; those that can no longer be drawn are left alone."""
        kept = number >= self.first[env]
        self.tree[self._leaf(number[kept], env[kept])] = priority[kept]
        self.largest = max(self.largest, float(priority[kept].max(initial=0.0)))

    def get_state(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("interval", "stored", "complete", "largest")}
        states = {path: array.copy() for path, array in leaves(self.states)}
        return {**counts, "states": states, "row": self.row.copy(), "first": self.first.copy(), "tree": self.tree[:]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        for path, array in leaves(self.states):
            array[...] = state["states"][path]
        self.row[:], self.first[:], self.tree[:] = state["row"], state["first"], state["tree"]
        self.stored, self.complete, self.largest = state["stored"], state["complete"], state["largest"]

    def _leaf(self, number: Index | int, env: Index) -> Index:
        return number % self.room * self.ring.envs + env


class Sequences(Stored):
    """Draws whole sequences.

    `state_example` is a state of any number of envs, as `initial_state` gives it. `interval` is how many rows there
    are between two stored states at the least (None: as many as the first rollout has), so that short rollouts need
    not store a state each. `priorities` is the power alpha of 1511.05952; with None all are as likely.

    Steps earn `ratio` learned rows each once the warm-up is over and something can be drawn. Those before, and those
    of any time when nothing can be drawn, earn nothing: no updates pile up that would then come all at once.
    """

    def __init__(
        self,
        ring: Ring,
        state_example: Any,
        *,
        batch_size: int,
        ratio: float,
        warm_up: int,
        n_step: int,
        gamma: float,
        seed: int,
        burn_in: int,
        length: int,
        interval: int | None = None,
        priorities: float | None = None,
        epsilon: float = 1e-6,
    ) -> None:
        _check(ring, n_step, burn_in, length, interval)
        self.ring, self.state_example, self.alpha, self.epsilon = ring, state_example, priorities, epsilon
        self.batch_size, self.ratio, self.warm_up, self.n_step, self.gamma = batch_size, ratio, warm_up, n_step, gamma
        self.burn_in, self.length, self.interval = burn_in, length, interval
        self.seed, self.draws, self.steps, self.credit = seed, 0, 0, 0.0
        self.starts: Starts | None = None  # their room depends on the first rollout

    def add(self, batch: Batch) -> None:
        if batch.state is None:
            raise ValueError("the batch has no recurrent state: of agents without memory draw rows, with Experience.")
        rows, last_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.last_obs))
        if self.starts is None:
            self.starts = self._make_starts(len(rows.mask))
        self.starts.store(batch.state, int(self.ring.written[0]))
        self.ring.append(rows, last_obs)
        self.starts.follow_ring()
        real = int(rows.mask.sum())
        if self.starts.tree.total > 0:
            # Only what comes after the warm-up is owed updates.
            self.credit += self.ratio * min(real, max(0, self.steps + real - self.warm_up))
        self.steps += real

    def _make_starts(self, T: int) -> Starts:
        kept, rows = self.ring.capacity - 1, self.burn_in + self.length
        # After an add, every start is a multiple of T rows back.
        if kept // T * T < rows:
            raise ConfigError(
                f"rollouts of {T} rows never leave a whole sequence of burn_in + length = {rows} rows in a ring that "
                f"keeps {kept}: make the replay larger, or rollouts shorter."
            )
        return Starts(self.ring, self.state_example, self.interval or T, self.burn_in, self.length)

    def batches(self) -> Iterator[Batch]:
        cost = self.batch_size * self.length
        while self.credit >= cost and self.can_draw():
            self.credit -= cost
            yield self.draw()

    def can_draw(self) -> bool:
        """Whether there is any whole sequence with a real row."""
        if self.starts is None:
            return False
        self.starts.follow_ring()
        return self.starts.tree.total > 0

    def draw(self) -> Batch:
        if self.starts is None or not self.can_draw():
            raise ValueError(f"no sequence can be drawn: none of {self.burn_in + self.length} rows is stored whole.")
        rng = np.random.Generator(np.random.Philox(key=[self.seed, self.draws]))
        self.draws += 1
        number, env, probability = self.starts.draw(rng.random(self.batch_size))
        weight = None
        if self.alpha is not None:
            weight = torch.from_numpy((probability.min() / probability).astype(np.float32))
        place = number % self.starts.room
        start = self.starts.row[place]
        state = map_tree(lambda x: torch.from_numpy(x[place, env]), self.starts.states)
        steps = Steps(*map_tree(torch.from_numpy, self._rows(start, env)), None, None)
        targets = map_tree(torch.from_numpy, self._targets(start, env))
        return Batch(steps, targets, state, weight=weight, key=np.stack([number, env], -1))

    def _rows(self, start: Index, env: Index) -> Row:
        """[R, S]; beyond the newest row there is what was seen after it, and nothing else."""
        row = start + np.arange(self.burn_in + self.length + self.n_step)[:, None]
        newest = self.ring.written[0]
        taken = self.ring.take(np.minimum(row, newest).reshape(-1), np.broadcast_to(env, row.shape).reshape(-1))
        rows: Row = map_tree(lambda x: x.reshape(*row.shape, *x.shape[1:]), taken)
        for _, part in leaves(rows.replace(obs=None)):
            part[row >= newest] = 0  # all but an observation that lies there is left of an old row
        return rows

    def _targets(self, start: Index, env: Index) -> SequenceReturns:
        """[length, S]."""
        row = start + self.burn_in + np.arange(self.length)[:, None]
        env = np.broadcast_to(env, row.shape).reshape(-1)
        found = self.ring.n_steps(row.reshape(-1), env, self.n_step, self.gamma)
        reward, discount, bootstrap = (part.reshape(row.shape) for part in found)
        return SequenceReturns(reward, discount, bootstrap - start)

    def feedback(self, key: Any, priority: Any) -> None:
        """The error of each sequence that was drawn."""
        if self.starts is not None and self.alpha is not None and priority is not None:
            self.starts.follow_ring()  # it may have been cut since
            number, env = key.T
            error = np.abs(priority.detach().numpy().astype(np.float64))
            self.starts.set_priority(number, env, (error + self.epsilon) ** self.alpha)

    def get_state(self) -> dict[str, Any]:
        starts = None if self.starts is None else self.starts.get_state()
        return {"draws": self.draws, "steps": self.steps, "credit": self.credit, "starts": starts}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then: what is drawn next is the same, bit by bit."""
        starts, self.starts = state["starts"], None
        if starts is not None:
            self.starts = Starts(self.ring, self.state_example, starts["interval"], self.burn_in, self.length)
            self.starts.set_state(starts)
        self.draws, self.steps, self.credit = state["draws"], state["steps"], state["credit"]


def _check(ring: Ring, n_step: int, burn_in: int, length: int, interval: int | None) -> None:
    if ring.groups != 1:
        raise ConfigError(f"the ring has {ring.groups} groups of envs: sequences are drawn from one group alone.")
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
