"""Small fully connected agents without modules and autograd: the same numbers from a third of the calls.

    quick = quick_agent(agent)                       # None if the agent is of another kind
    action = quick.choose(obs, noise)                # while acting: as PolicyAgent.act, to rounding
    said = quick.say(obs, action)                    # and, of all rows at once, when the rollout is done
    rows = quick.forward(obs, action)                # log_prob, entropy and value of many rows at once
    vector = quick.gradient(rows, row_gradients)     # of all parameters, side by side

A small net takes far less time for arithmetic than for calls, so it is done by hand: products and activations in
torch, on the agent's own parameters, and what is about single rows in numpy. Whoever changes the agent or a loss need
not care: a subclass that overrides one does without, and `PolicyAgent.find_quick` and `Learner.gradients` compare
both ways and drop this one with a warning where they differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.agents.heads import PolicyOutput
from remuda.maths.distributions import LOG_SQRT_2_PI
from remuda.maths.losses import ROUNDING
from remuda.nets import MLP

WIDEST = 128  # of a layer; beyond it the arithmetic counts, and not the calls
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class RowOutputs:
    """What the agent says of [N] rows, and what `gradient` needs to know."""

    log_prob: Rows
    entropy: Rows
    value: Rows
    kept: Any


@dataclass(frozen=True)
class RowGradients:
    """Derivatives of a loss by what the agent said of each row; those by entropies are the same for all rows."""

    log_prob: Rows
    value: Rows
    entropy: float


class RowLosses(NamedTuple):
    """What an algorithm makes of `RowOutputs`: its loss by rows, and what `Losses` says beside it."""

    by_rows: RowGradients
    metrics: dict[str, Tensor | float]
    stop: bool = False


class QuickPolicy(Protocol):
    """From the outputs [N, K] of the policy's last layer to actions, and back."""

    def sample(self, outputs: Rows, noise: Rows) -> NDArray[Any]: ...
    def forward(self, outputs: Rows, action: NDArray[Any]) -> tuple[Rows, Rows, Any]: ...  # log_prob, entropy, kept
    def backward(self, kept: Any, log_prob: Rows, entropy: float) -> Rows: ...  # by outputs


class QuickCategorical:
    """One of n actions."""

    def sample(self, outputs: Rows, noise: Rows) -> NDArray[np.int64]:
        cumulative = np.exp(outputs - outputs.max(-1, keepdims=True)).cumsum(-1)
        chosen: NDArray[np.int64] = (cumulative <= noise * cumulative[:, -1:]).sum(-1)
        return chosen

    def forward(self, outputs: Rows, action: NDArray[np.int64]) -> tuple[Rows, Rows, Any]:
        log_p = log_softmax(outputs)
        p = np.exp(log_p)
        chosen = np.arange(len(action)), action
        entropy = -np.einsum("ij,ij->i", p, log_p)
        return log_p[chosen], entropy, (log_p, p, chosen, entropy)

    def backward(self, kept: Any, log_prob: Rows, entropy: float) -> Rows:
        log_p, p, chosen, entropies = kept
        by_outputs: Rows = p * -log_prob[:, None]
        by_outputs[chosen] += log_prob
        if entropy:
            by_outputs -= entropy * p * (log_p + entropies[:, None])
        return by_outputs


class QuickGaussian:
    """A Box, flat; where its deviations belong is where their gradient goes."""

    def __init__(self, log_std: nn.Parameter, into: Tensor) -> None:
        self.log_std, self.into = log_std, into

    def sample(self, outputs: Rows, noise: Rows) -> Rows:
        action: Rows = outputs + np.exp(self.log_std.detach().numpy()) * noise
        return action

    def forward(self, outputs: Rows, action: Rows) -> tuple[Rows, Rows, Any]:
        log_std = self.log_std.detach().numpy()
        precision = np.exp(-log_std)
        z = (action - outputs) * precision
        log_prob: Rows = np.einsum("ij,ij->i", z, z) * np.float32(-0.5)
        log_prob -= (log_std + np.float32(LOG_SQRT_2_PI)).sum()
        entropy = (log_std + np.float32(0.5 + LOG_SQRT_2_PI)).sum()
        return log_prob, np.full(len(z), entropy, np.float32), (z, precision)

    def backward(self, kept: Any, log_prob: Rows, entropy: float) -> Rows:
        z, precision = kept
        by_mean: Rows = z * log_prob[:, None]
        self.into.numpy()[:] = np.einsum("ij,ij->j", by_mean, z) - log_prob.sum() + len(z) * entropy
        by_mean *= precision
        return by_mean


class QuickTrunk:
    """The layers of an MLP."""

    def __init__(self, net: MLP, into: dict[int, Tensor]) -> None:
        linear = [layer for layer in net.layers if isinstance(layer, nn.Linear)]
        self.layers = [(layer.weight, layer.bias) for layer in linear]
        self.into = [(into[id(weight)], into[id(bias)]) for weight, bias in self.layers]
        self.is_tanh = isinstance(net.layers[-1], nn.Tanh)

    def features(self, x: Tensor) -> Tensor:
        """Of few rows."""
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
            x = x.tanh_() if self.is_tanh else x.relu_()
        return x

    def forward(self, x: Tensor) -> list[Tensor]:
        """The input and what every layer made of it; the last are the features."""
        seen = [x]
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
            # Of many rows the sigmoid is a third of the work: tanh(x) = 2 sigmoid(2 x) - 1, to 2e-7.
            x = x.mul_(2).sigmoid_().mul_(2).sub_(1) if self.is_tanh else x.relu_()
            seen.append(x)
        return seen

    def backward(self, seen: list[Tensor], gradient: Tensor) -> None:
        """From the gradient by the features to that by every weight."""
        for index in reversed(range(len(self.layers))):
            after = seen[index + 1]
            if self.is_tanh:
                gradient = torch.ops.aten.tanh_backward(gradient, after)
            else:
                gradient = torch.ops.aten.threshold_backward(gradient, after, 0)
            by_weight, by_bias = self.into[index]
            torch.mm(gradient.t(), seen[index], out=by_weight)
            torch.sum(gradient, 0, out=by_bias)
            if index:
                gradient = torch.mm(gradient, self.layers[index][0])


class QuickAgent:
    """A PolicyAgent with MLP trunks and one kind of actions; it shares the agent's parameters."""

    def __init__(self, agent: Any) -> None:
        parameters = list(agent.parameters())
        self._gradient = torch.zeros(sum(parameter.numel() for parameter in parameters))
        places = torch.split(self._gradient, [parameter.numel() for parameter in parameters])
        into = {id(p): place.view(p.shape) for p, place in zip(parameters, places, strict=True)}
        self._inputs = agent.inputs if needs_inputs(agent) else None
        self._trunk = QuickTrunk(agent.policy_trunk.net, into)
        is_shared = agent.value_trunk is agent.policy_trunk
        self._value_trunk = None if is_shared else QuickTrunk(agent.value_trunk.net, into)
        policy, value = agent.policy_head.linear, agent.value_head
        self._head, self._value_head = (policy.weight, policy.bias), (value.weight, value.bias)
        self._head_into, self._value_into = (
            tuple(into[id(parameter)] for parameter in head) for head in (self._head, self._value_head)
        )
        log_std = agent.policy_head.log_std
        self._policy: QuickPolicy = (
            QuickCategorical() if log_std is None else QuickGaussian(log_std, into[id(log_std)])
        )

    def choose(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for [B] observations; called without gradients."""
        x = obs if self._inputs is None else self._inputs(obs).reshape(len(obs), -1)
        outputs = F.linear(self._trunk.features(x), *self._head)
        return torch.from_numpy(self._policy.sample(outputs.numpy(), noise.numpy()))

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> PolicyOutput:
        rows = self.forward(obs, action)
        return PolicyOutput(torch.from_numpy(rows.log_prob), torch.from_numpy(rows.value))

    @torch.no_grad()
    def forward(self, obs: Tensor, action: Tensor) -> RowOutputs:
        """Of rows [N]."""
        x = obs if self._inputs is None else self._inputs(obs).reshape(len(obs), -1)
        seen = self._trunk.forward(x)
        value_seen = seen if self._value_trunk is None else self._value_trunk.forward(x)
        outputs, value = F.linear(seen[-1], *self._head), F.linear(value_seen[-1], *self._value_head)
        log_prob, entropy, kept = self._policy.forward(outputs.numpy(), action.numpy())
        return RowOutputs(log_prob, entropy, value.squeeze(-1).numpy(), (seen, value_seen, kept))

    @torch.no_grad()
    def gradient(self, rows: RowOutputs, by: RowGradients) -> Tensor:
        """The gradient by all parameters, in the order of `agent.parameters()`."""
        seen, value_seen, kept = rows.kept
        by_outputs = torch.from_numpy(self._policy.backward(kept, by.log_prob, by.entropy))
        by_value = torch.from_numpy(by.value).unsqueeze(-1)
        by_features = self._through_head(by_outputs, seen[-1], self._head[0], self._head_into)
        by_values = self._through_head(by_value, value_seen[-1], self._value_head[0], self._value_into)
        if self._value_trunk is None:
            by_features += by_values
        else:
            self._value_trunk.backward(value_seen, by_values)
        self._trunk.backward(seen, by_features)
        return self._gradient.clone()

    @staticmethod
    def _through_head(gradient: Tensor, features: Tensor, weight: Tensor, into: tuple[Tensor, ...]) -> Tensor:
        torch.mm(gradient.t(), features, out=into[0])
        torch.sum(gradient, 0, out=into[1])
        return torch.mm(gradient, weight)


def log_softmax(logits: Rows) -> Rows:
    shifted: Rows = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def quick_standardized(x: Rows) -> Rows:
    """Compute what `maths.standardised` does."""
    if len(x) < 2:
        return x
    mean = x.sum() / len(x)
    centered: Rows = x - mean
    deviation = math.sqrt(centered.dot(centered) / (len(x) - 1))
    if deviation <= ROUNDING * abs(mean):  # NaN stays NaN
        return np.zeros_like(x)
    centered /= np.float32(deviation + 1e-8)
    return centered


def needs_inputs(agent: Any) -> bool:
    """Whether observations are more than float32 vectors, taken as they are."""
    space = agent.observation
    return agent.inputs.has_statistics or space.kind != "box" or space.dtype != "float32" or len(space.shape) != 1


def quick_agent(agent: Any) -> QuickAgent | None:
    """Of agents with small fully connected nets on the CPU, without memory, for Discrete or Box actions."""
    nets = [trunk.net for trunk in (agent.policy_trunk, agent.value_trunk)]
    if agent.is_recurrent or not agent.observation.is_leaf or not all(type(net) is MLP for net in nets):
        return None
    layers = [layer for net in nets for layer in net.layers if isinstance(layer, nn.Linear)]
    if not layers or not all(isinstance(net.layers[-1], nn.Tanh | nn.ReLU) for net in nets):
        return None
    if max(layer.out_features for layer in layers) > WIDEST or math.prod(agent.observation.shape) > WIDEST:
        return None
    known = {id(parameter) for parameter in agent.parameters()}
    if not all(id(layer.weight) in known and id(layer.bias) in known for layer in layers):  # made from others
        return None
    if agent.action.kind not in ("discrete", "box") or any(p.device.type != "cpu" for p in agent.parameters()):
        return None
    return QuickAgent(agent)
