"""Distributions against torch's own, and sampling against the probabilities it should follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, Normal, kl_divergence

from remuda.maths import Categorical, Gaussian

INF = math.inf
LARGEST = 1 - 2**-24  # the largest uniform number in float32


def logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5,), (7, 3), (4, 2, 6), (3, 1)])
def test_categorical_agrees_with_torch(shape: tuple[int, ...]) -> None:
    mine, theirs = Categorical(logits(*shape)), TorchCategorical(logits=logits(*shape))
    other, their_other = Categorical(logits(*shape, seed=1)), TorchCategorical(logits=logits(*shape, seed=1))
    action = theirs.sample()
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    torch.testing.assert_close(mine.perplexity(), theirs.perplexity())
    torch.testing.assert_close(mine.kl(other), kl_divergence(theirs, their_other))
    assert torch.equal(mine.mode(), theirs.mode)


def test_categorical_draws_each_action_as_often_as_its_probability() -> None:
    """Noise on a regular grid: each action's share is its probability, to within one point of the grid."""
    count, distribution = 10_000, Categorical(logits(6))
    grid = ((torch.arange(count) + 0.5) / count).unsqueeze(-1)
    shares = distribution.sample(grid).bincount(minlength=6) / count
    assert (shares - distribution.logits.exp()).abs().max() < 1.5 / count


def test_categorical_frequencies_from_random_noise() -> None:
    count, distribution = 20_000, Categorical(logits(6))
    noise = torch.from_numpy(np.random.default_rng(0).random((count, 1), dtype=np.float32))
    expected = count * distribution.logits.exp()
    found = distribution.sample(noise).bincount(minlength=6)
    chi_square = ((found - expected).square() / expected).sum()
    assert chi_square < 20.5  # 99.9 % of draws with 5 degrees of freedom


def test_each_row_uses_its_own_noise() -> None:
    rows = Categorical(torch.zeros(2, 3, 4))
    noise = torch.tensor([[0.1, 0.3, 0.6], [0.9, 0.0, 0.5]]).unsqueeze(-1)
    assert rows.sample(noise).tolist() == [[0, 1, 2], [3, 0, 2]]


def test_zero_noise_draws_the_first_possible_action() -> None:
    assert Categorical(torch.tensor([-INF, -INF, 0.0, 1.0])).sample(torch.zeros(1)) == 2


@pytest.mark.parametrize("noise", [0.0, 2.0**-24, 0.5, LARGEST])
def test_an_impossible_action_is_never_drawn(noise: float) -> None:
    """Of 20,000 rows, many have cumulative sums that rounding leaves below the largest noise."""
    rows = logits(20_000, 5)
    rows[:, [0, 2, 4]] = -INF
    drawn = Categorical(rows).sample(torch.full((20_000, 1), noise))
    assert set(drawn.tolist()) <= {1, 3}


def test_actions_that_are_impossible_spoil_neither_values_nor_gradients() -> None:
    raw = torch.tensor([[0.0, -INF, math.log(3.0)]], requires_grad=True)
    distribution = Categorical(raw)
    assert distribution.log_prob(torch.tensor([1])) == -INF
    assert distribution.entropy().item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert distribution.kl(distribution).item() == 0
    loss = distribution.entropy() + distribution.log_prob(torch.tensor([0]))
    loss = loss + distribution.kl(Categorical(torch.zeros(1, 3)))
    (gradient,) = torch.autograd.grad(loss.sum(), raw)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


def test_kl_is_infinite_where_the_other_never_does_what_this_one_does() -> None:
    both, one = Categorical(torch.zeros(2)), Categorical(torch.tensor([0.0, -INF]))
    assert both.kl(one) == INF
    assert one.kl(both).item() == pytest.approx(math.log(2))


def test_a_single_action_is_certain() -> None:
    only = Categorical(torch.tensor([[3.0], [-7.0]]))
    for noise in (0.0, LARGEST):
        assert only.sample(torch.full((2, 1), noise)).tolist() == [0, 0]
    assert only.log_prob(torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]
    assert only.entropy().tolist() == [0, 0]


def test_large_logits_do_not_overflow() -> None:
    distribution = Categorical(torch.tensor([1e4, 0.0, -1e4]))
    assert distribution.log_prob(torch.tensor(0)) == 0
    assert distribution.entropy() == 0
    assert distribution.sample(torch.tensor([LARGEST])) == 0


@pytest.mark.parametrize("rows", [(), (5,), (4, 3)])
def test_gaussian_agrees_with_torch(rows: tuple[int, ...]) -> None:
    mean, log_std, other_mean, other_log_std = (
        logits(*shape, seed=seed) for seed, shape in enumerate([(*rows, 2), (2,), (*rows, 2), (2,)])
    )
    mine, other = Gaussian(mean, log_std), Gaussian(other_mean, other_log_std)
    theirs = Independent(Normal(mean, log_std.exp()), 1)
    their_other = Independent(Normal(other_mean, other_log_std.exp()), 1)
    action = theirs.sample()
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    torch.testing.assert_close(mine.perplexity(), theirs.entropy().exp())
    torch.testing.assert_close(mine.kl(other), kl_divergence(theirs, their_other))
    assert torch.equal(mine.mode(), mean)


def test_gaussian_gradients_agree_with_torch() -> None:
    mean, log_std = logits(6, 2).requires_grad_(), logits(2, seed=1).requires_grad_()
    action = logits(6, 2, seed=2)
    mine = Gaussian(mean, log_std).log_prob(action).sum() + Gaussian(mean, log_std).entropy().sum()
    normal = Independent(Normal(mean, log_std.exp()), 1)
    theirs = normal.log_prob(action).sum() + normal.entropy().sum()
    for a, b in zip(
        torch.autograd.grad(mine, [mean, log_std]), torch.autograd.grad(theirs, [mean, log_std]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gaussian_shifts_and_scales_its_noise() -> None:
    distribution = Gaussian(torch.tensor([[1.0, -2.0]]), torch.tensor([0.0, math.log(3.0)]))
    torch.testing.assert_close(distribution.sample(torch.tensor([[0.5, -1.0]])), torch.tensor([[1.5, -5.0]]))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((20_000, 2), dtype=np.float32))
    drawn = distribution.sample(noise)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.08, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.tensor([1.0, 3.0]), atol=0.06, rtol=0)
