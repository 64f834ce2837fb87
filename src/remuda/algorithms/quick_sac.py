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
from remuda.core import Clock, QuickGradients
from remuda.data import Batch
from remuda.maths.distributions import LOG_SQRT_2_PI


class Drawn(NamedTuple):
    """Rows [N] of a batch, and the noise of the actions that the actor would choose there."""

    obs: Tensor
    next_obs: Tensor
    noise: Tensor
    next_noise: Tensor
    taken: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor


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
    def gradients(self, batch: Batch, clock: Clock) -> QuickGradients:
        sac, agent, count = self.sac, self.sac.agent, len(batch.targets.reward)
        obs, next_obs = (agent.inputs(x).reshape(count, -1) for x in (batch.steps.obs, batch.last_obs))
        noise, next_noise = torch.randn(2, count, agent.width, generator=sac.generator(clock))
        rows = sac.rows(batch)
        weight = torch.as_tensor(rows.weight ** sac.beta(clock.progress)).expand(count)
        taken = agent.normalised(rows.action)
        drawn = Drawn(obs, next_obs, noise, next_noise, taken, rows.reward, rows.discount, weight)
        self.actor_vector.zero_()
        self.critic_vector.zero_()
        said = [
            self._some(Drawn(*(part[start : start + ROWS] for part in drawn)), sac.log_alpha.exp(), count)
            for start in range(0, count, ROWS)
        ]
        log_prob, best, q, error, squares = (torch.cat(parts) for parts in zip(*said, strict=True))
        alpha, mean_log_prob = sac.log_alpha.exp(), log_prob.mean()
        metrics: dict[str, Tensor | float] = {
            "critic_loss": 0.5 * (weight * squares).mean(),
            "actor_loss": alpha * mean_log_prob - best.mean(),
            "ent_coef": alpha,
            "entropy": -mean_log_prob,
            "q_mean": q.mean(),
        }
        groups = {"critic": self.critic_vector.clone(), "actor": self.actor_vector.clone()}
        if sac.learns_alpha:
            groups["alpha"] = -(mean_log_prob + sac.target_entropy).reshape(1)
            metrics["ent_coef_loss"] = sac.log_alpha[0] * groups["alpha"][0]
        return QuickGradients(groups, metrics, priority=error)

    def _some(self, drawn: Drawn, alpha: Tensor, count: int) -> tuple[Tensor, ...]:
        """Of some of `count` rows; returns what is said of each, gradients are added up."""
        obs, next_obs, noise, next_noise, taken, reward, discount, weight = drawn
        n = len(obs)
        seen = self.actor.forward(torch.cat([next_obs, obs]))
        mean, raw = seen[-1].chunk(2, -1)
        log_std = raw.clamp(*LOG_STD)
        scaled = log_std.exp() * torch.cat([next_noise, noise])
        u = mean + scaled
        action, log_prob = u.tanh(), self._log_prob(u, log_std, torch.cat([next_noise, noise]))
        # critics: what came of the actions taken, and what the actor would do now
        following = torch.cat([next_obs, action[:n]], -1)
        next_q = torch.minimum(*(target.forward(following)[-1][:, 0] for target in self.targets))
        goal = reward + discount * (next_q - alpha * log_prob[:n])
        both = torch.cat([torch.cat([obs, obs]), torch.cat([taken, action[n:]])], -1)
        looked = [critic.forward(both) for critic in self.critics]
        values = torch.stack([each[-1][:, 0] for each in looked])
        best, lower = values[:, n:].min(0)
        by_action = torch.zeros_like(noise)
        actions = slice(obs.shape[1], None)
        for index, (critic, each) in enumerate(zip(self.critics, looked, strict=True)):
            by_q = (weight * (values[index, :n] - goal)).mul_(1 / count)
            if n <= FEW:
                down = (lower == index) * (-1 / count)
                by_action += critic.differentiate(each, torch.cat([by_q, down]).unsqueeze(-1), n, actions)
                continue
            critic.differentiate([x[:n] for x in each], by_q.unsqueeze(-1), n)
            # a row's action is judged by one critic, the lower: half of the way back is spared
            judged = (lower == index).nonzero().squeeze(-1)
            way = [x[n:].index_select(0, judged) for x in each[1:-1]]
            by_action[judged] = critic.to_input([obs, *way], torch.full((len(judged), 1), -1 / count), actions)
        # the actor: through tanh, and d log_prob / du = 2 tanh(u)
        squashed = action[n:]
        by_u = by_action * (1 - squashed.square()) + (2 * alpha / count) * squashed
        by_log_std = (by_u * scaled[n:] - alpha / count) * ((raw[n:] >= LOG_STD[0]) & (raw[n:] <= LOG_STD[1]))
        self.actor.differentiate([x[n:] for x in seen], torch.cat([by_u, by_log_std], -1), n)
        squares = (goal - values[:, :n]).square().sum(0)
        return log_prob[n:], best, values[0, :n], (goal - values[0, :n]).abs(), squares

    @staticmethod
    def _log_prob(u: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
        """As SquashedGaussian.sample_with_log_prob."""
        log_slope = 2 * (math.log(2.0) - u - F.softplus(-2 * u))
        return -(0.5 * noise.square() + log_std + LOG_SQRT_2_PI + log_slope).sum(-1)


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
