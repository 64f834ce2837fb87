"""Convert actions between the arrays that rollouts store and the values that an env takes.

    write = writer(env.action_space, space)                      # space: the same space as a `core.Space`
    for env, action in zip(envs, write(actions)):                # from arrays [B] to one action for each of B envs
        env.step(action)

Stored discrete values count from 0, whereas an env counts from the `start` of its space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from remuda.core import Actions, Array, ArrayTree, Space
from remuda.data.arrays import ArrayTuple

Writer: TypeAlias = Callable[[ArrayTree], Sequence[Any]]


def writer(raw: gymnasium.Space, space: Space) -> Writer:
    """Return a function that converts stored actions [B] to B actions of the env's own space, one for each env.

    The actions are copies, which envs may keep or modify.
    """
    dtype = None if raw.dtype is None else np.dtype(raw.dtype)
    if space.kind == "discrete":
        if space.start or dtype != np.int64:
            return lambda array: (array + space.start).astype(dtype)
        return lambda array: array  # iterating over the array gives scalars, which are copies
    if space.kind == "multidiscrete":
        return lambda array: (array + space.starts).astype(dtype)
    if space.is_leaf and not space.shape:
        return lambda array: [np.array(each, dtype) for each in array]  # the env expects an array of shape ()
    if space.is_leaf:
        return lambda array: array.astype(dtype)
    if space.kind == "tuple":
        parts = [writer(part, entry) for part, entry in zip(raw.spaces, space.entries.values(), strict=True)]
        return lambda tree: list(zip(*(write(each) for write, each in zip(parts, tree, strict=True)), strict=True))
    keys = space.keys
    parts = [writer(raw.spaces[key], entry) for key, entry in zip(keys, space.entries.values(), strict=True)]

    def write_dict(tree: ArrayTree) -> list[dict[str, object]]:
        columns = [write(each) for write, each in zip(parts, tree, strict=True)]
        return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]

    return write_dict


def action_leaves(space: Space, action: Actions, count: int, path: str = "") -> Iterator[Array]:
    """Yield one array [count, ...] for each leaf of `space`, in the order of `space`, from actions for `count` envs.

    A dict in `action` may have the keys of the env's own space or the field names of `space`. Raise ValueError if an
    entry is missing or unknown, if a shape is wrong, or if discrete actions are not integers.
    """
    name = f"actions {path}" if path else "actions"
    if space.is_leaf:
        array = np.asarray(action)
        if array.shape != (count, *space.shape):
            raise ValueError(
                f"{name} have shape {array.shape}, this slot takes {(count, *space.shape)}: one action for each env."
            )
        if space.kind in ("discrete", "multidiscrete") and array.dtype.kind not in "iub":
            raise ValueError(
                f"{name} have dtype {array.dtype}, this slot takes integers: round and convert them first."
            )
        yield array
        return
    for (field, entry), value in zip(space.entries.items(), _entries(space, action, name), strict=True):
        yield from action_leaves(entry, value, count, f"{path}.{field}" if path else field)


def _entries(space: Space, action: Actions, name: str) -> Sequence[Any]:
    """Return the entries of `action` in the order of `space`; raise ValueError if any are missing or unknown."""
    fields = tuple(space.entries)
    if isinstance(action, ArrayTuple):
        found: Sequence[str] = action._fields
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
    given = ", ".join(sorted(map(str, found))) or "none"
    raise ValueError(f"{name} have the entries {given}, this slot takes {', '.join(fields)}: give exactly these.")


def stored_action(space: Space, action: Any) -> Actions:
    """Convert one action of the env's own space to a batch of one action, for `Envs.send` to a slot of one env."""
    if space.kind == "discrete":
        return np.asarray([action]) - space.start
    if space.kind == "multidiscrete":
        return np.asarray(action)[None] - space.starts
    if space.is_leaf:
        return np.asarray(action)[None]
    values = _entries(space, action, "actions")
    return tuple(stored_action(entry, value) for entry, value in zip(space.entries.values(), values, strict=True))
