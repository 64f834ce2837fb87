"""Plain values and arrays packed to bytes and back: values and types are equal, and other objects are refused."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from remuda.data.packing import MAX_DEPTH, Unpackable, pack, unpack


def is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        lengths = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return lengths and len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
arrays = hnp.arrays(
    st.sampled_from(["?", "u1", "i4", "i8", "f4", "f8", "<f8", ">f8", "S3", "U2"]),
    hnp.array_shapes(min_dims=0, max_side=3),
)
scalars = st.text(max_size=4).map(np.str_) | hnp.arrays(st.sampled_from(["?", "u1", "i8", "f4", "f8"]), ()).map(
    lambda array: array[()]
)
values = st.recursive(
    plain | arrays | scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 5]))
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(values)
def test_unpacked_values_have_the_same_types(value: Any) -> None:
    assert is_same(unpack(pack(value)), value)


def test_state_of_a_generator_is_restored() -> None:
    generator, other = np.random.default_rng(3), np.random.default_rng(4)
    generator.integers(5, size=7)
    other.bit_generator.state = unpack(pack(generator.bit_generator.state))
    assert other.integers(1 << 60, size=9).tolist() == generator.integers(1 << 60, size=9).tolist()


def test_arrays_are_writable_copies() -> None:
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    found = unpack(pack(array))
    found[0, 0] = 7
    assert array[0, 0] == 0
    assert found.tolist() == [[7, 2], [3, 5]]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([None]), lambda: 0, [object()], 1j])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(Unpackable):
        pack(value)


def test_deep_nesting_is_refused_by_pack_and_unpack() -> None:
    value: Any = 0
    node: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value, node = [value], ["list", node]
    with pytest.raises(Unpackable):
        pack(value)
    with pytest.raises(Unpackable):
        unpack(msgspec.msgpack.encode(node))


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_very_deep_nesting_of_foreign_bytes_is_refused(depth: int) -> None:
    """Arrays of one element each, deeper than the decoder can recurse."""
    with pytest.raises(Unpackable):
        unpack(b"\x91" * depth + b"\x01")


@pytest.mark.parametrize(
    "node",
    [
        ["array", "O", [1], b"12345678"],
        ["array", "f8", [1 << 40], b""],
        ["array", "f8", [-1], b""],
        ["array", "f8", [2], b"12345678"],
        ["array", "nonsense", [1], b"1"],
        ["eval", "1"],
        ["int", "zz"],
        ["int"],
        ["dict", [1]],
        ["dict", [["list"], 1]],
        [[]],
        [],
        ["deque", -3],
    ],
)
def test_invalid_bytes_are_refused(node: Any) -> None:
    with pytest.raises(Unpackable):
        unpack(msgspec.msgpack.encode(node))
    with pytest.raises(Unpackable):
        unpack(msgspec.msgpack.encode(node)[:-1])
