"""Convert plain values and arrays to bytes and back exactly, without executing code.

    data = pack({"state": np.zeros(4), "rng": generator.bit_generator.state})
    value = unpack(data)                      # raises Unpackable for bytes that pack did not write

Supported values are None, bools, ints of any size, floats, strings, bytes, lists, tuples, dicts, deques, and numpy
arrays and scalars of numbers and strings. Types are preserved, because a numpy scalar and a Python float may round
differently in later computations.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec
import numpy as np

from remuda.data.space import NumpyArray

MAX_DEPTH = 32
KINDS = "biufcSU"  # codes (`dtype.kind`) of the supported numpy dtypes: numbers, bools and strings


class Unpackable(ValueError):
    """A value that cannot be packed, or bytes that `pack` did not write."""


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(_node(value, 0))


def unpack(data: bytes | bytearray | memoryview) -> Any:
    try:
        return _value(msgspec.msgpack.decode(data), 0)
    except (msgspec.DecodeError, TypeError, IndexError, KeyError, ValueError, OverflowError, RecursionError) as error:
        raise Unpackable(f"{error}: this is not what was packed.") from None


def _node(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Unpackable(f"values are nested more than {MAX_DEPTH} deep.")
    deeper = depth + 1
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]
    if kind in (list, tuple):
        return [kind.__name__, *(_node(each, deeper) for each in value)]
    if kind is dict:
        return ["dict", *([_node(key, deeper), _node(each, deeper)] for key, each in value.items())]
    if kind is deque:
        return ["deque", value.maxlen, *(_node(each, deeper) for each in value)]
    if kind is bytes:
        return ["bytes", value]
    if kind is np.str_:
        return ["str_", str(value)]
    is_array = kind is np.ndarray  # False for subclasses such as masked arrays, which hold more than their numbers
    if (is_array or isinstance(value, np.generic)) and value.dtype.kind in KINDS and value.dtype.itemsize:
        name = "array" if is_array else "scalar"
        return [name, value.dtype.str, list(value.shape), value.tobytes()]
    raise Unpackable(f"a {kind.__name__} is neither a plain value nor an array of numbers.")


def _value(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if not isinstance(node, list):
        return node
    deeper = depth + 1
    kind, *parts = node
    match kind:
        case "int":
            return int(parts[0], 16)
        case "list" | "tuple":
            found = [_value(part, deeper) for part in parts]
            return found if kind == "list" else tuple(found)
        case "dict":
            return {_value(key, deeper): _value(each, deeper) for key, each in parts}
        case "deque":
            return deque((_value(part, deeper) for part in parts[1:]), parts[0])
        case "bytes":
            return parts[0]
        case "str_":
            return np.str_(parts[0])
        case "array" | "scalar":
            array = _array(*parts)
            return array if kind == "array" else array[()]
    raise ValueError(f"{kind!r} is not a kind of value")


def _array(name: str, shape: list[int], data: bytes) -> NumpyArray:
    dtype = np.dtype(name)
    if dtype.kind not in KINDS or len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"an array of {name} {shape} is not {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()
