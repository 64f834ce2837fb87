"""Experience replay: rows into a ring, batches of drawn rows out, as many as are due.

    replay = Experience(ring, batch_size=256, ratio=256, warm_up=10_000, n_step=3, gamma=0.99, seed=1)
    replay.add(batch)                              # [T, B] of fresh rows
    for batch in replay.batches():                 # what is due: `ratio` drawn rows for every real step
        replay.feedback(batch.key, priority)

A batch has rows [N]: `targets` are returns over n steps and what the value of `last_obs` is multiplied by. With
priorities, `weight` is the smallest of the drawn probabilities divided by each row's own: an algorithm raises it to
beta. What is drawn is a function of (seed, number of the draw): nothing random has to be saved to resume.

A draw is some sixty calls of numpy, each of one to three microseconds. What is said of times was measured with a
million rows and batches of 256 (bench/replay.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.data import ArrayTuple, Batch, Steps, map_tree
from remuda.replay.ring import Index, Ring, Row
from remuda.replay.stored import Stored
from remuda.replay.sumtree import SumTree

NONE: Index = np.zeros(0, np.int64)
MOST_ATTEMPTS = 1000  # to draw a real row; if one in a hundred is, a batch of 256 fails once in a hundred cases


class Returns(ArrayTuple):
    """Of every drawn row: rewards to come, and what the value after them is multiplied by."""

    reward: Any
    discount: Any


class Places:
    """A ring's rows by one number, (row * envs + env) % count, and by keys [N, 2] of row and env.

    np.take by one number costs a quarter of x[row, env]: 16 us against 60 of 256 observations that lie apart.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring, self.rows = ring, map_tree(lambda x: x.reshape(-1, *x.shape[2:]), ring.rows)
        # As arrays: of a number of Python, numpy makes one with each call, 0.5 us.
        self._envs, self._count = np.array(ring.envs), np.array(ring.envs * ring.capacity)
        # A ring of frames puts observations together by itself, and rows there may be gone earlier.
        self._has_obs, self._has_all = type(ring).obs is Ring.obs, type(ring).is_stored is Ring.is_stored

    def of(self, key: Index) -> Index:
        number: Index = key[:, 0] * self._envs
        number += key[:, 1]
        number %= self._count
        return number

    def keys(self, place: Index) -> tuple[Index, Index]:
        """Of what was written last to each place; and which of these rows can no longer be drawn."""
        ring, envs = self.ring, self.ring.envs
        written = ring.written[place % envs // ring.width] if ring.groups > 1 else int(ring.written[0])
        oldest = (written - ring.capacity) * envs
        age = place - oldest
        age %= self._count
        key = self._split(age + oldest)
        # The oldest of as many rows as there are places is gone. Where the least is takes a third of what it is.
        return key, NONE if self._has_all and age[age.argmin()] >= envs else self.gone(key)

    def at(self, share: NDArray[np.float64]) -> tuple[Index, Index]:
        """Places and keys of what lies at these shares of all rows that the ring counts; all are as likely."""
        ring, written = self.ring, int(self.ring.written[0])
        stored = min(written, ring.capacity - 1)
        if stored == 0 and not ring.count:
            raise ValueError("there is nothing to draw: no row was added yet.")
        if ring.groups > 1:
            key = np.stack(ring.at((share * ring.count).astype(np.int64)), -1)
            return self.of(key), key
        number = (share * (stored * ring.envs)).astype(np.int64)  # and so on: 10 us less than by ring.at
        number += (written - stored) * ring.envs
        return number % self._count, self._split(number)

    def _split(self, number: Index) -> Index:
        """Keys of row * envs + env; by columns, as they are worked with."""
        key = np.empty((2, len(number)), np.int64)
        np.divmod(number, self._envs, key[0], key[1])
        return key.T

    def gone(self, key: Index) -> Index:
        return np.flatnonzero(~self.ring.is_stored(key[:, 0], key[:, 1]))

    def unreal(self, place: Index, key: Index) -> Index:
        """Which of these rows, of those that the ring counts, are reset rows or lack frames."""
        is_real = self.rows.mask.take(place)
        if not self._has_all:
            is_real &= self.ring.is_stored(key[:, 0], key[:, 1])
        return np.flatnonzero(~is_real)

    def obs(self, place: Index, row: Index, env: Index) -> Any:
        return take(self.rows.obs, place) if self._has_obs else map_tree(torch.from_numpy, self.ring.obs(row, env))


def take(rows: Any, place: Index) -> Any:
    """Copies, as tensors; after the last place comes the first."""
    if type(rows) is np.ndarray:
        return torch.from_numpy(rows.take(place, 0, None, "wrap"))
    return map_tree(lambda x: torch.from_numpy(x.take(place, 0, None, "wrap")), rows)


class Numbers:
    """Random numbers of every draw, a function of (seed, draw).

    They are made for many draws at once: a generator takes 13 us to make, and what it makes as long again.
    """

    DRAWS = 64

    def __init__(self, seed: int, count: int, in_parts: bool) -> None:
        self._seed, self._count, self._block, self._numbers = seed, count, -1, np.zeros((0, count))
        self._parts = np.arange(count) if in_parts else np.zeros(count)

    def of(self, draw: int, attempt: int = 0) -> NDArray[np.float64]:
        """In [0, 1); in parts, one in each of [0, 1), [1, 2) ... With every attempt, others."""
        if attempt:  # this part of Philox's sequence no block comes to
            philox = np.random.Philox(key=[self._seed, draw], counter=[0, 0, 0, attempt])
            return np.random.Generator(philox).random(self._count) + self._parts
        block, number = divmod(draw, self.DRAWS)
        if block != self._block:
            philox = np.random.Philox(key=[self._seed, block])
            self._numbers = np.random.Generator(philox).random((self.DRAWS, self._count)) + self._parts
            self._block = block
        found: NDArray[np.float64] = self._numbers[number]
        return found


class Priorities:
    """Rows in proportion to their error to the power of alpha (1511.05952); a fresh row as likely as any."""

    def __init__(self, ring: Ring, alpha: float, epsilon: float = 1e-6) -> None:
        self.ring, self.alpha, self.epsilon = ring, alpha, epsilon
        self.tree, self.largest = SumTree(ring.capacity * ring.envs), 1.0
        self.places = Places(ring)
        self._drawn = (NONE, NONE, b"")

    def append(self, first: int, mask: Any, group: int = 0, priority: Any = None) -> None:
        """Of rows [T, B] that are written from `first` on, and of the place after them, which then holds no row.

        `priority` are their errors, if they are known already.
        """
        T, width = mask.shape
        row, env = np.divmod(np.arange((T + 1) * width), width)
        key = np.stack([row + first, env + group * width], -1)
        fresh, largest = np.zeros((T + 1, width)), self.largest
        if priority is None:
            fresh[:T][mask] = largest
        else:
            fresh[:T][mask], largest = self._raised(np.asarray(priority)[mask])
        newest = slice(-(self.ring.capacity) * width, None)
        self.tree.put(self.places.of(key[newest]), fresh.reshape(-1)[newest])
        self.largest = max(self.largest, largest)

    def draw(self, numbers: Numbers, draw: int) -> tuple[Index, Index, NDArray[np.float64]]:
        """Places, keys and priorities, one in each of as many equal parts of all that they add up to."""
        for attempt in itertools.count():
            place, priority = self.tree.draw(numbers.of(draw, attempt))
            key, gone = self.places.keys(place)
            if len(gone) == 0:
                break
            self.tree.put(place[gone], 0.0)  # rows whose frames are gone before they are
        self._drawn = (key, place, self.ring.written.tobytes())
        return place, key, priority

    def feedback(self, key: Index, error: NDArray[Any]) -> None:
        """Errors of rows drawn earlier; those that were overwritten since are left alone."""
        priority, largest = self._raised(error)
        drawn, place, written = self._drawn
        if key is not drawn or written != self.ring.written.tobytes():  # 15 us, and not of the last draw
            gone = self.places.gone(key)
            if len(gone):
                key, priority = np.delete(key, gone, 0), np.delete(priority, gone)
                largest = float(priority.max(initial=0.0))
            place = self.places.of(key)
        self.tree.put(place, priority.astype(np.float64))  # to write float32 there takes twice as long
        self.largest = max(self.largest, largest)

    def _raised(self, error: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """To the power of alpha; and the largest."""
        if len(error) == 0:
            return error, 0.0
        smallest = error[error.argmin()]
        if not smallest >= 0:  # NaN is not either
            raise ValueError(f"a priority of {smallest} was given: priorities are finite and not negative.")
        priority = (error + self.epsilon) ** self.alpha
        largest = float(priority[priority.argmax()])
        if not largest < np.inf:
            raise ValueError(f"a priority of {error.max()} was given: to the power {self.alpha}, it is not finite.")
        return priority, largest

    def get_state(self) -> dict[str, Any]:
        return {"tree": self.tree.get_state(), "largest": self.largest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.tree.set_state(state["tree"])
        self.largest = state["largest"]


class Experience(Stored):
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
        self.ring, self.priorities, self.places = ring, priorities, Places(ring)
        self.numbers = Numbers(seed, batch_size, in_parts=priorities is not None)
        self.batch_size, self.ratio, self.warm_up, self.n_step, self.gamma = batch_size, ratio, warm_up, n_step, gamma
        self.seed, self.draws, self.steps, self.credit = seed, 0, 0, 0.0
        self._gamma, self._mask = np.array(gamma, np.float32), torch.ones(batch_size, dtype=torch.bool)

    def add(self, batch: Batch) -> None:
        steps = batch.steps
        rows, last_obs = map_tree(lambda x: x.numpy(), (as_row(steps), batch.last_obs))
        if self.priorities is not None:  # first, because it may refuse
            is_given = batch.targets is not None and "priority" in batch.targets
            given = batch.targets.priority.detach().numpy() if is_given else None
            self.priorities.append(int(self.ring.written[0]), rows.mask, priority=given)
        self.ring.append(rows, last_obs)
        real = int(rows.mask.sum())
        # Only what comes after the warm-up is owed updates.
        self.credit += self.ratio * min(real, max(0, self.steps + real - self.warm_up))
        self.steps += real

    def batches(self) -> Iterator[Batch]:
        while self.credit >= self.batch_size:
            self.credit -= self.batch_size
            yield self.draw()

    def draw(self) -> Batch:
        weight = None
        if self.priorities is None:
            place, key = self._uniform()
        else:
            place, key, priority = self.priorities.draw(self.numbers, self.draws)
            weight = torch.from_numpy((priority[priority.argmin()] / priority).astype(np.float32))
        self.draws += 1
        rows, row, env = self.places.rows, key[:, 0], key[:, 1]
        obs, action = self.places.obs(place, row, env), take(rows.action, place)
        discount = rows.discount.take(place)
        reward = torch.from_numpy(rows.reward.take(place))
        # Every row is real: one mask for all batches.
        steps = Steps(obs, action, reward, torch.from_numpy(discount), self._mask, None, None)
        if self.n_step == 1:  # all of it was taken already; n_steps would take 60 us
            targets = Returns(reward, torch.from_numpy(discount * self._gamma))
            row, place = row + 1, place + self.ring.envs
        else:
            found = self.ring.n_steps(row, env, self.n_step, self.gamma)
            targets = Returns(torch.from_numpy(found.reward), torch.from_numpy(found.discount))
            row, place = found.row, self.places.of(np.stack([found.row, env], -1))
        last_obs = self.places.obs(place, row, env)
        return Batch(steps, targets, None, last_obs, weight, key)

    def _uniform(self) -> tuple[Index, Index]:
        """Places and keys of real rows, each as likely as any other: what is not real is drawn again."""
        place, key = self.places.at(self.numbers.of(self.draws))
        for attempt in range(1, MOST_ATTEMPTS):
            bad = self.places.unreal(place, key)
            if len(bad) == 0:
                return place, key
            place[bad], key[bad] = self.places.at(self.numbers.of(self.draws, attempt)[bad])
        raise ValueError(
            f"there is nothing to draw: after {MOST_ATTEMPTS} attempts, {len(bad)} rows are still not real."
        )

    def cut(self) -> None:
        first = int(self.ring.written[0])
        super().cut()
        if self.priorities is not None and self.ring.written[0] > first:
            self.priorities.append(first, np.zeros((1, self.ring.envs), bool))

    def feedback(self, key: Any, priority: Any) -> None:
        if self.priorities is not None and priority is not None:
            self.priorities.feedback(key, priority.detach().numpy())

    def get_state(self) -> dict[str, Any]:
        """All but the ring."""
        priorities = None if self.priorities is None else self.priorities.get_state()
        return {"draws": self.draws, "steps": self.steps, "credit": self.credit, "priorities": priorities}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then, what is drawn next is the same, bit by bit."""
        if self.priorities is not None:
            self.priorities.set_state(state["priorities"])
        self.draws, self.steps, self.credit = state["draws"], state["steps"], state["credit"]


def as_row(steps: Steps) -> Row:
    return Row(steps.obs, steps.action, steps.reward, steps.discount, steps.mask)
