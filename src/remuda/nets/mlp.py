"""Fully connected networks, and the weight initialization that all networks share.

    net = MLP((8,), hidden=(64, 64))
    values = head(net(inputs(obs)))

A network maps observations [N, *shape] to features [N, F]. The heads on top of the network belong to the agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Set orthogonal weights (arXiv 1312.6120), scaled by `gain`, and zero biases in place; return the layer.

    Gains are as in OpenAI Baselines: hidden layers sqrt(2), policy heads 0.01, value heads 1; but see residual.py.
    """
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Fully connected layers over the flattened observation, each followed by the activation."""

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        orthogonal_init: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
        if not shape:  # scalar observations [N] become [N, 1]
            layers = [nn.Unflatten(0, (-1, 1))]
        width = math.prod(shape)
        for size in hidden:
            layer = nn.Linear(width, size)
            layers += [orthogonal(layer, math.sqrt(2)) if orthogonal_init else layer, ACTIVATIONS[activation]()]
            width = size
        self.layers = nn.Sequential(*layers)

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.layers(obs)
        return features
