"""V-trace (arXiv 1802.01561): value targets and advantages of a policy, from rows that an older policy sampled.

Rows are as in returns.py: [T, B], with reset rows masked; v is [T + 1, B]. Let pi be the learned policy, mu the
acting policy, and rho_t = pi(a_t) / mu(a_t) the ratio of the probabilities that they give to action a_t. Then:

    delta_t     = min(rho_clip, rho_t) * (r_t + gamma * discount_t * v_{t+1} - v_t)
    vs_t        = v_t + delta_t + gamma * discount_t * lambda * min(c_clip, rho_t) * (vs_{t+1} - v_{t+1})
    advantage_t = min(pg_rho_clip, rho_t) * (r_t + gamma * discount_t * vs_{t+1} - v_t)

On a reset row, the advantage is 0 and vs equals v, so that a truncated episode is bootstrapped from v.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remuda.devices import send, to_cpu
from remuda.maths.returns import _check


@torch.no_grad()
def vtrace(
    log_rho_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    mask_t: Tensor,
    v: Tensor,
    gamma: float,
    lambda_: float = 1.0,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    pg_rho_clip: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the value targets vs_t and the advantages, [T, B] each, without gradients.

    `log_rho_t` [T, B] holds one log-ratio for each whole action, even if actions have several parts. If `rho_clip`,
    `c_clip` or `pg_rho_clip` is None, the minimum in its formula is replaced by rho_t.
    """
    _check(r_t, discount_t, mask_t, v)
    if log_rho_t.shape != r_t.shape:
        raise ValueError(f"rewards are {tuple(r_t.shape)}, so log ratios {tuple(log_rho_t.shape)} must be the same")
    rho_t, continues, is_reset = log_rho_t.exp(), gamma * discount_t, ~mask_t.bool()
    delta_t = at_most(rho_t, rho_clip) * (r_t + continues * v[1:] - v[:-1])
    decay_t = at_most(rho_t, c_clip) * lambda_ * continues
    # Reset rows are filled with 0, not multiplied by 0, because their numbers may not be finite.
    vs_t = v[:-1] + accumulated(delta_t.masked_fill(is_reset, 0.0), decay_t.masked_fill(is_reset, 0.0))
    weight_t = at_most(rho_t, pg_rho_clip).masked_fill(is_reset, 0.0)
    return vs_t, weight_t * one_step_advantages(vs_t, r_t, discount_t, mask_t, v, gamma)


@torch.no_grad()
def one_step_advantages(
    vs_t: Tensor, r_t: Tensor, discount_t: Tensor, mask_t: Tensor, v: Tensor, gamma: float
) -> Tensor:
    """Return V-trace's advantages before their weighting: r_t + gamma * discount_t * vs_{t+1} - v_t.

    The result is 0 on reset rows.
    """
    _check(r_t, discount_t, mask_t, v)
    vs_tp1 = torch.cat([vs_t[1:], v[-1:]])
    return (r_t + gamma * discount_t * vs_tp1 - v[:-1]).masked_fill(~mask_t.bool(), 0.0)


def at_most(rho_t: Tensor, clip: float | None) -> Tensor:
    return rho_t if clip is None else rho_t.clamp(max=clip)


def accumulated(delta_t: Tensor, decay_t: Tensor) -> Tensor:
    """Return acc_t = delta_t + decay_t * acc_{t+1}, computed row by row in numpy, which is faster here than torch."""
    delta, decay = (x.numpy() for x in to_cpu((delta_t, decay_t)))
    out = np.empty_like(delta)
    acc = np.zeros_like(delta[0])
    with np.errstate(over="ignore", invalid="ignore"):  # if ratios are not clipped, the sums may overflow
        for t in reversed(range(len(delta))):
            acc = delta[t] + decay[t] * acc
            out[t] = acc
    return send(torch.from_numpy(out), delta_t.device)
