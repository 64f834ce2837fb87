"""The ring compared with a model that stores all rows of every env in lists."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from references import slow_n_steps

from remuda.errors import ConfigError
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Ring, Row

FRAMES, GAMMA = 3, 0.9


@dataclass
class Model:
    """Envs whose observations are stacks of numbered frames, and all rows that they have produced."""

    envs: int
    rng: np.random.Generator
    mean_length: float
    rows: list[list[tuple[Any, ...]]] = field(default_factory=list)  # by env: obs, action, reward, discount, mask

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.envs)]
        self.next_frame = 1
        self.now = [self.first() for _ in range(self.envs)]
        self.has_ended = [False] * self.envs

    def frame(self) -> int:
        self.next_frame += 1
        return self.next_frame

    def first(self) -> np.ndarray:
        """Return a first stack of arbitrary frames: some real envs begin with blank frames, others with copies."""
        return np.array([self.frame() for _ in range(FRAMES)]).reshape(FRAMES, 1, 1)

    def step(self, env: int) -> None:
        obs = self.now[env]
        action, reward = int(self.rng.integers(5)), float(self.rng.integers(-3, 4))
        if self.has_ended[env]:  # the reset row: the final observation, whose action is not executed
            self.rows[env].append((obs, action, 0.0, 1.0, False))
            self.now[env], self.has_ended[env] = self.first(), False
            return
        ends, terminated = self.rng.random() < 1 / self.mean_length, self.rng.random() < 0.5
        self.rows[env].append((obs, action, reward, 0.0 if ends and terminated else 1.0, True))
        self.now[env] = np.concatenate([obs[1:], np.full((1, 1, 1), self.frame())])
        self.has_ended[env] = bool(ends)

    def rollout(self, T: int, envs: range) -> tuple[Row, np.ndarray]:
        for env in envs:
            for _ in range(T):
                self.step(env)
        columns = [zip(*self.rows[env][len(self.rows[env]) - T :], strict=True) for env in envs]
        stacked = [np.stack([np.stack(list(part)) for part in parts], 1) for parts in zip(*columns, strict=True)]
        obs, action, reward, discount, mask = stacked
        last = np.stack([self.now[env] for env in envs])
        return Row(obs, action, reward.astype(np.float32), discount.astype(np.float32), mask), last

    def cut(self, envs: range) -> None:
        """End all episodes with a reset row, as when envs are rebuilt."""
        for env in envs:
            self.rows[env].append((self.now[env], 0, 0.0, 1.0, False))
            self.now[env], self.has_ended[env] = self.first(), False

    def seen(self, row: int, env: int) -> np.ndarray:
        return self.now[env] if row == len(self.rows[env]) else self.rows[env][row][0]

    def n_steps(self, row: int, env: int, n: int) -> tuple[float, float, int]:
        return slow_n_steps(self.rows[env], len(self.rows[env]), row, n, GAMMA)


EXAMPLE = Row(
    obs=np.zeros((FRAMES, 1, 1), np.int64),
    action=np.zeros((), np.int64),
    reward=np.zeros((), np.float32),
    discount=np.zeros((), np.float32),
    mask=np.zeros((), bool),
)


def make(kind: str, capacity: int, envs: int, groups: int) -> Ring:
    if kind == "frames":
        return FrameRing(EXAMPLE, capacity, envs, FRAMES, groups)
    return Ring(EXAMPLE, capacity, envs, groups)


def check(ring: Ring, model: Model) -> int:
    """Check that every stored row is unchanged, and return the number of real rows."""
    row, env = ring.counters.locate(np.arange(ring.counters.count))
    assert len(set(zip(row.tolist(), env.tolist(), strict=True))) == ring.counters.count
    kept = ring.is_stored(row, env)
    row, env = row[kept], env[kept]
    taken = ring.take(row, env)
    for i, (r, e) in enumerate(zip(row.tolist(), env.tolist(), strict=True)):
        obs, action, reward, discount, mask = model.rows[e][r]
        np.testing.assert_array_equal(taken.obs[i], obs)
        assert (taken.action[i], taken.reward[i], taken.discount[i], taken.mask[i]) == (
            action,
            reward,
            discount,
            mask,
        )
    real = ring.is_real(row, env)
    assert real.tolist() == taken.mask.tolist()
    row, env = row[real], env[real]
    for n in (1, 2, 5):
        found = ring.n_steps(row, env, n, GAMMA)
        after = ring.obs(found.row, env)
        for i, (r, e) in enumerate(zip(row.tolist(), env.tolist(), strict=True)):
            reward, discount, last = model.n_steps(r, e, n)
            assert found.reward[i] == pytest.approx(reward, abs=1e-5)
            assert found.discount[i] == pytest.approx(discount, abs=1e-6)
            assert found.row[i] == last
            np.testing.assert_array_equal(after[i], model.seen(last, e))
    return len(row)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(["rows", "frames"]),
    capacity=st.integers(3, 40),
    groups=st.sampled_from([1, 2]),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 1), st.booleans()), min_size=1, max_size=8),
    mean_length=st.sampled_from([1.5, 4.0, 30.0]),
    seed=st.integers(0, 2**31),
)
@example(kind="frames", capacity=7, groups=1, lengths=[(7, 0, False)], mean_length=4.0, seed=0)
def test_ring_matches_model_for_any_rollout_lengths(
    kind: str, capacity: int, groups: int, lengths: list[tuple[int, int, bool]], mean_length: float, seed: int
) -> None:
    model = Model(4, np.random.default_rng(seed), mean_length)
    ring = make(kind, capacity, 4, groups)
    try:
        for T, which, is_cut in lengths:
            group = which % groups
            envs = range(group * ring.width, (group + 1) * ring.width)
            ring.append(*model.rollout(T, envs), group)
            if is_cut:
                last = np.stack([model.now[env] for env in envs])
                model.cut(envs)
                ring.cut(last, group)
            check(ring, model)
    finally:
        ring.close()


def test_newest_row_can_be_drawn_at_once() -> None:
    model = Model(2, np.random.default_rng(0), 1e9)
    ring = make("frames", 10, 2, 1)
    ring.append(*model.rollout(1, range(2)))
    assert check(ring, model) == 2
    ring.close()


def test_frames_of_long_episodes_are_all_kept() -> None:
    """A frame ring loses rows before they are overwritten only if more than one row in 64 begins an episode."""
    model = Model(2, np.random.default_rng(0), 1e9)
    ring = make("frames", 300, 2, 1)
    for _ in range(40):
        ring.append(*model.rollout(17, range(2)))
    assert check(ring, model) == 299 * 2
    ring.close()


def test_overwritten_row_is_not_stored() -> None:
    model = Model(1, np.random.default_rng(0), 5.0)
    ring = make("rows", 8, 1, 1)
    ring.append(*model.rollout(7, range(1)))
    zero, env = np.array([0]), np.array([0])
    assert ring.is_stored(zero, env).all()
    ring.append(*model.rollout(1, range(1)))
    assert not ring.is_stored(zero, env).any()
    assert not ring.is_stored(np.array([8]), env).any()  # not written yet
    ring.close()


def test_n_step_returns_of_a_worked_example() -> None:
    """A truncated episode with rewards 1, 2, 4; a terminated one with reward 8; and the first row of a third."""
    ring = Ring(EXAMPLE.replace(obs=np.zeros((), np.int64)), 20, 1)
    mask = np.array([True, True, True, False, True, False, True])
    rows = Row(
        obs=np.arange(7),
        action=np.zeros(7, np.int64),
        reward=np.array([1, 2, 4, 0, 8, 0, 16], np.float32),
        discount=np.array([1, 1, 1, 1, 0, 1, 1], np.float32),
        mask=mask,
    )
    ring.append(Row(*(x[:, None] for x in rows)), np.array([7]))
    row = np.flatnonzero(mask)
    found = ring.n_steps(row, np.zeros_like(row), 2, 0.5)
    assert found.reward.tolist() == [2.0, 4.0, 4.0, 8.0, 16.0]
    assert found.discount.tolist() == [0.25, 0.25, 0.5, 0.0, 0.5]
    assert ring.obs(found.row, np.zeros_like(row))[[0, 1, 2, 4]].tolist() == [2, 3, 3, 7]
    ring.close()


def test_atari_transition_takes_little_more_memory_than_one_frame() -> None:
    """100,000 stacks of four 84x84 frames in eight envs: other replays store one or two stacks per transition."""
    ring = FrameRing(EXAMPLE.replace(obs=np.zeros((4, 84, 84), np.uint8)), 12_500, 8, 4)
    taken = sum(os.fstat(memory.fd).st_size for memory in ring.memory)  # reserved, not resident
    assert 84 * 84 < taken / 100_000 <= 7_300
    ring.close()


@pytest.mark.parametrize("T", [1, 7])
def test_observations_that_are_not_stacks_are_refused(T: int) -> None:
    ring = FrameRing(EXAMPLE, 40, 1, FRAMES, checked_rows=20)
    obs = np.zeros((21, 1, *np.asarray(EXAMPLE.obs).shape), np.uint8)
    obs += np.arange(21, dtype=np.uint8).reshape(21, 1, *[1] * np.asarray(EXAMPLE.obs).ndim)  # equal frames
    ones = np.ones((T, 1), np.float32)
    rows = Row(None, ones.astype(np.int64), ones, ones, ones.astype(bool))

    def append_all() -> None:
        for t in range(0, 21 - T, T):
            ring.append(rows.replace(obs=obs[t : t + T]), obs[t + T])

    with pytest.raises(ConfigError, match=r"replay\.frames=\d, and observations are not stacks"):
        append_all()
    ring.close()
