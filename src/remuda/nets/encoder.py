"""Choose a network by name or by the observation's shape; each image of a Dict gets a branch of its own.

    inputs = Inputs(space)
    net = make_net(inputs.shapes, "auto")
    features = net(inputs(obs))                 # [N, F], from a tensor or a named array tuple of tensors

You can use a network of your own instead of the result of `make_net`. Its constructor takes `inputs.shapes`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from remuda.core import TensorTree
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
    """A network for Dict observations: an MLP whose input is the features of all images and all other entries.

    Entries with three axes are images. `make_branch` makes the network (branch) of one image from the image's shape.
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
        # A ModuleDict would need paths such as "a.b" as keys, but torch does not allow dots in module names.
        self.branches = nn.ModuleList(
            make_branch(shape) if len(shape) == 3 else nn.Identity() for shape in shapes.values()
        )
        with torch.no_grad():
            blanks = [torch.zeros(2, *shape) for shape in shapes.values()]
            width = self._concatenated(blanks).shape[-1]
        self.body = MLP((width,), hidden, activation, orthogonal_init)

    def _concatenated(self, entries: Sequence[Tensor]) -> Tensor:
        parts = [branch(entry) for branch, entry in zip(self.branches, entries, strict=True)]
        return torch.cat([part.reshape(len(part), -1) for part in parts], -1)

    def forward(self, obs: TensorTree) -> Tensor:
        entries = dict(leaves(obs))  # looked up by name, so that a missing entry raises KeyError
        features: Tensor = self.body(self._concatenated([entries[name] for name in self.names]))
        return features


def make_net(
    shapes: Shapes,
    net: str = "auto",
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    orthogonal_init: bool = True,
) -> nn.Module:
    """Make a network for inputs with `shapes`; if `shapes` is a dict, `net` names the network of each image.

    If `net` is "auto", images of at least 36x36 pixels get "nature", and smaller images of at least 3x3 pixels get
    "small". Everything else gets "mlp". `hidden` and `activation` apply to MLPs, including the MLP on top of a dict's
    branches. Image networks have the sizes given in their papers.
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
