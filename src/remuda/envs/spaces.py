"""Gymnasium spaces as `core.Space`: Box and Discrete, and one sentence for every other.

    observation = observation_space(env.observation_space, "CartPole-v1")
    action = action_space(env.action_space, "CartPole-v1")

The wire form of a space is how a worker tells the pool what its envs are like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from remuda.core import Space
from remuda.errors import EnvSpecError


def observation_space(space: Any, label: str) -> Space:
    """Floats are stored as float32, integers and bools as they are, discrete values as int64 from 0."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return _discrete(space)
    if isinstance(space, gymnasium.spaces.Box):
        return _box(space, "float32" if np.issubdtype(space.dtype, np.floating) else str(np.dtype(space.dtype)))
    raise _refusal("observation", space, label)


def action_space(space: Any, label: str) -> Space:
    """Discrete, or Box of floats, with or without finite bounds."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return _discrete(space)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _box(space, "float32")
    raise _refusal("action", space, label)


def _discrete(space: Any) -> Space:
    return Space("discrete", (), "int64", n=int(space.n), start=int(space.start))


def _box(space: Any, dtype: str) -> Space:
    with np.errstate(over="ignore"):  # the largest float64 is a usual bound, and infinite in float32
        low, high = space.low.astype(dtype), space.high.astype(dtype)
    return Space("box", tuple(int(size) for size in space.shape), dtype, low, high)


def _refusal(which: str, space: Any, label: str) -> EnvSpecError:
    text = str(space)
    text = text if len(text) <= 120 else text[:117] + "..."
    floats = " of floats" if which == "action" else ""
    return EnvSpecError(
        f"{label} has the {which} space {text}; Box{floats} and Discrete are supported: flatten it with a "
        "gymnasium wrapper, in a factory function that you give as env."
    )


def space_to_wire(space: Space) -> dict[str, Any]:
    """A space as msgpack carries it."""
    bounds = (
        {} if space.low is None or space.high is None else {"low": space.low.tobytes(), "high": space.high.tobytes()}
    )
    return {
        "kind": space.kind,
        "shape": space.shape,
        "dtype": space.dtype,
        "n": space.n,
        "start": space.start,
        **bounds,
    }


def space_from_wire(values: Mapping[str, Any]) -> Space:
    shape, dtype = tuple(values["shape"]), values["dtype"]
    low, high = (
        np.frombuffer(values[bound], dtype).reshape(shape).copy() if bound in values else None
        for bound in ("low", "high")
    )
    return Space(values["kind"], shape, dtype, low, high, values["n"], values["start"])
