"""Discounted returns of what a ring holds."""

from __future__ import annotations

import numpy as np

from remuda.replay.ring import Ring, unbroken


def return_range(ring: Ring, gamma: float) -> tuple[float, float, float]:
    """Return the smallest and largest discounted return of all real rows, and that of the mean reward forever.

    Returns end where episodes do, and with the newest row: nothing is bootstrapped. With a gamma of 1 rewards do not
    add up to a finite return forever, and the last number is 0.
    """
    low, high, total, count = 0.0, 0.0, 0.0, 0
    for group in range(ring.groups):
        columns, first, end = ring.columns(group), ring.oldest(group), int(ring.look(group))
        if first >= end:
            continue
        places = np.concatenate([np.arange(part.start, part.stop) for part, _ in unbroken(first, end, ring.capacity)])
        reward, discount, mask = (x[places, columns] for x in (ring.rows.reward, ring.rows.discount, ring.rows.mask))
        following = np.zeros(reward.shape[1])
        for t in reversed(range(len(reward))):
            following = np.where(mask[t], reward[t] + gamma * discount[t] * following, 0.0)
            low, high = min(low, float(following.min())), max(high, float(following.max()))
        total, count = total + float(reward[mask].sum(dtype=np.float64)), count + int(np.count_nonzero(mask))
    steady = total / max(1, count) / (1 - gamma) if gamma < 1 else 0.0
    return low, high, steady
