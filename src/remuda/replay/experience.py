"""Experience replay: rows into a ring, batches of drawn rows out, as many as are due.

    replay = Experience(ring, batch_size=256, ratio=256, warm_up=10_000, n_step=3, gamma=0.99, seed=1)
    replay.add(batch)                              # [T, B] of fresh rows
    for batch in replay.batches():                 # what is due: `ratio` drawn rows for every real step
        replay.feedback(batch.key, priority)

A batch has rows [N]: `targets` are returns over n steps and what the value of `last_obs` is multiplied by. With
priorities, `weight` is the smallest of the drawn probabilities divided by each row's own: an algorithm raises it to
beta. What is drawn is a function of (seed, number of the draw): nothing random has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from remuda.data import ArrayTuple, Batch, Steps, map_tree
from remuda.replay.ring import Index, Ring, Row
from remuda.replay.sumtree import SumTree


class Returns(ArrayTuple):
    """Of every drawn row: rewards to come, and what the value after them is multiplied by."""

    reward: Any
    discount: Any


class Priorities:
    """Rows in proportion to their error to the power of alpha (1511.05952); a fresh row as likely as any."""

    def __init__(self, ring: Ring, alpha: float, epsilon: float = 1e-6) -> None:
        self.ring, self.alpha, self.epsilon = ring, alpha, epsilon
        self.tree, self.largest = SumTree(ring.capacity * ring.envs), 1.0

    def leaf(self, row: Index, env: Index) -> Index:
        return row % self.ring.capacity * self.ring.envs + env

    def append(self, first: int, mask: Any, group: int = 0) -> None:
        """Of rows that were just written, and of the place after them, which holds no row any more."""
        T, width = mask.shape
        row = np.repeat(np.arange(first, first + T + 1), width)
        env = np.tile(np.arange(width) + group * width, T + 1)
        fresh = np.concatenate([np.where(mask, self.largest, 0.0), np.zeros((1, width))])
        newest = slice(-(self.ring.capacity) * width, None)
        self.tree[self.leaf(row, env)[newest]] = fresh.reshape(-1)[newest]

    def draw(self, uniform: Any) -> tuple[Index, Index, Any]:
        """Rows, envs and probabilities, one in each of as many equal parts of the mass."""
        total = self.tree.total
        leaf = self.tree.find((np.arange(len(uniform)) + uniform) * (total / len(uniform)))
        place, env = np.divmod(leaf, self.ring.envs)
        written = self.ring.written[env // self.ring.width]
        row = written - 1 - (written - 1 - place) % self.ring.capacity
        return row, env, self.tree[leaf] / total

    def feedback(self, row: Index, env: Index, error: Any) -> None:
        """Errors of rows drawn earlier; those that were overwritten since are left alone."""
        kept = self.ring.is_stored(row, env)
        priority = (np.abs(error[kept]) + self.epsilon) ** self.alpha
        self.tree[self.leaf(row[kept], env[kept])] = priority
        if len(priority):
            self.largest = max(self.largest, float(priority.max()))


class Experience:
    """Draws single rows."""

    def __init__(
        self,
        ring: Ring,
        *,
        batch_size: int,
        ratio: float,
        warm_up: int,
        n_step: int,
        gamma: float,
        seed: int,
        priorities: Priorities | None = None,
    ) -> None:
        self.ring, self.priorities = ring, priorities
        self.batch_size, self.ratio, self.warm_up, self.n_step, self.gamma = batch_size, ratio, warm_up, n_step, gamma
        self.seed, self.draws, self.steps, self.credit = seed, 0, 0, 0.0

    def add(self, batch: Batch) -> None:
        steps = batch.steps
        rows, last_obs = map_tree(lambda x: x.numpy(), (as_row(steps), batch.last_obs))
        first = int(self.ring.written[0])
        self.ring.append(rows, last_obs)
        if self.priorities is not None:
            self.priorities.append(first, rows.mask)
        real = int(rows.mask.sum())
        # Only what comes after the warm-up is owed updates.
        self.credit += self.ratio * min(real, max(0, self.steps + real - self.warm_up))
        self.steps += real

    def batches(self) -> Iterator[Batch]:
        while self.credit >= self.batch_size:
            self.credit -= self.batch_size
            yield self.draw()

    def draw(self) -> Batch:
        rng = np.random.Generator(np.random.Philox(key=[self.seed, self.draws]))
        self.draws += 1
        weight = None
        if self.priorities is None:
            row, env = self._uniform(rng)
        else:
            row, env, probability = self._prioritised(self.priorities, rng)
            weight = torch.from_numpy((probability.min() / probability).astype(np.float32))
        found = self.ring.n_steps(row, env, self.n_step, self.gamma)
        rows, last_obs = map_tree(torch.from_numpy, (self.ring.take(row, env), self.ring.obs(found.row, env)))
        targets = Returns(torch.from_numpy(found.reward), torch.from_numpy(found.discount))
        steps = Steps(*rows, None, None)
        return Batch(steps, targets, last_obs=last_obs, weight=weight, key=np.stack([row, env], -1))

    def _uniform(self, rng: np.random.Generator) -> tuple[Index, Index]:
        """Real rows, each as likely as any other: what is not real is drawn again."""
        row, env = self.ring.at(rng.integers(0, self.ring.count, self.batch_size))
        while True:
            bad = np.flatnonzero(~(self.ring.is_real(row, env) & self.ring.is_stored(row, env)))
            if len(bad) == 0:
                return row, env
            row[bad], env[bad] = self.ring.at(rng.integers(0, self.ring.count, len(bad)))

    def _prioritised(self, priorities: Priorities, rng: np.random.Generator) -> tuple[Index, Index, Any]:
        """Rows whose frames are gone before they are lose their priority as soon as they are drawn."""
        while True:
            row, env, probability = priorities.draw(rng.random(self.batch_size))
            gone = ~self.ring.is_stored(row, env)
            if not gone.any():
                return row, env, probability
            priorities.tree[priorities.leaf(row[gone], env[gone])] = 0.0

    def feedback(self, key: Any, priority: Any) -> None:
        if self.priorities is not None and priority is not None:
            row, env = key.T
            self.priorities.feedback(row, env, priority.detach().numpy())


def as_row(steps: Steps) -> Row:
    return Row(steps.obs, steps.action, steps.reward, steps.discount, steps.mask)
