"""Which net an observation gets: by its shape, or by name; and a branch per entry where it has entries.

    inputs = Inputs(space)
    net = make_net(inputs.shapes, "auto")
    features = net(inputs(obs))                 # [N, F], from a tensor or a named array tuple of tensors

A net of the user's own takes the same shapes, and is put in the place of what `make_net` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from remuda.data import leaves
from remuda.errors import ConfigError, nearest
from remuda.nets.conv import NATURE_SIDE, SMALL_SIDE, A3CNet, NatureCNN, SmallCNN, image_sides
from remuda.nets.inputs import Shapes
from remuda.nets.mlp import MLP
from remuda.nets.residual import ImpalaNet

IMAGE_NETS: dict[str, Callable[..., nn.Module]] = {
    "nature": NatureCNN,
    "a3c": A3CNet,
    "small": SmallCNN,
    "impala": ImpalaNet,
    "impala-fixup": partial(ImpalaNet, fixup=True),
}
NETS = ("auto", "mlp", *IMAGE_NETS)


class EntriesNet(nn.Module):
    """Each image entry through a branch of its own, everything else flat; side by side through an MLP.

    `make_branch` makes the net of an image (a shape of three axes).
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        make_branch: Callable[[tuple[int, ...]], nn.Module],
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        orthogonal_init: bool = True,
    ) -> None:
        super().__init__()
        self.names = tuple(shapes)
        # A list, because names of modules must not have the dots of paths.
        self.branches = nn.ModuleList(
            make_branch(shape) if len(shape) == 3 else nn.Identity() for shape in shapes.values()
        )
        with torch.no_grad():
            blanks = [torch.zeros(2, *shape) for shape in shapes.values()]
            width = self._side_by_side(blanks).shape[-1]
        self.body = MLP((width,), hidden, activation, orthogonal_init)

    def _side_by_side(self, entries: Sequence[Tensor]) -> Tensor:
        parts = [branch(entry) for branch, entry in zip(self.branches, entries, strict=True)]
        return torch.cat([part.reshape(len(part), -1) for part in parts], -1)

    def forward(self, obs: Any) -> Tensor:
        entries = dict(leaves(obs))  # by name, so that what is missing or elsewhere is an error and not another input
        features: Tensor = self.body(self._side_by_side([entries[name] for name in self.names]))
        return features


def make_net(
    shapes: Shapes,
    net: str = "auto",
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    orthogonal_init: bool = True,
) -> nn.Module:
    """A net for inputs of these shapes; of a dict of them, the name is about its images.

    auto: images of at least 36x36 get nature, smaller ones small, and everything else (also images of less than 3x3,
    which no convolution fits) mlp. `hidden` and `activation` are those of MLPs: image nets have the sizes of their
    papers, and of a dict they come after its branches.
    """
    if net not in NETS:
        raise ConfigError(f"agent.net={net} is not known: {nearest(net, NETS)}")
    if net in IMAGE_NETS and not any(len(shape) == 3 for shape in _every(shapes)):
        raise ConfigError(
            f"agent.net={net} needs an image, which has three axes, and observations have the shape "
            f"{_described(shapes)}: use agent.net=mlp or auto."
        )

    def branch(shape: tuple[int, ...]) -> nn.Module:
        name = _automatic(shape) if net == "auto" else net
        return nn.Flatten() if name == "mlp" else IMAGE_NETS[name](shape, orthogonal_init=orthogonal_init)

    if isinstance(shapes, dict):
        return EntriesNet(shapes, branch, hidden, activation, orthogonal_init)
    if net == "mlp" or (net == "auto" and _automatic(shapes) == "mlp"):
        return MLP(shapes, hidden, activation, orthogonal_init)
    return branch(shapes)


def _automatic(shape: tuple[int, ...]) -> str:
    if len(shape) != 3 or min(image_sides(shape)) < SMALL_SIDE:
        return "mlp"
    return "nature" if min(image_sides(shape)) >= NATURE_SIDE else "small"


def _every(shapes: Shapes) -> list[tuple[int, ...]]:
    return list(shapes.values()) if isinstance(shapes, dict) else [shapes]


def _described(shapes: Shapes) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) if isinstance(shapes, dict) else f"{shapes}"
