"""Deep deterministic policy gradients (arXiv 1509.02971), with the options of TD3 (td3.py).

All losses of an update use the same parameters. Many other libraries update the critics before they compute the
actor's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from remuda.agents import ActorAgent, Critic
from remuda.algorithms.actor_critic import over_progress
from remuda.algorithms.critics import joined, smallest
from remuda.algorithms.off_policy import OffPolicy
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.devices import send


class DDPG(OffPolicy):
    """An actor that maximizes the first critic's value, and critics that bootstrap from target networks."""

    def __init__(
        self,
        agent: ActorAgent,
        critics: list[Critic],
        seed: int,
        *,
        tau: float = 0.005,
        target_interval: int = 1,
        policy_delay: int = 1,
        target_noise: float = 0.0,
        target_noise_clip: float = 0.5,
        beta: float | Callable[[float], float] = 0.4,
        clip_reward: bool = False,
        burn_in: int = 0,
        reward_scale: float = 1.0,
    ) -> None:
        """Only every `policy_delay`-th update changes the actor.

        Of the updates that change the actor, every `target_interval`-th also moves the target networks.
        """
        super().__init__(agent, seed, tau, target_interval * policy_delay, clip_reward, burn_in, reward_scale)
        self.critics, self._critics = nn.ModuleList(critics), critics
        self.target, self.target_critics = self.make_target(agent), self.make_target(self.critics)
        self._target_critics = cast("list[Critic]", list(self.target_critics))
        self.policy_delay, self.beta = policy_delay, over_progress(beta)
        self.target_noise, self.target_noise_clip = target_noise, target_noise_clip

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"critic": list(self.critics.parameters()), "actor": list(self.agent.parameters())}

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        seen = self._critic_features(batch)
        return joined(self._critic_losses(batch, clock, seen), self._actor_losses(batch, clock, seen[0]))

    def critic_losses(self, batch: Batch, clock: Clock) -> Losses:
        return self._critic_losses(batch, clock, self._critic_features(batch))

    def actor_losses(self, batch: Batch, clock: Clock) -> Losses:
        with torch.no_grad():
            seen = self.now(batch, self._critics[0].features)
        return self._actor_losses(batch, clock, seen)

    def _critic_features(self, batch: Batch) -> list[Tensor]:
        return [self.now(batch, critic.features) for critic in self._critics]

    def _critic_losses(self, batch: Batch, clock: Clock, seen: list[Tensor]) -> Losses:
        rows = self.rows(batch)
        with torch.no_grad():
            next_action, _ = self.target.choose(self.after(batch, self.target.features, batch.state))
            next_action = self.smoothed(next_action, clock)
            next_q = smallest([c(self.after(batch, c.features), next_action) for c in self._target_critics])
            goal = rows.reward + rows.discount * next_q
        action, weight = self.agent.normalized(rows.action), rows.weight ** self.beta(clock.progress)
        values = [critic(own, action) for critic, own in zip(self._critics, seen, strict=True)]
        critic_loss = sum((weight * (goal - q).square()).mean() for q in values)
        assert isinstance(critic_loss, Tensor)
        metrics: dict[str, Tensor | float] = {
            "critic_loss": critic_loss.detach(),
            "q_mean": values[0].detach().mean(),
        }
        return Losses({"critic": critic_loss}, metrics, self.priority((goal - values[0]).detach().abs(), batch))

    def _actor_losses(self, batch: Batch, clock: Clock, seen: Tensor) -> Losses:
        """Return the actor's loss, or no losses if this update does not change the actor (`policy_delay`).

        `seen` holds the first critic's features of the observations.
        """
        if (clock.version + 1) % self.policy_delay:
            return Losses({}, {})
        chosen, _ = self.agent.choose(self.now(batch, self.agent.features, batch.state))
        loss = -self._critics[0](seen, chosen).mean()
        return Losses({"actor": loss}, {"actor_loss": loss.detach()})

    def smoothed(self, action: Tensor, clock: Clock) -> Tensor:
        """Add clipped noise to a target action (TD3), because similar actions should have similar values."""
        if not self.target_noise:
            return action
        noise = self.target_noise * torch.randn(action.shape, generator=self.generator(clock))
        noise = send(noise, action.device)
        return (action + noise.clamp(-self.target_noise_clip, self.target_noise_clip)).clamp(-1, 1)
