"""Slow reference implementations for several tests: plain loops, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def slow_projection(p: Sequence[float], r: float, discount: float, support: Sequence[float]) -> list[float]:
    """Return the projected distribution of Algorithm 1 in arXiv:1707.06887, computed atom by atom."""
    low, high = support[0], support[-1]
    step = (high - low) / (len(support) - 1)
    out = [0.0] * len(support)
    for probability, z in zip(p, support, strict=True):
        b = (min(max(r + discount * z, low), high) - low) / step
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:
            out[lower] += probability
        else:
            out[lower] += probability * (upper - b)
            out[upper] += probability * (b - lower)
    return out


def slow_vtrace(
    column: Sequence[tuple[float, float, float, bool]],
    v: Sequence[float],
    gamma: float,
    lambda_: float,
    clips: tuple[float | None, float | None, float | None],
) -> tuple[list[float], list[float]]:
    """Return V-trace targets and weighted advantages of one env, by Eq. 1 of arXiv:1802.01561.

    Each row of the column is (rho, reward, discount, mask).
    """
    rho_clip, c_clip, pg_rho_clip = (math.inf if clip is None else clip for clip in clips)
    T = len(column)

    def target(s: int) -> float:
        total, weight = v[s], 1.0
        for t in range(s, T):
            rho, reward, discount, mask = column[t]
            if not mask:
                break
            total += weight * min(rho_clip, rho) * (reward + gamma * discount * v[t + 1] - v[t])
            weight *= gamma * discount * lambda_ * min(c_clip, rho)
            if discount == 0:
                break
        return total

    def advantage(s: int) -> float:
        rho, reward, discount, mask = column[s]
        return min(pg_rho_clip, rho) * (reward + gamma * discount * target(s + 1) - v[s]) if mask else 0.0

    return [target(s) for s in range(T)], [advantage(s) for s in range(T)]


def slow_n_steps(rows: Sequence[Any], written: int, row: int, n: int, gamma: float) -> tuple[float, float, int]:
    """Compute the n-step return, the product of discounts and the bootstrap row.

    The last three elements of each row are reward, discount and mask.
    """
    total, product = 0.0, 1.0
    for _ in range(n):
        if row == written or not rows[row][-1]:
            break
        *_, reward, discount, _ = rows[row]
        total += product * reward
        product *= gamma * discount
        row += 1
        if discount == 0:
            break
    return total, product, row
