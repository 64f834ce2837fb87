"""IMPALA (arXiv 1802.01561): policy gradients from sequences that an older policy sampled, corrected by V-trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from remuda.agents import PolicyAgent
from remuda.algorithms.actor_critic import ActorCritic, over_progress
from remuda.core import Clock, Losses
from remuda.data import Batch, Rollout, Steps, map_tree, resets
from remuda.maths import Distribution, one_step_advantages, vtrace


class RealRows(NamedTuple):
    """The N rows of a batch in which an action was taken (mask True). Every field has one entry per row.

    `policy`, `value` and `log_prob` are outputs of the current network.
    """

    steps: Steps
    policy: Distribution
    value: Tensor
    log_prob: Tensor
    log_rho: Tensor  # log of rho, the ratio of the action's probabilities under the current and the acting policy
    target: Tensor  # target of `value`; neither this target nor the advantages have a gradient
    pg_advantage: Tensor  # advantage multiplied by the clipped rho, for the policy gradient
    advantage: Tensor  # advantage that is not multiplied by rho


class IMPALA(ActorCritic):
    """Policy gradients from whole sequences, with V-trace targets computed from the current network's outputs."""

    def __init__(
        self,
        agent: PolicyAgent,
        num_envs: int,
        *,
        gamma: float,
        vtrace_lambda: float = 1.0,
        rho_clip: float | None = 1.0,
        c_clip: float | None = 1.0,
        pg_rho_clip: float | None = 1.0,
        correction: Literal["vtrace", "none"] = "vtrace",
        reduction: Literal["sum", "mean"] = "mean",
        ent_coef: float | Callable[[float], float] = 0.0,
        vf_coef: float = 0.5,
        normalize_reward: bool = False,
        clip_reward: bool = False,
    ) -> None:
        super().__init__(agent, num_envs, gamma, normalize_reward=normalize_reward, clip_reward=clip_reward)
        self.vtrace_lambda, self.rho_clip, self.c_clip = vtrace_lambda, rho_clip, c_clip
        self.pg_rho_clip, self.correction, self.reduction = pg_rho_clip, correction, reduction
        self.ent_coef, self.vf_coef = over_progress(ent_coef), vf_coef

    @property
    def gradient_reduction(self) -> Literal["sum", "mean"] | None:
        """How to combine gradients if a batch is split by columns: "sum" or "mean"; None if it must not be split.

        For a subclass that changes the loss, the result is None unless the subclass also overrides this property.
        """
        is_current = describes(type(self), "gradient_reduction", "losses", "corrected_rows", "reduced")
        return self.reduction if is_current else None

    def prepare(self, rollout: Rollout) -> Batch:
        """Return a batch without targets. Targets depend on the parameters, so `losses` computes them."""
        return Batch(
            rollout.steps.replace(reward=self.rewards(rollout)), state=rollout.state, next_obs=rollout.next_obs
        )

    def corrected_rows(self, batch: Batch) -> RealRows:
        """Unroll the agent over the T rows and `next_obs`; return the real rows with their V-trace targets."""
        steps, mask = batch.steps, batch.steps.mask
        no_row = torch.zeros_like(mask[:1])
        obs = map_tree(lambda rows, last: torch.cat([rows, last.unsqueeze(0)]), steps.obs, batch.next_obs)
        reset = None if batch.state is None else resets(torch.cat([mask, no_row]))
        (policy, v), _ = self.agent.unroll(obs, batch.state, reset)
        real, policy = steps.replace(obs=None)[mask], policy.rows(torch.cat([mask, no_row]))
        log_prob = policy.log_prob(real.action)
        log_rho = log_prob - real.policy.log_prob

        log_rho_t = torch.zeros_like(steps.reward)
        if self.correction == "vtrace":  # otherwise all ratios are 1, as if the current policy had acted
            log_rho_t[mask] = log_rho.detach()
        rows = (steps.reward, steps.discount, mask, v.detach())
        clips = (self.rho_clip, self.c_clip, self.pg_rho_clip)
        vs_t, pg_advantage_t = vtrace(log_rho_t, *rows, self.gamma, self.vtrace_lambda, *clips)
        advantage_t = one_step_advantages(vs_t, *rows, self.gamma)
        return RealRows(
            real, policy, v[:-1][mask], log_prob, log_rho, vs_t[mask], pg_advantage_t[mask], advantage_t[mask]
        )

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        rows = self.corrected_rows(batch)
        policy_loss = self.reduced(-rows.pg_advantage * rows.log_prob)
        value_loss = self.reduced(0.5 * (rows.target - rows.value).square())
        entropy = self.reduced(rows.policy.entropy())
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef(clock.progress) * entropy
        return Losses(
            groups={"policy": loss},
            metrics=self.loss_metrics(loss, value_loss, entropy, policy_loss=policy_loss) | self.ratio_metrics(rows),
        )

    def reduced(self, rows: Tensor) -> Tensor:
        """Return the sum or mean of `rows`, which has one entry for each real row; 0 if there are no real rows."""
        return rows.sum() if self.reduction == "sum" else rows.sum() / max(1, len(rows))

    @torch.no_grad()
    def ratio_metrics(self, rows: RealRows) -> dict[str, Tensor | float]:
        """Return the mean of rho over the real rows, and the fraction of these rows whose rho is above `rho_clip`."""
        rho, count = rows.log_rho.exp(), max(1, len(rows.log_rho))
        # The margin excludes ratios that exceed a `rho_clip` of 1 only by rounding.
        clipped = 0.0 if self.rho_clip is None else (rho > self.rho_clip * (1 + 1e-4)).sum() / count
        return {"rho": rho.sum() / count, "rho_clipped": clipped}


def describes(kind: type, claim: str, *methods: str) -> bool:
    """Return whether the attribute `claim`, a statement about `methods`, is still true of the class `kind`.

    The statement may be wrong if a subclass overrides one of the methods without overriding the attribute as well.
    In this case the result is False.
    """

    def owner(name: str) -> type:
        return next(each for each in kind.__mro__ if name in vars(each))

    return all(issubclass(owner(claim), owner(method)) for method in methods)
