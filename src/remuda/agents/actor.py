"""The actor of DDPG, TD3 and SAC, deterministic or stochastic, and its critics.

action, _, state = agent.act(obs, state, explore, noise)         # actions within the env's bounds
features, _ = agent.features(obs, state, reset)                  # for learning: single rows [N], or sequences [T, B]
action, log_prob = agent.choose(features, noise)                 # actions between -1 and 1, as critics expect
q = critic(critic.features(obs)[0], action)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from remuda.agents.heads import NoiseParts
from remuda.agents.trunk import NetFactory, Trunk, make_trunk, unroll_trunk
from remuda.core import FastPolicy, Space, TensorTree
from remuda.data import ArrayTuple
from remuda.maths import SquashedGaussian
from remuda.nets import MLP, Inputs
from remuda.nets.recurrent import State

LOG_STD = (-20.0, 2.0)  # bounds of a stochastic actor's log_std, as in the code of arXiv 1812.05905
DRIFT = 0.15  # fraction by which Ornstein-Uhlenbeck noise decays in each step (arXiv 1509.02971)
DRIFT_SCALE = math.sqrt(1 - (1 - DRIFT) ** 2)  # factor that gives the noise a stationary standard deviation of 1


class ActorState(ArrayTuple):
    """The agent's state in each of B envs, which is carried from row to row.

    `memory` is the recurrent state, and `drift` is the Ornstein-Uhlenbeck noise. A field that the agent does not need
    is None.
    """

    memory: State | None
    drift: Tensor | None


class ActorAgent(nn.Module):
    """An agent for Box actions, either deterministic (tanh, with added noise) or stochastic (squashed Gaussian)."""

    exploration = 1.0  # default of `explore`, a factor on the noise
    fast_policy: FastPolicy | None = None
    middle: Tensor
    reach: Tensor

    def __init__(
        self,
        observation: Space,
        action: Space,
        make_net: NetFactory,
        *,
        stochastic: bool,
        noise: Literal["gaussian", "ou"] = "gaussian",
        noise_std: float = 0.1,
        normalize_obs: bool = False,
        center_images: bool = False,
        core: Literal["lstm", "gru"] | None = None,
        core_size: int = 128,
    ) -> None:
        super().__init__()
        self.observation, self.action, self.stochastic = observation, action, stochastic
        self.is_recurrent = core is not None
        self.drifts, self.noise_std = noise == "ou" and not stochastic, noise_std
        self.width = math.prod(action.shape)
        self.noise: NoiseParts = (("normal", self.width),)
        self.inputs = Inputs(observation, normalize_obs, center_images)
        self.trunk = make_trunk(self.inputs, observation, make_net, core, core_size)
        self.head = nn.Linear(self.trunk.width, (2 if stochastic else 1) * self.width)
        low, high = (torch.as_tensor(bound).float().reshape(-1) for bound in (action.low, action.high))
        self.register_buffer("middle", (high + low) / 2, persistent=False)
        self.register_buffer("reach", (high - low) / 2, persistent=False)

    def compile_nets(self) -> None:
        """Let torch compile the network when it is called next. The names of its parameters do not change."""
        self.trunk.net.compile(dynamic=True)

    def initial_state(self, batch: int) -> ActorState | None:
        memory = None if self.trunk.core is None else self.trunk.core.initial_state(batch)
        drift = torch.zeros(batch, self.width, device=self.middle.device) if self.drifts else None
        return None if memory is None and drift is None else ActorState(memory, drift)

    def act(
        self, obs: TensorTree, state: ActorState | None, explore: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, None, ActorState | None]:
        """Return actions for observations [B], None (there is no policy output), and the next state.

        `explore` [B] is a factor on the noise of each env; if `explore` is None, the factor is 1.
        """
        memory, drift = (None, None) if state is None else state
        features, memory = self.trunk.step(self.inputs(obs), memory)
        if drift is not None:
            drift = (1 - DRIFT) * drift + noise
            noise = DRIFT_SCALE * drift
        if explore is not None:
            noise = noise * explore.unsqueeze(-1)
        if self.stochastic:
            action = self.distribution(features).sample(noise)
        else:
            action = (self.head(features).tanh() + self.noise_std * noise).clamp(-1, 1)
        following = None if state is None else ActorState(memory, drift)
        return self.middle + self.reach * action, None, following

    def features(
        self, obs: TensorTree, state: ActorState | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, ActorState | None]:
        """Return features, and the recurrent state after the last row (None if the agent has no recurrent core).

        `obs` holds N single rows [N, ...], or B sequences of T rows [T, B, ...] that start from `state` [B]. Where
        reset[t, b] is True, the state of sequence b is reset before row t.
        """
        memory = None if state is None else state.memory
        features, memory = unroll_trunk(self.trunk, self.inputs, self.observation, obs, memory, reset)
        return features, None if memory is None else ActorState(memory, None)

    def distribution(self, features: Tensor) -> SquashedGaussian:
        mean, log_std = self.head(features).chunk(2, -1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD))

    def choose(self, features: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return differentiable actions between -1 and 1, and their log-densities.

        A deterministic actor uses no `noise`, and returns None in place of the log-densities.
        """
        if not self.stochastic:
            return self.head(features).tanh(), None
        assert noise is not None
        return self.distribution(features).sample_with_log_prob(noise)

    def normalized(self, action: Tensor) -> Tensor:
        """Scale the env's actions to the range from -1 to 1, which critics expect."""
        return (action - self.middle) / self.reach.clamp(min=1e-30)  # clamp avoids 0 / 0 where both bounds are equal


class Critic(nn.Module):
    """The value of an action, computed by an MLP from the observation's features concatenated with the action."""

    def __init__(
        self,
        inputs: Inputs,
        observation: Space,
        action: Space,
        make_net: NetFactory | None,
        hidden: Sequence[int],
        activation: str,
        core: Literal["lstm", "gru"] | None = None,
        core_size: int = 128,
    ) -> None:
        """Build the networks.

        The critic shares the agent's `inputs`. If `make_net` is None, observations must be vectors. They are passed
        to the recurrent core or, without a core, directly to the MLP.
        """
        super().__init__()
        self.observation, self._inputs = observation, (inputs,)  # the tuple hides the agent's `inputs` from torch
        if make_net is None and core is None:
            self.trunk = Trunk(nn.Flatten(), math.prod(observation.shape), None, 0)
        else:
            self.trunk = make_trunk(inputs, observation, make_net or (lambda _: nn.Flatten()), core, core_size)
        self.body: nn.Module = MLP(
            (self.trunk.width + math.prod(action.shape),), hidden, activation, orthogonal_init=False
        )
        self.head = nn.Linear(hidden[-1], 1)

    def features(
        self, obs: TensorTree, state: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """Return features, and the state after the last row.

        `obs` holds N single rows [N, ...], or B sequences of T rows [T, B, ...] that start from `state` [B]. Where
        reset[t, b] is True, the state of sequence b is reset before row t. If `state` is None, a recurrent core
        starts from zeros.
        """
        if self.trunk.core is not None and state is None:
            assert reset is not None
            state = self.trunk.core.initial_state(reset.shape[1])
        return unroll_trunk(self.trunk, self._inputs[0], self.observation, obs, state, reset)

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        values: Tensor = self.head(self.body(torch.cat([features, action], -1))).squeeze(-1)
        return values
