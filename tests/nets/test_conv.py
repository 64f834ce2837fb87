"""Tests of convolutional networks: layers, layouts of images, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.errors import ConfigError
from remuda.nets import A3CNet, ImpalaNet, NatureCNN, SmallCNN, is_channels_first

torch.set_num_threads(1)  # more threads are many times slower on a busy machine


def layers_of(net: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in net.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 84, 84), True),
        ((3, 210, 160), True),
        ((84, 84, 4), False),
        ((10, 10, 10), False),  # MinAtar's Seaquest
        ((10, 10, 4), False),
        ((7, 7, 3), False),
        ((5, 5, 9), False),  # smaller than only one of the other two
        ((5, 9, 5), False),
        ((3, 4, 4), True),
    ],
)
def test_is_channels_first(shape: tuple[int, ...], expected: bool) -> None:
    assert is_channels_first(shape) is expected


def test_nature_has_three_convolutions_and_a_linear_layer_each_with_relu() -> None:
    net, images = NatureCNN((4, 84, 84)), torch.rand(2, 4, 84, 84)
    first, second, third, last = layers_of(net)
    assert [layer.weight.shape for layer in (first, second, third, last)] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
        (512, 3136),
    ]
    x = F.relu(F.conv2d(images, first.weight, first.bias, stride=4))
    x = F.relu(F.conv2d(x, second.weight, second.bias, stride=2))
    x = F.relu(F.conv2d(x, third.weight, third.bias))
    expected = F.relu(F.linear(x.permute(0, 2, 3, 1).flatten(1), last.weight, last.bias))
    torch.testing.assert_close(net(images), expected, atol=1e-5, rtol=1e-4)


def test_small_has_one_convolution_and_a_linear_layer_each_with_relu() -> None:
    net, images = SmallCNN((10, 10, 6)), torch.rand(3, 10, 10, 6)
    first, last = layers_of(net)
    assert [layer.weight.shape for layer in (first, last)] == [(16, 6, 3, 3), (128, 16 * 8 * 8)]
    x = F.relu(F.conv2d(images.permute(0, 3, 1, 2), first.weight, first.bias))
    torch.testing.assert_close(net(images), F.relu(F.linear(x.flatten(1), last.weight, last.bias)))


def test_sizes_can_be_chosen() -> None:
    assert NatureCNN((1, 40, 52), features=7, convolutions=((2, 8, 4), (3, 4, 2), (4, 3, 1)))(
        torch.rand(2, 1, 40, 52)
    ).shape == (2, 7)
    assert SmallCNN((5, 3, 2), features=9, channels=4)(torch.rand(2, 5, 3, 2)).shape == (2, 9)


@pytest.mark.parametrize("make", [NatureCNN, SmallCNN, ImpalaNet])
def test_channels_may_come_first_or_last(make: type[nn.Module]) -> None:
    first, last = make((3, 40, 44)), make((40, 44, 3))
    last.load_state_dict(first.state_dict())
    images = torch.rand(2, 3, 40, 44)
    torch.testing.assert_close(first(images), last(images.permute(0, 2, 3, 1)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [NatureCNN, SmallCNN, ImpalaNet])
@pytest.mark.parametrize("shape", [(3, 40, 44), (40, 44, 3)])
def test_memory_formats_agree_in_features_and_gradients(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    plain, last = make(shape, channels_last=False), make(shape, channels_last=True)
    last.load_state_dict(plain.state_dict())
    images = torch.rand(2, *shape)
    outputs = [net(images) for net in (plain, last)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    gradients = [
        torch.autograd.grad(out.square().mean(), list(net.parameters()))
        for net, out in zip((plain, last), outputs, strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("make", [NatureCNN, SmallCNN, ImpalaNet])
def test_images_reach_the_convolution_in_the_requested_memory_format(make: type[nn.Module]) -> None:
    for channels_last in (False, True):
        net, seen = make((3, 40, 44), channels_last=channels_last), []
        convolution = next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
        convolution.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        net(torch.rand(2, 3, 40, 44))
        assert seen[0].is_contiguous(memory_format=torch.channels_last) is channels_last
        weights = [parameter for parameter in net.parameters() if parameter.dim() == 4]
        assert {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights} == {channels_last}


def gram(weight: Tensor) -> Tensor:
    rows = weight.flatten(1)
    return rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows


@pytest.mark.parametrize("net", [NatureCNN((4, 84, 84)), SmallCNN((10, 10, 4))])
def test_layers_start_orthogonal_with_gain_sqrt_2(net: nn.Module) -> None:
    for layer in layers_of(net):
        found = gram(layer.weight)
        torch.testing.assert_close(found, 2 * torch.eye(len(found)), atol=1e-4, rtol=1e-4)
        assert not layer.bias.any()


def test_orthogonal_init_can_be_turned_off() -> None:
    for net in (NatureCNN((4, 40, 40), orthogonal_init=False), SmallCNN((9, 9, 4), orthogonal_init=False)):
        assert all(layer.bias.any() for layer in layers_of(net))
        assert layers_of(net)[0].weight.abs().max() <= 1 / math.sqrt(layers_of(net)[0].weight[0].numel())


@pytest.mark.parametrize("shape", [(4, 35, 84), (4, 84, 35), (10, 10, 4), (35, 36, 3)])
def test_nature_refuses_small_images_and_names_another_net(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.net=nature needs .* 36x36 .* \d+x\d+: use agent\.net=small\.$"):
        NatureCNN(shape)


def test_smallest_images_are_accepted() -> None:
    assert NatureCNN((36, 36, 3))(torch.rand(1, 36, 36, 3)).shape == (1, 512)
    assert SmallCNN((3, 3, 2))(torch.rand(1, 3, 3, 2)).shape == (1, 128)


def test_a3c_accepts_smaller_images_than_nature_and_names_itself_in_errors() -> None:
    assert A3CNet((4, 20, 36))(torch.zeros(1, 4, 20, 36)).shape == (1, 256)
    with pytest.raises(ConfigError, match=r"agent\.net=a3c needs images of 20x20 pixels or more.*these have 19x84"):
        A3CNet((4, 19, 84))


def test_small_refuses_images_smaller_than_its_kernel() -> None:
    with pytest.raises(ConfigError, match=r"agent\.net=small needs .* 3x3 .* 2x5: use agent\.net=mlp\."):
        SmallCNN((2, 5, 2))
