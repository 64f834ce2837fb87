"""Schedules: numbers as functions of a run's progress from 0 to 1.

3e-4                                constant
linear(3e-4, 0)                     a line from the first value to the second
piecewise(0:3e-4, 0.5:1e-4, 1:0)    lines between the given points
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from remuda.errors import ConfigError

Schedule = Callable[[float], float]

_CALL = re.compile(r"^(linear|piecewise)\((.*)\)$")


def parse_schedule(text: str | float, name: str = "schedule") -> Schedule:
    """Parse a schedule; `name` is the name of the option, for error messages."""
    try:
        points = _points(str(text).strip())
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} is not a schedule: give a number, linear(START, END) or "
            "piecewise(0:VALUE, ..., 1:VALUE), with values of at least 0 and rising positions from 0 to 1."
        ) from None
    # Cache the last value, because the progress is the same in all updates of a round.
    return lru_cache(maxsize=1)(lambda progress: _interpolate(points, progress))


def largest_value(text: str | float) -> float:
    """Return the largest value that a schedule takes."""
    return max(value for _, value in _points(str(text).strip()))


def _points(text: str) -> list[tuple[float, float]]:
    call = _CALL.match(text)
    if call is None:
        points = [(0.0, float(text))]
    elif call[1] == "linear":
        start, end = (float(part) for part in call[2].split(","))
        points = [(0.0, start), (1.0, end)]
    else:
        pairs = [part.split(":") for part in call[2].split(",")]
        points = [(float(position), float(value)) for position, value in pairs]
    positions = [position for position, _ in points]
    if not all(math.isfinite(position) and math.isfinite(value) and value >= 0 for position, value in points):
        raise ValueError(text)
    if any(a >= b for a, b in pairwise(positions)) or positions[0] < 0 or positions[-1] > 1:
        raise ValueError(text)
    return points


def _interpolate(points: list[tuple[float, float]], progress: float) -> float:
    if progress <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if progress <= x1:
            return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)
    return points[-1][1]
