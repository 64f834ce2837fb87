"""Statistics of the last finished episodes, and the reduction of metrics over several rounds.

>>> window = Window(size=2)
>>> for ep_rew in (1.0, 2.0, 4.0):                       # the values of each finished episode
...     window.add({"ep_rew": ep_rew})
>>> window.summary()["rollout/ep_rew_mean"]
3.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from remuda.errors import ConfigError

STATISTICS = ("mean", "std", "median", "min", "max")


class Window:
    """The values of the last `size` finished episodes. Different episodes may report different fields."""

    def __init__(self, size: int = 100) -> None:
        self._episodes: deque[dict[str, float]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._episodes)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of one finished episode."""
        self._episodes.append(dict(values))

    def get_state(self) -> list[dict[str, float]]:
        """Return the episodes in the window, for a checkpoint."""
        return list(self._episodes)

    def set_state(self, episodes: Iterable[Mapping[str, float]]) -> None:
        """Replace the episodes in the window with the episodes of a checkpoint."""
        self._episodes.clear()
        self._episodes.extend(dict(values) for values in episodes)

    def summary(self) -> dict[str, float]:
        """Return statistics of each field over the episodes that report it; omit fields that no episode reports."""
        fields: dict[str, list[float]] = {}
        for episode in self._episodes:
            for name, value in episode.items():
                if value == value:  # leave out NaN, because a single NaN would make all statistics NaN
                    fields.setdefault(name, []).append(value)
        metrics: dict[str, float] = {}
        for name, values in fields.items():
            array = np.asarray(values, np.float64)
            with np.errstate(invalid="ignore"):  # numpy warns about the deviation of infinite returns, which is NaN
                numbers = (array.mean(), array.std(), np.median(array), array.min(), array.max())
            for statistic, number in zip(STATISTICS, numbers, strict=True):
                metrics[f"rollout/{name}_{statistic}"] = float(number)
        return metrics


def summarize(name: str, values: Sequence[float]) -> float:
    """Reduce the values that a metric had in several rounds to one value.

    Metrics in replay/ are counts and ratios of the whole run, so the last value is returned. Metrics that end in
    _max are reduced to their maximum, and all other metrics to their mean.
    """
    if name.startswith("replay/"):
        return values[-1]
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def as_number(name: str, value: object) -> float:
    """Return a metric as a float; raise ConfigError if a callback added a value that is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"round.metrics[{name!r}] is {value!r}: a callback may only add numbers.") from None
