"""Convolutional networks for images, which map [N, *shape] to features [N, F].

    net = NatureCNN((4, 84, 84))                # channels first, as in Atari's stacked frames
    net = SmallCNN((10, 10, 6))                 # channels last, as in MinAtar and MiniGrid
    features = net(images)                      # float32 [N, *shape]

`channels_last` stores the channels of a pixel next to each other. Each cell of the table shows two times:
milliseconds in torch's default layout / with `channels_last`. They are medians of 12 to 30 alternating measurements,
on two Zen 3 cores with other processes running (torch 2.13):

| net | batch | one thread | two threads |
|---|---|---|---|
| NatureCNN, 4x84x84 | 256, forward and backward | 527 / 438 | 1,095 / 953 |
| NatureCNN, 4x84x84 | 8, forward | 5.9 / 6.1 | 54 / 44 |
| SmallCNN, 10x10x6 | 256, forward and backward | 6.2 / 6.6 | 111 / 61 |
| SmallCNN, 10x10x6 | 8, forward | 0.41 / 0.41 | 4.9 / 5.7 |
| ImpalaNet, 4x84x84 | 64, forward and backward | 642 / 484 | 757 / 637 |
| ImpalaNet, 4x84x84 | 8, forward | 33 / 18 | 80 / 47 |

`channels_last` is therefore the default of the large networks, but not of SmallCNN. (The two threads had to share
their cores with other processes, so compare only the two numbers within a cell.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from remuda.errors import ConfigError
from remuda.nets.mlp import Layer, orthogonal
from remuda.nets.wide import WideLinear

NATURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # (output channels, kernel size, stride) of each convolution
A3C_LAYERS = ((16, 8, 4), (32, 4, 2))
NATURE_SIDE = 36  # smallest height and width of an image; NATURE_LAYERS reduce 36x36 pixels to one pixel
SMALL_SIDE = 3  # smallest height and width for SmallCNN, which has a 3x3 convolution


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether the first of three axes is the smallest, and is therefore taken as the channels of an image."""
    return len(shape) == 3 and shape[0] < min(shape[1:])


def image_sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of an image with channels first or last."""
    return (shape[1], shape[2]) if is_channels_first(shape) else (shape[0], shape[1])


def initialized(layer: Layer, orthogonal_init: bool) -> Layer:
    """Initialize a layer orthogonally, with the gain for ReLU, or leave it as torch initialized it."""
    return orthogonal(layer, math.sqrt(2)) if orthogonal_init else layer


class ImageLayout(nn.Module):
    """Convert images [N, *shape], channels first or last, to [N, channels, height, width] in a given memory format.

    The format does not change results, except for rounding. `lay_out` converts the weights of a network to the same
    format, because otherwise torch would convert the weights in every call.
    """

    def __init__(self, shape: tuple[int, ...], channels_last: bool) -> None:
        super().__init__()
        self.is_first = is_channels_first(shape)
        self.channels = shape[0] if self.is_first else shape[2]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        images = images if self.is_first else images.permute(0, 3, 1, 2)
        return images.contiguous(memory_format=self.memory_format)

    def lay_out(self, net: nn.Module) -> None:
        for parameter in net.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=self.memory_format)


class Pixels(nn.Module):
    """Flatten [N, channels, height, width] to [N, features], with the channels of a pixel next to each other.

    This does not copy images whose memory format is channels_last.
    """

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


class NatureCNN(nn.Module):
    """Convolutions of 8x8 stride 4, 4x4 stride 2 and 3x3 stride 1, and a linear layer, with ReLU after each.

    This is the network of DQN (Mnih et al., Nature 518, 2015). Images need at least 36x36 pixels.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        features: int = 512,
        orthogonal_init: bool = True,
        convolutions: Sequence[tuple[int, int, int]] = NATURE_LAYERS,
        channels_last: bool = True,
        name: str = "nature",  # value of agent.net, for error messages
    ) -> None:
        super().__init__()
        height, width = refuse_small(shape, name, smallest_side(convolutions), "small")
        layout = ImageLayout(shape, channels_last)
        layers: list[nn.Module] = [layout]
        depth = layout.channels
        for out, kernel, stride in convolutions:
            layers += [initialized(nn.Conv2d(depth, out, kernel, stride), orthogonal_init), nn.ReLU(inplace=True)]
            depth, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        last = initialized(WideLinear(depth * height * width, features), orthogonal_init)
        self.layers = nn.Sequential(*layers, Pixels(), last, nn.ReLU(inplace=True))
        layout.lay_out(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class A3CNet(NatureCNN):
    """The network of A3C (arXiv 1602.01783): two convolutions and 256 features, a third of NatureCNN's cost."""

    def __init__(self, shape: tuple[int, ...], orthogonal_init: bool = True, channels_last: bool = True) -> None:
        super().__init__(shape, 256, orthogonal_init, A3C_LAYERS, channels_last, "a3c")


class SmallCNN(nn.Module):
    """One convolution of 3x3 and a linear layer, with ReLU after each (the network of MinAtar, arXiv 1903.03176)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        features: int = 128,
        channels: int = 16,
        orthogonal_init: bool = True,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        height, width = refuse_small(shape, "small", SMALL_SIDE, "mlp")
        layout = ImageLayout(shape, channels_last)
        convolution = initialized(nn.Conv2d(layout.channels, channels, 3), orthogonal_init)
        last = initialized(nn.Linear(channels * (height - 2) * (width - 2), features), orthogonal_init)
        relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(layout, convolution, relu, nn.Flatten(), last, relu)
        layout.lay_out(self)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


def smallest_side(convolutions: Sequence[tuple[int, int, int]]) -> int:
    """Return the smallest height and width of images that convolutions (channels, kernel, stride) accept."""
    side = 1
    for _, kernel, stride in reversed(convolutions):
        side = (side - 1) * stride + kernel
    return side


def refuse_small(shape: tuple[int, ...], net: str, side: int, remedy: str) -> tuple[int, int]:
    """Return height and width of an image; raise ConfigError if its height or width is below `side`."""
    height, width = image_sides(shape)
    if min(height, width) < side:
        raise ConfigError(
            f"agent.net={net} needs images of {side}x{side} pixels or more, and these have {height}x{width}: "
            f"use agent.net={remedy}."
        )
    return height, width
