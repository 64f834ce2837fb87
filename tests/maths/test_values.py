"""Tests of functions for value-based algorithms against slow references and worked numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import slow_projection
from torch import Tensor

from remuda.maths.values import huber, project, rescale, unscale


@given(st.integers(0, 10_000), st.integers(2, 51), st.floats(-30, 30), st.floats(0, 1))
def test_projection_against_a_slow_reference(seed: int, atoms: int, r: float, discount: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(3, atoms, generator=generator, dtype=torch.float64).softmax(-1)
    support = torch.linspace(-10, 10, atoms, dtype=torch.float64)
    rewards = torch.tensor([r, 0.0, 10.0], dtype=torch.float64)
    discounts = torch.tensor([discount, 1.0, 0.0], dtype=torch.float64)
    mine = project(p, rewards, discounts, support)
    slow = [
        slow_projection(p[i].tolist(), float(rewards[i]), float(discounts[i]), support.tolist()) for i in range(3)
    ]
    torch.testing.assert_close(mine, torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(mine.sum(-1), torch.ones(3, dtype=torch.float64))


def test_projection_of_worked_numbers() -> None:
    support = torch.tensor([0.0, 1.0, 2.0])
    p = torch.tensor([[0.2, 0.3, 0.5]])
    half = project(p, torch.tensor([0.5]), torch.tensor([1.0]), support)
    torch.testing.assert_close(
        half, torch.tensor([[0.1, 0.25, 0.65]])
    )  # atoms move to 0.5, 1.5, and 2.5, which is clipped to 2
    ended = project(p, torch.tensor([1.0]), torch.tensor([0.0]), support)
    torch.testing.assert_close(ended, torch.tensor([[0.0, 1.0, 0.0]]))
    best = project(p, torch.tensor([9.0]), torch.tensor([0.0]), support)
    torch.testing.assert_close(best, torch.tensor([[0.0, 0.0, 1.0]]))


def test_projection_keeps_the_mean_inside_the_support() -> None:
    torch.manual_seed(0)
    support = torch.linspace(-10, 10, 51)
    p, r, discount = torch.rand(64, 51).softmax(-1), torch.rand(64), torch.full((64,), 0.9)
    mean = (project(p, r, discount, support) * support).sum(-1)
    torch.testing.assert_close(mean, r + 0.9 * (p * support).sum(-1), rtol=1e-4, atol=1e-4)


@given(st.floats(-1e6, 1e6))
def test_unscale_inverts_rescale(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    assert float(unscale(rescale(value))) == pytest.approx(x, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("x", [-300.0, -1.0, -1e-3, 0.0, 1e-4, 0.5, 21.0, 3e5])
def test_rescaling_in_single_precision(x: float) -> None:
    value = torch.tensor(x)
    assert float(unscale(rescale(value))) == pytest.approx(x, rel=1e-4, abs=1e-6)


def test_rescaling_of_worked_numbers() -> None:
    x = torch.tensor([0.0, 3.0, -8.0, 99.0])
    torch.testing.assert_close(rescale(x), torch.tensor([0.0, 1.003, -2.008, 9.099]))


@pytest.mark.parametrize("delta", [0.5, 1.0, 10.0])
def test_huber_equals_torch(delta: float) -> None:
    error: Tensor = torch.linspace(-20, 20, 101)
    expected = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
    torch.testing.assert_close(huber(error, delta), expected)
