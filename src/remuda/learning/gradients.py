"""`Gradients`, which `Learner.gradients` returns and `Learner.apply` takes, and their computation by autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from remuda.core import Losses
from remuda.errors import ConfigError

Pieces: TypeAlias = tuple[Tensor, ...]  # vectors that, concatenated in this order, form one vector for a group


@dataclass(frozen=True)
class Gradients:
    """The gradient of one batch for each parameter group, as a tuple of pieces.

    Autograd returns one piece for each parameter; concatenating the pieces would cost a copy of all gradients.
    """

    pieces: dict[str, Pieces]
    version: int  # version of the parameters from which the gradients were computed
    metrics: dict[str, Tensor | float]
    priority: Tensor | None
    stop: bool

    @property
    def groups(self) -> dict[str, Tensor]:
        """The gradient of each group as one vector."""
        return {name: torch.cat(pieces) for name, pieces in self.pieces.items()}


def as_one_vector(parameters: list[nn.Parameter]) -> Tensor:
    """Concatenate parameters into one vector, and make the parameters views of this vector.

    One call of torch can then update or copy all parameters.
    """
    if len({parameter.dtype for parameter in parameters}) > 1:
        raise ConfigError("the networks mix parameters of different dtypes: make them all float32.")
    vector = torch.cat([flatten_as(parameter.detach(), parameter) for parameter in parameters])
    slices = torch.split(vector, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, slices, strict=True):
        if has_channels_last(parameter):
            out, channels, *sides = parameter.shape
            parameter.data = part.view(out, *sides, channels).movedim(-1, 1)
        else:
            parameter.data = part.view(parameter.shape)
    return vector


def has_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def flatten_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a tensor shaped like `parameter`, in the order in which the parameter is stored in memory."""
    return (tensor.movedim(1, -1) if has_channels_last(parameter) else tensor).reshape(-1)


def differentiate(losses: Losses, parameters: Mapping[str, list[nn.Parameter]], version: int) -> Gradients:
    """Compute the gradients of losses by autograd, with one backward pass for each parameter group."""
    pieces = {}
    for index, (name, loss) in enumerate(losses.groups.items()):
        last = index == len(losses.groups) - 1
        found = torch.autograd.grad(loss, parameters[name], retain_graph=not last, allow_unused=True)
        pairs = zip(found, parameters[name], strict=True)
        pieces[name] = tuple(flatten_as(torch.zeros_like(p) if g is None else g, p) for g, p in pairs)
    return Gradients(pieces, version, losses.metrics, losses.priority, losses.stop)
