"""The range of discounted returns in a ring, compared with loops over every env."""

from __future__ import annotations

import numpy as np
import pytest

from remuda.replay import Ring, Row
from remuda.replay.ring_replay import return_range

NUMBER = np.zeros((), np.float32)
EXAMPLE = Row(NUMBER, NUMBER, NUMBER, NUMBER, np.zeros((), bool))


def rows(reward: np.ndarray, discount: np.ndarray, mask: np.ndarray) -> Row:
    blank = np.zeros_like(reward)
    return Row(blank, blank, reward, discount, mask)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_return_range_matches_loops(seed: int, gamma: float) -> None:
    rng, T = np.random.default_rng(seed), 31
    ring = Ring(EXAMPLE, 20, 4, groups=2)  # the newest 19 of 31 rows are kept
    try:
        low, high, rewards = 0.0, 0.0, list[float]()
        for group in range(2):
            mask = rng.random((T, 2)) < 0.8
            reward = np.where(mask, rng.normal(size=(T, 2)), 0).astype(np.float32)
            discount = np.where(rng.random((T, 2)) < 0.1, 0, 1).astype(np.float32)
            for first in range(0, T, 5):
                part = slice(first, first + 5)
                ring.append(rows(reward[part], discount[part], mask[part]), np.zeros(2, np.float32), group)
            for b in range(2):
                for t in range(T - 19, T):
                    total, factor, at = 0.0, 1.0, t
                    while at < T and mask[at, b] and factor > 0:
                        total += factor * reward[at, b]
                        factor *= gamma * discount[at, b]
                        at += 1
                    low, high = min(low, total), max(high, total)
                    rewards += [float(reward[t, b])] if mask[t, b] else []
        steady = float(np.mean(rewards)) / (1 - gamma) if gamma < 1 else 0.0
        assert return_range(ring, gamma) == pytest.approx((low, high, steady), rel=1e-5)
    finally:
        ring.close()


def test_return_range_of_truncated_episodes_with_reward_minus_one() -> None:
    """Three episodes as in MountainCar, which truncates them after 200 steps; the last one is not over yet."""
    T, ring = 500, Ring(EXAMPLE, 1000, 1)
    try:
        mask = (np.arange(T)[:, None] + 1) % 201 > 0
        ring.append(rows(-mask.astype(np.float32), np.ones((T, 1), np.float32), mask), np.zeros(1, np.float32))
        low, high, steady = return_range(ring, 0.99)
        assert (low, high, steady) == pytest.approx((-(1 - 0.99**200) / 0.01, 0.0, -100.0))
    finally:
        ring.close()


def test_return_range_of_an_empty_ring_is_zero() -> None:
    ring = Ring(EXAMPLE, 10, 2)
    try:
        assert return_range(ring, 0.99) == (0.0, 0.0, 0.0)
    finally:
        ring.close()
