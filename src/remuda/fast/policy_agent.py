"""Fast forms of small fully connected policy agents, with the same results from a third of the calls to torch.

    fast = fast_policy_agent(agent)                  # None if the agent is not supported
    action = fast.choose(obs, noise)                 # while sampling: equal to PolicyAgent.act, except for rounding
    output = fast.evaluate_actions(obs, action)      # for all rows at once, when the rollout is complete
    rows = fast.forward(obs, action)                 # log_prob, entropy and value of many rows
    vector = fast.gradient(rows, row_gradients)      # gradients of all parameters, concatenated

The fast forms use no autograd and, except for `Inputs`, no modules. Torch computes matrix products and activations
from the agent's own parameters. Numpy, whose calls cost less, computes everything else.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.agents import PolicyAgent, PolicyOutput
from remuda.core import Agent
from remuda.data import NumpyArray
from remuda.fast.registry import register_policy
from remuda.fast.relu_net import gradient_views
from remuda.maths.distributions import LOG_SQRT_2_PI
from remuda.nets import MLP

logger = logging.getLogger("remuda.fast")

MAX_WIDTH = 128  # largest width of a layer; in wider layers the arithmetic dominates, and autograd is as fast
Rows = NDArray[np.float32]
Parameters = tuple[Tensor, Tensor]  # weight and bias of a layer, or their gradients
Kept = tuple[Any, ...]  # data from a distribution's forward pass for its backward pass


class Activations(NamedTuple):
    """Data of `FastPolicyAgent.forward` that `FastPolicyAgent.gradient` needs."""

    policy: list[Tensor]  # the input of the policy trunk, then the output of each layer
    value: list[Tensor]
    distribution: Kept


@dataclass(frozen=True)
class RowOutputs:
    """Outputs of the agent for N rows, and the activations of the forward pass, which `gradient` needs."""

    log_prob: Rows
    entropy: Rows
    value: Rows
    activations: Activations


@dataclass(frozen=True)
class RowGradients:
    """Derivatives of a loss with respect to `RowOutputs`. The entropy has the same derivative in all rows."""

    log_prob: Rows
    value: Rows
    entropy: float


class FastDistribution(Protocol):
    """An action distribution, with derivatives, computed from the outputs [N, K] of the policy head.

    `forward` also returns the data that `backward` needs. In `backward`, `log_prob` [N] and `entropy` are derivatives
    of the loss with respect to each row's log-probability and entropy.
    """

    def sample(self, outputs: Rows, noise: Rows) -> NumpyArray: ...
    def forward(self, outputs: Rows, action: NumpyArray) -> tuple[Rows, Rows, Kept]: ...  # log_prob, entropy, kept
    def backward(self, kept: Kept, log_prob: Rows, entropy: float) -> Rows: ...  # gradient with respect to outputs


class FastCategorical:
    """Distribution over n discrete actions."""

    def sample(self, outputs: Rows, noise: Rows) -> NDArray[np.int64]:
        cumulative = np.exp(outputs - outputs.max(-1, keepdims=True)).cumsum(-1)
        chosen: NDArray[np.int64] = (cumulative <= noise * cumulative[:, -1:]).sum(-1)
        return chosen

    def forward(self, outputs: Rows, action: NDArray[np.int64]) -> tuple[Rows, Rows, Kept]:
        log_p = log_softmax(outputs)
        p = np.exp(log_p)
        chosen = np.arange(len(action)), action
        entropy = -np.einsum("ij,ij->i", p, log_p)
        return log_p[chosen], entropy, (log_p, p, chosen, entropy)

    def backward(self, kept: Kept, log_prob: Rows, entropy: float) -> Rows:
        log_p, p, chosen, entropies = kept
        by_outputs: Rows = p * -log_prob[:, None]
        by_outputs[chosen] += log_prob
        if entropy:
            by_outputs -= entropy * p * (log_p + entropies[:, None])
        return by_outputs


class FastGaussian:
    """Gaussian distribution over flat Box actions. `backward` also writes the gradient of `log_std` to `into`."""

    def __init__(self, log_std: nn.Parameter, into: Tensor) -> None:
        self.log_std, self.into = log_std, into

    def sample(self, outputs: Rows, noise: Rows) -> Rows:
        action: Rows = outputs + np.exp(self.log_std.detach().numpy()) * noise
        return action

    def forward(self, outputs: Rows, action: Rows) -> tuple[Rows, Rows, Kept]:
        log_std = self.log_std.detach().numpy()
        precision = np.exp(-log_std)
        z = (action - outputs) * precision
        log_prob: Rows = np.einsum("ij,ij->i", z, z) * np.float32(-0.5)
        log_prob -= (log_std + np.float32(LOG_SQRT_2_PI)).sum()
        entropy = (log_std + np.float32(0.5 + LOG_SQRT_2_PI)).sum()
        return log_prob, np.full(len(z), entropy, np.float32), (z, precision)

    def backward(self, kept: Kept, log_prob: Rows, entropy: float) -> Rows:
        z, precision = kept
        by_mean: Rows = z * log_prob[:, None]
        self.into.numpy()[:] = np.einsum("ij,ij->j", by_mean, z) - log_prob.sum() + len(z) * entropy
        by_mean *= precision
        return by_mean


class FastMLP:
    """The layers of an MLP with tanh or ReLU. `backward` writes the gradients of the MLP's parameters to `views`."""

    def __init__(self, net: MLP, views: dict[int, Tensor]) -> None:
        linear = [layer for layer in net.layers if isinstance(layer, nn.Linear)]
        self.layers: list[Parameters] = [(layer.weight, layer.bias) for layer in linear]
        self.into: list[Parameters] = [(views[id(weight)], views[id(bias)]) for weight, bias in self.layers]
        self.is_tanh = isinstance(net.layers[-1], nn.Tanh)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of a few rows, without storing the activations for a backward pass."""
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
            x = x.tanh_() if self.is_tanh else x.relu_()
        return x

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return a list of the input and the output of every layer. The last output is the features."""
        outputs = [x]
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
            # On many rows, 2 sigmoid(2 x) - 1 takes a third of the time of tanh(x). They differ by at most 2e-7.
            x = x.mul_(2).sigmoid_().mul_(2).sub_(1) if self.is_tanh else x.relu_()
            outputs.append(x)
        return outputs

    def backward(self, outputs: list[Tensor], gradient: Tensor) -> None:
        """Write all parameters' gradients to `into`. `gradient` is the gradient with respect to the features."""
        for index in reversed(range(len(self.layers))):
            output = outputs[index + 1]
            if self.is_tanh:
                gradient = torch.ops.aten.tanh_backward(gradient, output)
            else:
                gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
            by_weight, by_bias = self.into[index]
            torch.mm(gradient.t(), outputs[index], out=by_weight)
            torch.sum(gradient, 0, out=by_bias)
            if index:
                gradient = torch.mm(gradient, self.layers[index][0])


class FastPolicyAgent:
    """Fast form of a PolicyAgent with MLP trunks and Discrete or Box actions, which shares the agent's parameters."""

    def __init__(self, agent: PolicyAgent) -> None:
        self._gradient, views = gradient_views(list(agent.parameters()))
        self._inputs = None if agent.inputs.is_identity else agent.inputs
        policy_net, value_net = agent.policy_trunk.net, agent.value_trunk.net
        assert isinstance(policy_net, MLP)
        assert isinstance(value_net, MLP)
        self._trunk = FastMLP(policy_net, views)
        is_shared = agent.value_trunk is agent.policy_trunk
        self._value_trunk = None if is_shared else FastMLP(value_net, views)
        policy, value = agent.policy_head.linear, agent.value_head
        self._head: Parameters = (policy.weight, policy.bias)
        self._value_head: Parameters = (value.weight, value.bias)
        self._head_into: Parameters = (views[id(policy.weight)], views[id(policy.bias)])
        self._value_into: Parameters = (views[id(value.weight)], views[id(value.bias)])
        log_std = agent.policy_head.log_std
        self._distribution: FastDistribution = (
            FastCategorical() if log_std is None else FastGaussian(log_std, views[id(log_std)])
        )

    def agrees_with(self, agent: Agent, obs: Tensor, noise: Tensor) -> bool:
        """Return whether actions and outputs equal those of `agent.act`; log a warning if they do not."""
        action, output, _ = agent.act(obs, None, None, noise)
        assert isinstance(action, Tensor)
        assert output is not None
        pairs = [(self.choose(obs, noise), action), *zip(self.evaluate_actions(obs, action), output, strict=True)]
        if all(torch.allclose(mine, other, rtol=1e-3, atol=1e-4) for mine, other in pairs):
            return True
        name = type(agent).__name__
        logger.warning("%s: fast-path actions disagree with act(); falling back to act().", name)
        return False

    def choose(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Return sampled actions for B observations; call in inference mode, in which tensors convert to numpy."""
        x = obs if self._inputs is None else self._inputs(obs).reshape(len(obs), -1)
        outputs = F.linear(self._trunk.features(x), *self._head)
        return torch.from_numpy(self._distribution.sample(outputs.numpy(), noise.numpy()))

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> PolicyOutput:
        rows = self.forward(obs, action)
        return PolicyOutput(torch.from_numpy(rows.log_prob), torch.from_numpy(rows.value))

    @torch.no_grad()
    def forward(self, obs: Tensor, action: Tensor) -> RowOutputs:
        """Return the agent's outputs for N rows, and the activations that `gradient` needs."""
        x = obs if self._inputs is None else self._inputs(obs).reshape(len(obs), -1)
        policy = self._trunk.forward(x)
        value = policy if self._value_trunk is None else self._value_trunk.forward(x)
        outputs, values = F.linear(policy[-1], *self._head), F.linear(value[-1], *self._value_head)
        log_prob, entropy, kept = self._distribution.forward(outputs.numpy(), action.numpy())
        return RowOutputs(log_prob, entropy, values.squeeze(-1).numpy(), Activations(policy, value, kept))

    @torch.no_grad()
    def gradient(self, rows: RowOutputs, by: RowGradients) -> Tensor:
        """Return the gradient of all parameters as one vector, in the order of `agent.parameters()`."""
        policy, value, kept = rows.activations
        by_outputs = torch.from_numpy(self._distribution.backward(kept, by.log_prob, by.entropy))
        by_value = torch.from_numpy(by.value).unsqueeze(-1)
        by_features = self._through_head(by_outputs, policy[-1], self._head[0], self._head_into)
        by_values = self._through_head(by_value, value[-1], self._value_head[0], self._value_into)
        if self._value_trunk is None:
            by_features += by_values
        else:
            self._value_trunk.backward(value, by_values)
        self._trunk.backward(policy, by_features)
        return self._gradient.clone()

    @staticmethod
    def _through_head(gradient: Tensor, features: Tensor, weight: Tensor, into: Parameters) -> Tensor:
        torch.mm(gradient.t(), features, out=into[0])
        torch.sum(gradient, 0, out=into[1])
        return torch.mm(gradient, weight)


def log_softmax(logits: Rows) -> Rows:
    shifted: Rows = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


@register_policy(PolicyAgent)
def fast_policy_agent(agent: PolicyAgent) -> FastPolicyAgent | None:
    """Return the fast form of a small MLP agent on the CPU with Discrete or Box actions; None for other agents."""
    nets = [trunk.net for trunk in (agent.policy_trunk, agent.value_trunk)]
    mlps = [net for net in nets if type(net) is MLP]
    if agent.is_recurrent or not agent.observation.is_leaf or len(mlps) != len(nets):
        return None
    layers = [layer for net in mlps for layer in net.layers if isinstance(layer, nn.Linear)]
    if not layers or not all(isinstance(net.layers[-1], nn.Tanh | nn.ReLU) for net in mlps):
        return None
    if max(layer.out_features for layer in layers) > MAX_WIDTH or math.prod(agent.observation.shape) > MAX_WIDTH:
        return None
    known = {id(parameter) for parameter in agent.parameters()}
    # Weights that torch computes from other parameters (weight_norm) have no gradient of their own.
    if not all(id(layer.weight) in known and id(layer.bias) in known for layer in layers):
        return None
    if agent.action.kind not in ("discrete", "box") or any(p.device.type != "cpu" for p in agent.parameters()):
        return None
    return FastPolicyAgent(agent)
