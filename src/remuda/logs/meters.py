"""What the last finished episodes were like.

>>> window = Window(size=2)
>>> for ep_rew in (1.0, 2.0, 4.0):                       # a scheme hands over each finished episode's values
...     window.add({"ep_rew": ep_rew})
>>> window.summary()["rollout/ep_rew_mean"]
3.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from remuda.errors import ConfigError

STATISTICS = ("mean", "std", "median", "min", "max")


class Window:
    """The values of the last `size` episodes, whichever fields each of them had."""

    def __init__(self, size: int = 100) -> None:
        self._episodes: deque[dict[str, float]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._episodes)

    def add(self, values: Mapping[str, float]) -> None:
        """One finished episode. Everything that costs time is left to `summary`."""
        self._episodes.append(dict(values))

    def get_state(self) -> list[dict[str, float]]:
        return list(self._episodes)

    def set_state(self, episodes: Iterable[Mapping[str, float]]) -> None:
        self._episodes.clear()
        self._episodes.extend(dict(values) for values in episodes)

    def summary(self) -> dict[str, float]:
        """Statistics of each field over the episodes in which it was a number; fields without any are left out."""
        fields: dict[str, list[float]] = {}
        for episode in self._episodes:
            for name, value in episode.items():
                if value == value:  # NaN alone differs from itself: the env had nothing to say
                    fields.setdefault(name, []).append(value)
        metrics: dict[str, float] = {}
        for name, values in fields.items():
            array = np.asarray(values, np.float64)
            with np.errstate(invalid="ignore"):  # an infinite return has an infinite mean and no deviation
                numbers = (array.mean(), array.std(), np.median(array), array.min(), array.max())
            for statistic, number in zip(STATISTICS, numbers, strict=True):
                metrics[f"rollout/{name}_{statistic}"] = float(number)
        return metrics


def summarize(name: str, of_rounds: Sequence[float]) -> float:
    """Values of the rounds of a line: the largest, or, of counts and ratios so far, the last, or the mean."""
    if name.startswith("replay/"):
        return of_rounds[-1]
    return max(of_rounds) if name.endswith("_max") else sum(of_rounds) / len(of_rounds)


def as_number(name: str, value: Any) -> float:
    """Return a metric as a float: a callback may have added anything."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"round.metrics[{name!r}] is {value!r}: a callback may only add numbers.") from None
