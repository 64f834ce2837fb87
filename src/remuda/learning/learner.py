"""The learner: gradients of a batch (G) and updates of the parameters (U), kept apart.

    batch = learner.prepare(rollout)
    for minibatch in ...:
        learner.step(minibatch)                     # = learner.apply(learner.gradients(minibatch))
    learner.finish(rollout)

G reads parameters and writes none; U is the only place where they change. That is what lets a scheme compute
gradients in one process and apply them in another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from remuda.core import Algorithm, Clock, FastPath, SeparableAlgorithm
from remuda.data import Batch, Rollout, map_tree
from remuda.errors import ConfigError, TrainingError
from remuda.learning.gradients import Gradients, norm
from remuda.learning.optimizers import OptimizerOptions, make_optimizer
from remuda.learning.parts import Parts
from remuda.learning.schedules import Schedule

MAX_BAD_UPDATES = 10  # not finite, in a row


def as_one_vector(parameters: list[nn.Parameter]) -> Tensor:
    """All of them side by side, and from now on views of it: one call clips, steps or copies them all."""
    if len({parameter.dtype for parameter in parameters}) > 1:
        raise ConfigError("the networks mix parameters of different dtypes: make them all float32.")
    vector = torch.cat([as_it_lies(parameter.detach(), parameter) for parameter in parameters])
    places = torch.split(vector, [parameter.numel() for parameter in parameters])
    for parameter, place in zip(parameters, places, strict=True):
        if has_channels_last(parameter):
            out, channels, *sides = parameter.shape
            parameter.data = place.view(out, *sides, channels).movedim(-1, 1)
        else:
            parameter.data = place.view(parameter.shape)
    return vector


def has_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def as_it_lies(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Its numbers in a row, in the order in which those of the parameter lie in memory."""
    return (tensor.movedim(1, -1) if has_channels_last(parameter) else tensor).reshape(-1)


class Learner:
    """Owns an algorithm's parameters and their optimizers."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: OptimizerOptions,
        learning_rate: Schedule,
        max_grad_norm: float | None,
        num_parts: int = 1,  # of a batch, whose gradients are computed at the same time
        own_rates: Mapping[str, Schedule] | None = None,  # of groups that do not take the learning rate
        device: str = "cpu",  # of the nets, and of batches while they are learned from
        fast_path: FastPath | None = None,
    ) -> None:
        self.own_rates = own_rates or {}
        self._elsewhere = None if device == "cpu" else torch.device(device)
        if self._elsewhere is not None:
            algorithm.to(self._elsewhere)
        self.algorithm, self.learning_rate, self.max_grad_norm = algorithm, learning_rate, max_grad_norm
        self.parameters = algorithm.groups()
        self.vectors = {name: as_one_vector(group) for name, group in self.parameters.items()}
        self.optimizers = {name: make_optimizer(vector, optimizer) for name, vector in self.vectors.items()}
        self.clock = Clock()
        self.skipped = 0  # updates left out because a gradient was not finite
        self.statistics_version = 0  # how often `finish` has changed the agent, without an update
        self._bad_in_a_row = 0
        self._fast_path = fast_path
        reduction = algorithm.gradient_reduction if isinstance(algorithm, SeparableAlgorithm) else None
        self._parts = Parts(num_parts, reduction) if num_parts > 1 and reduction is not None else None

    @property
    def version(self) -> int:
        return self.clock.version

    def set_progress(self, progress: float) -> None:
        """Tell the schedules how much of the run is done, 0 to 1."""
        self.clock = Clock(self.version, min(progress, 1.0))

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Batch:
        return self.algorithm.prepare(rollout)

    def agent_on_cpu(self) -> Any:
        """The agent, to act with; where it is on another device, a copy of it as it is now."""
        agent = self.algorithm.agent
        return agent if self._elsewhere is None else deepcopy(agent).cpu()

    def _moved(self, tree: Any) -> Any:
        return map_tree(lambda x: x.to(self._elsewhere), tree)

    def gradients(self, batch: Batch) -> Gradients:
        """G: all from the same parameters, by hand where the algorithm can and agrees with its own `losses`."""
        if self._elsewhere is not None:
            names = ("steps", "targets", "state", "next_obs", "weight")
            moved = replace(batch, **{name: self._moved(getattr(batch, name)) for name in names})
            found = self._by_autograd(moved)
            return replace(found, priority=None if found.priority is None else found.priority.cpu())
        if self._fast_path is not None:
            fast = self._fast_path.gradients(batch, self.clock, self._by_autograd)
            if fast is not None:
                return fast
        if self._parts is not None:
            return self._parts.gradients(self._by_autograd, batch)
        return self._by_autograd(batch)

    def _by_autograd(self, batch: Batch) -> Gradients:
        """One backward pass per group."""
        losses = self.algorithm.losses(batch, self.clock)
        pieces = {}
        for index, (name, loss) in enumerate(losses.groups.items()):
            last = index == len(losses.groups) - 1
            found = torch.autograd.grad(loss, self.parameters[name], retain_graph=not last, allow_unused=True)
            pairs = zip(found, self.parameters[name], strict=True)
            pieces[name] = tuple(as_it_lies(torch.zeros_like(p) if g is None else g, p) for g, p in pairs)
        return Gradients(pieces, self.version, losses.metrics, losses.priority, losses.stop)

    def apply(self, gradients: Gradients) -> dict[str, Tensor | float]:
        """U: clip, step, count. Gradients that are not finite change nothing."""
        norms = {name: norm(pieces) for name, pieces in gradients.pieces.items()}
        if not all(math.isfinite(size) for size in norms.values()):
            self._skip(gradients)
            return {"skipped_updates": self.skipped}
        self._bad_in_a_row = 0
        rate = self.learning_rate(self.clock.progress)
        for name, pieces in gradients.pieces.items():
            if self.max_grad_norm is not None and norms[name] > self.max_grad_norm:
                pieces = torch._foreach_mul(pieces, self.max_grad_norm / norms[name])
            own_rate = self.own_rates.get(name)
            self.optimizers[name].step(pieces, rate if own_rate is None else own_rate(self.clock.progress))
        self.clock = Clock(self.version + 1, self.clock.progress)
        self.algorithm.after_update(self.clock)
        return {"grad_norm": max(norms.values()), "learning_rate": rate}

    def step(self, batch: Batch) -> Gradients:
        """G, then U unless the algorithm asked to stop; the metrics of both are in what is returned."""
        gradients = self.gradients(batch)
        if not gradients.stop:
            skipped = self.skipped
            gradients.metrics.update(self.apply(gradients))
            if self.skipped > skipped:  # errors that are not finite say nothing of how to draw
                return replace(gradients, priority=None)
        return gradients

    def finish(self, rollout: Rollout) -> None:
        """Update running statistics of observations, after the last gradient of a rollout."""
        if self._elsewhere is not None:
            rollout = replace(rollout, steps=rollout.steps.replace(obs=self._moved(rollout.steps.obs)))
        # Algorithms that do not say whether the agent changed are taken to have changed it.
        self.statistics_version += self.algorithm.after_rollout(rollout) is not False

    def close(self) -> None:
        """End its threads; what was learned stays."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None

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
        self.skipped, self._bad_in_a_row = state["skipped"], state["bad_in_a_row"]

    def _skip(self, gradients: Gradients) -> None:
        self.skipped += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= MAX_BAD_UPDATES:
            losses = {name: float(value) for name, value in gradients.metrics.items() if "loss" in name}
            raise TrainingError(
                f"gradients were not finite in {MAX_BAD_UPDATES} updates in a row after update {self.version} "
                f"(last losses {losses}): lower the learning rate or max_grad_norm, or look for extreme rewards."
            )
