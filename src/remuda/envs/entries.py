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


class Forbidden(ValueError):
    """A value that its space forbids; whoever knows the env adds which one it was."""


# --- observations: from an env to arrays ----------------------------------------------------------------------------


def reader(raw: Any, space: Space, name: str = "observation") -> Callable[[Any], Any]:
    """A function from what an env returns to what is stored of it: a value, or a tuple of them for its entries."""
    if space.kind == "dict":
        return _dict_reader(raw, space, name)
    if space.kind == "tuple":
        return _tuple_reader(raw, space, name)
    kind = {"box": _box_reader, "discrete": _discrete_reader, "multidiscrete": _multi_reader}
    return kind.get(space.kind, _binary_reader)(raw, space, name)


def _box_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    shape, dtype = space.shape, np.dtype(raw.dtype)

    def read(obs: Any) -> Any:
        _require_array(obs, shape, name)
        if obs.dtype != dtype:
            raise Forbidden(f"{name} has dtype {obs.dtype}, its space says {dtype}: {_remedy(name)}")
        return obs

    return read


def _discrete_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    first, last = space.start, space.start + space.n - 1

    def read(obs: Any) -> int:
        array = np.asarray(obs)
        if array.shape != () or not np.issubdtype(array.dtype, np.integer):
            raise Forbidden(f"{name} is {obs!r}, its space says an integer: return an int, or change the space.")
        if not first <= int(array) <= last:
            raise Forbidden(f"{name} is {obs!r}, its space says {first} to {last}: widen the space.")
        return int(array) - first

    return read


def _multi_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    assert space.sizes is not None
    assert space.starts is not None
    sizes, starts, shape = space.sizes, space.starts, space.shape

    def read(obs: Any) -> Any:
        _require_array(obs, shape, name)
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


def _binary_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    shape = space.shape

    def read(obs: Any) -> Any:
        _require_array(obs, shape, name)
        if not ((obs == 0) | (obs == 1)).all():
            at = np.argwhere((obs != 0) & (obs != 1))[0].tolist()
            raise Forbidden(f"{name} is {obs[tuple(at)]} at {at}, its space says 0 or 1: {_remedy(name)}")
        return obs

    return read


def _dict_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    reads = [
        (key, reader(raw.spaces[key], entry, f"{name}.{field}"))
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


def _tuple_reader(raw: Any, space: Space, name: str) -> Callable[[Any], Any]:
    entries = zip(raw.spaces, space.entries.items(), strict=True)
    reads = [reader(part, entry, f"{name}.{field}") for part, (field, entry) in entries]

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


def _require_array(obs: Any, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(obs, np.ndarray | np.generic):
        raise Forbidden(f"{name} is a {type(obs).__name__}, its space says a numpy array: {_remedy(name)}")
    if obs.shape != shape:
        raise Forbidden(f"{name} has shape {obs.shape}, its space says {shape}: {_remedy(name)}")


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
