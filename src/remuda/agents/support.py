"""The support of return distributions, which is the range of their atoms, from v_min to v_max.

The support can be derived from observed returns. `ClippedTargets` checks whether it is wide enough.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger("remuda.agents")

DEFAULT_SUPPORT = (-10.0, 10.0)  # used until returns are observed, or if all rewards are 0
MARGIN = 0.25  # margin on either side, as a fraction of the observed range
GROWTH = 3.0  # factor on the largest observed return, because a learned policy earns more than a random one
WATCHED_UPDATES = 200  # updates between two reads of the clipped fraction; a read waits for the device
NEGLIGIBLE = 1e-3  # atoms with a lower probability are ignored when the range of targets is measured
MAX_CLIPPED = 0.02  # clipped fraction of target probability above which a warning is logged


class ReturnRange(NamedTuple):
    """Range of the discounted returns of stored rows; a return ends with the episode or the newest stored row."""

    low: float
    high: float
    steady: float  # the return if every future reward were equal to the mean reward


def derive_support(seen: ReturnRange) -> tuple[float, float]:
    """Return v_min and v_max; if no reward other than 0 was observed, log a warning and return the default.

    The support covers 0, the observed returns and `seen.steady`, with a margin on both sides. Observed returns lack
    the rewards that would follow a truncation or the newest row; `seen.steady` is an estimate that includes them.
    v_max is at least `GROWTH` times the largest observed return.
    """
    low, high = min(0.0, seen.low, seen.steady), max(0.0, seen.high, seen.steady)
    if high == low:
        logger.warning(
            "no reward other than 0 was seen before learning started, so returns are taken to be in %g..%g: set "
            "algo.v_min and algo.v_max, or raise algo.learning_starts.",
            *DEFAULT_SUPPORT,
        )
        return DEFAULT_SUPPORT
    margin = MARGIN * (high - low)
    return low - margin, max(high + margin, GROWTH * seen.high)


class ClippedTargets:
    """Warns once if more than `MAX_CLIPPED` of the target distributions' probability lies beyond the support.

    The clipped fractions stay on the device and are read only every `WATCHED_UPDATES` updates.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._begin()

    def _begin(self) -> None:
        self._shares: list[Tensor] = []
        self._lows: list[Tensor] = []
        self._highs: list[Tensor] = []

    def add(self, share: Tensor, low: Tensor, high: Tensor, support: Tensor) -> None:
        """Add the results of `clipped_share` for one update. In every `WATCHED_UPDATES`-th call, check their mean."""
        if self._has_warned:
            return
        self._shares.append(share)
        self._lows.append(low)
        self._highs.append(high)
        if len(self._shares) < WATCHED_UPDATES:
            return
        clipped = float(torch.stack(self._shares).mean())
        if clipped > MAX_CLIPPED:
            self._has_warned = True
            logger.warning(
                "%.0f %% of target distributions are clipped to the support %g..%g, as they reach from %.4g to %.4g: "
                "set algo.v_min and algo.v_max to the smallest and largest discounted return.",
                100 * clipped,
                float(support[0]),
                float(support[-1]),
                float(torch.stack(self._lows).amin()),
                float(torch.stack(self._highs).amax()),
            )
        self._begin()


def clipped_share(p: Tensor, r: Tensor, discount: Tensor, support: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fraction of target probability that lies beyond the support, as a mean over rows.

    The target of each row has the probabilities p [N, atoms] at the atoms r + discount * support. Also return the
    lowest and the highest atom of all rows, ignoring atoms whose probability is below `NEGLIGIBLE`.
    """
    rounding = 1e-5 * (support[-1] - support[0])
    shifted = r.unsqueeze(-1) + discount.unsqueeze(-1) * support
    is_beyond = (shifted < support[0] - rounding) | (shifted > support[-1] + rounding)
    is_negligible = p < NEGLIGIBLE
    low, high = (
        shifted.masked_fill(is_negligible, torch.inf).amin(),
        shifted.masked_fill(is_negligible, -torch.inf).amax(),
    )
    return (p * is_beyond).sum(-1).mean(), low, high
