"""The actor-critic agent: a policy and a value of every observation.

    action, said, state = agent.act(obs, state, explore, noise)      # sampling: said.log_prob, said.value
    outputs, state = agent.unroll(obs, state, reset)                 # learning: outputs.distribution, outputs.value

A user's own network is a module whose constructor takes the observation's shape and whose forward maps float
observations [N, *shape] to features [N, F]; the agent finds F by trying, and puts the heads on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.core import Space
from remuda.data import ArrayTuple
from remuda.maths import Categorical, Distribution, Gaussian
from remuda.nets import Standardise, orthogonal

NetFactory = Callable[[tuple[int, ...]], nn.Module]


class Said(ArrayTuple):
    """What the policy said while acting; stored with every row."""

    log_prob: Any
    value: Any


class Outputs(NamedTuple):
    """What the agent says of rows when learning."""

    distribution: Distribution
    value: Tensor


class PolicyAgent(nn.Module):
    """Policy and value nets (one shared net if `shared`), with linear heads."""

    def __init__(
        self,
        observation: Space,
        action: Space,
        make_net: NetFactory,
        *,
        shared: bool = False,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__()
        self.observation, self.action = observation, action
        shape = (observation.n,) if observation.kind == "discrete" else observation.shape
        self.is_image = observation.dtype == "uint8" and len(shape) == 3
        wants_statistics = normalize_obs and observation.kind == "box" and not self.is_image
        self.standardise = Standardise(shape) if wants_statistics else None
        self.policy_net = make_net(shape)
        self.value_net = self.policy_net if shared else make_net(shape)
        width = self.policy_net(torch.zeros(2, *shape)).shape[-1]
        self.is_discrete = action.kind == "discrete"
        outputs = action.n if self.is_discrete else math.prod(action.shape)  # Box actions are flat here
        self.policy_head = nn.Linear(width, outputs)
        self.value_head = nn.Linear(width, 1)
        if orthogonal_init:  # a small policy head starts near uniform or zero actions
            orthogonal(self.policy_head, 0.01)
            orthogonal(self.value_head, 1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.full((outputs,), log_std_init))
        self.noise: tuple[tuple[Literal["uniform", "normal"], int], ...] = (
            (("uniform", 1),) if self.is_discrete else (("normal", outputs),)
        )

    def initial_state(self, batch: int) -> None:
        return None

    def inputs(self, obs: Tensor) -> Tensor:
        """Stored observations [N, ...] as the float32 that nets take."""
        if self.observation.kind == "discrete":
            return F.one_hot(obs, self.observation.n).float()
        if self.is_image:  # scaled by what a pixel can be, not by what was seen
            return obs.float() / 255
        obs = obs.float()
        return obs if self.standardise is None else self.standardise(obs)

    def evaluate(self, obs: Tensor) -> Outputs:
        """Distribution and value of rows [N, ...] or sequences [T, B, ...]."""
        leading = obs.shape[: obs.dim() - len(self.observation.shape)]
        inputs = self.inputs(obs if len(leading) == 1 else obs.flatten(0, len(leading) - 1))
        features = self.policy_net(inputs)
        values = features if self.value_net is self.policy_net else self.value_net(inputs)
        head, value = self.policy_head(features), self.value_head(values).squeeze(-1)
        if len(leading) > 1:
            head, value = head.reshape(*leading, -1), value.reshape(leading)
        distribution = Categorical(head) if self.is_discrete else Gaussian(head, self.log_std)
        return Outputs(distribution, value)

    def act(self, obs: Tensor, state: Any, explore: Tensor | None, noise: Tensor) -> tuple[Tensor, Said, Any]:
        """Actions for [B] observations; explore [B] says which envs explore (0: greedy), None that all do."""
        distribution, value = self.evaluate(obs)
        action = distribution.sample(noise)
        if explore is not None:
            exploring = explore.bool() if self.is_discrete else explore.bool().unsqueeze(-1)
            action = torch.where(exploring, action, distribution.mode())
        return action, Said(distribution.log_prob(action), value), state

    def value(self, obs: Tensor, state: Any) -> Tensor:
        """Values [B] alone; no state is advanced."""
        inputs = self.inputs(obs)
        values: Tensor = self.value_head(self.value_net(inputs)).squeeze(-1)
        return values

    def unroll(self, obs: Tensor, state: Any, reset: Tensor | None) -> tuple[Outputs, Any]:
        """Outputs for rows [N, ...] or sequences [T, B, ...]; a feed-forward agent has no state to carry."""
        return self.evaluate(obs), state
