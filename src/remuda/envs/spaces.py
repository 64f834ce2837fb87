"""Convert Gymnasium's Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces to `core.Space`.

    observation = observation_space(env.observation_space, "CartPole-v1")
    action = action_space(env.action_space, "CartPole-v1")

Any other space, and a Dict or Tuple without entries, is refused with an EnvSpecError of one sentence. Workers send
the spaces of their envs to the pool as plain values (`space_to_wire`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from remuda.core import Space
from remuda.data.arrays import RESERVED
from remuda.errors import EnvSpecError

SUPPORTED = "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those are supported"
ARRAYS = ("low", "high", "sizes", "starts")


def observation_space(space: gymnasium.Space, label: str) -> Space:
    """Convert an observation space to `core.Space`; `label` names the env in errors.

    Floats are stored as float32, integers and bools with their dtype, discrete values as int64 counted from 0.
    """
    return _convert(space, label, "observation", "")


def action_space(space: gymnasium.Space, label: str) -> Space:
    """Convert an action space to `core.Space`. Boxes must be of floats, but may have infinite bounds."""
    return _convert(space, label, "action", "")


def _convert(space: gymnasium.Space, label: str, which: str, path: str) -> Space:
    kinds = gymnasium.spaces
    if isinstance(space, kinds.Discrete):
        return Space(
            "discrete", (), "int64", n=int(space.n), start=int(space.start), env_dtype=str(np.dtype(space.dtype))
        )
    if isinstance(space, kinds.Box):
        is_float = np.issubdtype(space.dtype, np.floating)
        if is_float or which == "observation":
            box = _box(space, "float32" if is_float else str(np.dtype(space.dtype)))
            return _round_inwards(box, space) if which == "action" else box
    if isinstance(space, kinds.MultiDiscrete):
        sizes, starts = (np.array(each, np.int64) for each in (space.nvec, space.start))
        return Space(
            "multidiscrete", sizes.shape, "int64", sizes=sizes, starts=starts, env_dtype=str(np.dtype(space.dtype))
        )
    if isinstance(space, kinds.MultiBinary):
        return Space("multibinary", tuple(int(size) for size in space.shape), "int8")
    if isinstance(space, kinds.Dict) and space.spaces and all(isinstance(key, str) for key in space.spaces):
        keys = tuple(space.spaces)
        named = zip(_names(keys), space.spaces.values(), strict=True)
        return Space("dict", entries=_entries(named, label, which, path), keys=keys)
    if isinstance(space, kinds.Tuple) and len(space.spaces):
        items = ((f"item{index}", entry) for index, entry in enumerate(space.spaces))
        return Space("tuple", entries=_entries(items, label, which, path))
    raise _refusal(space, label, which, path)


def _entries(named: Iterable[tuple[str, gymnasium.Space]], label: str, which: str, path: str) -> dict[str, Space]:
    return {name: _convert(entry, label, which, f"{path}.{name}" if path else name) for name, entry in named}


def _box(space: gymnasium.spaces.Box, dtype: str) -> Space:
    with np.errstate(over="ignore"):  # the largest float64 is a common bound, and becomes infinite in float32
        low, high = space.low.astype(dtype), space.high.astype(dtype)
    return Space("box", tuple(int(size) for size in space.shape), dtype, low, high)


def _round_inwards(box: Space, space: gymnasium.spaces.Box) -> Space:
    """Return `box` with float32 bounds that lie within the exact bounds of `space`.

    The bounds of `box` were rounded to float32. A bound that was rounded outwards moves inwards by one float32 step,
    because the env might refuse an action that equals the rounded bound.
    """
    assert box.low is not None
    assert box.high is not None
    low, high = np.float32(np.inf), np.float32(-np.inf)
    is_low, is_high = (np.isfinite(bound) for bound in (box.low, box.high))
    return replace(
        box,
        low=np.where(is_low & (box.low < space.low), np.nextafter(box.low, low), box.low),
        high=np.where(is_high & (box.high > space.high), np.nextafter(box.high, high), box.high),
    )


def _names(keys: Sequence[str]) -> Iterator[str]:
    """Yield a unique field name of an `ArrayTuple` for each key; keys that are valid names are kept."""
    taken = {key for key in keys if _is_name(key)}
    for key in keys:
        name = key
        if not _is_name(key):
            stem = re.sub(r"\W", "_", key, flags=re.ASCII)
            name = stem = stem if _is_name(stem) else f"x{stem}"
            count = 1
            while name in taken:
                count += 1
                name = f"{stem}_{count}"
            taken.add(name)
        yield name


def _is_name(key: str) -> bool:
    return key.isidentifier() and not key.startswith("_") and key not in RESERVED


def _refusal(space: gymnasium.Space, label: str, which: str, path: str) -> EnvSpecError:
    text = str(space)
    text = text if len(text) <= 120 else text[:117] + "..."
    floats = " of floats" if which == "action" else ""
    where = f" at {path}" if path else ""
    return EnvSpecError(
        f"{label} has the {which} space {text}{where}; Box{floats}, {SUPPORTED}: change it with a gymnasium "
        "wrapper, in a factory function that you give as env."
    )


def space_to_wire(space: Space) -> dict[str, object]:
    """Return a space as plain values that msgpack can encode."""
    arrays = {name: getattr(space, name) for name in ARRAYS}
    return {
        "kind": space.kind,
        "shape": space.shape,
        "dtype": space.dtype,
        "n": space.n,
        "start": space.start,
        "arrays": {name: array.tobytes() for name, array in arrays.items() if array is not None},
        "entries": [[name, space_to_wire(entry)] for name, entry in space.entries.items()],
        "keys": space.keys,
        "env_dtype": space.env_dtype,
    }


def space_from_wire(values: Mapping[str, Any]) -> Space:
    """Return the space that `space_to_wire` described."""
    shape, dtype = tuple(values["shape"]), values["dtype"]
    arrays = {name: np.frombuffer(data, dtype).reshape(shape).copy() for name, data in values["arrays"].items()}
    entries = {name: space_from_wire(entry) for name, entry in values["entries"]}
    return Space(
        values["kind"],
        shape,
        dtype,
        n=values["n"],
        start=values["start"],
        entries=entries,
        keys=tuple(values["keys"]),
        env_dtype=values["env_dtype"],
        **arrays,
    )
