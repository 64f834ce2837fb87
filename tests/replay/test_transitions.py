"""Transition replay: due updates, drawn rows, and their frequencies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remuda.data import ArrayTuple, Batch, Steps, leaves, map_tree, namedarraytuple
from remuda.data.packing import pack, unpack
from remuda.replay.frames import FrameRing
from remuda.replay.priorities import DrawNumbers, Priorities
from remuda.replay.ring import Ring, Row
from remuda.replay.transitions import Returns, TransitionReplay, as_row

EXAMPLE = Row(
    obs=np.zeros(1, np.float32),
    action=np.zeros((), np.int64),
    reward=np.zeros((), np.float32),
    discount=np.zeros((), np.float32),
    mask=np.zeros((), bool),
)


def fresh(T: int, B: int, first: int, ends: tuple[int, ...] = ()) -> Batch:
    """Return rows whose observation is their number; the rows in `ends` are reset rows."""
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
    return Batch(steps, next_obs=torch.full((B, 1), float(first + T)))


def make(capacity: int = 50, B: int = 2, alpha: float | None = None, **options: Any) -> TransitionReplay:
    ring = Ring(EXAMPLE, capacity, B)
    settings: dict[str, Any] = {"batch_size": 8, "ratio": 4.0, "warm_up": 0, "n_step": 1, "gamma": 0.9, "seed": 1}
    return TransitionReplay(
        ring, **{**settings, **options}, priorities=None if alpha is None else Priorities(ring, alpha)
    )


def test_due_batches_follow_the_ratio_and_are_given_once() -> None:
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


def test_no_updates_are_due_for_the_warm_up() -> None:
    replay = make(ratio=1.0, batch_size=1, warm_up=5)
    replay.add(fresh(2, 2, 0))
    assert list(replay.batches()) == []
    replay.add(fresh(2, 2, 2))
    assert len(list(replay.batches())) == 3
    replay.add(fresh(2, 2, 4))
    assert len(list(replay.batches())) == 4


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_all_real_rows_and_no_reset_rows_are_drawn(alpha: float | None) -> None:
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


def test_n_step_returns_and_next_observations() -> None:
    replay = make(n_step=3, batch_size=256, ratio=256.0)
    replay.add(fresh(10, 2, 0, ends=(6,)))
    batch = replay.draw()
    for number, reward, discount, after in zip(
        batch.steps.obs[:, 0].tolist(),
        batch.targets.reward.tolist(),
        batch.targets.discount.tolist(),
        batch.next_obs[:, 0].tolist(),
        strict=True,
    ):
        steps = min(3, (6 if number < 6 else 10) - int(number))
        assert reward == pytest.approx(sum(0.9**k for k in range(steps)))
        assert discount == pytest.approx(0.9**steps)
        assert after == number + steps


def test_draws_are_a_function_of_seed_and_number() -> None:
    one, other, third = make(), make(), make(seed=2)
    for replay in (one, other, third):
        replay.add(fresh(20, 2, 0))
    one.draw()
    other.counters.draws = 1
    first, second, different = one.draw(), other.draw(), third.draw()
    np.testing.assert_array_equal(first.key, second.key)
    assert not np.array_equal(first.key, different.key)


def test_prioritized_draws_are_proportional_and_weights_correct_for_it() -> None:
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


def test_feedback_for_overwritten_rows_is_ignored() -> None:
    replay = make(capacity=9, B=1, alpha=1.0)
    replay.add(fresh(8, 1, 0))
    old = np.stack([np.arange(8), np.zeros(8, int)], -1)
    replay.add(fresh(8, 1, 8))
    before = replay.priorities.tree[:].copy()
    replay.feedback(old, torch.full((8,), 100.0))
    np.testing.assert_array_equal(replay.priorities.tree[:], before)
    assert replay.priorities.largest == 1.0


def test_new_row_gets_the_largest_priority() -> None:
    replay = make(capacity=30, B=1, alpha=1.0)
    replay.add(fresh(4, 1, 0))
    replay.feedback(np.stack([np.arange(4), np.zeros(4, int)], -1), torch.tensor([1.0, 5.0, 2.0, 3.0]))
    replay.add(fresh(1, 1, 4))
    assert replay.priorities.tree[4] == pytest.approx(5.0, rel=1e-5)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_rows_with_overwritten_frames_are_not_drawn(alpha: float | None) -> None:
    """Every second row is a reset row, so that every two rows need three frames."""
    example = EXAMPLE.replace(obs=np.zeros((3, 1, 1), np.int64))
    ring = FrameRing(example, 64, 1, 3)
    replay = TransitionReplay(
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
        replay.add(Batch(batch.steps.replace(obs=stack), next_obs=last))
        drawn = replay.draw()
        row = drawn.key[:, 0]
        assert (row % 2 == 0).all()
        np.testing.assert_array_equal(drawn.steps.obs[:, 2, 0, 0].numpy(), row * 10 + 2)
        np.testing.assert_array_equal(drawn.steps.obs[:, 0, 0, 0].numpy(), row * 10)
    assert len(set(row.tolist())) < 32


def test_rollout_longer_than_the_ring_keeps_its_newest_rows() -> None:
    replay = make(capacity=6, B=2, alpha=1.0, batch_size=32)
    replay.add(fresh(40, 2, 0))
    assert set(replay.draw().steps.obs[:, 0].tolist()) == {35.0, 36.0, 37.0, 38.0, 39.0}


class Known(ArrayTuple):
    """Targets with initial priorities, as a sampler may compute them."""

    priority: Any


def keys(row: Any, env: Any = 0) -> np.ndarray:
    return np.stack(np.broadcast_arrays(row, env), -1)


def priorities_of(replay: TransitionReplay) -> np.ndarray:
    """Return the priorities of all places, shaped [capacity, B]."""
    assert replay.priorities is not None
    return replay.priorities.tree[:].reshape(replay.ring.capacity, replay.ring.envs)


def restored(replay: TransitionReplay, **options: Any) -> TransitionReplay:
    """Return another replay with the same rows and with the state that a file would contain."""
    alpha = None if replay.priorities is None else replay.priorities.alpha
    other = make(replay.ring.capacity, replay.ring.envs, alpha, batch_size=replay.batch_size, **options)
    for (_, theirs), (_, mine) in zip(leaves(other.ring.rows), leaves(replay.ring.rows), strict=True):
        theirs[:] = mine
    other.ring.written[:] = replay.ring.written
    other.set_state(unpack(pack(replay.get_state())))
    return other


def test_prioritized_frequencies_of_many_envs() -> None:
    """Chi-square with 122 degrees of freedom: 176.0 has probability 0.001.

    One row is drawn from each part of the mass, so frequencies vary less than those of independent draws: only the
    upper end of the distribution is tested.
    """
    replay = make(capacity=50, B=3, alpha=0.6, batch_size=32)
    replay.add(fresh(70, 3, 0, ends=tuple(range(30, 70, 5))))  # 49 are kept, of which 8 are reset rows
    row, env = (x.reshape(-1) for x in np.meshgrid(np.arange(21, 70), np.arange(3), indexing="ij"))
    real = (row < 30) | (row % 5 != 0)
    row, env = row[real], env[real]
    error = np.random.default_rng(1).uniform(0, 3, len(row)).astype(np.float32)
    replay.feedback(keys(row, env), torch.from_numpy(error))
    share = (error.astype(float) + 1e-6) ** 0.6
    share /= share.sum()
    draws, found = 3000, np.zeros((70, 3))
    for _ in range(draws):
        np.add.at(found, tuple(replay.draw().key.T), 1)
    expected = share * draws * 32
    assert found.sum() == found[row, env].sum() == draws * 32
    assert len(row) == 123
    assert ((found[row, env] - expected) ** 2 / expected).sum() < 176.0


def test_uniform_frequencies() -> None:
    """Chi-square with 122 degrees of freedom: 176.0 has probability 0.001, 79.4 has 0.999."""
    replay = make(capacity=50, B=3, batch_size=32)
    replay.add(fresh(70, 3, 0, ends=tuple(range(30, 70, 5))))
    draws, found = 3000, np.zeros((70, 3))
    for _ in range(draws):
        np.add.at(found, tuple(replay.draw().key.T), 1)
    drawn = found[found > 0]
    assert len(drawn) == 123
    assert 79.4 < ((drawn - draws * 32 / 123) ** 2 / (draws * 32 / 123)).sum() < 176.0


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_weights_against_a_slow_reference(alpha: float) -> None:
    replay = make(capacity=300, B=2, alpha=alpha, batch_size=64)
    rng = np.random.default_rng(2)
    replay.add(fresh(200, 2, 0))
    error = {(row, env): 1.0 for row in range(200) for env in range(2)}
    for _ in range(20):
        batch = replay.draw()
        priority = {key: (value + 1e-6) ** alpha if value != 1.0 else 1.0 for key, value in error.items()}
        total = sum(priority.values())
        probability = [priority[row, env] / total for row, env in batch.key.tolist()]
        expected = torch.tensor([min(probability) / each for each in probability])
        torch.testing.assert_close(batch.weight, expected, rtol=1e-5, atol=0)
        fed = rng.uniform(0, 0.9, 64).astype(np.float32)
        replay.feedback(batch.key, torch.from_numpy(fed))
        error |= {(row, env): float(each) for (row, env), each in zip(batch.key.tolist(), fed, strict=True)}


def test_initial_priorities_are_raised_to_alpha_like_errors() -> None:
    replay = make(capacity=20, B=2, alpha=0.5)
    batch = fresh(4, 2, 0, ends=(2,))
    given = torch.tensor([[1.0, 4.0], [9.0, 0.0], [torch.nan, -1.0], [0.25, 16.0]])  # reset rows are not read
    replay.add(replace(batch, targets=Known(given)))
    np.testing.assert_allclose(priorities_of(replay)[:5], [[1, 2], [3, 1e-3], [0, 0], [0.5, 4], [0, 0]], rtol=1e-5)
    replay.add(fresh(1, 2, 4))  # gets the largest priority
    np.testing.assert_allclose(priorities_of(replay)[4:6], [[4, 4], [0, 0]], rtol=1e-5)
    assert replay.priorities is not None
    replay.priorities.append(5, np.ones((1, 2), bool), td_error=np.array([[4.0, 1.0]]))
    np.testing.assert_allclose(priorities_of(replay)[5], [2, 1], rtol=1e-5)


def test_targets_without_a_priority_get_the_largest_priority() -> None:
    replay = make(capacity=20, B=1, alpha=0.5)
    replay.add(replace(fresh(2, 1, 0), targets=Returns(torch.zeros(2, 1), torch.zeros(2, 1))))
    assert priorities_of(replay)[:2].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
def test_bad_priorities_are_refused_and_change_nothing(bad: float) -> None:
    replay = make(capacity=20, B=1, alpha=0.5)
    replay.add(fresh(4, 1, 0))
    with pytest.raises(ValueError, match=f"a priority of {bad} was given: .*finite"):
        replay.feedback(keys(np.arange(2)), torch.tensor([2.0, bad]))
    with pytest.raises(ValueError, match=f"a priority of {bad} was given: .*finite"):
        replay.add(replace(fresh(2, 1, 4), targets=Known(torch.tensor([[2.0], [bad]]))))
    assert priorities_of(replay)[:6, 0].tolist() == [1, 1, 1, 1, 0, 0]
    assert replay.ring.written[0] == replay.steps == 4
    assert replay.priorities is not None
    assert replay.priorities.largest == 1.0


def test_feedback_of_the_last_draw_is_ignored_for_overwritten_rows() -> None:
    replay = make(capacity=9, B=1, alpha=1.0, batch_size=64)
    replay.add(fresh(8, 1, 0))
    batch = replay.draw()
    replay.add(fresh(3, 1, 8))
    before = priorities_of(replay).copy()
    replay.feedback(batch.key, torch.full((64,), 7.0))
    kept = [row % 9 for row in range(3, 8)]
    np.testing.assert_allclose(priorities_of(replay)[kept], 7.0, rtol=1e-5)
    others = [row % 9 for row in range(8, 12)]
    np.testing.assert_array_equal(priorities_of(replay)[others], before[others])


def test_feedback_of_the_last_two_draws() -> None:
    replay = make(capacity=40, B=2, alpha=1.0, batch_size=6)
    replay.add(fresh(30, 2, 0))
    first, second = replay.draw(), replay.draw()
    replay.feedback(first.key, torch.full((6,), 2.0))
    replay.feedback(second.key, torch.full((6,), 3.0))
    expected = np.ones((40, 2))
    expected[30:] = 0
    expected[tuple(first.key.T)], expected[tuple(second.key.T)] = 2, 3
    np.testing.assert_allclose(priorities_of(replay), expected, rtol=1e-5)
    replay.feedback(first.key[:0], torch.zeros(0))
    replay.feedback(first.key, None)
    np.testing.assert_allclose(priorities_of(replay), expected, rtol=1e-5)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_one_step_targets_match_n_steps_at_every_place_of_the_ring(alpha: float | None) -> None:
    replay = make(capacity=13, B=2, alpha=alpha, batch_size=128)
    for round in range(12):
        batch = fresh(3, 2, 3 * round, ends=(1,) if round % 3 == 0 else ())
        batch.steps.reward[:] = torch.arange(3 * round, 3 * round + 3)[:, None] * batch.steps.mask
        batch.steps.discount[2, 1] = 0.0
        replay.add(batch)
        drawn = replay.draw()
        row, env = drawn.key.T
        found = replay.ring.n_steps(row, env, 1, 0.9)
        np.testing.assert_array_equal(drawn.targets.reward.numpy(), found.reward)
        np.testing.assert_array_equal(drawn.targets.discount.numpy(), found.discount)
        np.testing.assert_array_equal(drawn.next_obs[:, 0].numpy(), found.row)
        np.testing.assert_array_equal(drawn.steps.obs[:, 0].numpy(), row)
        np.testing.assert_array_equal(drawn.steps.reward.numpy(), row)
        np.testing.assert_array_equal(drawn.steps.discount.numpy(), np.where((row % 3 == 2) & (env == 1), 0, 1))


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_groups_of_envs_may_have_different_numbers_of_rows(alpha: float | None) -> None:
    """The second of two groups is far ahead; all rows that are still stored in either can be drawn."""
    ring = Ring(EXAMPLE, 10, 4, groups=2)
    priorities = None if alpha is None else Priorities(ring, alpha)
    options: dict[str, Any] = {"ratio": 1.0, "warm_up": 0, "n_step": 1, "gamma": 0.9, "seed": 1}
    replay = TransitionReplay(ring, batch_size=256, **options, priorities=priorities)
    for group, lengths in enumerate([(6,), (7, 7, 7)]):
        for first, T in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
            rows, next_obs = map_tree(
                lambda x: x.numpy(), (as_row(fresh(T, 2, first).steps), fresh(T, 2, first).next_obs)
            )
            if priorities is not None:
                priorities.append(first, rows.mask, group)
            ring.append(rows, next_obs, group)
    batch = replay.draw()
    assert {tuple(key) for key in batch.key.tolist()} == {
        (row, env) for env in range(4) for row in (range(6) if env < 2 else range(12, 21))
    }
    np.testing.assert_array_equal(batch.steps.obs[:, 0].numpy(), batch.key[:, 0])
    np.testing.assert_array_equal(batch.next_obs[:, 0].numpy(), batch.key[:, 0] + 1)
    replay.feedback(batch.key, torch.ones(256))


def test_observations_and_actions_may_be_array_tuples() -> None:
    Seen = namedarraytuple("Seen", "place speed")
    example = EXAMPLE.replace(obs=Seen(np.zeros(2, np.float32), np.zeros((), np.int64)), action=Known(np.zeros(3)))
    replay = TransitionReplay(Ring(example, 9, 2), batch_size=8, ratio=1.0, warm_up=0, n_step=2, gamma=0.9, seed=0)
    number = torch.arange(6).reshape(6, 1).expand(6, 2)
    obs, action = (
        Seen(number.float()[..., None].expand(6, 2, 2), number),
        Known(number[..., None].expand(6, 2, 3).double()),
    )
    next_obs = Seen(torch.full((2, 2), 6.0), torch.full((2,), 6))
    replay.add(Batch(fresh(6, 2, 0).steps.replace(obs=obs, action=action), next_obs=next_obs))
    batch = replay.draw()
    row = torch.from_numpy(batch.key[:, 0].copy())
    torch.testing.assert_close(batch.steps.obs.place, row.float()[:, None].expand(8, 2))
    torch.testing.assert_close(batch.steps.action.priority, row.double()[:, None].expand(8, 3))
    torch.testing.assert_close(batch.next_obs.speed, (row + 2).clamp(max=6))


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_draws_do_not_depend_on_the_number_of_the_first_draw(alpha: float | None) -> None:
    """Random numbers are generated for many draws at once; starting in the middle must give the same draws."""
    one = make(alpha=alpha)
    one.add(fresh(20, 2, 0, ends=(3, 4, 5, 6)))
    expected = [one.draw() for _ in range(3 * DrawNumbers.DRAWS)]
    assert len({batch.key.tobytes() for batch in expected}) > 0.98 * len(expected)  # a few batches repeat by chance
    for number in (0, DrawNumbers.DRAWS - 1, DrawNumbers.DRAWS, 2 * DrawNumbers.DRAWS + 5):
        other = make(alpha=alpha)
        other.add(fresh(20, 2, 0, ends=(3, 4, 5, 6)))
        other.counters.draws = number
        for batch in expected[number : number + 3]:
            np.testing.assert_array_equal(other.draw().key, batch.key)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_restored_replay_continues_bit_equal(alpha: float | None) -> None:
    replay = make(capacity=400, B=3, alpha=alpha, batch_size=32, ratio=3.0, warm_up=100)
    rng = torch.Generator().manual_seed(0)

    def go_on(replay: TransitionReplay, first: int, rounds: int) -> list[Batch]:
        rng.manual_seed(first)
        drawn = []
        for round in range(rounds):
            replay.add(fresh(10, 3, first + 10 * round, ends=(4,)))
            for batch in replay.batches():
                drawn.append(batch)
                replay.feedback(batch.key, torch.rand(32, generator=rng) ** 8)
        return drawn

    assert len(go_on(replay, 0, 60)) == 142  # (60 * 27 - 100) * 3 / 32
    other = restored(replay, ratio=3.0, warm_up=100)
    expected, found = go_on(replay, 600, 50), go_on(other, 600, 50)
    assert len(expected) == len(found) > 100
    for ours, theirs in zip(expected, found, strict=True):
        for (name, a), (_, b) in zip(
            leaves((ours.steps, ours.weight)), leaves((theirs.steps, theirs.weight)), strict=True
        ):
            assert torch.equal(a, b), name
        np.testing.assert_array_equal(ours.key, theirs.key)
    assert (other.counters.draws, other.steps, other.counters.credit) == (
        replay.counters.draws,
        replay.steps,
        replay.counters.credit,
    )


def test_state_is_a_copy_and_must_have_the_same_size() -> None:
    replay = make(capacity=20, B=2, alpha=0.6)
    replay.add(fresh(10, 2, 0))
    state = replay.get_state()
    replay.feedback(keys(np.arange(5)), torch.full((5,), 9.0))
    other = restored(replay)
    other.add(fresh(1, 2, 10))
    np.testing.assert_allclose(priorities_of(other)[10], 9**0.6, rtol=1e-5)  # the largest priority is restored
    other.set_state(state)
    assert set(priorities_of(other).flat) == {0.0, 1.0}
    with pytest.raises(ValueError, match="40 places, and this tree has 42"):
        make(capacity=21, B=2, alpha=0.6).set_state(state)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_draw_without_real_rows_raises(alpha: float | None) -> None:
    replay = make(alpha=alpha)
    with pytest.raises(ValueError, match="there is nothing to"):
        replay.draw()
    replay.add(fresh(3, 2, 0, ends=(0, 1, 2)))
    with pytest.raises(ValueError, match="there is nothing to"):
        replay.draw()


def test_row_overwritten_by_a_cut_is_not_drawn() -> None:
    replay = make(capacity=9, B=1, alpha=1.0, batch_size=64)
    replay.add(fresh(12, 1, 0))
    assert set(replay.draw().key[:, 0].tolist()) == set(range(4, 12))
    replay.cut()
    batch = replay.draw()
    assert set(batch.key[:, 0].tolist()) == set(range(5, 12))
    last = batch.key[:, 0] == 11
    assert (batch.next_obs[last] == 12).all()


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_cut_ends_returns_and_is_never_drawn(alpha: float | None) -> None:
    """Returns do not extend beyond the cut, and a second cut changes nothing."""
    replay = make(capacity=20, alpha=alpha, n_step=3, batch_size=64)
    for first in (0, 5, 10, 15, 20):
        replay.add(fresh(5, 2, first))
        before = int(replay.ring.written[0])
        replay.cut()
        replay.cut()
        assert replay.ring.written[0] == before + 1
    seen = set()
    for _ in range(20):
        batch = replay.draw()
        number = batch.steps.obs[:, 0]
        seen |= set(number.tolist())
        left = 5 - number % 5  # rewards of 1 until the cut
        discounted = [sum(0.9**k for k in range(int(min(3, n)))) for n in left.tolist()]
        assert batch.targets.reward.tolist() == pytest.approx(discounted)
        assert batch.targets.discount.tolist() == pytest.approx([0.9 ** int(min(3, n)) for n in left.tolist()])
        assert batch.next_obs[:, 0].tolist() == [float(n + min(3, k)) for n, k in zip(number, left, strict=True)]
    assert seen == set(map(float, range(int(min(seen)), 25))), "all stored real rows must be drawn"
