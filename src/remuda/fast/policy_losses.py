"""The losses of A2C and PPO with hand-written derivatives, for the agents of policy_agent.py.

`a2c_losses` and `ppo_losses` compute the losses of `A2C.losses` and `PPO.losses` (algorithms/) in numpy, and also the
derivatives of these losses with respect to the agent's outputs for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from remuda.agents import PolicyAgent
from remuda.algorithms import A2C, PPO, ActorCritic
from remuda.core import Clock
from remuda.data import Batch
from remuda.fast.agreement import GradientFunction
from remuda.fast.policy_agent import RowGradients, RowOutputs, Rows, fast_policy_agent
from remuda.fast.registry import register
from remuda.learning.gradients import Gradients
from remuda.maths.losses import MAX_LOG_RATIO, ROUNDING

Learned = TypeVar("Learned", bound=ActorCritic)


class RowLosses(NamedTuple):
    """Derivatives of a loss with respect to each row's outputs, and the metrics and stop flag of `core.Losses`."""

    by_rows: RowGradients
    metrics: dict[str, Tensor | float]
    stop: bool = False


def policy_gradients(
    algorithm: Learned, losses: Callable[[Learned, RowOutputs, Batch, Clock], RowLosses]
) -> GradientFunction | None:
    """Return a gradient function that uses `losses` and the agent's fast form; None if there is no fast form."""
    agent = fast_policy_agent(algorithm.agent)
    if agent is None:
        return None

    def compute(batch: Batch, clock: Clock) -> Gradients | None:
        if batch.state is not None:
            return None
        # Do not let numpy warn if ratios overflow. The gradients are then not finite, as with autograd, and the
        # learner skips the update.
        with np.errstate(over="ignore", invalid="ignore"):
            rows = agent.forward(batch.steps.obs, batch.steps.action)
            found = losses(algorithm, rows, batch, clock)
            vector = agent.gradient(rows, found.by_rows)
        return Gradients({"policy": (vector,)}, clock.version, found.metrics, None, found.stop)

    return compute


@register(A2C, PolicyAgent)
def a2c_gradients(a2c: A2C) -> GradientFunction | None:
    return policy_gradients(a2c, a2c_losses)


@register(PPO, PolicyAgent)
def ppo_gradients(ppo: PPO) -> GradientFunction | None:
    return policy_gradients(ppo, ppo_losses)


def a2c_losses(a2c: A2C, rows: RowOutputs, batch: Batch, clock: Clock) -> RowLosses:
    """Compute the loss of `A2C.losses` and its derivatives with respect to each row's outputs."""
    n, ent_coef = len(rows.value), a2c.ent_coef(clock.progress)
    advantage, target = (tensor.numpy() for tensor in batch.targets)
    if a2c.normalize_advantage:
        advantage = standardized_rows(advantage)
    error = rows.value - target
    policy_loss, value_loss = -float(advantage.dot(rows.log_prob)) / n, float(error.dot(error)) / n
    entropy = float(rows.entropy.sum()) / n
    by_rows = RowGradients(
        log_prob=advantage * np.float32(-1 / n),
        value=error * np.float32(2 * a2c.vf_coef / n),
        entropy=-ent_coef / n,
    )
    metrics: dict[str, Tensor | float] = {
        "loss": policy_loss + a2c.vf_coef * value_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": -entropy,
    }
    return RowLosses(by_rows, metrics)


def ppo_losses(ppo: PPO, rows: RowOutputs, batch: Batch, clock: Clock) -> RowLosses:
    """Compute the loss of `PPO.losses` and its derivatives with respect to each row's outputs."""
    steps, n, progress = batch.steps, len(rows.value), clock.progress
    clip, ent_coef = ppo.clip_range(progress), ppo.ent_coef(progress)
    advantage, target = (tensor.numpy() for tensor in batch.targets)
    if ppo.normalize_advantage:
        advantage = standardized_rows(advantage)
    log_ratio = rows.log_prob - steps.policy.log_prob.numpy()
    max_log_ratio = np.where(advantage >= 0, np.float32(MAX_LOG_RATIO), np.float32(np.inf))  # see clipped_surrogate
    ratio = np.exp(np.minimum(log_ratio, max_log_ratio))
    gain, clipped_gain = ratio * advantage, ratio.clip(1 - clip, 1 + clip) * advantage
    error = rows.value - target
    squared = error.dot(error)
    if ppo.clip_range_vf is not None:
        old, limit = steps.policy.value.numpy(), ppo.clip_range_vf(progress)
        moved = rows.value - old
        clipped_error = old + moved.clip(-limit, limit) - target
        # Where the clipped error is larger, the loss does not depend on the value, so the derivative is 0.
        is_clipped = (np.abs(moved) > limit) & (np.abs(clipped_error) > np.abs(error))
        squared = np.square(np.where(is_clipped, clipped_error, error)).sum()
        error = np.where(is_clipped, np.float32(0), error)
    policy_loss = -float(np.minimum(gain, clipped_gain).sum()) / n
    value_loss, entropy = float(squared) / n, float(rows.entropy.sum()) / n
    kl = float((np.expm1(log_ratio) - log_ratio).sum()) / n
    by_rows = RowGradients(
        log_prob=np.where(gain > clipped_gain, np.float32(0), gain) * np.float32(-1 / n),  # NaN in gain stays NaN
        value=error * np.float32(2 * ppo.vf_coef / n),
        entropy=-ent_coef / n,
    )
    metrics: dict[str, Tensor | float] = {
        "loss": policy_loss + ppo.vf_coef * value_loss - ent_coef * entropy,
        "policy_gradient_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_loss": -entropy,
        "approx_kl": kl,
        "clip_fraction": np.count_nonzero(np.abs(ratio - 1) > clip) / n,
        "clip_range": clip,
    }
    return RowLosses(by_rows, metrics, ppo.target_kl is not None and kl > 1.5 * ppo.target_kl)


def standardized_rows(x: Rows) -> Rows:
    """Scale rows to mean 0 and deviation 1 in numpy, as `maths.standardized` does in torch."""
    if len(x) < 2:
        return x
    mean = x.sum() / len(x)
    centered: Rows = x - mean
    deviation = math.sqrt(centered.dot(centered) / (len(x) - 1))
    if deviation <= ROUNDING * abs(mean):  # False for NaN, so that the result is NaN
        return np.zeros_like(x)
    centered /= np.float32(deviation + 1e-8)
    return centered
