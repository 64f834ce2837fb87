"""Fully connected nets by hand, for large batches: gradients of what is asked for, and nothing that is not.

    net = QuickNet(layers, into)                     # relu between them; `into` is where gradients are added up
    seen = net.forward(x)                            # x, what every layer made of it, and the output at the end
    by_first = net.differentiate(seen, by_output, len(x), keep=False)       # gradients of all weights
    by_action = net.to_input(by_first, slice(17, 23))

What autograd does of the same is right, but twice as slow: it keeps what it need not, and goes through memory where
this stays in the cache. Callers hand over some thousand rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.agents.trunk import Trunk
from remuda.nets import MLP

ROWS = 2048  # at a time: with 512 the products are too small, with 8192 what is between them leaves the cache

FEW = 1024  # rows up to which a call more costs more than a product that could be spared


class QuickNet:
    """Layers that share the parameters of modules."""

    def __init__(self, layers: Sequence[nn.Linear], into: dict[int, Tensor] | None = None) -> None:
        self.layers = [(layer.weight, layer.bias) for layer in layers]
        self.into = None if into is None else [(into[id(weight)], into[id(bias)]) for weight, bias in self.layers]

    def forward(self, x: Tensor) -> list[Tensor]:
        seen = [x]
        for weight, bias in self.layers[:-1]:
            x = F.linear(x, weight, bias).relu_()
            seen.append(x)
        return [*seen, F.linear(x, *self.layers[-1])]

    def differentiate(self, seen: list[Tensor], by_output: Tensor, rows: int, keep: bool) -> Tensor:
        """Of the first `rows` rows to all weights, added to what is there if that is to be kept.

        Returns the gradient by what the first layer made of all rows.
        """
        assert self.into is not None
        for index in reversed(range(len(self.layers))):
            by_weight, by_bias = self.into[index]
            by, made = (by_output, seen[index]) if rows == len(by_output) else (by_output[:rows], seen[index][:rows])
            by_weight.addmm_(by.t(), made, beta=int(keep))
            if keep:
                by_bias.add_(by.sum(0))
            else:
                torch.sum(by, 0, out=by_bias)
            if index:
                by_output = self._below(index, seen[index], by_output)
        return by_output

    def to_first(self, hidden: list[Tensor], by_output: Tensor) -> Tensor:
        """From the gradient by the output to that by what the first layer made, the first of `hidden`."""
        for index in reversed(range(1, len(self.layers))):
            by_output = self._below(index, hidden[index - 1], by_output)
        return by_output

    def to_input(self, by_first: Tensor, columns: slice) -> Tensor:
        """On from there to some columns of the input."""
        return by_first @ self.layers[0][0][:, columns]

    def _below(self, index: int, made: Tensor, by_output: Tensor) -> Tensor:
        """Through a layer, and the relu that made what it saw."""
        by_input = by_output @ self.layers[index][0]
        torch.ops.aten.threshold_backward.grad_input(by_input, made, 0, grad_input=by_input)
        return by_input


def linear_layers(trunk: Trunk, *more: nn.Module) -> list[nn.Linear] | None:
    """Of a trunk and what is on top of it, from the bottom; None where there is anything but layers with relu."""
    parts = [trunk.net, *more]
    found: list[nn.Linear] = []
    for part in parts:
        steps = list(part.layers) if type(part) is MLP else [part]
        for step in steps:
            if isinstance(step, nn.Linear) and step.bias is not None:
                found.append(step)
            elif not isinstance(step, nn.ReLU | nn.Flatten):
                return None
    return None if trunk.core is not None else found


def gradient_places(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, dict[int, Tensor]]:
    """A vector for the gradient of all parameters, and where in it that of each one lies."""
    vector = torch.zeros(sum(parameter.numel() for parameter in parameters))
    places = torch.split(vector, [parameter.numel() for parameter in parameters])
    return vector, {id(p): place.view(p.shape) for p, place in zip(parameters, places, strict=True)}
