"""The actor-critic agent: a policy and a value for every observation, with or without memory.

    action, output, state = agent.act(obs, state, explore, noise)    # sampling: output.log_prob, output.value
    outputs, state = agent.unroll(obs, state, reset)                 # learning: outputs.distribution, outputs.value

A network of your own is a torch module. Its constructor takes the observation's shape, or a dict {path: shape} for
Dict and Tuple observations. Its `forward` maps float observations [N, *shape], or a named array tuple of them, to
features [N, F]. The agent finds F by calling the network, and adds the heads and, if configured, a recurrent core.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from remuda.agents.heads import PolicyHead, PolicyOutput
from remuda.agents.trunk import NetFactory, Trunk, leading_axes, net_width
from remuda.core import FastPolicy, Space, TensorTree
from remuda.data import ArrayTuple, map_tree
from remuda.maths import Distribution
from remuda.nets import Inputs, orthogonal
from remuda.nets.recurrent import State


class Outputs(NamedTuple):
    """Outputs of `PolicyAgent.unroll` for each row: the action distribution, and the estimated value."""

    distribution: Distribution
    value: Tensor


class Memory(ArrayTuple):
    """Recurrent states of policy and value; `value` is None if policy and value share a core."""

    policy: State
    value: State | None


class PolicyAgent(nn.Module):
    """An actor-critic agent with linear heads on two trunks, for policy and value, or on one trunk if `shared`."""

    exploration = 1.0  # default of `explore`: 0 selects the most likely action, other numbers a random one
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
        if orthogonal_init:
            # With gain 0.01, discrete actions are nearly uniform at first, and the means of Box actions nearly 0.
            orthogonal(self.policy_head.linear, 0.01)
            orthogonal(self.value_head, 1.0)
        self.noise = self.policy_head.noise

    def compile_nets(self) -> None:
        """Let torch compile the networks when they are called next. The names of their parameters do not change."""
        self.fast_policy = None  # the fast policy would not use the compiled networks
        for net in {id(trunk.net): trunk.net for trunk in (self.policy_trunk, self.value_trunk)}.values():
            net.compile(dynamic=True)  # dynamic, because the sizes of minibatches differ by a few rows

    def initial_state(self, batch: int) -> Memory | None:
        """Return the state of `batch` envs at the start of their episodes, or None if the agent has no core."""
        if self.policy_trunk.core is None:
            return None
        policy = self.policy_trunk.core.initial_state(batch)
        if self.value_trunk.core is self.policy_trunk.core:
            return Memory(policy, None)
        assert self.value_trunk.core is not None
        return Memory(policy, self.value_trunk.core.initial_state(batch))

    def act(
        self, obs: TensorTree, state: Memory | None, explore: Tensor | None, noise: Tensor
    ) -> tuple[TensorTree, PolicyOutput, Memory | None]:
        """Return actions for observations [B], the policy's outputs for these actions, and the next state.

        Where `explore` [B] is 0, the action is the mode of the distribution. Elsewhere, the action is sampled. If
        `explore` is None, all actions are sampled.
        """
        inputs = self.inputs(obs)
        memory = state if state is not None else Memory(None, None)
        features, policy_state = self.policy_trunk.step(inputs, memory.policy)
        if self.value_trunk is self.policy_trunk:
            values, value_state = features, None
        else:
            values, value_state = self.value_trunk.step(inputs, memory.value)
        distribution = self.policy_head(features)
        action = distribution.choose(noise, explore)
        output = PolicyOutput(distribution.log_prob(action), self.value_head(values).squeeze(-1))
        return action, output, Memory(policy_state, value_state) if self.is_recurrent else None

    def value(self, obs: TensorTree, state: Memory | None) -> Tensor:
        """Return the values [B] of observations [B], given the recurrent `state`, which is not advanced."""
        memory = state if state is not None else Memory(None, None)
        is_shared = self.value_trunk is self.policy_trunk
        features, _ = self.value_trunk.step(self.inputs(obs), memory.policy if is_shared else memory.value)
        values: Tensor = self.value_head(features).squeeze(-1)
        return values

    def unroll(self, obs: TensorTree, state: Memory | None, reset: Tensor | None) -> tuple[Outputs, Memory | None]:
        """Return outputs, and the state after the last row.

        `obs` holds N single rows [N, ...], or B sequences of T rows [T, B, ...] that start from `state` [B]. Where
        reset[t, b] is True, the state of sequence b is reset before row t. Without a core, there is no state.
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
