"""The agent of deep Q-learning: a value for every action, or a distribution over returns, with or without memory.

action, _, state = agent.act(obs, state, explore, noise)         # explore [B]: the probability of a random action
outputs, state = agent.unroll(obs, state, reset)                 # values [..., A], or logits [..., A, atoms]
q = agent.expected(outputs)                                      # values [..., A]
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from remuda.agents.heads import NoiseParts
from remuda.agents.support import DEFAULT_SUPPORT
from remuda.agents.trunk import NetFactory, make_trunk, unroll_trunk
from remuda.core import FastPolicy, Space, TensorTree
from remuda.nets import Inputs, NoisyLinear
from remuda.nets.recurrent import State


class Stream(nn.Module):
    """A linear layer from features to outputs, with a hidden layer before it if `hidden` is not 0."""

    def __init__(self, width: int, hidden: int, outputs: int, noisy: bool) -> None:
        super().__init__()
        widths = [width, *([hidden] if hidden else []), outputs]
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(NoisyLinear(a, b) if noisy else nn.Linear(a, b) for a, b in pairs)
        self.noise_widths = [a + b for a, b in pairs] if noisy else []

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        parts = [None] * len(self.layers) if noise is None else torch.split(noise, self.noise_widths, -1)
        for index, (layer, part) in enumerate(zip(self.layers, parts, strict=True)):
            x = layer(x.relu() if index else x, part) if self.noise_widths else layer(x.relu() if index else x)
        return x


class QHead(nn.Module):
    """A head that outputs values [..., A] or logits [..., A, atoms] of A actions.

    If `dueling`, the head computes advantages and a state value in two streams (arXiv 1511.06581).
    """

    def __init__(self, width: int, actions: int, atoms: int, hidden: int, dueling: bool, noisy: bool) -> None:
        super().__init__()
        self.shape = (actions, atoms)
        self.advantage = Stream(width, hidden, actions * atoms, noisy)
        self.state = Stream(width, hidden, atoms, noisy) if dueling else None
        streams = [self.advantage] if self.state is None else [self.advantage, self.state]
        self.noise_widths: list[int] = [sum(stream.noise_widths) for stream in streams]

    def forward(self, features: Tensor, noise: Tensor | None) -> Tensor:
        parts = [None, None] if noise is None else [*torch.split(noise, self.noise_widths, -1), None]
        outputs: Tensor = self.advantage(features, parts[0]).unflatten(-1, self.shape)
        if self.state is not None:
            outputs = outputs - outputs.mean(-2, keepdim=True) + self.state(features, parts[1]).unsqueeze(-2)
        return outputs.squeeze(-1) if self.shape[1] == 1 else outputs


class QAgent(nn.Module):
    """An epsilon-greedy agent. If `noisy`, it also explores by noise on the weights of its head (NoisyNet)."""

    fast_policy: FastPolicy | None = None
    support: Tensor
    has_support: Tensor  # whether `set_support` has been called

    def __init__(
        self,
        observation: Space,
        action: Space,
        make_net: NetFactory,
        *,
        dueling: bool = False,
        noisy: bool = False,
        atoms: int = 1,
        v_min: float | Literal["auto"] = DEFAULT_SUPPORT[0],
        v_max: float | Literal["auto"] = DEFAULT_SUPPORT[1],
        head_hidden: int | None = None,
        normalize_obs: bool = False,
        center_images: bool = False,
        core: Literal["lstm", "gru"] | None = None,
        core_size: int = 128,
        exploration: float = 0.05,
    ) -> None:
        """Build the networks; `head_hidden` is the width of a hidden layer in the head, and 0 means none.

        `head_hidden` defaults to the number of features for dueling and noisy heads, and to 0 for other heads. The
        two streams of a dueling head would be equivalent to one linear layer if they had no hidden layer. If `v_min`
        or `v_max` is "auto", this bound is taken from DEFAULT_SUPPORT until `set_support` is called, and the support
        is saved and published with the weights.
        """
        super().__init__()
        self.observation, self.action, self.is_recurrent = observation, action, core is not None
        self.exploration = exploration
        self.inputs = Inputs(observation, normalize_obs, center_images)
        self.trunk = make_trunk(self.inputs, observation, make_net, core, core_size)
        if head_hidden is None:
            head_hidden = self.trunk.width if dueling or noisy else 0
        self.head = QHead(self.trunk.width, action.n, atoms, head_hidden, dueling, noisy)
        self.bounds = (v_min, v_max)
        self.is_auto = atoms > 1 and "auto" in self.bounds
        low, high = self._bounded(*DEFAULT_SUPPORT)
        self.register_buffer("support", torch.linspace(low, high, atoms), persistent=self.is_auto)
        if self.is_auto:
            self.register_buffer("has_support", torch.zeros((), dtype=torch.bool))
        self.noise_width = sum(self.head.noise_widths)
        # The first uniform number decides whether to act at random; the second selects the random action.
        parts: NoiseParts = (("uniform", 2),)
        self.noise: NoiseParts = (*parts, ("normal", self.noise_width)) if noisy else parts

    def set_support(self, low: float, high: float) -> None:
        """Set v_min to `low` if it is "auto", and v_max to `high` if it is "auto".

        A bound given as a number does not change. If v_min would then not be below v_max, the "auto" bound is moved
        so that the support has the width `high` - `low`.
        """
        low, high = self._bounded(low, high)
        self.support.copy_(torch.linspace(low, high, len(self.support)))
        self.has_support.fill_(True)

    def _bounded(self, low: float, high: float) -> tuple[float, float]:
        v_min, v_max = self.bounds
        width = high - low
        low, high = (low if v_min == "auto" else v_min), (high if v_max == "auto" else v_max)
        if low >= high and "auto" in self.bounds:  # the number given for one bound contradicts the other bound
            low, high = (high - width, high) if v_min == "auto" else (low, low + width)
        return low, high

    def compile_nets(self) -> None:
        """Let torch compile the network when it is called next. The names of its parameters do not change."""
        self.trunk.net.compile(dynamic=True)

    def initial_state(self, batch: int) -> State | None:
        return None if self.trunk.core is None else self.trunk.core.initial_state(batch)

    def act(
        self, obs: TensorTree, state: State | None, explore: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, None, State | None]:
        """Return epsilon-greedy actions for observations [B], None (there is no policy output), and the next state.

        `explore` [B] holds the epsilons; None means `self.exploration` for every env. Where epsilon is 0, nothing is
        random, and noisy layers use their mean weights.
        """
        features, state = self.trunk.step(self.inputs(obs), state)
        chance = torch.full((len(noise),), self.exploration, device=noise.device) if explore is None else explore
        on_weights = None
        if self.noise_width:
            on_weights = noise[:, 2:] * (chance > 0).unsqueeze(-1)
        best = self.expected(self.head(features, on_weights)).argmax(-1)
        random = (noise[:, 1] * self.action.n).long()
        return torch.where(noise[:, 0] < chance, random, best), None, state

    def unroll(
        self, obs: TensorTree, state: State | None, reset: Tensor | None, noise: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """Return outputs, and the state after the last row.

        `obs` holds N single rows [N, ...], or B sequences of T rows [T, B, ...] that start from `state` [B]. Where
        reset[t, b] is True, the state of sequence b is reset before row t. All rows have the same weight noise,
        `noise` [noise_width]; if it is None, noisy layers use their mean weights.
        """
        features, state = unroll_trunk(self.trunk, self.inputs, self.observation, obs, state, reset)
        return self.head(features, noise), state

    def expected(self, outputs: Tensor) -> Tensor:
        """Return values [..., A]: `outputs` itself or, if `outputs` are logits, the means of the distributions."""
        return outputs if len(self.support) == 1 else outputs.softmax(-1) @ self.support
