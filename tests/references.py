"""Slow references that several tests compare with: plain loops, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def slow_projection(p: Sequence[float], r: float, discount: float, support: Sequence[float]) -> list[float]:
    """Algorithm 1 of 1707.06887, atom by atom."""
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


def slow_n_steps(rows: Sequence[Any], written: int, row: int, n: int, gamma: float) -> tuple[float, float, int]:
    """Return, product of discounts and bootstrap row; of each row the last three are reward, discount and mask."""
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
