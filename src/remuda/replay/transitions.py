"""Experience replay: rows into a ring, batches of drawn rows out, as many as are due.

    replay = Experience(ring, batch_size=256, ratio=256, warm_up=10_000, n_step=3, gamma=0.99, seed=1)
    replay.add(batch)                              # [T, B] of fresh rows
    for batch in replay.batches():                 # what is due: `ratio` drawn rows for every real step
        replay.feedback(batch.key, priority)

A batch has rows [N]: `targets` are returns over n steps and what the value of `next_obs` is multiplied by. With
priorities, `weight` is the smallest of the drawn probabilities divided by each row's own: an algorithm raises it to
beta. What is drawn is a function of (seed, number of the draw): nothing random has to be saved to resume.

Rows may also be appended by other processes, which have the ring's memory (ring.py):

    replay = Experience(ring, ..., is_shared=True, most_per_round=20)
    replay.follow()                                # takes note of what was appended since, and of what is due for it
    for batch in replay.batches(): ...             # 20 at most, so that somebody publishes weights in between

A batch some of whose rows were overwritten while it was put together is drawn again, and they are counted
(`redrawn`). With a `ratio` of None updates are always due.

A draw is some sixty calls of numpy, each of one to three microseconds. What is said of times was measured with a
million rows and batches of 256 (bench/replay.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import ArrayTuple, Batch, Steps, map_tree
from remuda.replay.priorities import Numbers, Priorities
from remuda.replay.ring import Index, NothingToDraw, Ring, Row
from remuda.replay.ring_index import RingIndex, take
from remuda.replay.ring_replay import MOST_ATTEMPTS, RingReplay


class Returns(ArrayTuple):
    """Of every drawn row: rewards to come, and what the value after them is multiplied by."""

    reward: Any
    discount: Any


class TransitionReplay(RingReplay):
    """Draws single rows."""

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
        most_per_round: int | None = None,
        lead: int = 0,
    ) -> None:
        super().__init__(ring, batch_size, ratio, warm_up, seed, is_shared, most_per_round, lead)
        self.priorities, self.places = priorities, RingIndex(ring, is_shared)
        self.numbers = Numbers(seed, batch_size, in_parts=priorities is not None)
        self.n_step, self.gamma, self.rows_per_batch = n_step, gamma, batch_size
        self._gamma, self._mask = np.array(gamma, np.float32), torch.ones(batch_size, dtype=torch.bool)

    def _begin_here(self) -> None:
        super()._begin_here()
        self._seen = self.ring.written.copy()  # rows that have their priority

    def add(self, batch: Batch) -> None:
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.priorities is not None:  # first, because it may refuse
            is_given = batch.targets is not None and "priority" in batch.targets
            given = batch.targets.priority.detach().numpy() if is_given else None
            self.priorities.append(int(self.ring.written[0]), rows.mask, priority=given)
        self.ring.append(rows, next_obs)
        self._seen[0] = self.ring.written[0]
        self._owe(int(rows.mask.sum()))

    def add_each(self, rows: Row, next_obs: Any, env: Index) -> None:
        """Append one row [N] to each of N envs, of a ring that has one group per env; `next_obs` comes after it."""
        at = self.ring.written[env]
        self.ring.append_each(rows, next_obs, env)
        if self.priorities is not None:
            self.priorities.append_each(at, env, rows.mask)

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch of any size, whatever is due."""
        if batch_size != self.batch_size:
            self.batch_size = self.rows_per_batch = batch_size
            self.numbers = Numbers(self.seed, batch_size, in_parts=self.priorities is not None)
            self._mask = torch.ones(batch_size, dtype=torch.bool)
        return self._gather()

    def _take_note(self) -> None:
        if self.priorities is not None:
            self._seen[:] = [self.priorities.sync(group, int(seen)) for group, seen in enumerate(self._seen)]

    def can_draw(self) -> bool:
        """Whoever learns before there is a real row has set no warm-up, and is told so; but rows that others write
        are counted before they can be seen."""
        if not self.is_shared:
            return True
        self._take_note()
        return self.ring.count > 0 if self.priorities is None else self.priorities.tree.total > 0

    def _gather(self) -> Batch:
        weight = None
        if self.priorities is None:
            place, key = self._uniform()
        else:
            place, key, priority = self.priorities.draw(self.numbers, self.draws)
            weight = torch.from_numpy((priority[priority.argmin()] / priority).astype(np.float32))
        self.draws += 1
        # Every row is real: one mask for all batches.
        return batch_of_rows(self.places, place, key, self.n_step, self._gamma, self._mask, weight)

    def _torn(self, batch: Batch) -> int:
        return self.places.torn(batch.key)

    def _uniform(self) -> tuple[Index, Index]:
        """Places and keys of real rows, each as likely as any other: what is not real is drawn again."""
        place, key = self.places.at(self.numbers.of(self.draws))
        for attempt in range(1, MOST_ATTEMPTS):
            bad = self.places.unreal(place, key)
            if len(bad) == 0:
                return place, key
            place[bad], key[bad] = self.places.at(self.numbers.of(self.draws, attempt)[bad])
        raise NothingToDraw(
            f"there is nothing to draw: after {MOST_ATTEMPTS} attempts, {len(bad)} rows are still not real."
        )

    def feedback(self, key: Any, priority: Any) -> None:
        if self.priorities is not None and priority is not None:
            self.priorities.feedback(key, priority.detach().numpy())

    def get_state(self) -> dict[str, Any]:
        """All but the ring."""
        priorities = None if self.priorities is None else self.priorities.get_state()
        return {**self._counts(), "seen": self._seen.copy(), "priorities": priorities}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then, what is drawn next is the same, bit by bit."""
        if self.priorities is not None:
            self.priorities.set_state(state["priorities"])
        self._set_counts(state)
        self._seen[:] = state["seen"]
        for group in range(self.ring.groups if self.ring.error is not None else 0):
            self.ring.td_errors[group] = self._seen[group]
            self.ring.forgo_judgement(group)


def batch_of_rows(
    places: RingIndex,
    place: Index,
    key: Index,
    n_step: int,
    gamma: NDArray[np.float32],
    mask: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> Batch:
    """Copies of rows [N], of returns over n steps from each, and of what was seen after those."""
    ring, rows, row, env = places.ring, places.rows, key[:, 0], key[:, 1]
    obs, action = places.obs(place, row, env), take(rows.action, place)
    discount = rows.discount.take(place)
    reward = torch.from_numpy(rows.reward.take(place))
    steps = Steps(obs, action, reward, torch.from_numpy(discount), mask, None, None)
    if n_step == 1:  # all of it was taken already; n_steps would take 60 us
        targets = Returns(reward, torch.from_numpy(discount * gamma))
        row, place = row + 1, place + ring.envs
    else:
        found = ring.n_steps(row, env, n_step, float(gamma))
        targets = Returns(torch.from_numpy(found.reward), torch.from_numpy(found.discount))
        row, place = found.row, places.of(np.stack([found.row, env], -1))
    return Batch(steps, targets, None, places.obs(place, row, env), weight, key)


def as_row(steps: Steps) -> Row:
    return Row(steps.obs, steps.action, steps.reward, steps.discount, steps.mask)
