"""The gradients of `SAC.losses` by hand, for fully connected nets: some thousand rows at a time, all in the cache.

`Learner.gradients` compares both ways now and then and drops this one, with a warning, where they differ; whoever
changes a loss need not care.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from remuda.agents.actor import LOG_STD, Critic
from remuda.agents.quick_net import FEW, ROWS, QuickNet, gradient_places, linear_layers
from remuda.core import Clock, FastGradients
from remuda.data import Batch
from remuda.maths.distributions import LOG_SQRT_2_PI


class Drawn(NamedTuple):
    """Rows [N] of a batch, and the noise [2, N] of the actions that the actor would choose there and after them."""

    obs: Tensor
    next_obs: Tensor
    noise: Tensor
    taken: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor

    def some(self, rows: slice) -> Drawn:
        return Drawn(*(part[:, rows] if name == "noise" else part[rows] for name, part in self._asdict().items()))


class ActorOutput(NamedTuple):
    """Of each row."""

    log_prob: Tensor  # of the action that the actor would choose
    best: Tensor  # what the lower critic says of it
    q: Tensor  # what the first says of the action taken
    error: Tensor  # of all critics [N, 2]


class QuickSAC:
    """Shares the parameters of a SAC with two critics."""

    def __init__(self, sac: Any) -> None:
        groups = sac.groups()
        self.sac = sac
        self.actor_vector, actor_into = gradient_places(groups["actor"])
        self.critic_vector, critic_into = gradient_places(groups["critic"])
        self.actor = QuickNet(layers_of_actor(sac.agent), actor_into)
        self.critics = [QuickNet(layers_of_critic(critic), critic_into) for critic in sac.critics]
        self.targets = [QuickNet(layers_of_critic(critic)) for critic in sac.target_critics]

    @torch.no_grad()
    def gradients(self, batch: Batch, clock: Clock) -> FastGradients:
        sac, agent, count = self.sac, self.sac.agent, len(batch.targets.reward)
        obs, next_obs = (agent.inputs(x).reshape(count, -1) for x in (batch.steps.obs, batch.next_obs))
        noise = torch.randn(2, count, agent.width, generator=sac.generator(clock))
        rows = sac.rows(batch)
        weight = torch.as_tensor(rows.weight ** sac.beta(clock.progress)).expand(count)
        drawn = Drawn(obs, next_obs, noise, agent.normalized(rows.action), rows.reward, rows.discount, weight)
        alpha = float(sac.log_alpha.exp())
        if count <= ROWS:
            said = self._some(drawn, alpha, count, keep=False)
        else:
            parts = [slice(start, start + ROWS) for start in range(0, count, ROWS)]
            found = [self._some(drawn.some(part), alpha, count, keep=part.start > 0) for part in parts]
            said = ActorOutput(*(torch.cat(each) for each in zip(*found, strict=True)))
        mean_log_prob = said.log_prob.mean()
        metrics: dict[str, Tensor | float] = {
            "critic_loss": 0.5 * (weight @ said.error.square().sum(1)) / count,
            "actor_loss": alpha * mean_log_prob - said.best.mean(),
            "ent_coef": alpha,
            "entropy": -mean_log_prob,
            "q_mean": said.q.mean(),
        }
        groups = {"critic": self.critic_vector.clone(), "actor": self.actor_vector.clone()}
        if sac.learns_alpha:
            groups["alpha"] = -(mean_log_prob + sac.target_entropy).reshape(1)
            metrics["ent_coef_loss"] = sac.log_alpha[0] * groups["alpha"][0]
        return FastGradients(groups, metrics, priority=said.error[:, 0].abs())

    def _some(self, drawn: Drawn, alpha: float, count: int, keep: bool) -> ActorOutput:
        """Of some of `count` rows; gradients are added to those of rows before them, if they are to be kept."""
        obs, next_obs, noise, taken, reward, discount, weight = drawn
        n, noise = len(obs), noise.flatten(0, 1)
        seen = self.actor.forward(torch.cat([obs, next_obs]))
        mean, raw = seen[-1].chunk(2, -1)
        log_std = raw.clamp(*LOG_STD)
        scaled = log_std.exp() * noise
        u = mean + scaled
        action, next_action = torch.split(u.tanh(), n)
        log_prob, next_log_prob = torch.split(self._log_prob(u, log_std, noise), n)
        # critics: what came of the actions taken, and what the actor would do now
        following = torch.cat([next_obs, next_action], -1)
        next_q = torch.minimum(*(target.forward(following)[-1] for target in self.targets)).squeeze(-1)
        goal = torch.addcmul(reward, discount, next_q.sub_(next_log_prob, alpha=alpha))
        both = torch.cat([torch.cat([obs, taken], -1), torch.cat([obs, action], -1)])
        looked = [critic.forward(both) for critic in self.critics]
        taken_q, chosen_q = torch.split(torch.cat([each[-1] for each in looked], -1), n)
        best, lower = chosen_q.min(-1, keepdim=True)
        error = taken_q - goal.unsqueeze(-1)
        by_taken = error * (weight / count).unsqueeze(-1)
        by_chosen = torch.zeros_like(by_taken).scatter_(1, lower, -1 / count)
        by_action = self._through_critics(looked, by_taken, by_chosen, keep, slice(obs.shape[1], None))
        # the actor: through tanh, and d log_prob / du = 2 tanh(u)
        by_u = torch.ops.aten.tanh_backward(by_action, action).add_(action, alpha=2 * alpha / count)
        by_log_std = (by_u * scaled[:n]).sub_(alpha / count)
        by_raw = torch.ops.aten.hardtanh_backward(by_log_std, raw[:n], *LOG_STD)
        self.actor.differentiate([x[:n] for x in seen], torch.cat([by_u, by_raw], -1), n, keep)
        return ActorOutput(log_prob, best.squeeze(-1), taken_q[:, 0], error)

    def _through_critics(
        self, looked: list[list[Tensor]], by_taken: Tensor, by_chosen: Tensor, keep: bool, actions: slice
    ) -> Tensor:
        """By the actions taken to the weights, by those chosen to the actions [N, A]."""
        n = len(by_taken)
        if n <= FEW:
            by_both = torch.split(torch.cat([by_taken, by_chosen]), 1, -1)
            first, second = (
                critic.to_input(critic.differentiate(each, by, n, keep)[n:], actions)
                for critic, each, by in zip(self.critics, looked, by_both, strict=True)
            )
            return first.add_(second)
        by_action = torch.empty(n, looked[0][0].shape[1] - actions.start)
        for index, (critic, each) in enumerate(zip(self.critics, looked, strict=True)):
            critic.differentiate([x[:n] for x in each], by_taken[:, index : index + 1], n, keep)
            # a row's action is judged by one critic, the lower: half of the way back is spared
            judged = by_chosen[:, index].nonzero().squeeze(-1)
            hidden = [x[n:].index_select(0, judged) for x in each[1:-1]]
            by_first = critic.to_first(hidden, by_chosen[judged, index : index + 1])
            by_action[judged] = critic.to_input(by_first, actions)
        return by_action

    @staticmethod
    def _log_prob(u: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
        """As SquashedGaussian.sample_with_log_prob."""
        each = torch.addcmul(log_std, noise, noise, value=0.5).sub_(F.softplus(-2 * u).add_(u), alpha=2)
        return -each.sum(-1) - u.shape[-1] * (LOG_SQRT_2_PI + 2 * math.log(2.0))


def layers_of_actor(agent: Any) -> Any:
    return linear_layers(agent.trunk, agent.head)


def layers_of_critic(critic: Any) -> Any:
    return linear_layers(critic.trunk, critic.body, critic.head) if type(critic) is Critic else None


def quick_sac(sac: Any) -> QuickSAC | None:
    """Of plain relu nets over vectors on the CPU, with two critics."""
    nets = [layers_of_actor(sac.agent), *(layers_of_critic(critic) for critic in sac.critics)]
    has_vectors = sac.agent.observation.kind == "box" and len(sac.agent.observation.shape) == 1
    on_cpu = all(parameter.device.type == "cpu" for parameter in sac.parameters())
    if any(layers is None for layers in nets) or len(sac.critics) != 2 or not has_vectors or not on_cpu:
        return None
    return QuickSAC(sac)
