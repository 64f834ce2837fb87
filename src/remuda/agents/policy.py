"""The actor-critic agent: a policy and a value of every observation, with or without memory.

    action, said, state = agent.act(obs, state, explore, noise)      # sampling: said.log_prob, said.value
    outputs, state = agent.unroll(obs, state, reset)                 # learning: outputs.distribution, outputs.value

A user's own network is a module whose constructor takes the observation's shape (of Dict and Tuple observations a
dict {path: shape}) and whose forward maps float observations [N, *shape] (a named array tuple of them) to features
[N, F]; the agent finds F by trying, and puts a recurrent core, if one is asked for, and the heads on top.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from remuda.agents.heads import PolicyHead, PolicyOutput
from remuda.agents.trunk import NetFactory, Trunk, leading_axes, net_width
from remuda.core import FastPolicy, Space
from remuda.data import ArrayTuple, map_tree
from remuda.maths import Distribution
from remuda.nets import Inputs, orthogonal


class Outputs(NamedTuple):
    """What the agent says of rows when learning."""

    distribution: Distribution
    value: Tensor


class Memory(ArrayTuple):
    """Recurrent state of policy and value, where each has a core of its own."""

    policy: Any
    value: Any


class PolicyAgent(nn.Module):
    """Policy and value trunks (one for both if `shared`), with linear heads."""

    exploration = 1.0  # actions are sampled; any amount above 0 means the same
    fast_policy: FastPolicy | None = None

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
        center_images: bool = False,
        core: Literal["lstm", "gru"] | None = None,
        core_size: int = 128,
    ) -> None:
        super().__init__()
        self.observation, self.action, self.is_recurrent = observation, action, core is not None
        self.inputs = Inputs(observation, normalize_obs, center_images)
        policy_net = make_net(self.inputs.shapes)
        value_net = policy_net if shared else make_net(self.inputs.shapes)
        width = net_width(policy_net, self.inputs, observation)
        self.policy_trunk = Trunk(policy_net, width, core, core_size)
        self.value_trunk = self.policy_trunk if shared else Trunk(value_net, width, core, core_size)
        self.policy_head = PolicyHead(action, self.policy_trunk.width, log_std_init)
        self.value_head = nn.Linear(self.value_trunk.width, 1)
        if orthogonal_init:  # a small policy head starts near uniform or zero actions
            orthogonal(self.policy_head.linear, 0.01)
            orthogonal(self.value_head, 1.0)
        self.noise = self.policy_head.noise

    def compile_nets(self) -> None:
        """By torch.compile from their next call on; parameters and their names stay what they are."""
        self.fast_policy = None  # it would not use the compiled networks
        for net in {id(trunk.net): trunk.net for trunk in (self.policy_trunk, self.value_trunk)}.values():
            net.compile(dynamic=True)  # minibatches differ by a few rows

    def initial_state(self, batch: int) -> Any:
        """Of so many envs at the start of their episodes; None without a core."""
        if self.policy_trunk.core is None:
            return None
        policy = self.policy_trunk.core.initial_state(batch)
        if self.value_trunk.core is self.policy_trunk.core:
            return Memory(policy, None)
        assert self.value_trunk.core is not None
        return Memory(policy, self.value_trunk.core.initial_state(batch))

    def act(self, obs: Any, state: Any, explore: Tensor | None, noise: Tensor) -> tuple[Any, PolicyOutput, Any]:
        """Actions for [B] observations; explore [B] says which envs explore (0: greedy), None that all do."""
        inputs = self.inputs(obs)
        memory = state if state is not None else Memory(None, None)
        features, policy_state = self.policy_trunk.step(inputs, memory.policy)
        if self.value_trunk is self.policy_trunk:
            values, value_state = features, None
        else:
            values, value_state = self.value_trunk.step(inputs, memory.value)
        distribution = self.policy_head(features)
        action = distribution.choose(noise, explore)
        said = PolicyOutput(distribution.log_prob(action), self.value_head(values).squeeze(-1))
        return action, said, Memory(policy_state, value_state) if self.is_recurrent else None

    def value(self, obs: Any, state: Any) -> Tensor:
        """Values [B] alone; no state is advanced."""
        memory = state if state is not None else Memory(None, None)
        is_shared = self.value_trunk is self.policy_trunk
        features, _ = self.value_trunk.step(self.inputs(obs), memory.policy if is_shared else memory.value)
        values: Tensor = self.value_head(features).squeeze(-1)
        return values

    def unroll(self, obs: Any, state: Any, reset: Tensor | None) -> tuple[Outputs, Any]:
        """Outputs for rows [N, ...], or for sequences [T, B, ...] that start from `state` [B].

        Before row t the state of env b is put back where reset[t, b]. An agent without a core has no state to carry.
        """
        leading = leading_axes(self.observation, obs)
        inputs = self.inputs(obs if len(leading) == 1 else map_tree(lambda x: x.flatten(0, 1), obs))
        memory = state if state is not None else Memory(None, None)
        features, policy_state = self.policy_trunk.unroll(inputs, leading, memory.policy, reset)
        if self.value_trunk is self.policy_trunk:
            values, value_state = features, None
        else:
            values, value_state = self.value_trunk.unroll(inputs, leading, memory.value, reset)
        value = self.value_head(values).squeeze(-1)
        if len(leading) > 1:
            features, value = features.reshape(*leading, -1), value.reshape(leading)
        outputs = Outputs(self.policy_head(features), value)
        return outputs, Memory(policy_state, value_state) if self.is_recurrent else None
