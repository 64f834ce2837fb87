"""Tests of losses by worked numbers, and of the gradients that clipping removes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from remuda.fast.policy_losses import standardized_rows
from remuda.maths import approximate_kl, clipped_surrogate, standardized, value_loss


def surrogate(ratio: float, advantage: float, clip: float = 0.2) -> tuple[float, float]:
    """Return the loss of one row and its gradient with respect to the log-ratio."""
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor([advantage]), clip)
    (gradient,) = torch.autograd.grad(loss, log_ratio)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),  # within the range the gradient is that of ratio * advantage
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # good action, ratio above the range: clipped
        (0.5, 2.0, -1.0, -1.0),  # good action that became less likely: not clipped
        (0.5, -2.0, 1.6, 0.0),  # bad action, ratio below the range: clipped
        (1.5, -2.0, 3.0, 3.0),  # bad action that became more likely: not clipped
    ],
)
def test_clipped_surrogate_in_every_region(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert surrogate(ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("log_ratio", [50.0, 89.0, 1e4, math.inf])
@pytest.mark.parametrize("advantage", [2.0, 0.0])
def test_clipped_rows_have_no_gradient_however_large_their_ratio(log_ratio: float, advantage: float) -> None:
    """exp overflows float32 at 88.7: an infinite ratio times a zero gradient must not become NaN."""
    rows = torch.tensor([log_ratio, 0.1], requires_grad=True)
    loss = clipped_surrogate(rows, torch.tensor([advantage, 1.0]), 0.2)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert loss.item() == pytest.approx(-(1.2 * advantage + math.exp(0.1)) / 2)
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(0.1) / 2])


def test_loss_of_a_negative_advantage_is_unbounded() -> None:
    assert surrogate(math.exp(80), -1.0) == pytest.approx((math.exp(80), math.exp(80)), rel=1e-5)
    log_ratio = torch.tensor([100.0])
    assert clipped_surrogate(log_ratio, torch.tensor([-1.0]), 0.2) == math.inf, (
        "an infinite loss, whose update the learner skips"
    )


def test_clipped_surrogate_is_the_mean_over_rows() -> None:
    ratio, advantage = torch.tensor([1.5, 0.5, 1.0, 1.5]), torch.tensor([2.0, -2.0, 3.0, -1.0])
    loss = clipped_surrogate(ratio.log(), advantage, 0.2)
    assert loss.item() == pytest.approx(-(2.4 - 1.6 + 3.0 - 1.5) / 4)


def test_wide_clip_range_never_clips() -> None:
    assert surrogate(1.5, 2.0, clip=9.0) == pytest.approx((-3.0, -3.0))


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_value_loss_is_the_mean_squared_error() -> None:
    assert value_loss(values(1, 2, 3), values(2, 2, 5)).item() == pytest.approx(5 / 3)
    assert value_loss(values(1, 2, 3), values(2, 2, 5), values(9, 9, 9), None).item() == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.3, 1.0, 3.0, 1.7**2, -3.4),  # within 0.5 of the old value: an ordinary error
        (2.0, 1.0, 3.0, 1.5**2, 0.0),  # already moved 1 toward the target, only 0.5 counts
        (0.0, 1.0, 3.0, 3.0**2, -6.0),  # moved away from the target: the true error is the larger
        (4.0, 1.0, 1.2, 2.8**2, 5.6),  # overshot: the true error is the larger
    ],
)
def test_clipped_value_loss_takes_the_larger_error(
    value: float, old: float, target: float, loss: float, gradient: float
) -> None:
    now = values(value).requires_grad_()
    found = value_loss(now, values(target), values(old), 0.5)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, now)[0].item() == pytest.approx(gradient)


def test_approximate_kl_by_worked_numbers() -> None:
    assert approximate_kl(torch.zeros(5)) == 0
    found = approximate_kl(values(math.log(2), math.log(0.5)))
    assert found.item() == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)


def test_approximate_kl_is_nonnegative_and_estimates_the_kl_divergence() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.25, 0.35])
    # If every action occurs as often as under the old policy, the mean is exact.
    actions = torch.repeat_interleave(torch.arange(3), torch.tensor([50, 30, 20]))
    log_ratio = (new.log() - old.log())[actions]
    assert approximate_kl(log_ratio).item() == pytest.approx((old * (old / new).log()).sum().item(), abs=1e-6)
    for row in torch.linspace(-3, 3, 60):
        assert approximate_kl(row.unsqueeze(0)) > 0


def test_standardized() -> None:
    torch.testing.assert_close(standardized(values(1, 2, 3)), values(-1, 0, 1))  # uses the sample standard deviation
    torch.testing.assert_close(standardized(values(1, 2, 3) * 7 - 4), values(-1, 0, 1))
    assert standardized(values(5)).tolist() == [5]
    assert standardized(values(2, 2, 2)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [3.7, -2.3e4, 1e-6, 0.0])
@pytest.mark.parametrize("rows", [2, 33, 64, 1000])
def test_equal_rows_are_standardized_to_zero_on_both_paths(value: float, rows: int) -> None:
    """The mean of equal float32 numbers may be off by an ulp, which must not be scaled up to a signal."""
    x = torch.full((rows,), value)
    x[::2] = x[::2] * (1 + 1e-7)
    assert standardized(x).eq(0).all()
    assert not standardized_rows(x.numpy()).any()


def test_small_but_real_spread_is_standardized() -> None:
    x = 100.0 + 0.01 * torch.arange(64.0)
    assert standardized(x).std().item() == pytest.approx(1.0, rel=1e-3)
    torch.testing.assert_close(torch.from_numpy(standardized_rows(x.numpy())), standardized(x), rtol=1e-2, atol=1e-2)
