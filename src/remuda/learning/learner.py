"""The learner: computes gradients of a batch and updates the parameters, as separate steps.

    batch = learner.prepare(rollout)
    for minibatch in ...:
        learner.step(minibatch)                     # = learner.apply(learner.gradients(minibatch))
    learner.finish(rollout)

`gradients` only reads parameters, and only `apply` changes them. A scheme can therefore compute gradients in one
process and apply them in another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remuda.core import (
    ActorCriticAlgorithm,
    Algorithm,
    Clock,
    FastPath,
    HasTargetNetworks,
    SeparableAlgorithm,
    Statistics,
)
from remuda.data import Batch, Rollout
from remuda.devices import CPU
from remuda.errors import TrainingError
from remuda.learning.changing import change_option
from remuda.learning.gradient_threads import GradientThreads
from remuda.learning.gradients import Gradients, as_one_vector, differentiate
from remuda.learning.optimizers import OptimizerOptions, make_optimizer, norms
from remuda.learning.schedules import Schedule
from remuda.learning.side_by_side import SideBySide, batch_on, priority_for

MAX_BAD_UPDATES = 10  # training fails after this many consecutive updates with gradients that are not finite


class Learner:
    """Owns an algorithm's parameters and their optimizers."""

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: OptimizerOptions,
        learning_rate: Schedule,
        max_grad_norm: float | None,
        num_threads: int = 1,  # number of threads, each of which computes the gradients of a part of the batch
        own_rates: Mapping[str, Schedule] | None = None,  # learning rates by group; other groups use `learning_rate`
        device: str = "cpu",  # device of the networks; batches are copied to it
        fast_path: FastPath | None = None,  # used only if the device is the CPU
        actor_device: str | None = None,  # if given, a thread of its own computes the actor's gradients there
    ) -> None:
        self.own_rates = own_rates or {}
        self.device = torch.device(device)
        if self.device != CPU:
            algorithm.to(self.device)
        self.algorithm, self.learning_rate, self.max_grad_norm = algorithm, learning_rate, max_grad_norm
        self._target_networks = algorithm if isinstance(algorithm, HasTargetNetworks) else None
        self.parameters = algorithm.groups()
        self.vectors = {name: as_one_vector(group) for name, group in self.parameters.items()}
        self.optimizers = {name: make_optimizer(vector, optimizer) for name, vector in self.vectors.items()}
        self.clock = Clock()
        self.skipped = 0  # number of updates skipped because a gradient was not finite
        self.statistics_version = 0  # number of times that `finish` has updated the agent's observation statistics
        self._bad_in_a_row = 0
        self._fast_path = fast_path
        reduction = algorithm.gradient_reduction if isinstance(algorithm, SeparableAlgorithm) else None
        self._threads = GradientThreads(num_threads, reduction) if num_threads > 1 and reduction else None
        self._side_by_side: SideBySide | None = None
        if actor_device is not None:
            assert isinstance(algorithm, ActorCriticAlgorithm), "only an actor and critics can be on two devices"
            self._side_by_side = SideBySide(algorithm, self.parameters, self.device, torch.device(actor_device))

    @property
    def version(self) -> int:
        return self.clock.version

    def set_progress(self, progress: float) -> None:
        """Set the fraction of the run that is done, 0 to 1, for schedules."""
        self.clock = Clock(self.version, min(progress, 1.0))

    def set_option(self, name: str, value: str | float | None) -> None:
        """Use `value` for the option `name` of the algorithm in all later updates (see `change_option`)."""
        change_option(self, name, value)

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Batch:
        """Update the reward statistics, and return the batch that the replay stores for this rollout."""
        if statistics := self.algorithm.reward_statistics(rollout):
            self.algorithm.absorb(statistics)
        return self.algorithm.prepare(rollout)

    def agent_on_cpu(self) -> Any:
        """Return the agent if it is on the CPU, otherwise a copy of it that is moved to the CPU."""
        agent = self.algorithm.agent
        return agent if self.device == CPU else deepcopy(agent).cpu()

    def gradients(self, batch: Batch) -> Gradients:
        """Compute the gradients of all parameter groups for a batch, at the current parameters."""
        if self._fast_path is not None and self.device == CPU:
            fast = self._fast_path.gradients(batch, self.clock, self._by_autograd)
            if fast is not None:
                return fast
        if self._threads is not None:
            return self._threads.gradients(self._by_autograd, batch)
        return self._by_autograd(batch)

    def _by_autograd(self, batch: Batch) -> Gradients:
        """Compute gradients by autograd, with one backward pass for each parameter group."""
        if self._side_by_side is not None:
            return self._side_by_side.gradients(batch, self.clock)
        losses = self.algorithm.losses(batch_on(batch, self.device), self.clock)
        found = differentiate(losses, self.parameters, self.version)
        return found if self.device == CPU else replace(found, priority=priority_for(batch, found.priority))

    def apply(self, gradients: Gradients) -> dict[str, Tensor | float]:
        """Clip the gradients, step the optimizers and return metrics; skip the update if a gradient is not finite."""
        sizes = norms(gradients.pieces)
        if not all(math.isfinite(size) for size in sizes.values()):
            self._skip(gradients)
            return {"skipped_updates": self.skipped}
        self._bad_in_a_row = 0
        rate = self.learning_rate(self.clock.progress)
        for name, pieces in gradients.pieces.items():
            if self.max_grad_norm is not None and sizes[name] > self.max_grad_norm:
                pieces = torch._foreach_mul(pieces, self.max_grad_norm / sizes[name])
            own_rate = self.own_rates.get(name)
            self.optimizers[name].step(pieces, rate if own_rate is None else own_rate(self.clock.progress))
        self.clock = Clock(self.version + 1, self.clock.progress)
        if self._target_networks is not None:
            self._target_networks.after_update(self.clock)
        return {"grad_norm": max(sizes.values()), "learning_rate": rate}

    def step(self, batch: Batch) -> Gradients:
        """Compute gradients, and apply them unless their `stop` is True; return the gradients with all metrics."""
        gradients = self.gradients(batch)
        if not gradients.stop:
            skipped = self.skipped
            gradients.metrics.update(self.apply(gradients))
            if self.skipped > skipped:  # the priorities of a skipped batch may not be finite either
                return replace(gradients, priority=None)
        return gradients

    def finish(self, rollout: Rollout) -> dict[str, float]:
        """Update the observation statistics after a rollout's last gradient; only a PartedLearner returns metrics."""
        if statistics := self.obs_statistics(rollout):
            self.algorithm.absorb(statistics)
            self.statistics_version += 1
        return {}

    @torch.no_grad()
    def obs_statistics(self, rollout: Rollout) -> Statistics:
        return self.algorithm.obs_statistics(rollout)

    def close(self) -> None:
        """Stop the threads; the parameters stay usable."""
        for part in (self._side_by_side, self._fast_path):
            if part is not None:
                part.close()
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def check_agreement(self) -> None:
        """Do nothing, because there is no other process whose learner could differ from this one."""

    def state_dict(self) -> dict[str, object]:
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
        self.skipped, self._bad_in_a_row = self.skipped + 1, self._bad_in_a_row + 1
        if self._bad_in_a_row >= MAX_BAD_UPDATES:
            losses = {name: float(value) for name, value in gradients.metrics.items() if "loss" in name}
            raise TrainingError(
                f"gradients were not finite in {MAX_BAD_UPDATES} updates in a row after update {self.version}"
                f"{f' (last losses {losses})' if losses else ''}: lower the learning rate or max_grad_norm, or look "
                "for extreme rewards."
            )
