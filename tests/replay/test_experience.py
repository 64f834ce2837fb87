"""Experience replay: what is due, what is drawn, and how often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remuda.data import Batch, Steps
from remuda.replay.experience import Experience, Priorities
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Ring, Row

EXAMPLE = Row(
    obs=np.zeros(1, np.float32),
    action=np.zeros((), np.int64),
    reward=np.zeros((), np.float32),
    discount=np.zeros((), np.float32),
    mask=np.zeros((), bool),
)


def fresh(T: int, B: int, first: int, ends: tuple[int, ...] = ()) -> Batch:
    """Rows whose observation is their number; where an episode has ended, the next row is a reset row."""
    number = torch.arange(first, first + T, dtype=torch.float32)
    mask = torch.ones(T, B, dtype=torch.bool)
    for end in ends:
        mask[end] = False
    steps = Steps(
        obs=number[:, None, None].expand(T, B, 1).clone(),
        action=torch.zeros(T, B, dtype=torch.int64),
        reward=torch.ones(T, B) * mask,
        discount=torch.ones(T, B),
        mask=mask,
        policy=None,
        version=torch.zeros(T, B, dtype=torch.int64),
    )
    return Batch(steps, last_obs=torch.full((B, 1), float(first + T)))


def make(capacity: int = 50, B: int = 2, alpha: float | None = None, **options: Any) -> Experience:
    ring = Ring(EXAMPLE, capacity, B)
    settings: dict[str, Any] = {"batch_size": 8, "ratio": 4.0, "warm_up": 0, "n_step": 1, "gamma": 0.9, "seed": 1}
    return Experience(ring, **{**settings, **options}, priorities=None if alpha is None else Priorities(ring, alpha))


def test_what_is_due_follows_the_ratio_and_nothing_is_due_twice() -> None:
    replay = make(ratio=3.0, batch_size=8)
    due = []
    for round in range(6):
        replay.add(fresh(1, 2, round))
        due.append(len(list(replay.batches())))
        assert list(replay.batches()) == []
    assert due == [0, 1, 1, 1, 0, 1]  # 6 drawn rows are earned in each round
    assert sum(due) * 8 <= 6 * 2 * 3


def test_reset_rows_earn_nothing() -> None:
    replay = make(ratio=1.0, batch_size=1)
    replay.add(fresh(4, 2, 0, ends=(1, 3)))
    assert len(list(replay.batches())) == 4


def test_the_warm_up_is_owed_nothing() -> None:
    replay = make(ratio=1.0, batch_size=1, warm_up=5)
    replay.add(fresh(2, 2, 0))
    assert list(replay.batches()) == []
    replay.add(fresh(2, 2, 2))
    assert len(list(replay.batches())) == 3
    replay.add(fresh(2, 2, 4))
    assert len(list(replay.batches())) == 4


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_only_real_rows_are_drawn_and_each_of_them(alpha: float | None) -> None:
    replay = make(capacity=20, alpha=alpha, batch_size=64, ratio=64.0)
    seen = set()
    for round in range(5):
        replay.add(fresh(7, 2, 7 * round, ends=(2,)))
        for batch in replay.batches():
            assert batch.steps.mask.all()
            seen |= {
                (int(number), int(env)) for number, (_, env) in zip(batch.steps.obs[:, 0], batch.key, strict=True)
            }
            np.testing.assert_array_equal(batch.key[:, 0], batch.steps.obs[:, 0].long().numpy())
    expected = {(number, env) for number in range(35) for env in range(2) if number % 7 != 2}
    assert seen == expected


def test_returns_and_what_follows() -> None:
    replay = make(n_step=3, batch_size=256, ratio=256.0)
    replay.add(fresh(10, 2, 0, ends=(6,)))
    batch = replay.draw()
    for number, reward, discount, after in zip(
        batch.steps.obs[:, 0].tolist(),
        batch.targets.reward.tolist(),
        batch.targets.discount.tolist(),
        batch.last_obs[:, 0].tolist(),
        strict=True,
    ):
        steps = min(3, (6 if number < 6 else 10) - int(number))
        assert reward == pytest.approx(sum(0.9**k for k in range(steps)))
        assert discount == pytest.approx(0.9**steps)
        assert after == number + steps


def test_the_same_draws_from_the_same_seed_and_number() -> None:
    one, other, third = make(), make(), make(seed=2)
    for replay in (one, other, third):
        replay.add(fresh(20, 2, 0))
    one.draw()
    other.draws = 1
    first, second, different = one.draw(), other.draw(), third.draw()
    np.testing.assert_array_equal(first.key, second.key)
    assert not np.array_equal(first.key, different.key)


def test_prioritised_draws_are_in_proportion_and_weights_undo_it() -> None:
    """Chi-square with 15 degrees of freedom: 37.7 has probability 0.001."""
    replay = make(capacity=20, B=1, alpha=0.5, batch_size=16)
    replay.add(fresh(16, 1, 0))
    row, env = np.arange(16), np.zeros(16, int)
    error = torch.linspace(0.1, 4, 16)
    replay.feedback(np.stack([row, env], -1), error)
    share = error.sqrt() / error.sqrt().sum()
    draws = 4000
    found = np.zeros(16)
    for _ in range(draws):
        batch = replay.draw()
        drawn = batch.key[:, 0]
        np.add.at(found, drawn, 1)
        weight = (share[drawn].min() / share[drawn]).float()
        torch.testing.assert_close(batch.weight, weight, rtol=1e-4, atol=1e-5)
    expected = share.numpy() * draws * 16
    assert ((found - expected) ** 2 / expected).sum() < 37.7


def test_feedback_of_rows_that_are_gone_is_ignored() -> None:
    replay = make(capacity=9, B=1, alpha=1.0)
    replay.add(fresh(8, 1, 0))
    old = np.stack([np.arange(8), np.zeros(8, int)], -1)
    replay.add(fresh(8, 1, 8))
    before = replay.priorities.tree[:].copy()
    replay.feedback(old, torch.full((8,), 100.0))
    np.testing.assert_array_equal(replay.priorities.tree[:], before)
    assert replay.priorities.largest == 1.0


def test_a_fresh_row_is_as_likely_as_the_likeliest() -> None:
    replay = make(capacity=30, B=1, alpha=1.0)
    replay.add(fresh(4, 1, 0))
    replay.feedback(np.stack([np.arange(4), np.zeros(4, int)], -1), torch.tensor([1.0, 5.0, 2.0, 3.0]))
    replay.add(fresh(1, 1, 4))
    assert replay.priorities.tree[4] == pytest.approx(5.0, rel=1e-5)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_rows_whose_frames_are_gone_are_not_drawn(alpha: float | None) -> None:
    """Every second row is a reset row, so beginnings need three frames for every two rows."""
    example = EXAMPLE.replace(obs=np.zeros((3, 1, 1), np.int64))
    ring = FrameRing(example, 64, 1, 3)
    replay = Experience(
        ring,
        batch_size=32,
        ratio=1.0,
        warm_up=0,
        n_step=1,
        gamma=0.9,
        seed=1,
        priorities=None if alpha is None else Priorities(ring, alpha),
    )
    for first in range(0, 200, 10):
        batch = fresh(10, 1, first, ends=(1, 3, 5, 7, 9))
        number = torch.arange(first, first + 10).reshape(10, 1, 1, 1, 1)
        stack = torch.cat([number * 10, number * 10 + 1, number * 10 + 2], 2)
        stack[1::2, :, :2], stack[1::2, :, 2] = stack[::2, :, 1:], stack[1::2, :, 2]
        last = torch.full((1, 3, 1, 1), 0)
        replay.add(Batch(batch.steps.replace(obs=stack), last_obs=last))
        drawn = replay.draw()
        row = drawn.key[:, 0]
        assert (row % 2 == 0).all()
        np.testing.assert_array_equal(drawn.steps.obs[:, 2, 0, 0].numpy(), row * 10 + 2)
        np.testing.assert_array_equal(drawn.steps.obs[:, 0, 0, 0].numpy(), row * 10)
    assert len(set(row.tolist())) < 32


def test_more_rows_than_fit() -> None:
    replay = make(capacity=6, B=2, alpha=1.0, batch_size=32)
    replay.add(fresh(40, 2, 0))
    assert set(replay.draw().steps.obs[:, 0].tolist()) == {35.0, 36.0, 37.0, 38.0, 39.0}
