"""The learner: gradients of a batch (G) and updates of the parameters (U), kept apart.

    batch = learner.prepare(rollout)
    for minibatch in ...:
        learner.step(minibatch)                     # = learner.apply(learner.gradients(minibatch))
    learner.finish(rollout)

G reads parameters and writes none; U is the only place where they change. That is what lets a scheme compute
gradients in one process and apply them in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remuda.core import Algorithm, Clock
from remuda.data import Batch, Rollout
from remuda.errors import TrainingError
from remuda.learning.schedules import Schedule

MAX_BAD_UPDATES = 10  # not finite, in a row


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer, and its constants."""

    name: str = "adam"
    epsilon: float = 1e-5
    weight_decay: float = 0.0
    rms_alpha: float = 0.99
    momentum: float = 0.0


def make_optimizer(parameters: list[nn.Parameter], options: OptimizerOptions) -> torch.optim.Optimizer:
    """The rate is set before every update. Fused Adam costs a third of the loop over parameters."""
    if options.name == "rmsprop":
        return torch.optim.RMSprop(
            parameters,
            alpha=options.rms_alpha,
            eps=options.epsilon,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            foreach=True,
        )
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(parameters, eps=options.epsilon, weight_decay=options.weight_decay, fused=True)


@dataclass(frozen=True)
class Gradients:
    """What G hands to U."""

    groups: dict[str, list[Tensor]]
    version: int  # of the parameters they were computed from
    metrics: dict[str, Tensor | float]
    priority: Tensor | None
    stop: bool


class Learner:
    """Owns an algorithm's parameters and their optimizers."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: OptimizerOptions,
        learning_rate: Schedule,
        max_grad_norm: float | None,
    ) -> None:
        self.algorithm, self.learning_rate, self.max_grad_norm = algorithm, learning_rate, max_grad_norm
        self.parameters = algorithm.groups()
        self.optimizers = {name: make_optimizer(group, optimizer) for name, group in self.parameters.items()}
        self.clock = Clock()
        self.skipped = 0  # updates left out because a gradient was not finite
        self._bad_in_a_row = 0

    @property
    def version(self) -> int:
        return self.clock.version

    def set_progress(self, progress: float) -> None:
        """Tell the schedules how much of the run is done, 0 to 1."""
        self.clock = Clock(self.version, min(progress, 1.0))

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Batch:
        return self.algorithm.prepare(rollout)

    def gradients(self, batch: Batch) -> Gradients:
        """G: one backward pass per group, all from the same parameters."""
        losses = self.algorithm.losses(batch, self.clock)
        groups = {}
        for index, (name, loss) in enumerate(losses.groups.items()):
            last = index == len(losses.groups) - 1
            found = torch.autograd.grad(loss, self.parameters[name], retain_graph=not last, allow_unused=True)
            pairs = zip(found, self.parameters[name], strict=True)
            groups[name] = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        return Gradients(groups, self.version, losses.metrics, losses.priority, losses.stop)

    def apply(self, gradients: Gradients) -> dict[str, Tensor | float]:
        """U: clip, step, count. Gradients that are not finite change nothing."""
        norms = {name: torch.nn.utils.get_total_norm(group) for name, group in gradients.groups.items()}
        if not all(norm.isfinite() for norm in norms.values()):
            self._skip(gradients)
            return {"skipped_updates": self.skipped}
        self._bad_in_a_row = 0
        rate = self.learning_rate(self.clock.progress)
        for name, group in gradients.groups.items():
            for parameter, gradient in zip(self.parameters[name], group, strict=True):
                parameter.grad = gradient
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters[name], self.max_grad_norm, norms[name])
            for settings in self.optimizers[name].param_groups:
                settings["lr"] = rate
            self.optimizers[name].step()
            self.optimizers[name].zero_grad(set_to_none=True)
        self.clock = Clock(self.version + 1, self.clock.progress)
        self.algorithm.after_update(self.clock)
        return {"grad_norm": max(norms.values()), "learning_rate": rate}

    def step(self, batch: Batch) -> Gradients:
        """G, then U unless the algorithm asked to stop; the metrics of both are in what is returned."""
        gradients = self.gradients(batch)
        if not gradients.stop:
            gradients.metrics.update(self.apply(gradients))
        return gradients

    def finish(self, rollout: Rollout) -> None:
        """After the last gradient of a rollout: running statistics of observations."""
        self.algorithm.after_rollout(rollout)

    def state_dict(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "version": self.version,
            "progress": self.clock.progress,
            "skipped": self.skipped,
            "bad_in_a_row": self._bad_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.clock = Clock(state["version"], state["progress"])
        self.skipped, self._bad_in_a_row = state["skipped"], state.get("bad_in_a_row", 0)

    def _skip(self, gradients: Gradients) -> None:
        self.skipped += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= MAX_BAD_UPDATES:
            losses = {name: float(value) for name, value in gradients.metrics.items() if "loss" in name}
            raise TrainingError(
                f"gradients were not finite in {MAX_BAD_UPDATES} updates in a row after update {self.version} "
                f"(last losses {losses}): lower the learning rate or max_grad_norm, or look for extreme rewards."
            )
