"""Compute the gradients of an actor and of its critics at the same time, on two devices or in two threads of a CPU.

The Spreeze framework also updates actor and critics on two GPUs. In this module, the learner owns all parameters, on
one device. If the actor's gradients are computed on another device, that device holds a copy of the algorithm. The
learner's parameters are copied to it before each gradient, and the actor's gradients and metrics are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from remuda.core import ActorCriticAlgorithm, Clock
from remuda.data import Batch
from remuda.devices import CPU, send, to_cpu, to_device
from remuda.learning.gradients import Gradients, as_one_vector, differentiate

Parameters = Mapping[str, list[nn.Parameter]]


class SideBySide:
    """Computes the gradients of the actor in a thread of its own; call `close` at the end."""

    def __init__(
        self,
        algorithm: ActorCriticAlgorithm,
        parameters: Parameters,
        device: torch.device,
        actor_device: torch.device,
    ) -> None:
        """`parameters` are the learner's parameters by group, on `device`.

        Gradients of the critics are computed on `device`, and those of the actor on `actor_device`.
        """
        self.algorithm, self.parameters = algorithm, parameters
        self.device, self.actor_device = device, actor_device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="remuda-actor")
        self._theirs, self._their_parameters = algorithm, parameters
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])  # the learner's tensors, and the actor's copies
        if actor_device != device:
            self._theirs = deepcopy(algorithm)
            self._theirs.to(actor_device)
            self._their_parameters = self._theirs.groups()
            for group in self._their_parameters.values():
                as_one_vector(group)
            self._pairs = (tensors_of(algorithm), tensors_of(self._theirs))

    def gradients(self, batch: Batch, clock: Clock) -> Gradients:
        """Return the gradients of all groups, on the learner's device."""
        self._copy_parameters()
        actor = self._pool.submit(self._actor_gradients, batch, clock)
        try:
            losses = self.algorithm.critic_losses(batch_on(batch, self.device), clock)
            found = differentiate(losses, self.parameters, clock.version)
        finally:
            of_actor = actor.result()  # wait even after an exception, because the actor's thread reads parameters
        pieces = {name: to_device(each, self.device) for name, each in of_actor.pieces.items()}
        metrics = {
            name: send(value, self.device) if isinstance(value, Tensor) else value
            for name, value in of_actor.metrics.items()
        }
        return replace(
            found,
            pieces={**found.pieces, **pieces},
            metrics={**found.metrics, **metrics},
            priority=priority_for(batch, found.priority),
        )

    def _actor_gradients(self, batch: Batch, clock: Clock) -> Gradients:
        losses = self._theirs.actor_losses(batch_on(batch, self.actor_device), clock)
        return differentiate(losses, self._their_parameters, clock.version)

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        for ours, theirs in zip(*self._pairs, strict=True):
            theirs.copy_(ours, non_blocking=True)

    def close(self) -> None:
        self._pool.shutdown()


def tensors_of(algorithm: ActorCriticAlgorithm) -> list[Tensor]:
    """Return the tensors on which the actor's gradients may depend, which are all except those of target networks."""
    return [tensor for name, tensor in algorithm.state_dict().items() if not name.startswith("target")]


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch that losses need to `device`; return the batch with these tensors."""
    if device == CPU:
        return batch
    names = ("steps", "targets", "state", "next_obs", "weight")
    return replace(batch, **{name: to_device(getattr(batch, name), device) for name in names})


def priority_for(batch: Batch, priority: Tensor | None) -> Tensor | None:
    """Return priorities on the CPU, or None if the replay that has drawn the batch does not use priorities."""
    return None if priority is None or batch.weight is None else to_cpu(priority)
