"""RUN/spaces.json: the observation and action space of a run, so that its policy can be loaded without its env.

    write_spaces(run, info.observation, info.action)
    observation, action = read_spaces(run)              # read_spaces returns None if there is no file

Numbers are stored exactly. An array of equal elements is stored as one number, and infinities as the strings "inf"
and "-inf". A run directory may come from an untrusted source, so all values in the file are checked: CheckpointError
is raised if the file is damaged or describes impossible spaces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from remuda.core import Space
from remuda.data.arrays import RESERVED
from remuda.errors import CheckpointError
from remuda.logs.files import to_json, write_atomic
from remuda.runs.directory import SPACES

ARRAYS = {"box": ("low", "high"), "multidiscrete": ("sizes", "starts")}  # names of the arrays of a space, by kind
KINDS = ("box", "discrete", "multidiscrete", "multibinary", "dict", "tuple")
# Maximum number of elements in both spaces together, and of values in a discrete space. Larger spaces are refused,
# because no agent can learn in them.
MAX_NUMBERS = 1 << 22
MAX_BYTES = 1 << 26  # maximum size of the file
MAX_DEPTH = 32


def write_spaces(run: Path, observation: Space, action: Space) -> None:
    """Write spaces.json to the run directory `run`."""
    text = to_json({"observation": space_to_json(observation), "action": space_to_json(action)}, indent=1)
    write_atomic(run / SPACES, text + "\n")


def read_spaces(run: Path) -> tuple[Space, Space] | None:
    """Return the observation and action space, or None if the run has no spaces.json."""
    path = run / SPACES
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if (count := sum(_count(found[name]) for name in ("observation", "action"))) > MAX_NUMBERS:
            raise ValueError(f"spaces of {count:,} numbers")
        return space_from_json(found["observation"]), space_from_json(found["action"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointError(
            f"{path} cannot be used ({type(error).__name__}: {reason}): restore it, or delete it and pass env=... to "
            "take the spaces from the env."
        ) from None


def space_to_json(space: Space) -> dict[str, object]:
    """Return a space as JSON values."""
    out: dict[str, object] = {"kind": space.kind}
    if not space.is_leaf:
        out["entries"] = {name: space_to_json(entry) for name, entry in space.entries.items()}
        return out | ({"keys": list(space.keys)} if space.kind == "dict" else {})
    out |= {"shape": list(space.shape), "dtype": space.dtype}
    out |= {name: numbers(getattr(space, name)) for name in ARRAYS.get(space.kind, ())}
    out |= {"n": space.n, "start": space.start} if space.kind == "discrete" else {}
    return out | ({"env_dtype": space.env_dtype} if space.env_dtype else {})


def numbers(array: NDArray[np.generic]) -> object:
    """Return an array as a flat list, or as one number if all elements are equal."""
    flat = array.reshape(-1)
    same = len(flat) > 0 and bool((flat == flat[0]).all())
    return exact(flat[0].item()) if same else [exact(value) for value in flat.tolist()]


def exact(value: float) -> float | str:
    """Return a number as a JSON value; infinities become the strings "inf" and "-inf"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def space_from_json(values: Mapping[str, Any], depth: int = 0) -> Space:
    """Return the space that `space_to_json` converted to `values`; raise ValueError if `values` are invalid."""
    kind = values["kind"]
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of space")
    if kind in ("dict", "tuple"):
        return _nested(kind, values, depth)
    shape, dtype = tuple(_size(size) for size in values["shape"]), str(values["dtype"])
    if np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"{dtype} is not a numeric type")
    arrays: dict[str, Any] = {name: _array(values[name], shape, dtype) for name in ARRAYS.get(kind, ())}
    n, start = (_size(values["n"]), int(values["start"])) if kind == "discrete" else (0, 0)
    if kind == "discrete" and not 0 < n <= MAX_NUMBERS:
        raise ValueError(f"a discrete space of {n} values")
    if kind == "multidiscrete" and not ((arrays["sizes"] > 0) & (arrays["sizes"] <= MAX_NUMBERS)).all():
        raise ValueError("a discrete space without values")
    env_dtype = str(values.get("env_dtype", ""))
    if env_dtype and np.dtype(env_dtype).kind not in "biuf":
        raise ValueError(f"{env_dtype} is not a numeric type")
    return Space(kind, shape, dtype, n=n, start=start, env_dtype=env_dtype, **arrays)


def _nested(kind: Literal["dict", "tuple"], values: Mapping[str, Any], depth: int) -> Space:
    named = dict(values["entries"])
    bad = [name for name in named if not name.isidentifier() or name.startswith("_") or name in RESERVED]
    if depth > MAX_DEPTH or not named or bad:
        raise ValueError(
            f"a space with the entries {', '.join(bad)}" if bad else "a space that is nested too deeply, or empty"
        )
    keys = tuple(str(key) for key in values["keys"]) if kind == "dict" else ()
    if kind == "dict" and len(set(keys)) != len(named):
        raise ValueError(f"{len(named)} entries with {len(keys)} keys")
    return Space(kind, entries={name: space_from_json(each, depth + 1) for name, each in named.items()}, keys=keys)


def _count(values: Mapping[str, Any], depth: int = 0) -> int:
    """Return the number of elements in a space's arrays, without allocating them."""
    if depth > MAX_DEPTH:
        raise ValueError("a space that is nested too deeply")
    if "entries" in values:
        return sum(_count(each, depth + 1) for each in dict(values["entries"]).values())
    return math.prod(_size(size) for size in values["shape"])


def _size(size: object) -> int:
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is not a size")
    return size


def _array(values: float | str | list[float | str], shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    is_float = np.dtype(dtype).kind == "f"
    read = [float(value) if is_float else value for value in (values if isinstance(values, list) else [values])]
    if not is_float and not all(isinstance(value, int) for value in read):
        raise ValueError(f"bounds of {dtype} that are not integers")
    array = np.array(read, dtype)
    if np.isnan(array).any() if is_float else False:
        raise ValueError("bounds that are NaN")
    return array.reshape(shape) if isinstance(values, list) else np.full(shape, array[0], dtype)
