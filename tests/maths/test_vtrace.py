"""Tests of V-trace against its definition, row by row, and against worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from references import slow_vtrace
from rollouts import Stream, random_stream
from torch import Tensor

from remuda.maths import discounted_returns, gae, n_step_returns, one_step_advantages, vtrace

GAMMA = 0.9
Clips = tuple[float | None, float | None, float | None]


def random_ratios(seed: int, stream: Stream) -> Tensor:
    """Return logarithms of ratios, most of which are between 1/7 and 7."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(stream.r_t.shape, generator=generator, dtype=torch.float64)


def slowly(log_rho: Tensor, stream: Stream, lambda_: float, clips: Clips) -> tuple[Tensor, Tensor]:
    fields = [log_rho.exp().tolist(), *(x.tolist() for x in stream.rows)]
    T, B = stream.r_t.shape
    vs, advantage = torch.empty(T, B, dtype=torch.float64), torch.empty(T, B, dtype=torch.float64)
    for b in range(B):
        column = [tuple(field[t][b] for field in fields[:4]) for t in range(T)]
        found = slow_vtrace(column, [row[b] for row in fields[4]], GAMMA, lambda_, clips)  # type: ignore[arg-type]
        vs[:, b], advantage[:, b] = (torch.tensor(x, dtype=torch.float64) for x in found)
    return vs, advantage


@pytest.mark.parametrize("block", range(4))
def test_vtrace_is_the_sum_of_weighted_errors_of_each_episode(block: int) -> None:
    for seed in range(250 * block, 250 * block + 250):
        draw = np.random.default_rng(seed)
        stream = random_stream(seed)
        log_rho = random_ratios(seed, stream)
        lambda_ = float(draw.choice([0.0, 0.7, 1.0]))
        clips: Clips = tuple(None if draw.random() < 0.25 else float(draw.uniform(0.3, 3)) for _ in range(3))  # type: ignore[assignment]
        found = vtrace(log_rho, *stream.rows, GAMMA, lambda_, *clips)
        for mine, slow in zip(found, slowly(log_rho, stream, lambda_, clips), strict=True):
            torch.testing.assert_close(mine, slow, atol=1e-10, rtol=1e-10)


def test_ratios_of_one_give_returns() -> None:
    for seed in range(100):
        stream = random_stream(seed)
        one, mask = torch.zeros_like(stream.r_t), stream.mask_t
        vs, advantage = vtrace(one, *stream.rows, GAMMA)
        torch.testing.assert_close(vs, discounted_returns(*stream.rows, GAMMA))
        torch.testing.assert_close(vs, n_step_returns(*stream.rows, GAMMA, n=len(one)))
        torch.testing.assert_close(advantage, torch.where(mask, vs - stream.v[:-1], 0.0))


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_targets_with_ratios_of_one_are_values_plus_gae(lambda_: float) -> None:
    for seed in range(50):
        stream = random_stream(seed)
        vs, _ = vtrace(torch.zeros_like(stream.r_t), *stream.rows, GAMMA, lambda_)
        torch.testing.assert_close(vs, stream.v[:-1] + gae(*stream.rows, GAMMA, lambda_))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(-1)


# The rows are r=1 with a ratio of 2; r=3 with 1/2, truncated; the reset row; r=4 with 4, terminated.
WORKED = (column(1, 3, 0, 4), column(1, 1, 1, 0), column(1, 1, 0, 1).bool(), column(1, 2, 4, 8, 16))
LOG_RHO = column(2, 0.5, 1, 4).log()


@pytest.mark.parametrize(
    ("clips", "vs", "advantage"),
    [
        # Row 1: 2 + 0.5 * (3 + 0.5 * 4 - 2). Row 0: 1 + 1 * (1 + 0.5 * 2 - 1) + 0.5 * 1 * (3.5 - 2).
        ((1.0, 1.0, 1.0), [2.75, 3.5, 4, 4], [1.75, 1.5, 0, -4]),
        # Row 0: 1 + 2 * 1 + 0.5 * 2 * (3.5 - 2). Row 3: 8 + 4 * (4 - 8).
        ((None, None, None), [4.5, 3.5, 4, -8], [3.5, 1.5, 0, -16]),
        ((None, 1.0, 1.0), [3.75, 3.5, 4, -8], [1.75, 1.5, 0, -4]),
        ((1.0, None, 3.0), [3.5, 3.5, 4, 4], [3.5, 1.5, 0, -12]),
        ((0.25, 1.0, 1.0), [1.625, 2.75, 4, 7], [1.375, 1.5, 0, -4]),
    ],
)
def test_worked_numbers(clips: Clips, vs: list[float], advantage: list[float]) -> None:
    found = vtrace(LOG_RHO, *WORKED, 0.5, 1.0, *clips)
    torch.testing.assert_close(found[0], column(*vs))
    torch.testing.assert_close(found[1], column(*advantage))


def test_advantage_is_the_ratio_times_the_one_step_advantage() -> None:
    stream = random_stream(7, 12, 4)
    log_rho = random_ratios(7, stream)
    vs, weighted = vtrace(log_rho, *stream.rows, GAMMA, 0.8, 1.5, 1.0, pg_rho_clip=None)
    plain = one_step_advantages(vs, *stream.rows, GAMMA)
    torch.testing.assert_close(weighted, log_rho.exp() * plain)
    assert not plain[~stream.mask_t].any()


def test_no_clipping_equals_very_large_clip_values() -> None:
    stream = random_stream(3, 12, 4)
    log_rho = random_ratios(3, stream)
    none = vtrace(log_rho, *stream.rows, GAMMA, 1.0, None, None, None)
    large = vtrace(log_rho, *stream.rows, GAMMA, 1.0, 1e9, 1e9, 1e9)
    torch.testing.assert_close(none, large)


def test_contents_of_reset_rows_do_not_matter() -> None:
    stream = random_stream(1, 12, 4)
    log_rho, is_reset = random_ratios(1, stream), ~stream.mask_t
    assert is_reset.sum() > 3
    expected = vtrace(log_rho, *stream.rows, GAMMA, 0.9)
    for garbage in (1e6, math.inf, math.nan):
        r_t, discount_t = stream.r_t.clone(), stream.discount_t.clone()
        log_rho[is_reset] = r_t[is_reset] = discount_t[is_reset] = garbage
        found = vtrace(log_rho, r_t, discount_t, stream.mask_t, stream.v, GAMMA, 0.9)
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert torch.equal(expected[0][is_reset], stream.v[:-1][is_reset])
    assert not expected[1][is_reset].any()


def test_overflowing_ratio_is_clipped_and_zero_ratio_leaves_the_value() -> None:
    r, one, v = column(1, 1), column(1, 1), column(3, 5, 7)
    vs, advantage = vtrace(column(1000, -math.inf), r, one, one.bool(), v, 0.5)
    assert vs.flatten().tolist() == [3 + (1 + 2.5 - 3), 5]
    assert advantage.flatten().tolist() == [0.5, 0]


def test_no_gradient_flows_through_targets() -> None:
    stream = random_stream(2, 6, 3)
    log_rho, v = random_ratios(2, stream).requires_grad_(), stream.v.clone().requires_grad_()
    found = vtrace(log_rho, stream.r_t, stream.discount_t, stream.mask_t, v, GAMMA)
    assert not any(x.requires_grad for x in found)
    assert not one_step_advantages(found[0], stream.r_t, stream.discount_t, stream.mask_t, v, GAMMA).requires_grad


def test_inputs_are_unchanged() -> None:
    stream = random_stream(4, 6, 3)
    log_rho = random_ratios(4, stream)
    before = [x.clone() for x in (log_rho, *stream.rows)]
    vtrace(log_rho, *stream.rows, GAMMA)
    assert all(torch.equal(x, y) for x, y in zip(before, (log_rho, *stream.rows), strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p, r, d, m, v: (p[:-1], r, d, m, v),
        lambda p, r, d, m, v: (p[:, :1], r, d, m, v),
        lambda p, r, d, m, v: (p.unsqueeze(-1), r, d, m, v),
        lambda p, r, d, m, v: (p, r, d, m, v[:-1]),
        lambda p, r, d, m, v: (p, r, d[:-1], m, v),
        lambda p, r, d, m, v: (p, r, d, m[:, :1], v),
        lambda p, r, d, m, v: (p[:, 0], r[:, 0], d[:, 0], m[:, 0], v[:, 0]),
    ],
)
def test_wrong_shapes_are_refused(spoil: object) -> None:
    stream = random_stream(0, 4, 2)
    with pytest.raises(ValueError, match=r"^rewards (are|have shape)"):
        vtrace(*spoil(torch.zeros(4, 2), *stream.rows), GAMMA)  # type: ignore[operator]


def test_unclipped_ratios_that_overflow_are_not_finite_and_do_not_warn() -> None:
    """Warnings of numpy are errors in this test suite."""
    stream = random_stream(0, 5, 2)
    log_rho = torch.full_like(stream.r_t, 1000.0)
    vs, _ = vtrace(log_rho, *stream.rows, 0.9, 1.0, None, None, None)
    assert not vs.isfinite().all()
