"""Optimizers of one vector of parameters: what torch.optim computes, at less cost per call.

    optimizer = make_optimizer(vector, OptimizerOptions("adam"))
    optimizer.step(gradient, rate=3e-4)              # changes the vector in place
    optimizer.load_state_dict(optimizer.state_dict())

For the parameters of a small agent most of what torch.optim.Adam takes is not its inner function, which is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and its constants."""

    name: str = "adam"
    epsilon: float = 1e-5
    weight_decay: float = 0.0
    rms_alpha: float = 0.99
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)


class Optimizer(Protocol):
    def step(self, gradient: Tensor, rate: float) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Adam:
    """Adam (1412.6980), or AdamW (1711.05101), where the decay does not pass through the moments."""

    def __init__(self, vector: Tensor, options: OptimizerOptions) -> None:
        self.vector, self.options = vector, options
        self._update = adamw if options.name == "adamw" else adam
        self.steps = torch.zeros(())
        self.mean, self.square = torch.zeros_like(self.vector), torch.zeros_like(self.vector)

    def step(self, gradient: Tensor, rate: float) -> None:
        options = self.options
        self._update(
            *([self.vector], [gradient], [self.mean], [self.square], [], [self.steps]),
            fused=True,
            amsgrad=False,
            beta1=options.betas[0],
            beta2=options.betas[1],
            lr=rate,
            weight_decay=options.weight_decay,
            eps=options.epsilon,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])


class RMSprop:
    """As torch.optim.RMSprop: epsilon outside of the root, and momentum of the step where it is asked for."""

    def __init__(self, vector: Tensor, options: OptimizerOptions) -> None:
        self.vector, self.options = vector, options
        self.square = torch.zeros_like(self.vector)
        self.momentum = torch.zeros_like(self.vector) if options.momentum else None

    def step(self, gradient: Tensor, rate: float) -> None:
        options = self.options
        if options.weight_decay:
            gradient = gradient + options.weight_decay * self.vector
        self.square.mul_(options.rms_alpha).addcmul_(gradient, gradient, value=1 - options.rms_alpha)
        spread = self.square.sqrt().add_(options.epsilon)
        if self.momentum is None:
            self.vector.addcdiv_(gradient, spread, value=-rate)
        else:
            self.momentum.mul_(options.momentum).addcdiv_(gradient, spread)
            self.vector.add_(self.momentum, alpha=-rate)

    def state_dict(self) -> dict[str, Any]:
        return {"square": self.square, "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.square.copy_(state["square"])
        if self.momentum is not None:
            self.momentum.copy_(state["momentum"])


def make_optimizer(vector: Tensor, options: OptimizerOptions) -> Optimizer:
    return RMSprop(vector, options) if options.name == "rmsprop" else Adam(vector, options)
