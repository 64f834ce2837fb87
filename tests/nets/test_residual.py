"""Tests of the IMPALA network against its layers, and of the properties of Fixup at initialization."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.nets import ImpalaNet
from remuda.nets.residual import FixupBlock, ResidualBlock, Shift

torch.set_num_threads(1)  # more threads are many times slower on a busy machine


def blocks_of(net: nn.Module) -> list[FixupBlock | ResidualBlock]:
    return [block for block in net.modules() if isinstance(block, (FixupBlock, ResidualBlock))]


def test_layers_are_those_of_the_paper() -> None:
    net, images = ImpalaNet((4, 84, 84)), torch.rand(2, 4, 84, 84)
    weights = iter([layer for layer in net.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))])

    def conv(x: Tensor) -> Tensor:
        layer = next(weights)
        return F.conv2d(x, layer.weight, layer.bias, padding=1)

    x, sides = images, []
    for channels in (16, 32, 32):
        x = F.max_pool2d(conv(x), 3, stride=2, padding=1)
        assert x.shape[1] == channels
        sides.append(x.shape[2])
        for _ in range(2):
            x = x + conv(F.relu(conv(F.relu(x))))
    last = next(weights)
    assert sides == [42, 21, 11]
    assert last.weight.shape == (256, 3872)
    assert next(weights, None) is None
    torch.testing.assert_close(
        net(images), F.relu(last(F.relu(x).permute(0, 2, 3, 1).flatten(1))), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("fixup", [False, True])
@pytest.mark.parametrize("shape", [(7, 7, 3), (3, 64, 64), (1, 9, 2), (1, 1, 1)])
def test_images_of_any_size(shape: tuple[int, ...], fixup: bool) -> None:
    assert ImpalaNet(shape, features=11, channels=(4, 8), fixup=fixup)(torch.rand(2, *shape)).shape == (2, 11)


def test_every_fixup_block_starts_as_the_identity() -> None:
    net = ImpalaNet((4, 20, 20), fixup=True)
    blocks = blocks_of(net)
    assert len(blocks) == 6
    for block in blocks:
        x = torch.randn(2, block.first.in_channels, 5, 5)
        assert torch.equal(block(x), x)
    plain = blocks_of(ImpalaNet((4, 20, 20)))[0]
    assert not torch.equal(plain(x[:, :16]), x[:, :16])


@pytest.mark.parametrize("channels", [(16, 32, 32), (8, 8, 8, 8, 8)])
def test_first_convolution_of_fixup_blocks_is_scaled_by_the_number_of_blocks(channels: tuple[int, ...]) -> None:
    """The scale L ^ (-1 / (2 m - 2)) with m = 2 gives weights a gain of sqrt(2 / L)."""
    num_blocks = 2 * len(channels)
    for block in blocks_of(ImpalaNet((4, 32, 32), channels=channels, fixup=True)):
        rows = block.first.weight.flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2 / num_blocks * torch.eye(len(rows)), atol=1e-5, rtol=1e-4)
    torch.manual_seed(0)
    for block in blocks_of(ImpalaNet((4, 32, 32), channels=(64,) * len(channels), fixup=True, orthogonal_init=False)):
        expected = math.sqrt(2 / (64 * 9) / num_blocks)
        assert block.first.weight.std().item() == pytest.approx(expected, rel=0.02)


def test_fixup_has_a_scalar_bias_before_every_layer_and_activation() -> None:
    """Each section has one bias before its convolution, each block four and a multiplier, and the output two."""
    net = ImpalaNet((4, 20, 20), fixup=True)
    assert sum(isinstance(layer, Shift) for layer in net.modules()) == 3 + 2
    for block in blocks_of(net):
        assert block.biases.tolist() == [0, 0, 0, 0]
        assert block.scale.item() == 1
        block.last.weight.data.normal_()
        block.biases.data.normal_()
        block.scale.data.fill_(0.7)
        x = torch.randn(2, block.first.in_channels, 6, 6)
        b0, b1, b2, b3 = block.biases.tolist()
        branch = F.conv2d(F.relu(x + b0) + b1, block.first.weight, padding=1)
        branch = F.conv2d(F.relu(branch + b2) + b3, block.last.weight, padding=1)
        torch.testing.assert_close(block(x), x + 0.7 * branch, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("orthogonal_init", [True, False])
def test_fixup_keeps_the_scale_of_features_for_any_number_of_blocks(orthogonal_init: bool) -> None:
    """At initialization blocks are the identity, and sections change the scale only slightly."""
    torch.manual_seed(0)
    images = torch.rand(8, 3, 64, 64)
    for channels in ((16,), (16, 32, 32), (16,) * 6):
        with torch.no_grad():
            size = ImpalaNet((3, 64, 64), 64, channels, True, orthogonal_init)(images).square().mean().sqrt().item()
        assert 0.1 < size < 4


def test_features_of_the_orthogonal_net_have_a_scale_of_about_1() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        assert 0.5 < ImpalaNet((4, 64, 64))(torch.rand(8, 4, 64, 64)).square().mean().sqrt() < 4


@pytest.mark.parametrize("fixup", [False, True])
def test_first_gradients_reach_every_expected_parameter(fixup: bool) -> None:
    net = ImpalaNet((4, 20, 20), fixup=fixup)
    net(torch.rand(4, 4, 20, 20)).square().mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        # While the last convolution of a Fixup block is zero, only that convolution has a nonzero gradient.
        if not (fixup and (".first." in name or name.endswith(("biases", "scale")))):
            assert parameter.grad.any(), name
