"""A replay that stores rows in a ring and draws single transitions from it, uniformly or by priority.

    replay = TransitionReplay(ring, batch_size=256, ratio=256, warm_up=10_000, n_step=3, gamma=0.99, seed=1)
    replay.add(batch)                              # [T, B] new rows
    for batch in replay.batches():                 # all batches that are due: `ratio` drawn rows for every real step
        replay.feedback(batch.key, td_error)

A batch has rows [N]. Its `targets` are n-step returns, and factors that multiply the values of `next_obs`. With
priorities, `weight` is the smallest probability in the batch divided by the row's own probability; an algorithm
raises it to the power beta. A draw is a function of (seed, number of the draw), so no random state has to be saved.

Other processes may append rows to the memory of the ring (ring.py):

    replay = TransitionReplay(ring, ..., is_shared=True, max_batches_per_round=20)
    replay.sync()                                  # counts the rows that were appended since the last call
    for batch in replay.batches(): ...             # at most 20, so that weights are published between rounds

`TransitionPriority` computes TD errors of new rows in the process that samples them, so that rows with large errors
are drawn sooner (Ape-X).

A draw consists of about sixty numpy calls of one to three microseconds each. The times in the comments were measured
with a million rows and batches of 256 (bench/replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import Array, ArrayTuple, Batch, Steps, Tree, map_tree
from remuda.replay.counters import Index
from remuda.replay.priorities import DrawNumbers, Priorities
from remuda.replay.ring import NothingToDraw, Ring, RingIndex, Row, take
from remuda.replay.ring_replay import MAX_ATTEMPTS, RingReplay

TDErrorFunction = Callable[[Batch], torch.Tensor]


class Returns(ArrayTuple):
    """Targets of drawn rows.

    `reward` is the discounted sum of up to n rewards, and `discount` is the factor of the value of `next_obs`.
    """

    reward: Array
    discount: Array


class TransitionReplay(RingReplay):
    """Replay that draws single rows, uniformly or by priority."""

    def __init__(
        self,
        ring: Ring,
        *,
        batch_size: int,
        ratio: float | None,
        warm_up: int,
        n_step: int,
        gamma: float,
        seed: int,
        priorities: Priorities | None = None,
        is_shared: bool = False,
        max_batches_per_round: int | None = None,
        max_lead: int = 0,
    ) -> None:
        super().__init__(
            ring, batch_size, batch_size, ratio, warm_up, seed, is_shared, max_batches_per_round, max_lead
        )
        self.priorities, self.index, self.n_step, self.gamma = priorities, RingIndex(ring, is_shared), n_step, gamma
        self._gamma = np.array(gamma, np.float32)
        self._set_batch_size(batch_size)

    def _set_batch_size(self, batch_size: int) -> None:
        self.batch_size = self.counters.rows_per_batch = batch_size
        self.numbers = DrawNumbers(self.seed, batch_size, self.priorities is not None, self.part)
        self._mask = torch.ones(batch_size, dtype=torch.bool)

    def set_part(self, part: int, parts: int) -> None:
        super().set_part(part, parts)
        self.numbers = DrawNumbers(self.seed, self.batch_size, self.priorities is not None, part)

    def append(self, batch: Batch) -> tuple[int, bool]:
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.priorities is not None:  # first, because invalid priorities must not change the ring
            is_given = batch.targets is not None and "priority" in batch.targets
            given = batch.targets.priority.detach().numpy() if is_given else None
            self.priorities.append(int(self.ring.written[0]), rows.mask, td_error=given)
        self.ring.append(rows, next_obs)
        self.counters.mark_prioritized(0, int(self.ring.written[0]))
        return int(rows.mask.sum()), self.can_draw()

    def add_each(self, rows: Row, next_obs: Tree, env: Index) -> None:
        """Append one row for each env in `env`, and the observations after them, to a ring with one group per env."""
        row = self.ring.append_each(rows, next_obs, env)
        if self.priorities is not None:
            self.priorities.append_each(row, env, rows.mask)

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch of any size, whether it is due or not."""
        if batch_size != self.batch_size:
            self._set_batch_size(batch_size)
        return self._draw_once()

    def _sync_rows(self) -> None:
        if self.priorities is not None:
            for group in range(self.ring.groups):
                rows = self.counters.without_priority(group)
                self.priorities.sync(group, rows)
                self.counters.mark_prioritized(group, rows.stop)

    def can_draw(self) -> bool:
        """Return whether there is a row to draw; without `is_shared`, always return True.

        Without `is_shared`, `add` stores rows before it counts their steps, so the replay has rows when a batch is
        due. Drawing from an empty replay raises NothingToDraw.
        """
        if not self.is_shared:
            return True
        self._sync_rows()
        return self.ring.counters.count > 0 if self.priorities is None else self.priorities.tree.total > 0

    def _draw_once(self) -> Batch:
        weight = None
        draw = self.counters.draws
        if self.priorities is None:
            place, key = self._uniform(draw)
        else:
            place, key, priority = self.priorities.draw(self.numbers, draw)
            weight = torch.from_numpy((priority[priority.argmin()] / priority).astype(np.float32))
        self.counters.count_draw()
        # Every drawn row is real, so all batches share one mask.
        return batch_of_rows(self.index, place, key, self.n_step, self._gamma, self._mask, weight)

    def _count_torn(self, batch: Batch) -> int:
        return self.index.count_torn(batch.key)

    def _uniform(self, draw: int) -> tuple[Index, Index]:
        """Return places and keys of rows drawn uniformly; further draws replace reset rows and overwritten rows."""
        place, key = self.index.at(self.numbers.of(draw))
        for attempt in range(1, MAX_ATTEMPTS):
            bad = self.index.not_drawable(place, key)
            if len(bad) == 0:
                return place, key
            place[bad], key[bad] = self.index.at(self.numbers.of(draw, attempt)[bad])
        raise NothingToDraw(
            f"there is nothing to draw: after {MAX_ATTEMPTS} attempts, {len(bad)} rows are still not real."
        )

    def feedback(self, key: Index, priority: torch.Tensor | None) -> None:
        """Set the priorities of drawn rows from `priority`, which holds their absolute TD errors."""
        if self.priorities is not None and priority is not None:
            self.priorities.feedback(key, priority.detach().numpy())

    def get_state(self) -> dict[str, object]:
        priorities = None if self.priorities is None else self.priorities.get_state()
        return {**self.counters.get_state(), "seen": self.counters.prioritized.copy(), "priorities": priorities}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if self.priorities is not None:
            self.priorities.set_state(state["priorities"])
        self.counters.set_state(state)
        self.counters.mark_prioritized(slice(None), state["seen"])
        if self.ring.td_error is not None:  # TD errors are not saved, so mark them as unknown
            for group in range(self.ring.groups):
                self.ring.counters.publish_td_errors(group, int(self.counters.prioritized[group]))
                self.ring.waive_td_error(group)


class TransitionPriority:
    """Computes TD errors of the rows of one group, in the process that writes these rows.

        priority = TransitionPriority(ring, group=1, n_step=3, gamma=0.99, td_error=algorithm.td_error)
        ring.append(rows, next_obs, group=1)
        priority.update()                          # stores TD errors of all new rows; readers wait for them

    For the newest rows, fewer than n rewards are known, and TD errors are computed from these rewards.
    """

    def __init__(self, ring: Ring, group: int, n_step: int, gamma: float, td_error: TDErrorFunction) -> None:
        """`td_error` maps a batch of N rows to absolute TD errors [N]."""
        self.ring, self.group, self.n_step, self.td_error = ring, group, n_step, td_error
        self._index, self._gamma = RingIndex(ring), np.array(gamma, np.float32)

    def update(self) -> None:
        """Compute and store the missing TD errors of the group's rows."""
        ring, columns, rows = (
            self.ring,
            self.ring.columns(self.group),
            self.ring.counters.without_td_error(self.group),
        )
        env = np.arange(columns.start, columns.stop)
        row, env = np.meshgrid(np.arange(rows.start, rows.stop), env, indexing="ij")
        key = np.stack([row.reshape(-1), env.reshape(-1)], -1)
        place = self._index.place(key)
        mask = torch.from_numpy(self._index.rows.mask.take(place))
        error = self.td_error(batch_of_rows(self._index, place, key, self.n_step, self._gamma, mask))
        ring.set_td_error(self.group, rows.start, finite_or_nan(error).reshape(row.shape))


def finite_or_nan(error: torch.Tensor) -> NDArray[np.float32]:
    """Replace errors that are not finite by NaN, which means unknown. A diverging network thus sets no priorities."""
    found: NDArray[np.float32] = torch.where(error.isfinite(), error, torch.nan).numpy()
    return found


def batch_of_rows(
    index: RingIndex,
    place: Index,
    key: Index,
    n_step: int,
    gamma: NDArray[np.float32],
    mask: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> Batch:
    """Return a batch with copies of N rows, their n-step returns, and the observations to bootstrap from."""
    ring, rows, row, env = index.ring, index.rows, key[:, 0], key[:, 1]
    obs, action = index.obs(place, row, env), take(rows.action, place)
    discount = rows.discount.take(place)
    reward = torch.from_numpy(rows.reward.take(place))
    steps = Steps(obs, action, reward, torch.from_numpy(discount), mask, None, None)
    if n_step == 1:  # the reward of a row is its 1-step return, and calling n_steps would take 60 us
        targets = Returns(reward, torch.from_numpy(discount * gamma))
        row, place = row + 1, place + ring.envs
    else:
        found = ring.n_steps(row, env, n_step, float(gamma))
        targets = Returns(torch.from_numpy(found.reward), torch.from_numpy(found.discount))
        row, place = found.row, index.place(np.stack([found.row, env], -1))
    return Batch(steps, targets, None, index.obs(place, row, env), weight, key)


def as_row(steps: Steps) -> Row:
    """Return the fields of steps that a ring stores."""
    return Row(steps.obs, steps.action, steps.reward, steps.discount, steps.mask)
