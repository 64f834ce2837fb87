"""Values between an env and arrays: observations are checked and stored, actions handed out as their space has them.

    read = reader(env.observation_space, observation)            # raises Forbidden for what the space forbids
    views[...] = read(obs)                                       # one array, or a tree of one for each entry
    write = writer(env.action_space, action)
    for env, action in zip(envs, write(actions)):                # arrays [B] to what each of B envs is given
        env.step(action)

Arrays count from 0 where an env counts from the `start` of its space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.core import Space
from remuda.data.arrays import ArrayTuple
from remuda.data.trees import leaves

OnCast = Callable[[str], None] | None
ROUNDING = np.float32(1e-5)  # of bounds, relative to those beyond 1


class Forbidden(ValueError):
    """A value that its space forbids; whoever knows the env adds which one it was."""


# --- observations: from an env to arrays ----------------------------------------------------------------------------


def reader(raw: Any, space: Space, name: str = "observation", on_cast: OnCast = None) -> Callable[[Any], Any]:
    """Return a function from what an env returns to what is stored of it: a value, or a tuple of its entries.

    Values of another dtype, lists and tuples are cast where that loses nothing but the precision of floats;
    `on_cast` is then called with a sentence, if it is given.
    """
    if space.kind == "dict":
        return _dict_reader(raw, space, name, on_cast)
    if space.kind == "tuple":
        return _tuple_reader(raw, space, name, on_cast)
    kind = {"box": _box_reader, "discrete": _discrete_reader, "multidiscrete": _multi_reader}
    return kind.get(space.kind, _binary_reader)(raw, space, name, on_cast)


def _box_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    shape, dtype, stored = space.shape, np.dtype(raw.dtype), np.dtype(space.dtype)

    def read(obs: Any) -> Any:
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
        # Floats are only rounded; one that becomes infinite is refused with all that are, see find_not_finite.
        if stored.kind != "f" and (is_changed := np.atleast_1d(cast != array)).any():
            at = np.argwhere(is_changed)[0].tolist()
            raise Forbidden(f"{rule}, which cannot hold {np.atleast_1d(array)[tuple(at)]} at {at}: {_remedy(name)}")
        if on_cast is not None:
            on_cast(f"{rule}: it is cast at every step.")
        return cast

    return read


def _discrete_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    first, last = space.start, space.start + space.n - 1

    def read(obs: Any) -> int:
        array = np.asarray(obs)
        if array.shape != () or not np.issubdtype(array.dtype, np.integer):
            raise Forbidden(f"{name} is {obs!r}, its space says an integer: return an int, or change the space.")
        if not first <= int(array) <= last:
            raise Forbidden(f"{name} is {obs!r}, its space says {first} to {last}: widen the space.")
        return int(array) - first

    return read


def _multi_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    assert space.sizes is not None
    assert space.starts is not None
    sizes, starts, shape = space.sizes, space.starts, space.shape

    def read(obs: Any) -> Any:
        obs = _as_array(obs, shape, name, on_cast)
        if not np.issubdtype(obs.dtype, np.integer):
            raise Forbidden(f"{name} has dtype {obs.dtype}, its space says integers: {_remedy(name)}")
        counted = obs - starts
        if not ((counted >= 0) & (counted < sizes)).all():
            at = np.argwhere((counted < 0) | (counted >= sizes))[0].tolist()
            first = starts[tuple(at)]
            last = first + sizes[tuple(at)] - 1
            raise Forbidden(f"{name} is {obs[tuple(at)]} at {at}, its space says {first} to {last}: widen the space.")
        return counted

    return read


def _binary_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    shape = space.shape

    def read(obs: Any) -> Any:
        obs = _as_array(obs, shape, name, on_cast)
        if not ((obs == 0) | (obs == 1)).all():
            at = np.argwhere((obs != 0) & (obs != 1))[0].tolist()
            raise Forbidden(f"{name} is {obs[tuple(at)]} at {at}, its space says 0 or 1: {_remedy(name)}")
        return obs

    return read


def _dict_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    reads = [
        (key, reader(raw.spaces[key], entry, f"{name}.{field}", on_cast))
        for key, (field, entry) in zip(space.keys, space.entries.items(), strict=True)
    ]
    keys = set(space.keys)

    def read(obs: Any) -> Any:
        if not isinstance(obs, Mapping):
            raise Forbidden(f"{name} is a {type(obs).__name__}, its space says a dict: {_remedy(name)}")
        if obs.keys() != keys:
            raise Forbidden(f"{name} has the keys {_listed(obs)}, its space says {_listed(keys)}: {_remedy(name)}")
        return tuple([entry(obs[key]) for key, entry in reads])

    return read


def _tuple_reader(raw: Any, space: Space, name: str, on_cast: OnCast) -> Callable[[Any], Any]:
    entries = zip(raw.spaces, space.entries.items(), strict=True)
    reads = [reader(part, entry, f"{name}.{field}", on_cast) for part, (field, entry) in entries]

    def read(obs: Any) -> Any:
        if not isinstance(obs, (tuple, list)):
            raise Forbidden(f"{name} is a {type(obs).__name__}, its space says a tuple: {_remedy(name)}")
        if len(obs) != len(reads):
            raise Forbidden(f"{name} has {len(obs)} entries, its space says {len(reads)}: {_remedy(name)}")
        return tuple([entry(value) for entry, value in zip(reads, obs, strict=True)])

    return read


def find_not_finite(reward: Any, obs: Any) -> str | None:
    """Return what is wrong with a reward and a stored observation that are to be finite, or None."""
    stored = np.asarray(reward, np.float64) if isinstance(reward, int | float | np.number | np.ndarray) else None
    with np.errstate(over="ignore"):
        if stored is None or stored.shape != () or not np.isfinite(stored.astype(np.float32)).all():
            plain = reward.item() if isinstance(reward, np.number) else reward
            return f"reward is {plain!r}, rewards are finite float32 numbers: repair its step()."
    for path, array in leaves(obs, "observation"):
        if not np.isfinite(array).all():
            first = np.argwhere(~np.isfinite(np.atleast_1d(array)))[0].tolist()
            return f"{path} is {np.atleast_1d(array)[tuple(first)]} at {first}: repair what computes it."
    return None


def _as_array(obs: Any, shape: tuple[int, ...], name: str, on_cast: OnCast) -> Any:
    """Return an observation as an array of this shape; lists, tuples and numbers are accepted."""
    if not isinstance(obs, np.ndarray | np.generic):
        given = f"{name} is a {type(obs).__name__}, its space says a numpy array"
        try:
            array = np.asarray(obs) if isinstance(obs, list | tuple | bool | int | float) else None
        except ValueError:  # lists of different lengths
            array = None
        if array is None or array.dtype.kind not in "biuf":
            raise Forbidden(f"{given}: {_remedy(name)}")
        if on_cast is not None:
            on_cast(f"{given}: it is converted at every step.")
        obs = array
    if obs.shape != shape:
        raise Forbidden(f"{name} has shape {obs.shape}, its space says {shape}: {_remedy(name)}")
    return obs


class BoundsCheck:
    """Finds observations outside the bounds of their space; float bounds are meant up to rounding."""

    def __init__(self, space: Space) -> None:
        boxes = [(path, leaf) for path, leaf in space.leaves("observation") if leaf.kind == "box"]
        self._bounds = {path: bounds for path, leaf in boxes if (bounds := _bounds_of(leaf)) is not None}
        self._said: dict[str, Any] = {
            path: (leaf.low, leaf.high) for path, leaf in boxes
        }  # without room for rounding

    @property
    def is_needed(self) -> bool:
        """False where nothing that can be stored is out of bounds."""
        return bool(self._bounds)

    def find(self, obs: Any) -> str | None:
        """Return a sentence about the first stored value out of bounds, or None."""
        for path, array in leaves(obs, "observation"):
            if path in self._bounds:
                low, high = self._bounds[path]
                outside = (array < low) | (array > high)
                if outside.any():
                    at = np.argwhere(np.atleast_1d(outside))[0].tolist()
                    low, high = self._said[path]
                    value, low, high = (np.atleast_1d(each)[tuple(at)] for each in (array, low, high))
                    return f"{path} is {value} at {at}, its space says {low:g} to {high:g}"
        return None


def _bounds_of(leaf: Space) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return low and high of a box whose dtype has values outside of them, with room for rounding."""
    assert leaf.low is not None
    assert leaf.high is not None
    low, high = leaf.low, leaf.high
    if np.dtype(leaf.dtype).kind == "f":
        with np.errstate(over="ignore"):  # the largest float32 is a usual bound
            low = low - ROUNDING * np.maximum(1.0, np.abs(low))
            high = high + ROUNDING * np.maximum(1.0, np.abs(high))
        is_free = np.isinf(low).all() and np.isinf(high).all()
    elif np.dtype(leaf.dtype).kind in "iu":
        limits = np.iinfo(leaf.dtype)
        is_free = (low == limits.min).all() and (high == limits.max).all()
    else:
        is_free = True
    return None if is_free else (low, high)


def _remedy(name: str) -> str:
    space = name.partition(".")[0] + "_space"
    return f"return what {space} promises, or change {space}."


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


# --- actions: from arrays to envs -----------------------------------------------------------------------------------


def writer(raw: Any, space: Space) -> Callable[[Any], Any]:
    """A function from arrays [B], in the tree of the space, to one action for each of B envs, as its space has it.

    What an env is given is its own: it may keep or change it.
    """
    dtype = None if raw.dtype is None else np.dtype(raw.dtype)
    if space.kind == "discrete":
        if space.start or dtype != np.int64:
            return lambda array: (array + space.start).astype(dtype)
        return lambda array: array  # iterating it makes scalars, which are copies
    if space.kind == "multidiscrete":
        return lambda array: (array + space.starts).astype(dtype)
    if space.is_leaf and not space.shape:
        return lambda array: [np.array(each, dtype) for each in array]  # arrays without axes, not scalars
    if space.is_leaf:
        return lambda array: array.astype(dtype)
    if space.kind == "tuple":
        parts = [writer(part, entry) for part, entry in zip(raw.spaces, space.entries.values(), strict=True)]
        return lambda tree: list(zip(*(write(each) for write, each in zip(parts, tree, strict=True)), strict=True))
    keys = space.keys
    parts = [writer(raw.spaces[key], entry) for key, entry in zip(keys, space.entries.values(), strict=True)]

    def write_dict(tree: Any) -> list[dict[str, Any]]:
        columns = [write(each) for write, each in zip(parts, tree, strict=True)]
        return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]

    return write_dict


def action_leaves(space: Space, action: Any, count: int, path: str = "") -> Iterator[NDArray[Any]]:
    """The leaves of actions for so many envs, in the order of the space's; dicts may use the env's own keys."""
    name = f"actions {path}" if path else "actions"
    if space.is_leaf:
        array = np.asarray(action)
        if array.shape != (count, *space.shape):
            raise ValueError(
                f"{name} have shape {array.shape}, this slot takes {(count, *space.shape)}: one action for each env."
            )
        yield array
        return
    for (field, entry), value in zip(space.entries.items(), _values(space, action, name), strict=True):
        yield from action_leaves(entry, value, count, f"{path}.{field}" if path else field)


def _values(space: Space, action: Any, name: str) -> Sequence[Any]:
    fields = tuple(space.entries)
    if isinstance(action, ArrayTuple):
        found: Sequence[Any] = action._fields
        if action._fields == fields:
            return action
    elif isinstance(action, Mapping):
        found = tuple(action)
        for names in (space.keys, fields):
            if set(found) == set(names):
                return [action[each] for each in names]
    elif isinstance(action, (tuple, list)):
        found = [f"item{index}" for index in range(len(action))]
        if len(action) == len(fields):
            return action
    else:
        raise ValueError(
            f"{name} are a {type(action).__name__}, this slot takes entries {', '.join(fields)}: give them."
        )
    raise ValueError(
        f"{name} have the entries {_listed(found)}, this slot takes {', '.join(fields)}: give exactly these."
    )


def stored_action(space: Space, action: Any) -> Any:
    """One action as the env has it, as arrays [1] in the tree of the space: what `send` takes."""
    if space.kind == "discrete":
        return np.asarray([action]) - space.start
    if space.kind == "multidiscrete":
        return np.asarray(action)[None] - space.starts
    if space.is_leaf:
        return np.asarray(action)[None]
    values = _values(space, action, "actions")
    return tuple(stored_action(entry, value) for entry, value in zip(space.entries.values(), values, strict=True))
