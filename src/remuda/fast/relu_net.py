"""Hand-written forward and backward passes of fully connected ReLU networks, for large batches.

    net = ReluNet(layers, views)                     # backward() writes parameter gradients to `views`
    outputs = net.forward(x)                         # [x, outputs of hidden layers..., output of the last layer]
    by_first = net.backward(outputs, by_output, len(x), accumulate=False)  # gradient w.r.t. the first layer's output
    by_action = net.to_input(by_first, slice(17, 23))                      # gradient w.r.t. columns 17 to 22 of x

Autograd takes twice as long, because it stores more tensors than fit in the cache. This module computes only the
gradients that are needed. Callers pass large batches in pieces of `MAX_ROWS` rows, so that the tensors of a piece
stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.agents.trunk import Trunk
from remuda.nets import MLP

MAX_ROWS = 2048  # rows in a piece of a batch; 512 rows are inefficient, and activations of 8192 rows exceed the cache

FEW_ROWS = 1024  # up to this many rows, computing rows with zero gradient is faster than leaving them out


class ReluNet:
    """Linear layers of existing modules, with ReLU between the layers."""

    def __init__(self, layers: Sequence[nn.Linear], views: dict[int, Tensor] | None = None) -> None:
        self.layers = [(layer.weight, layer.bias) for layer in layers]
        self.into = None if views is None else [(views[id(weight)], views[id(bias)]) for weight, bias in self.layers]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return a list of the input and the output of every layer."""
        outputs = [x]
        for weight, bias in self.layers[:-1]:
            x = F.linear(x, weight, bias).relu_()
            outputs.append(x)
        return [*outputs, F.linear(x, *self.layers[-1])]

    def backward(self, outputs: list[Tensor], by_output: Tensor, rows: int, accumulate: bool) -> Tensor:
        """Write the gradients of all parameters to the constructor's `views`, as sums over the first `rows` rows.

        Return the gradient, for all rows, with respect to the first layer's output before the ReLU.

        `outputs` is the result of `forward`, and `by_output` is the gradient with respect to the last of these
        outputs. If `accumulate` is True, parameter gradients are added to the contents of the views.
        """
        assert self.into is not None
        for index in reversed(range(len(self.layers))):
            by_weight, by_bias = self.into[index]
            by, x = by_output, outputs[index]
            if rows != len(by_output):
                by, x = by[:rows], x[:rows]
            by_weight.addmm_(by.t(), x, beta=int(accumulate))
            if accumulate:
                by_bias.add_(by.sum(0))
            else:
                torch.sum(by, 0, out=by_bias)
            if index:
                by_output = self._to_previous(index, outputs[index], by_output)
        return by_output

    def to_first(self, hidden: list[Tensor], by_output: Tensor) -> Tensor:
        """Return the gradient w.r.t. the first layer's output, as `backward` does, but no parameter gradients.

        `hidden` holds the outputs of the hidden layers, without the input and the output of the network.
        """
        for index in reversed(range(1, len(self.layers))):
            by_output = self._to_previous(index, hidden[index - 1], by_output)
        return by_output

    def to_input(self, by_first: Tensor, columns: slice) -> Tensor:
        """Return the gradient with respect to `columns` of the input.

        `by_first` is the result of `backward` or `to_first`.
        """
        return by_first @ self.layers[0][0][:, columns]

    def _to_previous(self, index: int, x: Tensor, by_output: Tensor) -> Tensor:
        """Pass a gradient back through layer `index` and through the ReLU before it, whose output is `x`."""
        by_input = by_output @ self.layers[index][0]
        torch.ops.aten.threshold_backward.grad_input(by_input, x, 0, grad_input=by_input)
        return by_input


def linear_layers(trunk: Trunk, *more: nn.Module) -> list[nn.Linear] | None:
    """Return the linear layers of `trunk` and then of `more`, or None if the modules are not a plain ReLU network."""
    found: list[nn.Linear] = []
    for part in [trunk.net, *more]:
        steps = list(part.layers) if type(part) is MLP else [part]
        for step in steps:
            if isinstance(step, nn.Linear) and step.bias is not None:
                found.append(step)
            elif not isinstance(step, nn.ReLU | nn.Flatten):
                return None
    return None if trunk.core is not None else found


def gradient_views(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return a vector for all gradients, and a dict from `id(parameter)` to the view for its gradient."""
    sizes = [parameter.numel() for parameter in parameters]
    vector = torch.zeros(sum(sizes))
    views = torch.split(vector, sizes)
    return vector, {id(p): view.view(p.shape) for p, view in zip(parameters, views, strict=True)}
