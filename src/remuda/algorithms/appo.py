"""Asynchronous PPO: PPO's clipped surrogate (arXiv 1707.06347) with V-trace targets and advantages (1802.01561)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from remuda.agents import PolicyAgent
from remuda.algorithms.impala import IMPALA
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.maths import approximate_kl, clipped_surrogate, standardized, value_loss


class APPO(IMPALA):
    """IMPALA with PPO's surrogate, which keeps the learned policy near the acting policy even over several epochs."""

    def __init__(
        self,
        agent: PolicyAgent,
        num_envs: int,
        *,
        clip_range: Callable[[float], float],
        clip_range_vf: Callable[[float], float] | None = None,
        normalize_advantage: bool = True,
        target_kl: float | None = None,
        **options: Any,
    ) -> None:
        """`options` are further arguments of IMPALA, but not `reduction`, which is always "mean"."""
        super().__init__(agent, num_envs, reduction="mean", **options)
        self.clip_range, self.clip_range_vf = clip_range, clip_range_vf
        self.normalize_advantage, self.target_kl = normalize_advantage, target_kl

    @property
    def gradient_reduction(self) -> Literal["sum", "mean"] | None:
        """IMPALA's `gradient_reduction`, or None if standardized advantages or `target_kl` need the whole batch."""
        return None if self.normalize_advantage or self.target_kl is not None else super().gradient_reduction

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        rows = self.corrected_rows(batch)
        # Use the advantage without the factor rho, because `clipped_surrogate` multiplies by rho.
        advantage = standardized(rows.advantage) if self.normalize_advantage else rows.advantage
        clip = self.clip_range(clock.progress)
        value_clip = self.clip_range_vf(clock.progress) if self.clip_range_vf else None

        policy_loss = clipped_surrogate(rows.log_rho, advantage, clip)
        critic_loss = value_loss(rows.value, rows.target, rows.steps.policy.value, value_clip)
        entropy = self.reduced(rows.policy.entropy())
        loss = policy_loss + self.vf_coef * critic_loss - self.ent_coef(clock.progress) * entropy

        with torch.no_grad():
            kl = approximate_kl(rows.log_rho)
            clipped = self.reduced(((rows.log_rho.exp() - 1).abs() > clip).float())
        return Losses(
            groups={"policy": loss},
            metrics={
                **self.loss_metrics(loss, critic_loss, entropy, policy_gradient_loss=policy_loss),
                "approx_kl": kl,
                "clip_fraction": clipped,
                "clip_range": clip,
                **self.ratio_metrics(rows),
            },
            # As in PPO, a KL above 1.5 times the target ends the round without an update from this batch.
            stop=self.target_kl is not None and float(kl) > 1.5 * self.target_kl,
        )
