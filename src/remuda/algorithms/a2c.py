"""Advantage actor-critic, the synchronous form of A3C (arXiv 1602.01783): one gradient per rollout."""

from __future__ import annotations

from collections.abc import Callable

from remuda.agents import PolicyAgent
from remuda.algorithms.actor_critic import ActorCritic, over_progress
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.maths import standardized, value_loss


class A2C(ActorCritic):
    """The on-policy policy gradient with a learned baseline."""

    def __init__(
        self,
        agent: PolicyAgent,
        num_envs: int,
        *,
        gamma: float,
        gae_lambda: float,
        ent_coef: float | Callable[[float], float] = 0.0,
        vf_coef: float = 0.5,
        normalize_advantage: bool = False,
        normalize_reward: bool = False,
        clip_reward: bool = False,
    ) -> None:
        super().__init__(agent, num_envs, gamma, gae_lambda, normalize_reward, clip_reward)
        self.ent_coef, self.vf_coef = over_progress(ent_coef), vf_coef
        self.normalize_advantage = normalize_advantage

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        policy, value, steps, targets = self.real_rows(batch)
        advantage = standardized(targets.advantage) if self.normalize_advantage else targets.advantage

        policy_loss = -(advantage * policy.log_prob(steps.action)).mean()
        critic_loss = value_loss(value, targets.value)
        entropy = policy.entropy().mean()
        loss = policy_loss + self.vf_coef * critic_loss - self.ent_coef(clock.progress) * entropy
        return Losses(
            groups={"policy": loss},
            metrics=self.loss_metrics(loss, critic_loss, entropy, policy_loss=policy_loss),
        )
