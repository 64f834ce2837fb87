"""Tests of fully connected networks: initial weights, and running statistics against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remuda.nets import MLP, RunningMoments, Standardize, orthogonal


def gram(weight: Tensor) -> Tensor:
    """Return W W^T or W^T W, whichever is smaller."""
    return weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight


@pytest.mark.parametrize("shape", [(4, 64), (64, 4), (64, 64)])
@pytest.mark.parametrize("gain", [0.01, 1.0, math.sqrt(2)])
def test_orthogonal_init(shape: tuple[int, int], gain: float) -> None:
    layer = orthogonal(nn.Linear(*shape), gain)
    torch.testing.assert_close(gram(layer.weight), gain**2 * torch.eye(min(shape)), atol=1e-5, rtol=1e-4)
    assert not layer.bias.any()


def test_mlp_layers_start_orthogonal_with_gain_sqrt_2() -> None:
    layers = [layer for layer in MLP((6,), (32, 16)).layers if isinstance(layer, nn.Linear)]
    assert [layer.weight.shape for layer in layers] == [(32, 6), (16, 32)]
    for layer in layers:
        torch.testing.assert_close(gram(layer.weight), 2 * torch.eye(min(layer.weight.shape)), atol=1e-5, rtol=1e-4)
        assert not layer.bias.any()


def test_orthogonal_init_can_be_turned_off() -> None:
    layers = [layer for layer in MLP((6,), (32,), orthogonal_init=False).layers if isinstance(layer, nn.Linear)]
    assert (gram(layers[0].weight) - 2 * torch.eye(6)).abs().max() > 0.1
    assert layers[0].bias.any()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 4, 3)])
def test_mlp_flattens_observations_of_any_shape(shape: tuple[int, ...]) -> None:
    net = MLP(shape, (8, 7), "relu")
    rows = torch.randn(3, *shape)
    features = net(rows)
    assert features.shape == (3, 7)
    assert (features >= 0).all()
    first, second = (layer for layer in net.layers if isinstance(layer, nn.Linear))
    torch.testing.assert_close(features, second(first(rows.reshape(3, -1)).relu()).relu())


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("sizes", [[100], [1] * 100, [1, 50, 7, 42], [0, 99, 0, 1]])
def test_running_moments_equal_numpy_for_all_batch_sizes(shape: tuple[int, ...], sizes: list[int]) -> None:
    rows = np.random.default_rng(0).normal(
        1000.0, 3.0, size=(100, *shape)
    )  # such a mean would cost float32 its precision
    moments, start = RunningMoments(shape), 0
    for size in sizes:
        moments.update(torch.from_numpy(rows[start : start + size]))
        start += size
    assert moments.count == 100
    np.testing.assert_allclose(moments.mean.numpy(), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var.numpy(), rows.var(0), rtol=1e-9)


def test_running_moments_are_in_the_state_dict() -> None:
    moments, other = RunningMoments((2,)), RunningMoments((2,))
    moments.update(torch.randn(10, 2))
    other.load_state_dict(moments.state_dict())
    more = torch.randn(7, 2)
    moments.update(more)
    other.update(more)
    assert all(torch.equal(a, b) for a, b in zip(moments.buffers(), other.buffers(), strict=True))


def test_standardize_without_statistics_is_the_identity() -> None:
    rows = torch.randn(5, 3)
    assert torch.equal(Standardize((3,))(rows), rows)


def test_standardize_gives_mean_0_and_standard_deviation_1() -> None:
    standardize = Standardize((3,))
    rows = torch.randn(500, 3) * torch.tensor([0.01, 1.0, 50.0]) + torch.tensor([-5.0, 0.0, 300.0])
    standardize.update(rows[:200])
    standardize.update(rows[200:])
    out = standardize(rows)
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(out.std(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)


def test_standardize_clips_at_ten_deviations_and_keeps_its_input() -> None:
    standardize = Standardize(())
    standardize.update(torch.tensor([-1.0, 1.0]))
    rows = torch.tensor([0.5, 11.0, -1e6])
    assert standardize(rows).tolist() == pytest.approx([0.5, 10.0, -10.0])
    assert rows.tolist() == [0.5, 11.0, -1e6]


def test_constant_feature_becomes_zero() -> None:
    standardize = Standardize((1,))
    standardize.update(torch.full((50, 1), 0.1))
    assert standardize(torch.full((1, 1), 0.1)).item() == pytest.approx(0, abs=1e-3)
