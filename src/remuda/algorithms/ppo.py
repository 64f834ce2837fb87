"""Proximal policy optimization (arXiv 1707.06347). docs/algorithms/ppo.md lists every detail with its test."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remuda.agents import PolicyAgent
from remuda.algorithms.actor_critic import ActorCritic, over_progress
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.maths import approximate_kl, clipped_surrogate, standardized, value_loss


class PPO(ActorCritic):
    """Policy gradients over several epochs per rollout; clipping keeps the learned policy near the acting policy."""

    def __init__(
        self,
        agent: PolicyAgent,
        num_envs: int,
        *,
        gamma: float,
        gae_lambda: float,
        clip_range: Callable[[float], float],
        clip_range_vf: Callable[[float], float] | None = None,
        ent_coef: float | Callable[[float], float] = 0.0,
        vf_coef: float = 0.5,
        normalize_advantage: bool = True,
        normalize_reward: bool = False,
        clip_reward: bool = False,
        target_kl: float | None = None,
    ) -> None:
        super().__init__(agent, num_envs, gamma, gae_lambda, normalize_reward, clip_reward)
        self.clip_range, self.clip_range_vf = clip_range, clip_range_vf
        self.ent_coef, self.vf_coef = over_progress(ent_coef), vf_coef
        self.normalize_advantage, self.target_kl = normalize_advantage, target_kl

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        policy, value, steps, targets = self.real_rows(batch)
        log_ratio = policy.log_prob(steps.action) - steps.policy.log_prob
        advantage = standardized(targets.advantage) if self.normalize_advantage else targets.advantage
        clip = self.clip_range(clock.progress)
        value_clip = self.clip_range_vf(clock.progress) if self.clip_range_vf else None

        policy_loss = clipped_surrogate(log_ratio, advantage, clip)
        critic_loss = value_loss(value, targets.value, steps.policy.value, value_clip)
        entropy = policy.entropy().mean()
        loss = policy_loss + self.vf_coef * critic_loss - self.ent_coef(clock.progress) * entropy

        with torch.no_grad():
            kl = approximate_kl(log_ratio)
            clipped = ((log_ratio.exp() - 1).abs() > clip).float().mean()
        return Losses(
            groups={"policy": loss},
            metrics={
                **self.loss_metrics(loss, critic_loss, entropy, policy_gradient_loss=policy_loss),
                "approx_kl": kl,
                "clip_fraction": clipped,
                "clip_range": clip,
            },
            # As in Stable-Baselines3, a KL above 1.5 times the target ends the round with no update from this batch.
            stop=self.target_kl is not None and float(kl) > 1.5 * self.target_kl,
        )
