"""Soft actor-critic (arXiv 1812.05905): maximize rewards plus alpha * entropy.

The temperature alpha is learned or fixed. All losses of an update use the same parameters. Many other libraries
update the critics before they compute the actor's loss.
"""

from __future__ import annotations

import math
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


class SAC(OffPolicy):
    """An actor, critics, and target critics; a learned temperature keeps the actor's entropy at `target_entropy`."""

    def __init__(
        self,
        agent: ActorAgent,
        critics: list[Critic],
        seed: int,
        *,
        tau: float = 0.005,
        target_interval: int = 1,
        ent_coef: float | None = None,
        ent_coef_init: float = 1.0,
        target_entropy: float | None = None,
        beta: float | Callable[[float], float] = 0.4,
        clip_reward: bool = False,
        burn_in: int = 0,
        reward_scale: float = 1.0,
    ) -> None:
        """`ent_coef` is a fixed temperature; if it is None, the temperature is learned, starting at `ent_coef_init`.

        `target_entropy` defaults to minus the number of action dimensions.
        """
        super().__init__(agent, seed, tau, target_interval, clip_reward, burn_in, reward_scale)
        self.critics, self._critics = nn.ModuleList(critics), critics
        self.target_critics = self.make_target(self.critics)
        self._target_critics = cast("list[Critic]", list(self.target_critics))
        self.learns_alpha, self.beta = ent_coef is None, over_progress(beta)
        self.log_alpha = nn.Parameter(torch.full((1,), math.log(ent_coef_init if ent_coef is None else ent_coef)))
        self.target_entropy = -float(agent.width) if target_entropy is None else target_entropy

    def groups(self) -> dict[str, list[nn.Parameter]]:
        groups = {"critic": list(self.critics.parameters()), "actor": list(self.agent.parameters())}
        return {**groups, "alpha": [self.log_alpha]} if self.learns_alpha else groups

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        features, next_features = self.now_and_after(batch, self.agent.features, batch.state)
        seen = self._critic_features(batch)
        return joined(
            self._critic_losses(batch, clock, next_features, seen), self._actor_losses(batch, clock, features, seen)
        )

    def critic_losses(self, batch: Batch, clock: Clock) -> Losses:
        with torch.no_grad():
            next_features = self.after(batch, self.agent.features, batch.state)
        return self._critic_losses(batch, clock, next_features, self._critic_features(batch))

    def actor_losses(self, batch: Batch, clock: Clock) -> Losses:
        features = self.now(batch, self.agent.features, batch.state)
        with torch.no_grad():
            seen = self._critic_features(batch)
        return self._actor_losses(batch, clock, features, seen)

    def _critic_features(self, batch: Batch) -> list[Tensor]:
        return [self.now(batch, critic.features) for critic in self._critics]

    def _critic_losses(self, batch: Batch, clock: Clock, next_features: Tensor, seen: list[Tensor]) -> Losses:
        """Return the critics' loss.

        `next_features` holds the actor's features of the observations n steps later. `seen` holds each critic's
        features of the current observations.
        """
        rows, alpha = self.rows(batch), self.log_alpha.detach().exp()
        _, next_noise = self._noises(clock, next_features)
        with torch.no_grad():
            next_action, next_log_prob = self.agent.choose(next_features, next_noise)
            next_q = smallest([c(self.after(batch, c.features), next_action) for c in self._target_critics])
            goal = rows.reward + rows.discount * (next_q - alpha * next_log_prob)
        taken, weight = self.agent.normalized(rows.action), rows.weight ** self.beta(clock.progress)
        values = [critic(own, taken) for critic, own in zip(self._critics, seen, strict=True)]
        critic_loss = sum(0.5 * (weight * (goal - q).square()).mean() for q in values)
        assert isinstance(critic_loss, Tensor)
        metrics: dict[str, Tensor | float] = {
            "critic_loss": critic_loss.detach(),
            "q_mean": values[0].detach().mean(),
        }
        return Losses({"critic": critic_loss}, metrics, self.priority((goal - values[0]).detach().abs(), batch))

    def _actor_losses(self, batch: Batch, clock: Clock, features: Tensor, seen: list[Tensor]) -> Losses:
        """Return the losses of actor and temperature.

        `features` holds the actor's features of the observations, and `seen` holds each critic's features of them.
        """
        alpha = self.log_alpha.detach().exp()
        noise, _ = self._noises(clock, features)
        action, log_prob = self.agent.choose(features, noise)
        best = smallest([critic(own, action) for critic, own in zip(self._critics, seen, strict=True)])
        assert log_prob is not None
        groups = {"actor": (alpha * log_prob - best).mean()}
        metrics: dict[str, Tensor | float] = {
            "actor_loss": groups["actor"].detach(),
            "ent_coef": alpha[0],
            "entropy": -log_prob.detach().mean(),
        }
        if self.learns_alpha:  # Eq. 18 of the paper, with log alpha in place of alpha, as in the authors' code
            groups["alpha"] = -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean()
            metrics["ent_coef_loss"] = groups["alpha"].detach()
        return Losses(groups, metrics)

    def _noises(self, clock: Clock, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return noise for the actor's actions in the current observations, and in the observations n steps later."""
        both = torch.randn(2, len(features), self.agent.width, generator=self.generator(clock))
        noise, next_noise = send(both, features.device)
        return noise, next_noise
