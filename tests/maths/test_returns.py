"""Tests of returns against their definitions, episode by episode, and against worked numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from rollouts import Stream, random_stream
from torch import Tensor

from remuda.maths import ExplainedVariance, discounted_returns, gae, n_step_returns

GAMMA, LAMBDA = 0.9, 0.8


class Piece(NamedTuple):
    """The rows of one env that belong to one episode."""

    env: int
    start: int
    rewards: list[float]
    values: list[float]  # one element longer; the last element is the bootstrap value


def pieces(stream: Stream) -> Iterator[Piece]:
    """Cut each column wherever an episode ends.

    The bootstrap value is 0 for a terminated episode, and the value of the next observation for an episode that is
    truncated or continues after the rollout.
    """
    reward, discount, mask, value = (x.tolist() for x in stream.rows)
    T, B = stream.r_t.shape
    for b in range(B):
        t = 0
        while t < T:
            if not mask[t][b]:
                t += 1
                continue
            start = t
            while discount[t][b] == 1 and t + 1 < T and mask[t + 1][b]:
                t += 1
            future = 0.0 if discount[t][b] == 0 else value[t + 1][b]
            rows = range(start, t + 1)
            yield Piece(b, start, [reward[k][b] for k in rows], [*(value[k][b] for k in rows), future])
            t += 1


def n_step(piece: Piece, k: int, n: int) -> float:
    """Return r_k + g r_k+1 + ... + g^m V, where m is n or the number of remaining rewards, if smaller."""
    m = min(n, len(piece.rewards) - k)
    return sum(GAMMA**i * piece.rewards[k + i] for i in range(m)) + GAMMA**m * piece.values[k + m]


def lambda_advantage(piece: Piece, k: int) -> float:
    """Return the geometric mixture of all n-step returns minus the value; the last one has the remaining weight."""
    longest = len(piece.rewards) - k
    mixed = sum((1 - LAMBDA) * LAMBDA ** (n - 1) * n_step(piece, k, n) for n in range(1, longest))
    return mixed + LAMBDA ** (longest - 1) * n_step(piece, k, longest) - piece.values[k]


def by_pieces(stream: Stream, on_reset: Tensor, definition: object) -> Tensor:
    out = on_reset.clone()
    for piece in pieces(stream):
        for k in range(len(piece.rewards)):
            out[piece.start + k, piece.env] = definition(piece, k)  # type: ignore[operator]
    return out


@pytest.mark.parametrize("block", range(4))
def test_gae_is_the_mixture_of_n_step_returns_of_each_episode(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        stream = random_stream(seed)
        expected = by_pieces(stream, torch.zeros_like(stream.r_t), lambda_advantage)
        torch.testing.assert_close(gae(*stream.rows, GAMMA, LAMBDA), expected)


@pytest.mark.parametrize("block", range(2))
def test_discounted_returns_sum_each_episode_to_its_end(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        stream = random_stream(seed)
        expected = by_pieces(stream, stream.v[:-1], lambda piece, k: n_step(piece, k, len(piece.rewards)))
        torch.testing.assert_close(discounted_returns(*stream.rows, GAMMA), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
def test_n_step_returns_stop_at_n_rewards_or_at_the_end(n: int) -> None:
    for seed in range(80):
        stream = random_stream(seed)
        expected = by_pieces(stream, stream.v[:-1], lambda piece, k: n_step(piece, k, n))
        torch.testing.assert_close(n_step_returns(*stream.rows, GAMMA, n), expected)


def test_random_streams_cover_every_kind_of_boundary() -> None:
    """Otherwise the comparisons above would miss cases."""
    seen = set()
    for seed in range(100):
        stream = random_stream(seed)
        T, B = stream.r_t.shape
        for b in range(B):
            for t in range(T):
                if not stream.mask_t[t, b]:
                    seen.add("reset in the first row" if t == 0 else "reset later")
                elif t == T - 1:
                    seen.add("terminated with the last row" if stream.discount_t[t, b] == 0 else "cut")
                elif not stream.mask_t[t + 1, b]:
                    seen.add("terminated" if stream.discount_t[t, b] == 0 else "truncated")
    assert len(seen) == 6


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(-1)


def test_worked_numbers_of_a_truncation_then_a_termination() -> None:
    """The rows are r=1; r=2, truncated; a reset row; r=4, terminated; and a reset row at the end of the rollout."""
    r, mask = column(1, 2, 0, 4, 0), column(1, 1, 0, 1, 0).bool()
    discount = column(1, 1, 1, 0, 1)
    v = column(10, 20, 30, 40, 50, 60)
    # Row 3: 4 - 40. Row 1: 2 + 0.5 * 30 - 20. Row 0: 1 + 0.5 * 20 - 10, and 0.5 * 0.5 of row 1's.
    assert gae(r, discount, mask, v, 0.5, 0.5).flatten().tolist() == [1 - 0.75, -3, 0, -36, 0]
    assert discounted_returns(r, discount, mask, v, 0.5).flatten().tolist() == [1 + 0.5 * 17, 17, 30, 4, 50]
    assert n_step_returns(r, discount, mask, v, 0.5, 1).flatten().tolist() == [11, 17, 30, 4, 50]


def test_lambda_1_is_monte_carlo_and_lambda_0_is_one_step() -> None:
    stream = random_stream(3, 12, 4)
    value, zero = stream.v[:-1], torch.zeros_like(stream.r_t)
    monte_carlo = torch.where(stream.mask_t, discounted_returns(*stream.rows, GAMMA) - value, zero)
    torch.testing.assert_close(gae(*stream.rows, GAMMA, 1.0), monte_carlo)
    one_step = torch.where(stream.mask_t, n_step_returns(*stream.rows, GAMMA, 1) - value, zero)
    torch.testing.assert_close(gae(*stream.rows, GAMMA, 0.0), one_step)


def test_advantages_do_not_cross_envs_or_reset_rows() -> None:
    stream = random_stream(5, 10, 3)
    mask = stream.mask_t.clone()
    mask[:, 0], mask[4, 0] = True, False
    before = gae(stream.r_t, stream.discount_t, mask, stream.v, GAMMA, LAMBDA)
    changed = stream.r_t.clone()
    changed[6, 0] += 100
    after = gae(changed, stream.discount_t, mask, stream.v, GAMMA, LAMBDA)
    differs = before != after
    assert differs[6, 0]
    assert not differs[:5].any()
    assert not differs[:, 1:].any()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r, d, m, v: (r, d, m, v[:-1]),
        lambda r, d, m, v: (r, d[:-1], m, v),
        lambda r, d, m, v: (r, d, m[:, :1], v),
        lambda r, d, m, v: (r[:, 0], d[:, 0], m[:, 0], v[:, 0]),
        lambda r, d, m, v: (r.unsqueeze(-1), d, m, v),
    ],
)
def test_wrong_shapes_are_refused(spoil: object) -> None:
    rows = spoil(*random_stream(0, 4, 2).rows)  # type: ignore[operator]
    for function in (
        lambda: gae(*rows, GAMMA, LAMBDA),
        lambda: discounted_returns(*rows, GAMMA),
        lambda: n_step_returns(*rows, GAMMA, 2),
    ):
        with pytest.raises(ValueError, match=r"^rewards (are|have shape)"):
            function()


def test_n_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="n=0"):
        n_step_returns(*random_stream(0, 4, 2).rows, GAMMA, 0)


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    return float(ExplainedVariance.of(prediction, target))


def test_explained_variance() -> None:
    target = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(target, target) == 1
    assert explained_variance(target + 5, target) == 1  # a constant error has no variance
    assert explained_variance(torch.full((4,), 9.0), target) == 0
    assert explained_variance(-target, target) == pytest.approx(1 - 4)
    assert explained_variance(torch.tensor([1.0, 1.0, 3.0, 3.0]), target) == pytest.approx(1 - 1.5 / 3.5)
    assert math.isnan(explained_variance(target, torch.ones(4)))
    assert math.isnan(explained_variance(torch.empty(0), torch.empty(0)))


@pytest.mark.parametrize("counts", [[5, 5], [1, 0, 30], [0, 0], [7, 2, 2, 2]])
def test_explained_variance_of_several_sets_of_rows_is_that_of_all_rows(counts: list[int]) -> None:
    """The sets differ in their means, so the mean of their own explained variances would be another number."""
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randn(count, generator=generator) + 10 * index for index, count in enumerate(counts)]
    predictions = [target + torch.randn(len(target), generator=generator) for target in targets]
    each = [ExplainedVariance.of(*pair) for pair in zip(predictions, targets, strict=True)]
    found = float(ExplainedVariance.pool([one.numbers() for one in each]))
    assert found == pytest.approx(explained_variance(torch.cat(predictions), torch.cat(targets)), nan_ok=True)
    assert math.isnan(found) == (sum(counts) == 0)


def test_equal_targets_of_several_sets_of_rows_have_no_explained_variance() -> None:
    same = ExplainedVariance.of(torch.rand(3), torch.full((3,), 0.1))
    assert math.isnan(float(ExplainedVariance.pool([same.numbers()] * 3)))
