"""Trees: containers keep their types, None is skipped, and errors name the leaf that differs."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remuda.data import ArrayTuple, buffer_like, leading_shape, leaves, map_tree, namedarraytuple, stack

Pair = namedtuple("Pair", "left right")
Point = namedarraytuple("Point", "x y")

trees = st.recursive(
    st.none() | st.integers(-9, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


def test_map_tree_keeps_every_kind_of_container() -> None:
    tree = {"a": [1, (2, None)], "b": Pair(3, 4), "c": Point(x=5, y=Point(x=6, y=None))}
    got = map_tree(lambda leaf: leaf * 10, tree)
    assert got == {"a": [10, (20, None)], "b": Pair(30, 40), "c": Point(x=50, y=Point(x=60, y=None))}
    assert type(got["b"]) is Pair
    assert type(got["c"]) is Point
    assert type(got["c"].y) is Point


@given(trees)
def test_mapping_the_identity_returns_an_equal_tree(tree: Any) -> None:
    got = map_tree(lambda leaf: leaf, tree)
    assert got == tree
    assert type(got) is type(tree)


@given(trees)
def test_mapping_several_trees_visits_leaves_in_order(tree: Any) -> None:
    paths = [path for path, _ in leaves(tree)]
    values = [leaf for _, leaf in leaves(tree)]
    met: list[int] = []
    tripled = map_tree(lambda a, b: met.append(a) or a + b, tree, map_tree(lambda leaf: 2 * leaf, tree))
    assert met == values
    assert list(leaves(tripled)) == [(path, 3 * value) for path, value in zip(paths, values, strict=True)]


def test_leaves_have_dotted_paths_and_skip_none() -> None:
    tree = {"obs": Point(x=1, y=None), "pair": (2, [3]), "named": Pair(4, 5)}
    assert list(leaves(tree)) == [("obs.x", 1), ("pair.0", 2), ("pair.1.0", 3), ("named.0", 4), ("named.1", 5)]
    assert list(leaves(9)) == [("", 9)]
    assert list(leaves(None)) == []


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ((1, 2), (1, 2, 3)),
        ((1, 2), 3),
        (3, (1, 2)),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"a": 1}, {"a": {"b": 1}}),
        (Point(x=1, y=2), Pair(1, 2)),
    ],
)
def test_trees_that_differ_are_refused(tree: Any, other: Any) -> None:
    with pytest.raises(ValueError, match="trees differ"):
        map_tree(lambda a, b: a, tree, other)


def test_none_in_any_tree_is_kept_and_not_passed_to_the_function() -> None:
    assert map_tree(lambda a, b: a + b, (1, None, 3, None), (10, 20, None, None)) == (11, None, None, None)
    assert map_tree(lambda a, b: a + b, {"a": 1, "b": (1, 2)}, {"a": 2, "b": None}) == {"a": 3, "b": None}


def test_stack_adds_a_first_axis() -> None:
    rows = [Point(x=np.full(2, row), y=None) for row in range(3)]
    got = stack(rows)
    assert type(got) is Point
    assert got.x.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert got.y is None


def test_buffer_like_has_leading_axes_and_the_dtype_of_each_leaf() -> None:
    example = Point(x=np.zeros((2, 3), np.float32), y={"flag": True, "count": np.int64(3), "skip": None})
    buffer = buffer_like(example, (5, 4))
    assert isinstance(buffer, ArrayTuple)
    assert (buffer.x.shape, buffer.x.dtype) == ((5, 4, 2, 3), np.float32)
    assert (buffer.y["flag"].shape, buffer.y["flag"].dtype) == ((5, 4), np.bool_)
    assert buffer.y["count"].dtype == np.int64
    assert buffer.y["skip"] is None
    buffer[2, 1] = Point(x=example.x + 1, y=None)
    assert buffer.x.sum() == 6


def test_buffer_like_takes_torch_examples_and_another_allocator() -> None:
    taken: list[tuple[Any, Any]] = []

    def allocate(shape: Any, dtype: Any) -> Any:
        taken.append((shape, dtype))
        return np.ones(shape, dtype)

    buffer = buffer_like({"x": torch.zeros(3, dtype=torch.uint8)}, (2,), allocate)
    assert taken == [((2, 3), np.uint8)]
    assert buffer["x"].sum() == 6


def test_leading_shape_is_shared_by_all_leaves() -> None:
    tree = {"a": np.zeros((5, 4, 3)), "b": (torch.zeros(5, 4), None)}
    assert leading_shape(tree, 2) == (5, 4)
    assert leading_shape(tree, 1) == (5,)
    assert all(type(size) is int for size in leading_shape((torch.zeros(2, 3),), 2))


@pytest.mark.parametrize(
    ("tree", "count", "message"),
    [
        ({"a": np.zeros((5, 4)), "b": {"c": np.zeros((5, 3))}}, 2, r"leaf b\.c starts with axes \(5, 3\)"),
        ({"a": np.zeros(5), "b": np.zeros(5)}, 2, r"leaf a has shape \(5,\), and needs 2"),
        ({"a": None}, 1, "without leaves"),
    ],
)
def test_leading_shape_names_the_leaf_that_differs(tree: Any, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leading_shape(tree, count)
