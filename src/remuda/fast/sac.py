"""Hand-written gradients of `SAC.losses`, for a fully connected actor and two fully connected critics.

Batches are processed in pieces of `MAX_ROWS` rows, so that activations stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remuda.agents import ActorAgent, Critic
from remuda.agents.actor import LOG_STD
from remuda.algorithms import SAC
from remuda.core import Clock
from remuda.data import Batch
from remuda.fast.agreement import GradientFunction
from remuda.fast.registry import register
from remuda.fast.relu_net import FEW_ROWS, MAX_ROWS, ReluNet, gradient_views, linear_layers
from remuda.learning.gradients import Gradients, Pieces
from remuda.maths.distributions import LOG_SQRT_2_PI


class Transitions(NamedTuple):
    """Rows [N] of a batch, with the noise [2, N, A] for the actor's new actions in `obs` and `next_obs`."""

    obs: Tensor
    next_obs: Tensor
    noise: Tensor
    action: Tensor  # between -1 and 1
    reward: Tensor
    discount: Tensor
    weight: Tensor

    def slice(self, rows: slice) -> Transitions:
        return Transitions(
            *(part[:, rows] if name == "noise" else part[rows] for name, part in self._asdict().items())
        )


class RowResults(NamedTuple):
    """Results for every row, from which metrics and priorities are computed."""

    log_prob: Tensor  # log-density of the actor's new action
    best: Tensor  # value of the actor's new action, the lower of the two critics' values
    q: Tensor  # the first critic's value of the stored action
    error: Tensor  # value of the stored action minus its target, for both critics [N, 2]


class FastSAC:
    """Computes the gradients of a `SAC` object, whose parameters it shares."""

    def __init__(
        self, sac: SAC, actor: list[nn.Linear], critics: list[list[nn.Linear]], targets: list[list[nn.Linear]]
    ):
        groups = sac.groups()
        self.sac = sac
        self.actor_vector, actor_views = gradient_views(groups["actor"])
        self.critic_vector, critic_views = gradient_views(groups["critic"])
        self.actor = ReluNet(actor, actor_views)
        self.critics = [ReluNet(layers, critic_views) for layers in critics]
        self.targets = [ReluNet(layers) for layers in targets]

    @torch.no_grad()
    def gradients(self, batch: Batch, clock: Clock) -> Gradients | None:
        if batch.state is not None:
            return None
        sac, agent, count = self.sac, self.sac.agent, len(batch.targets.reward)
        obs, next_obs = (agent.inputs(x).reshape(count, -1) for x in (batch.steps.obs, batch.next_obs))
        noise = torch.randn(2, count, agent.width, generator=sac.generator(clock))
        rows = sac.rows(batch)
        weight = torch.as_tensor(rows.weight ** sac.beta(clock.progress)).expand(count)
        drawn = Transitions(obs, next_obs, noise, agent.normalized(rows.action), rows.reward, rows.discount, weight)
        alpha = float(sac.log_alpha.exp())
        found = self.compute(drawn, alpha)
        mean_log_prob = found.log_prob.mean()
        metrics: dict[str, Tensor | float] = {
            "critic_loss": 0.5 * (weight @ found.error.square().sum(1)) / count,
            "actor_loss": alpha * mean_log_prob - found.best.mean(),
            "ent_coef": alpha,
            "entropy": -mean_log_prob,
            "q_mean": found.q.mean(),
        }
        groups = {"critic": self.critic_vector.clone(), "actor": self.actor_vector.clone()}
        if sac.learns_alpha:
            groups["alpha"] = -(mean_log_prob + sac.target_entropy).reshape(1)
            metrics["ent_coef_loss"] = sac.log_alpha[0] * groups["alpha"][0]
        vectors: dict[str, Pieces] = {name: (vector,) for name, vector in groups.items()}
        return Gradients(vectors, clock.version, metrics, found.error[:, 0].abs(), stop=False)

    def compute(self, drawn: Transitions, alpha: float) -> RowResults:
        """Write the gradients of a batch to the gradient vectors of actor and critics; return each row's results."""
        return RowResults(*in_pieces(partial(self._piece, alpha=alpha), drawn))

    def _piece(self, drawn: Transitions, alpha: float, count: int, accumulate: bool) -> RowResults:
        """Write the gradients of `drawn`, a piece of a batch, to the gradient vectors of actor and critics.

        `count` is the number of rows of the whole batch, over which the losses are means. If `accumulate` is True,
        add the gradients to those that the vectors hold from earlier pieces.
        """
        obs, next_obs, noise, taken, reward, discount, weight = drawn
        n, noise = len(obs), noise.flatten(0, 1)
        outputs = self.actor.forward(torch.cat([obs, next_obs]))
        sample = Sample.of(outputs[-1], noise)
        action, next_action = torch.split(sample.action, n)
        log_prob, next_log_prob = torch.split(sample.log_prob, n)
        # Compute the targets of the critics, then the values of the stored actions and of the actor's new actions.
        following = torch.cat([next_obs, next_action], -1)
        next_q = torch.minimum(*(target.forward(following)[-1] for target in self.targets)).squeeze(-1)
        goal = torch.addcmul(reward, discount, next_q.sub_(next_log_prob, alpha=alpha))
        both = torch.cat([torch.cat([obs, taken], -1), torch.cat([obs, action], -1)])
        critic_outputs = [critic.forward(both) for critic in self.critics]
        taken_q, chosen_q = torch.split(torch.cat([each[-1] for each in critic_outputs], -1), n)
        best, lower = chosen_q.min(-1, keepdim=True)
        error = taken_q - goal.unsqueeze(-1)
        by_taken = error * (weight / count).unsqueeze(-1)
        by_chosen = torch.zeros_like(by_taken).scatter_(1, lower, -1 / count)
        by_action = self._through_critics(critic_outputs, by_taken, by_chosen, accumulate, slice(obs.shape[1], None))
        self.actor.backward([x[:n] for x in outputs], sample.backward(by_action, alpha, count), n, accumulate)
        return RowResults(log_prob, best.squeeze(-1), taken_q[:, 0], error)

    def _through_critics(
        self, outputs: list[list[Tensor]], by_taken: Tensor, by_chosen: Tensor, accumulate: bool, actions: slice
    ) -> Tensor:
        """Write the critics' gradients to their vector; return the gradient [N, A] with respect to the new actions.

        `outputs` holds each critic's outputs for N rows with stored actions and then N rows with the actor's new
        actions. `by_taken` and `by_chosen` [N, 2] are the gradients with respect to the critics' values of the stored
        and of the new actions. `actions` selects the action columns of the critics' inputs.
        """
        n = len(by_taken)
        if n <= FEW_ROWS:
            by_both = torch.split(torch.cat([by_taken, by_chosen]), 1, -1)
            first, second = (
                critic.to_input(critic.backward(each, by, n, accumulate)[n:], actions)
                for critic, each, by in zip(self.critics, outputs, by_both, strict=True)
            )
            return first.add_(second)
        by_action = torch.empty(n, outputs[0][0].shape[1] - actions.start)
        for index, (critic, each) in enumerate(zip(self.critics, outputs, strict=True)):
            critic.backward([x[:n] for x in each], by_taken[:, index : index + 1], n, accumulate)
            # In each row, the actor's loss uses only the lower of the two critics' values, so each critic passes back
            # only the rows in which its own value is used.
            rows = by_chosen[:, index].nonzero().squeeze(-1)
            hidden = [x[n:].index_select(0, rows) for x in each[1:-1]]
            by_first = critic.to_first(hidden, by_chosen[rows, index : index + 1])
            by_action[rows] = critic.to_input(by_first, actions)
        return by_action


class Sample(NamedTuple):
    """Actions sampled from a stochastic actor, and the data that `backward` needs."""

    raw: Tensor  # log_std before it is clamped
    scaled: Tensor  # noise times standard deviation
    action: Tensor
    log_prob: Tensor

    @classmethod
    def of(cls, output: Tensor, noise: Tensor) -> Sample:
        mean, raw = output.chunk(2, -1)
        log_std = raw.clamp(*LOG_STD)
        scaled = log_std.exp() * noise
        u = mean + scaled
        return cls(raw, scaled, u.tanh(), squashed_log_prob(u, log_std, noise))

    def backward(self, by_action: Tensor, alpha: float, count: int) -> Tensor:
        """Return the gradient of the actor's loss with respect to the actor's output in the first n rows.

        `by_action` [n, A] is the gradient with respect to the actions of these n rows, through the critics. The loss
        is a mean over `count` rows. With fixed noise, the derivative of the log-density of the action tanh(u) with
        respect to u is 2 tanh(u).
        """
        n = len(by_action)
        by_u = torch.ops.aten.tanh_backward(by_action, self.action[:n])
        by_u.add_(self.action[:n], alpha=2 * alpha / count)
        by_log_std = (by_u * self.scaled[:n]).sub_(alpha / count)
        return torch.cat([by_u, torch.ops.aten.hardtanh_backward(by_log_std, self.raw[:n], *LOG_STD)], -1)


def in_pieces(compute: Callable[..., tuple[Tensor, ...]], drawn: Transitions) -> Sequence[Tensor]:
    """Call `compute(piece, count=..., accumulate=...)` for pieces of a batch, and concatenate the results."""
    count = len(drawn.obs)
    if count <= MAX_ROWS:
        return compute(drawn, count=count, accumulate=False)
    bounds = [slice(start, start + MAX_ROWS) for start in range(0, count, MAX_ROWS)]
    pieces = [compute(drawn.slice(each), count=count, accumulate=each.start > 0) for each in bounds]
    return [torch.cat(each) for each in zip(*pieces, strict=True)]


def squashed_log_prob(u: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Compute the log-density that `SquashedGaussian.sample_with_log_prob` returns."""
    each = torch.addcmul(log_std, noise, noise, value=0.5).sub_(F.softplus(-2 * u).add_(u), alpha=2)
    return -each.sum(-1) - u.shape[-1] * (LOG_SQRT_2_PI + 2 * math.log(2.0))


Fast = TypeVar("Fast", bound=FastSAC)


def critic_layers(critics: nn.ModuleList) -> list[list[nn.Linear]] | None:
    """Return the linear layers of each critic, or None if a critic is not a plain ReLU network."""
    found = []
    for critic in critics:
        layers = linear_layers(critic.trunk, critic.body, critic.head) if type(critic) is Critic else None
        if layers is None:
            return None
        found.append(layers)
    return found


@register(SAC, ActorAgent)
def sac_gradients(sac: SAC) -> GradientFunction | None:
    """Return the gradient function of a SAC object, or None if it is not supported."""
    found = make_fast(sac, FastSAC)
    return None if found is None else found.gradients


def make_fast(sac: SAC, kind: type[Fast]) -> Fast | None:
    """Return an object of `kind` that computes the gradients of a SAC object, or None if it is not supported.

    Supported objects have ReLU networks on the CPU, vector observations, and two critics. Objects of a subclass are
    not supported, because `losses` calls many methods that a subclass may override.
    """
    actor = linear_layers(sac.agent.trunk, sac.agent.head)
    critics, targets = critic_layers(sac.critics), critic_layers(sac.target_critics)
    has_vectors = sac.agent.observation.kind == "box" and len(sac.agent.observation.shape) == 1
    on_cpu = all(parameter.device.type == "cpu" for parameter in sac.parameters())
    if actor is None or critics is None or targets is None or len(critics) != 2 or not has_vectors or not on_cpu:
        return None
    return kind(sac, actor, critics, targets) if type(sac) is SAC else None
