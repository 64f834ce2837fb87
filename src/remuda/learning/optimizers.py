"""Optimizers of one vector of parameters, with the results of torch.optim at a lower cost per call.

    optimizer = make_optimizer(vector, OptimizerOptions("adam"))
    optimizer.step((gradient,), rate=3e-4)           # changes the vector in place; gradients may have several pieces
    optimizer.load_state_dict(optimizer.state_dict())

For a small agent, torch.optim.Adam spends most of its time outside of its fused kernel, so this module calls only the
kernel. For a large agent, concatenating the pieces of the gradient would take time, so `step` accepts the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from remuda.learning.gradients import Pieces


@dataclass(frozen=True)
class OptimizerOptions:
    """The name of an optimizer, and its hyperparameters other than the learning rate."""

    name: str = "adam"
    epsilon: float = 1e-5
    weight_decay: float = 0.0
    rms_alpha: float = 0.99
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)


OptimizerState = dict[str, Tensor | None]


class Optimizer(Protocol):
    """An optimizer of one parameter vector, which it updates in place."""

    def step(self, gradient: Pieces, rate: float) -> None: ...
    def state_dict(self) -> OptimizerState: ...
    def load_state_dict(self, state: OptimizerState) -> None: ...


class Adam:
    """Adam (arXiv 1412.6980), or AdamW with decoupled weight decay (arXiv 1711.05101)."""

    def __init__(self, vector: Tensor, options: OptimizerOptions) -> None:
        self.vector, self.options = vector, options
        self._update = torch._fused_adamw_ if options.name == "adamw" else torch._fused_adam_
        self.steps = torch.zeros((), device=vector.device)
        self.mean, self.square = torch.zeros_like(self.vector), torch.zeros_like(self.vector)

    def step(self, gradient: Pieces, rate: float) -> None:
        options = self.options
        self.steps += 1
        self._update(
            split_as(self.vector, gradient),
            gradient,
            split_as(self.mean, gradient),
            split_as(self.square, gradient),
            [],
            [self.steps] * len(gradient),
            amsgrad=False,
            beta1=options.betas[0],
            beta2=options.betas[1],
            lr=rate,
            weight_decay=options.weight_decay,
            eps=options.epsilon,
            maximize=False,
        )

    def state_dict(self) -> OptimizerState:
        return {"steps": self.steps, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: OptimizerState) -> None:
        for name, mine in (("steps", self.steps), ("mean", self.mean), ("square", self.square)):
            copy_saved(mine, state[name])


class RMSprop:
    """RMSprop as in torch.optim: epsilon is added outside of the square root, and momentum is optional."""

    def __init__(self, vector: Tensor, options: OptimizerOptions) -> None:
        self.vector, self.options = vector, options
        self.square = torch.zeros_like(self.vector)
        self.momentum = torch.zeros_like(self.vector) if options.momentum else None

    def step(self, gradient: Pieces, rate: float) -> None:
        moments = [None] * len(gradient) if self.momentum is None else split_as(self.momentum, gradient)
        whole = (split_as(self.vector, gradient), split_as(self.square, gradient), moments)
        for piece, vector, square, momentum in zip(gradient, *whole, strict=True):
            self._step(piece, rate, vector, square, momentum)

    def _step(self, gradient: Tensor, rate: float, vector: Tensor, square: Tensor, momentum: Tensor | None) -> None:
        options = self.options
        if options.weight_decay:
            gradient = gradient + options.weight_decay * vector
        square.mul_(options.rms_alpha).addcmul_(gradient, gradient, value=1 - options.rms_alpha)
        spread = square.sqrt().add_(options.epsilon)
        if momentum is None:
            vector.addcdiv_(gradient, spread, value=-rate)
        else:
            momentum.mul_(options.momentum).addcdiv_(gradient, spread)
            vector.add_(momentum, alpha=-rate)

    def state_dict(self) -> OptimizerState:
        return {"square": self.square, "momentum": self.momentum}

    def load_state_dict(self, state: OptimizerState) -> None:
        copy_saved(self.square, state["square"])
        if self.momentum is not None:
            copy_saved(self.momentum, state["momentum"])


def copy_saved(tensor: Tensor, saved: Tensor | None) -> None:
    if saved is None:
        raise TypeError("an optimizer with other options was saved")
    tensor.copy_(saved)


def split_as(vector: Tensor, pieces: Pieces) -> Pieces:
    """Split `vector` into views that have the sizes of `pieces`."""
    return (vector,) if len(pieces) == 1 else torch.split(vector, [len(piece) for piece in pieces])


def make_optimizer(vector: Tensor, options: OptimizerOptions) -> Optimizer:
    return RMSprop(vector, options) if options.name == "rmsprop" else Adam(vector, options)


def norms(groups: Mapping[str, Pieces]) -> dict[str, float]:
    """Return the L2 norm of each group's vector. If the vectors are not on the CPU, wait for the device only once."""
    found = [norm(pieces) for pieces in groups.values()]
    if len(found) > 1 and found[0].device.type != "cpu":
        return dict(zip(groups, torch.stack(found).cpu().tolist(), strict=True))
    return {name: float(each) for name, each in zip(groups, found, strict=True)}


LARGE, ROWS = 1 << 18, 8  # `norm` splits pieces of LARGE or more numbers into ROWS rows, to use several threads


def norm(pieces: Pieces) -> Tensor:
    """Return the L2 norm of the vector that the pieces form together, as a tensor without axes."""
    found: list[Tensor] = []
    small = [piece for piece in pieces if not is_large(piece)]
    if small:
        found += torch._foreach_norm(small)
    for piece in pieces:
        if is_large(piece):  # torch uses one thread for the norm of a vector, and several for the norms of rows
            found += torch.linalg.vector_norm(piece.view(ROWS, -1), dim=1).unbind()
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))


def is_large(piece: Tensor) -> bool:
    return len(piece) >= LARGE and len(piece) % ROWS == 0
