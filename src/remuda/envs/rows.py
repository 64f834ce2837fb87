"""The rows into which a group of envs writes its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remuda.core import Array, Step
from remuda.processes.notices import Notice


@dataclass
class Rows:
    """Arrays of one `EnvGroup`, one row per env, and the episodes and notices that its envs report."""

    step: Step
    restarts: Array  # int64: how many times each env was rebuilt since the last Envs.reset()
    finished: Array  # int64: number of episodes that each env has finished so far
    all_finished: Array  # the array `finished` of the whole LocalEnvs or pool, including envs of other workers
    info: Mapping[str, Array] = field(default_factory=dict)  # float64 entries of info; nan where an env has none
    # Indices of rows in which the next step must first set terminated and truncated to False, and mask to True.
    marked: list[int] = field(default_factory=list)
    episodes: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (env, values) of finished episodes
    notices: list[Notice] = field(default_factory=list)
    # Keys of what is reported only once: the file:line of a failure (for its traceback), and "bounds of LABEL" (for
    # the warning about observations that are out of bounds).
    places: set[str] = field(default_factory=set)


def scalar_view(array: Array) -> Any:
    """Return a memoryview of the array; writing one number through it takes half the time of indexing the array."""
    return memoryview(array)  # type: ignore[arg-type]
