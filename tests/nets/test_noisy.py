"""Tests of noisy layers against explicit weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from remuda.nets import NoisyLinear


def squashed(number: float) -> float:
    """Return f(x) = sign(x) * sqrt(|x|), as in the paper."""
    return math.copysign(math.sqrt(abs(number)), number)


def by_hand(layer: NoisyLinear, x: list[float], noise: list[float]) -> list[float]:
    """Return the outputs for one row and its own noise, computed with Python floats."""
    mu, sigma = layer.weight.tolist(), layer.weight_sigma.tolist()
    bias, bias_sigma = layer.bias.tolist(), layer.bias_sigma.tolist()
    e_in, e_out = [squashed(e) for e in noise[: len(x)]], [squashed(e) for e in noise[len(x) :]]
    assert len(e_out) == len(bias)
    out = []
    for j in range(len(bias)):
        weights = [mu[j][i] + sigma[j][i] * e_out[j] * e_in[i] for i in range(len(x))]
        out.append(sum(w * number for w, number in zip(weights, x, strict=True)) + bias[j] + bias_sigma[j] * e_out[j])
    return out


def make_layer(width: int, outputs: int, seed: int = 0) -> NoisyLinear:
    """Return a layer with random parameters; deviations may be negative, as after training."""
    torch.manual_seed(seed)
    layer = NoisyLinear(width, outputs)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(("width", "outputs"), [(5, 3), (1, 1), (2, 7)])
def test_every_row_has_its_own_weights(width: int, outputs: int) -> None:
    layer = make_layer(width, outputs)
    assert layer.noise_width == width + outputs
    x, noise = torch.randn(9, width), torch.randn(9, width + outputs)
    slow = [by_hand(layer, x[row].tolist(), noise[row].tolist()) for row in range(9)]
    torch.testing.assert_close(layer(x, noise), torch.tensor(slow), rtol=1e-4, atol=1e-5)


def test_worked_numbers() -> None:
    layer = NoisyLinear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.weight_sigma.copy_(torch.tensor([[0.5, 0.25]]))
        layer.bias.fill_(10.0)
        layer.bias_sigma.fill_(3.0)
    # With e_in = (2, -3) and e_out = -1, the weights are (1 - 0.5 * 2, 2 + 0.25 * 3) and the bias is 10 - 3.
    found = layer(torch.tensor([[4.0, 8.0]]), torch.tensor([[4.0, -9.0, -1.0]]))
    assert found.tolist() == [[0.0 * 4 + 2.75 * 8 + 7.0]]


def test_weights_without_noise_are_their_means() -> None:
    layer, x = make_layer(5, 3), torch.randn(4, 5)
    mean = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x, None), mean)
    assert torch.equal(layer(x, torch.zeros(4, 8)), mean)


def test_rows_do_not_depend_on_other_rows_or_their_noise() -> None:
    layer, x = make_layer(5, 3), torch.randn(5).expand(6, 5)
    noise = torch.randn(6, 8)
    together = layer(x, noise)
    assert len(together.unique(dim=0)) == 6, "the same input with six different noises"
    for row in range(6):
        torch.testing.assert_close(layer(x[row : row + 1], noise[row : row + 1])[0], together[row])


@pytest.mark.parametrize("leading", [(4,), (3, 2)])
def test_one_noise_can_be_shared_by_all_rows(leading: tuple[int, ...]) -> None:
    layer, x, noise = make_layer(5, 3), torch.randn(*leading, 5), torch.randn(8)
    torch.testing.assert_close(layer(x, noise), layer(x, noise.expand(*leading, 8)))


def test_gradients_of_means_and_deviations() -> None:
    """The expected gradients of sum(c * y) are outer products, computed by loops."""
    layer, x, noise, c = make_layer(4, 3), torch.randn(6, 4), torch.randn(6, 7), torch.randn(6, 3)
    (c * layer(x, noise)).sum().backward()
    expected = {name: torch.zeros_like(parameter).double() for name, parameter in layer.named_parameters()}
    for row in range(6):
        e = [squashed(number) for number in noise[row].tolist()]
        for j in range(3):
            for i in range(4):
                expected["weight"][j, i] += float(c[row, j] * x[row, i])
                expected["weight_sigma"][j, i] += float(c[row, j] * x[row, i]) * e[4 + j] * e[i]
            expected["bias"][j] += float(c[row, j])
            expected["bias_sigma"][j] += float(c[row, j]) * e[4 + j]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)
        assert (parameter.grad != 0).all()


def test_only_means_have_gradients_without_noise() -> None:
    layer = make_layer(4, 3)
    layer(torch.randn(6, 4), None).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight_sigma.grad is None


def test_initial_values_are_those_of_the_paper() -> None:
    """Section 3.2, factorized noise: means are uniform within +-1 / sqrt(p), and deviations are 0.5 / sqrt(p)."""
    torch.manual_seed(0)
    layer = NoisyLinear(100, 200)
    for mean in (layer.weight, layer.bias):
        assert 0.09 < mean.abs().max().item() <= 0.1
        assert abs(mean.mean().item()) < 0.01
    for deviation in (layer.weight_sigma, layer.bias_sigma):
        assert torch.equal(deviation, torch.full_like(deviation, 0.05))


def test_mean_and_variance_over_many_noises() -> None:
    """E f(e) = 0 and E f(e)^2 = E |e| = sqrt(2 / pi), so that the variance of an output is known."""
    layer, x = make_layer(4, 2), torch.randn(4)
    noise: Tensor = torch.randn(40_000, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = layer(x.expand(40_000, 4), noise)
        size = math.sqrt(2 / math.pi)
        variance = size**2 * (layer.weight_sigma * x).square().sum(-1) + size * layer.bias_sigma.square()
        torch.testing.assert_close(outputs.var(0), variance, rtol=0.05, atol=0)
        assert ((outputs.mean(0) - layer(x, None)).abs() < 5 * (variance / 40_000).sqrt()).all()
