"""The rows that a group of envs writes its answers to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from remuda.core import Step
from remuda.processes.notices import Notice


@dataclass
class Rows:
    """Where envs that are stepped together write, and what else they report."""

    step: Step
    restarts: NDArray[Any]  # int64, of each env, since the last reset
    finished: NDArray[Any]  # int64, episodes that each env has finished
    all_finished: NDArray[Any]  # the same of every env of the group, in this process or others
    info: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # float64, nan where info has no such number
    marked: list[int] = field(default_factory=list)  # rows that are not those of an ordinary step: an end, no mask
    episodes: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # env, values of the one that ended
    notices: list[Notice] = field(default_factory=list)
    places: set[str] = field(default_factory=set)  # file:line of failures whose traceback was reported
