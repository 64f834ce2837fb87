"""Functions that DDPG, TD3 and SAC share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remuda.core import Losses


def joined(critic: Losses, actor: Losses) -> Losses:
    """Merge the losses of critics and actor into one object; its priorities are those of the critics' losses."""
    return Losses({**critic.groups, **actor.groups}, {**critic.metrics, **actor.metrics}, critic.priority)


def smallest(values: Sequence[Tensor]) -> Tensor:
    """Return the smallest of the critics' values for each row, to reduce overestimation (arXiv 1802.09477)."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).amin(0)
