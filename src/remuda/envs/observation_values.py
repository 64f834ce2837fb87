"""Check observations of envs against their space and convert them to the arrays that rollouts store.

    read = reader(env.observation_space, space)      # space: the same space as a `core.Space`
    views[...] = read(obs)                           # writes an array, or a tuple with one value per entry

`read` raises Forbidden if an observation contradicts its space, except that `BoundsCheck` checks the bounds of boxes.
Stored discrete values count from 0, whereas an env counts from the `start` of its space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from remuda.core import Array, ArrayTree, Space
from remuda.data.trees import leaves

OnCast: TypeAlias = Callable[[str], None] | None
# The stored form of one observation: an array, an int, or a tuple with one value for each entry of its space.
Stored: TypeAlias = Any
Reader: TypeAlias = Callable[[Any], Stored]
ROUNDING = np.float32(1e-5)  # tolerance for float bounds; relative for bounds above 1 or below -1


class Forbidden(ValueError):
    """An observation contradicts its space. The message does not name the env, because the caller adds the name."""


def reader(raw: gymnasium.Space, space: Space, name: str = "observation", on_cast: OnCast = None) -> Reader:
    """Return a function that converts an observation of an env to its stored form.

    A list, tuple or Python number is converted if the space requires an array. A box value whose dtype differs from
    that of the space is cast if this loses nothing but float precision. `on_cast`, if given, is called with a
    sentence about each such conversion or cast. Other values that contradict the space raise Forbidden. Values
    outside the bounds of a box are accepted; `BoundsCheck` finds them.
    """
    if space.kind == "dict":
        return _dict_reader(raw, space, name, on_cast)
    if space.kind == "tuple":
        return _tuple_reader(raw, space, name, on_cast)
    kind = {"box": _box_reader, "discrete": _discrete_reader, "multidiscrete": _multi_reader}
    return kind.get(space.kind, _binary_reader)(raw, space, name, on_cast)


def _box_reader(raw: gymnasium.Space, space: Space, name: str, on_cast: OnCast) -> Reader:
    shape, dtype, stored = space.shape, np.dtype(raw.dtype), np.dtype(space.dtype)

    def read(obs: object) -> Array:
        array = _as_array(obs, shape, name, on_cast)
        if array.dtype == dtype:
            return array
        if array.dtype == np.float64 and stored == np.float32 and on_cast is None:
            with np.errstate(over="ignore"):
                return array.astype(np.float32)
        rule = f"{name} has dtype {array.dtype}, its space says {dtype}"
        if array.dtype.kind not in "biuf":
            raise Forbidden(f"{rule}: {_remedy(name)}")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(stored)
        # A cast to floats only rounds, so it is not checked; `find_not_finite` finds values that became infinite.
        if stored.kind != "f" and (is_changed := np.atleast_1d(cast != array)).any():
            at = np.argwhere(is_changed)[0].tolist()
            raise Forbidden(f"{rule}, which cannot hold {np.atleast_1d(array)[tuple(at)]} at {at}: {_remedy(name)}")
        if on_cast is not None:
            on_cast(f"{rule}: it is cast at every step.")
        return cast

    return read


def _discrete_reader(raw: gymnasium.Space, space: Space, name: str, on_cast: OnCast) -> Reader:
    first, last = space.start, space.start + space.n - 1

    def read(obs: object) -> int:
        array = np.asarray(obs)
        if array.shape != () or not np.issubdtype(array.dtype, np.integer):
            raise Forbidden(f"{name} is {obs!r}, its space says an integer: return an int, or change the space.")
        if not first <= int(array) <= last:
            raise Forbidden(f"{name} is {obs!r}, its space says {first} to {last}: widen the space.")
        return int(array) - first

    return read


def _multi_reader(raw: gymnasium.Space, space: Space, name: str, on_cast: OnCast) -> Reader:
    assert space.sizes is not None
    assert space.starts is not None
    sizes, starts, shape = space.sizes, space.starts, space.shape

    def read(obs: object) -> Array:
        array = _as_array(obs, shape, name, on_cast)
        if not np.issubdtype(array.dtype, np.integer):
            raise Forbidden(f"{name} has dtype {array.dtype}, its space says integers: {_remedy(name)}")
        counted: Array = array - starts
        if not ((counted >= 0) & (counted < sizes)).all():
            at = np.argwhere((counted < 0) | (counted >= sizes))[0].tolist()
            first = starts[tuple(at)]
            last = first + sizes[tuple(at)] - 1
            value = array[tuple(at)]
            raise Forbidden(f"{name} is {value} at {at}, its space says {first} to {last}: widen the space.")
        return counted

    return read


def _binary_reader(raw: gymnasium.Space, space: Space, name: str, on_cast: OnCast) -> Reader:
    shape = space.shape

    def read(obs: object) -> Array:
        array = _as_array(obs, shape, name, on_cast)
        if not ((array == 0) | (array == 1)).all():
            at = np.argwhere((array != 0) & (array != 1))[0].tolist()
            raise Forbidden(f"{name} is {array[tuple(at)]} at {at}, its space says 0 or 1: {_remedy(name)}")
        return array

    return read


def _dict_reader(raw: gymnasium.spaces.Dict, space: Space, name: str, on_cast: OnCast) -> Reader:
    reads = [
        (key, reader(raw.spaces[key], entry, f"{name}.{field}", on_cast))
        for key, (field, entry) in zip(space.keys, space.entries.items(), strict=True)
    ]
    keys = set(space.keys)

    def read(obs: object) -> tuple[Stored, ...]:
        if not isinstance(obs, Mapping):
            raise Forbidden(f"{name} is a {type(obs).__name__}, its space says a dict: {_remedy(name)}")
        if obs.keys() != keys:
            raise Forbidden(f"{name} has the keys {_listed(obs)}, its space says {_listed(keys)}: {_remedy(name)}")
        return tuple([entry(obs[key]) for key, entry in reads])

    return read


def _tuple_reader(raw: gymnasium.spaces.Tuple, space: Space, name: str, on_cast: OnCast) -> Reader:
    entries = zip(raw.spaces, space.entries.items(), strict=True)
    reads = [reader(part, entry, f"{name}.{field}", on_cast) for part, (field, entry) in entries]

    def read(obs: object) -> tuple[Stored, ...]:
        if not isinstance(obs, (tuple, list)):
            raise Forbidden(f"{name} is a {type(obs).__name__}, its space says a tuple: {_remedy(name)}")
        if len(obs) != len(reads):
            raise Forbidden(f"{name} has {len(obs)} entries, its space says {len(reads)}: {_remedy(name)}")
        return tuple([entry(value) for entry, value in zip(reads, obs, strict=True)])

    return read


def find_not_finite(reward: object, obs: ArrayTree) -> str | None:
    """Return a sentence about the reward or observation value that is not finite, or None if all are finite."""
    stored = np.asarray(reward, np.float64) if isinstance(reward, int | float | np.number | np.ndarray) else None
    with np.errstate(over="ignore"):
        if stored is None or stored.shape != () or not np.isfinite(stored.astype(np.float32)).all():
            plain = reward.item() if isinstance(reward, np.number) else reward
            return f"reward is {plain!r}, rewards are finite float32 numbers: fix its step()."
    for path, array in leaves(obs, "observation"):
        if not np.isfinite(array).all():
            first = np.argwhere(~np.isfinite(np.atleast_1d(array)))[0].tolist()
            return f"{path} is {np.atleast_1d(array)[tuple(first)]} at {first}: fix what computes it."
    return None


def _as_array(obs: object, shape: tuple[int, ...], name: str, on_cast: OnCast) -> Array:
    """Return `obs`, which may be a list, tuple or number, as an array; raise Forbidden if it does not fit `shape`."""
    if not isinstance(obs, np.ndarray | np.generic):
        given = f"{name} is a {type(obs).__name__}, its space says a numpy array"
        try:
            array = np.asarray(obs) if isinstance(obs, list | tuple | bool | int | float) else None
        except ValueError:  # raised for nested lists of different lengths
            array = None
        if array is None or array.dtype.kind not in "biuf":
            raise Forbidden(f"{given}: {_remedy(name)}")
        if on_cast is not None:
            on_cast(f"{given}: it is converted at every step.")
        obs = array
    if obs.shape != shape:
        raise Forbidden(f"{name} has shape {obs.shape}, its space says {shape}: {_remedy(name)}")
    return obs  # type: ignore[return-value]  # numpy scalars behave like arrays without axes


class BoundsCheck:
    """Finds observations outside the bounds of their space, with a tolerance for rounded floats."""

    def __init__(self, space: Space) -> None:
        boxes = [(path, leaf) for path, leaf in space.leaves("observation") if leaf.kind == "box"]
        self._bounds = {path: bounds for path, leaf in boxes if (bounds := _bounds_of(leaf)) is not None}
        self._exact_bounds: dict[str, tuple[Any, Any]] = {path: (leaf.low, leaf.high) for path, leaf in boxes}

    @property
    def is_needed(self) -> bool:
        """Whether some stored value could be out of bounds; False if all bounds are the limits of their dtype."""
        return bool(self._bounds)

    def find(self, obs: ArrayTree) -> str | None:
        """Return a sentence about the first stored value that is out of bounds, or None if there is none."""
        for path, array in leaves(obs, "observation"):
            if path in self._bounds:
                low, high = self._bounds[path]
                outside = (array < low) | (array > high)
                if outside.any():
                    at = np.argwhere(np.atleast_1d(outside))[0].tolist()
                    exact = self._exact_bounds[path]
                    value, low, high = (np.atleast_1d(each)[tuple(at)] for each in (array, *exact))
                    return f"{path} is {value} at {at}, its space says {low:g} to {high:g}"
        return None


def _bounds_of(leaf: Space) -> tuple[Array, Array] | None:
    """Return (low, high) of a box, widened by `ROUNDING` for floats, or None if no value can be out of bounds."""
    assert leaf.low is not None
    assert leaf.high is not None
    low, high = leaf.low, leaf.high
    if np.dtype(leaf.dtype).kind == "f":
        with np.errstate(over="ignore"):  # a common bound is the largest float32, which overflows here
            low = low - ROUNDING * np.maximum(1.0, np.abs(low))
            high = high + ROUNDING * np.maximum(1.0, np.abs(high))
        is_free = np.isinf(low).all() and np.isinf(high).all()
    elif np.dtype(leaf.dtype).kind in "iu":
        limits = np.iinfo(leaf.dtype)
        is_free = (low == limits.min).all() and (high == limits.max).all()
    else:
        is_free = np.True_
    return None if is_free else (low, high)


def _remedy(name: str) -> str:
    space = name.partition(".")[0] + "_space"
    return f"return what {space} promises, or change {space}."


def _listed(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"
