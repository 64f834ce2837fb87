"""Tests of squashed Gaussians against the change-of-variables formula and numerical integrals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from remuda.maths import SquashedGaussian

DOUBLE = torch.float64


def log_cosh(u: float) -> float:
    """Return log(cosh(u)) for any u; cosh itself overflows from u = 710 on."""
    return abs(u) + math.log1p(math.exp(-2 * abs(u))) - math.log(2)


def log_density(u: float, mean: float, log_std: float) -> float:
    """Return the log-density of a = tanh(u): the density of u divided by da/du = 1 / cosh(u)^2."""
    z = (u - mean) / math.exp(log_std)
    return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) + 2 * log_cosh(u)


def share_below(a: float, mean: float, log_std: float) -> float:
    """Return P(tanh(u) <= a) = P(u <= atanh(a))."""
    return 0.5 * math.erfc(-(math.atanh(a) - mean) / (math.exp(log_std) * math.sqrt(2)))


def random_policy(*shape: int, dtype: torch.dtype = DOUBLE, seed: int = 0) -> SquashedGaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator, dtype=dtype)
    return SquashedGaussian(mean, 0.5 * torch.randn(*shape, generator=generator, dtype=dtype) - 0.5)


@pytest.mark.parametrize("shape", [(3,), (5, 2), (2, 3, 1)])
def test_log_prob_against_a_slow_reference(shape: tuple[int, ...]) -> None:
    policy = random_policy(*shape)
    u = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    rows = zip(u.reshape(-1, shape[-1]), policy.mean.reshape(u.shape).reshape(-1, shape[-1]), strict=True)
    deviations = policy.log_std.reshape(-1, shape[-1])
    slow = [
        sum(
            log_density(*numbers)
            for numbers in zip(own.tolist(), mean.tolist(), deviations[row].tolist(), strict=True)
        )
        for row, (own, mean) in enumerate(rows)
    ]
    found = policy.log_prob(u.tanh())
    assert found.shape == shape[:-1]
    torch.testing.assert_close(found.reshape(-1), torch.tensor(slow, dtype=DOUBLE), rtol=1e-9, atol=1e-9)


def test_worked_number() -> None:
    """At a = 0 the slope of tanh is 1 and the density that of a standard normal; at a = tanh(1) the slope is 0.42."""
    policy = SquashedGaussian(torch.zeros(1), torch.zeros(1))
    assert float(policy.log_prob(torch.zeros(1)).exp()) == pytest.approx(0.398942, rel=1e-5)
    # 0.241971 / 0.419974
    assert float(policy.log_prob(torch.tensor([math.tanh(1)])).exp()) == pytest.approx(0.576156, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("u", [-15.0, -12.0, -9.5, -7.0, -1.0, -1e-3, 0.0, 0.5, 3.0, 8.0, 10.0, 13.0, 15.0])
@pytest.mark.parametrize("noise", [-2.0, 0.0, 0.7])
def test_log_prob_of_extreme_samples_is_accurate(u: float, noise: float, dtype: torch.dtype) -> None:
    """From u = 9 on, tanh(u) is 1 in single precision, and log(1 - a^2) would be -inf."""
    log_std = -0.3
    mean = torch.tensor([u - math.exp(log_std) * noise], dtype=dtype)
    policy = SquashedGaussian(mean, torch.tensor([log_std], dtype=dtype))
    action, found = policy.sample_with_log_prob(torch.tensor([noise], dtype=dtype))
    assert float(action) == pytest.approx(math.tanh(u), abs=1e-6)
    assert float(found) == pytest.approx(log_density(u, float(mean), log_std), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("u", [-15.0, -9.0, -0.5, 0.0, 2.0, 9.0, 15.0])
def test_gradients_of_the_log_prob_of_a_sample(u: float) -> None:
    """d / d mean is 2 tanh(u) and d / d log_std is -1 + 2 tanh(u) * std * noise, finite for every u."""
    noise, log_std = torch.tensor([0.8]), torch.tensor([-1.0], requires_grad=True)
    mean = torch.tensor([u - math.exp(-1) * 0.8], requires_grad=True)
    _, log_prob = SquashedGaussian(mean, log_std).sample_with_log_prob(noise)
    by_mean, by_log_std = torch.autograd.grad(log_prob, [mean, log_std])
    assert float(by_mean) == pytest.approx(2 * math.tanh(u), abs=1e-5)
    assert float(by_log_std) == pytest.approx(-1 + 2 * math.tanh(u) * math.exp(-1) * 0.8, abs=1e-5)


def test_sample_with_log_prob_agrees_with_sample_and_log_prob() -> None:
    policy, noise = (
        random_policy(500, 3),
        torch.randn(500, 3, generator=torch.Generator().manual_seed(1), dtype=DOUBLE),
    )
    action, log_prob = policy.sample_with_log_prob(noise)
    assert torch.equal(action, policy.sample(noise))
    assert (action.abs() < 1).all()
    torch.testing.assert_close(policy.log_prob(action), log_prob, rtol=1e-6, atol=1e-6)


def test_log_probs_agree_in_single_precision_away_from_the_bounds() -> None:
    policy = random_policy(500, 3, dtype=torch.float32)
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(1))
    action, log_prob = policy.sample_with_log_prob(noise)
    near = (action.abs() < 0.999).all(-1)
    assert near.float().mean() > 0.9
    torch.testing.assert_close(policy.log_prob(action)[near], log_prob[near], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("edge", [-1.0, 1.0])
def test_log_prob_is_finite_at_the_bounds(edge: float) -> None:
    for dtype in (torch.float32, DOUBLE):
        policy = SquashedGaussian(torch.tensor([0.4], dtype=dtype), torch.tensor([0.1], dtype=dtype))
        found = float(policy.log_prob(torch.tensor([edge], dtype=dtype)))
        inside = math.copysign(1 - 1e-6, edge)
        assert found == pytest.approx(log_density(math.atanh(inside), 0.4, 0.1), abs=0.5)
        mean = torch.tensor([0.4], dtype=dtype, requires_grad=True)
        SquashedGaussian(mean, policy.log_std).log_prob(torch.tensor([edge], dtype=dtype)).backward()
        assert mean.grad is not None
        assert mean.grad.isfinite().all()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.8, -1.0), (-1.5, 0.3), (2.0, -2.0)])
def test_density_is_the_derivative_of_the_distribution_function(mean: float, log_std: float) -> None:
    policy = SquashedGaussian(torch.tensor([mean], dtype=DOUBLE), torch.tensor([log_std], dtype=DOUBLE))
    for a in (-0.99, -0.5, 0.0, 0.3, 0.9, 0.999):
        h = 1e-5 * (1 - abs(a))
        slope = (share_below(a + h, mean, log_std) - share_below(a - h, mean, log_std)) / (2 * h)
        found = float(policy.log_prob(torch.tensor([a], dtype=DOUBLE)).exp())
        assert found == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.8, -1.0), (-1.5, 0.3), (0.2, -3.0)])
def test_density_integrates_to_one(mean: float, log_std: float) -> None:
    count = 200_000
    grid = ((torch.arange(count, dtype=DOUBLE) + 0.5) * (2 / count) - 1).unsqueeze(-1)
    policy = SquashedGaussian(
        torch.tensor([mean], dtype=DOUBLE).expand(count, 1), torch.tensor([log_std], dtype=DOUBLE).expand(count, 1)
    )
    assert float(policy.log_prob(grid).exp().sum() * 2 / count) == pytest.approx(1.0, abs=1e-3)


def test_density_of_two_components_is_the_product() -> None:
    policy = random_policy(7, 2)
    action = policy.sample(torch.randn(7, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE))
    each = [
        SquashedGaussian(policy.mean[:, k : k + 1], policy.log_std[:, k : k + 1]).log_prob(action[:, k : k + 1])
        for k in range(2)
    ]
    torch.testing.assert_close(policy.log_prob(action), each[0] + each[1])


def test_frequencies_of_samples() -> None:
    """For 20,000 samples, five standard deviations of the share below an action are at most 0.018."""
    noise = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(1))
    action = SquashedGaussian(torch.tensor([0.5]), torch.tensor([-0.2])).sample(noise)
    for a in (-0.8, -0.2, 0.3, 0.6, 0.95):
        assert float((action <= a).float().mean()) == pytest.approx(share_below(a, 0.5, -0.2), abs=0.018)


def test_mode_is_the_sample_without_noise() -> None:
    policy = random_policy(4, 3)
    assert torch.equal(policy.mode(), policy.mean.tanh())
    assert torch.equal(policy.sample(torch.zeros(4, 3, dtype=DOUBLE)), policy.mode())


def test_samples_are_differentiable() -> None:
    """The derivatives are da / d mean = 1 - a^2 and da / d log_std = (1 - a^2) * std * noise."""
    mean, log_std = (torch.tensor([x], dtype=DOUBLE, requires_grad=True) for x in (0.3, -0.7))
    noise: Tensor = torch.tensor([1.2], dtype=DOUBLE)
    action, _ = SquashedGaussian(mean, log_std).sample_with_log_prob(noise)
    by_mean, by_log_std = torch.autograd.grad(action, [mean, log_std])
    a = math.tanh(0.3 + math.exp(-0.7) * 1.2)
    assert float(by_mean) == pytest.approx(1 - a * a)
    assert float(by_log_std) == pytest.approx((1 - a * a) * math.exp(-0.7) * 1.2)
