"""The residual network of IMPALA (arXiv 1802.01561, figure 3, right), with or without Fixup initialization.

    net = ImpalaNet((4, 84, 84))                # 15 convolutions; features [N, 256]
    net = ImpalaNet((64, 64, 3), fixup=True)

Fixup (arXiv 1901.09321) is an initialization for residual networks without normalization layers. With L residual
blocks of m convolutions each, every block starts as the identity, and the size of its first update does not grow
with L:

    last convolution of each block      0
    other convolutions of each block    usual initialization * L ^ (-1 / (2 m - 2))
    scalar multiplier of each block     1
    scalar biases                       0; there is one before every convolution, linear layer and activation

Here m = 2, so the factor is 1 / sqrt(L). The paper also sets the last layer of the network to 0. Here, the last layer
is the agent's head, which is initialized as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.nets.conv import ImageLayout, Pixels, image_sides, initialized
from remuda.nets.mlp import orthogonal
from remuda.nets.wide import WideLinear

BLOCKS = 2  # residual blocks of each section


class ResidualBlock(nn.Module):
    """The residual block x + conv(relu(conv(relu(x)))), with 3x3 convolutions."""

    def __init__(self, channels: int, orthogonal_init: bool) -> None:
        super().__init__()
        self.first = convolution(channels, channels, orthogonal_init)
        self.last = convolution(channels, channels, orthogonal_init)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.last(F.relu(self.first(F.relu(x))))
        return x + branch


class FixupBlock(nn.Module):
    """A residual block with Fixup's scalars, which is initially the identity.

    `num_blocks` is L, the number of residual blocks in the network.
    """

    def __init__(self, channels: int, orthogonal_init: bool, num_blocks: int) -> None:
        super().__init__()
        self.first = fixup_convolution(channels, channels, orthogonal_init)
        self.last = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        with torch.no_grad():
            self.first.weight.mul_(num_blocks**-0.5)
            self.last.weight.zero_()
        self.biases = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        b0, b1, b2, b3 = self.biases
        branch: Tensor = self.first(F.relu(x + b0) + b1)
        branch = self.last(F.relu(branch + b2) + b3) * self.scale
        return x + branch


class Shift(nn.Module):
    """A layer that adds one scalar bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ImpalaNet(nn.Module):
    """IMPALA's residual network: one section for each entry of `channels`, then ReLU, a linear layer and ReLU.

    A section is a 3x3 convolution, 3x3 max-pooling of stride 2, and two residual blocks. Without Fixup, orthogonal
    convolutions have gain 1. The other networks use gain sqrt(2). In this network, the outputs of shortcuts add up:
    for 4x84x84 images in 0..1, gain sqrt(2) gave features of magnitude 25, and gain 1 gives magnitude 1.7.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        features: int = 256,
        channels: Sequence[int] = (16, 32, 32),
        fixup: bool = False,
        orthogonal_init: bool = True,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        height, width = image_sides(shape)
        layout = ImageLayout(shape, channels_last)
        layers: list[nn.Module] = [layout]
        depth = layout.channels
        for out in channels:
            if fixup:
                layers += [Shift(), fixup_convolution(depth, out, orthogonal_init)]
            else:
                layers.append(convolution(depth, out, orthogonal_init))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            for _ in range(BLOCKS):
                layers.append(
                    FixupBlock(out, orthogonal_init, BLOCKS * len(channels))
                    if fixup
                    else ResidualBlock(out, orthogonal_init)
                )
            depth, height, width = out, (height + 1) // 2, (width + 1) // 2
        last = initialized(WideLinear(depth * height * width, features), orthogonal_init)
        if fixup:
            layers += [Shift(), nn.ReLU(), Pixels(), Shift(), last, nn.ReLU()]
        else:
            layers += [nn.ReLU(), Pixels(), last, nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        layout.lay_out(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


def convolution(depth: int, out: int, orthogonal_init: bool) -> nn.Conv2d:
    layer = nn.Conv2d(depth, out, 3, padding=1)
    return orthogonal(layer, 1.0) if orthogonal_init else layer


def fixup_convolution(depth: int, out: int, orthogonal_init: bool) -> nn.Conv2d:
    """Make a convolution without bias, initialized orthogonally or else by He's rule (arXiv 1502.01852).

    Fixup starts from one of these two initializations; torch's default weights would be smaller.
    """
    layer = nn.Conv2d(depth, out, 3, padding=1, bias=False)
    if not orthogonal_init:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return initialized(layer, orthogonal_init)
