"""Wrappers that let samplers pass CPU tensors to an agent on another device, and get CPU tensors back.

    agent = as_on_cpu(agent)                # an agent whose networks are on the CPU is returned unchanged
    action, output, state = agent.act(obs, state, explore, noise)

Every call copies its inputs to the device without waiting, and waits once for all its outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remuda.core import TensorTree, ValueAgent
from remuda.data import ArrayTuple, Tree
from remuda.devices import CPU, to_cpu, to_device


class DeviceAgent:
    """Wraps an agent whose networks are on `device`. All inputs and outputs of its methods are on the CPU."""

    def __init__(self, agent: Any, device: torch.device) -> None:
        self._agent, self._device = agent, device
        self.observation, self.noise, self.exploration = agent.observation, agent.noise, agent.exploration

    def initial_state(self, batch: int) -> Tree:
        return to_cpu(self._agent.initial_state(batch))

    def act(
        self, obs: TensorTree, state: Tree, explore: Tensor | None, noise: Tensor
    ) -> tuple[TensorTree, ArrayTuple | None, Tree]:
        found = self._agent.act(*to_device((obs, state, explore, noise), self._device))
        outputs: tuple[TensorTree, ArrayTuple | None, Tree] = to_cpu(found)
        return outputs


class DeviceValueAgent(DeviceAgent):
    """A `DeviceAgent` for an agent with a `value` method."""

    def value(self, obs: TensorTree, state: Tree) -> Tensor:
        value: Tensor = to_cpu(self._agent.value(*to_device((obs, state), self._device)))
        return value


def as_on_cpu(agent: Any) -> Any:
    """Return `agent` (an nn.Module) if it is on the CPU, otherwise a wrapper with inputs and outputs on the CPU."""
    device = next((parameter.device for parameter in agent.parameters()), CPU)
    if device == CPU:
        return agent
    kind = DeviceValueAgent if isinstance(agent, ValueAgent) else DeviceAgent
    return kind(agent, device)
