"""Named array tuples: one index for all fields, errors that name the field, and types that can be pickled."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remuda.data import ArrayTuple, FieldError, namedarraytuple

Point = namedarraytuple("Point", "x y")
Outer = namedarraytuple("Outer", ["inner", "z"])


class Declared(ArrayTuple):
    first: Any
    second: Any


class Extended(Declared):
    third: Any


def make_outer(library: str) -> Any:
    """Return an Outer: inner.x [4, 3] counts from 0, inner.y is absent, z [4] counts from 100."""
    x, z = np.arange(12.0).reshape(4, 3), np.arange(100, 104)
    if library == "torch":
        return Outer(inner=Point(x=torch.tensor(x), y=None), z=torch.tensor(z))
    return Outer(inner=Point(x=x.copy(), y=None), z=z.copy())


both = pytest.mark.parametrize("library", ["numpy", "torch"])


@both
@pytest.mark.parametrize(
    "where",
    [
        2,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        [3, 0],
        np.array([True, False, False, True]),
        (slice(None), None),
    ],
    ids=str,
)
def test_index_applies_to_every_nested_field(library: str, where: Any) -> None:
    outer = make_outer(library)
    got = outer[where]
    assert type(got) is Outer
    assert type(got.inner) is Point
    assert got.inner.y is None
    np.testing.assert_array_equal(np.asarray(got.inner.x), np.asarray(outer.inner.x)[where])
    np.testing.assert_array_equal(np.asarray(got.z), np.asarray(outer.z)[where])


@both
def test_slices_are_views_of_the_same_memory(library: str) -> None:
    outer = make_outer(library)
    outer[1:3].inner.x[0, 0] = -5
    assert outer.inner.x[1, 0] == -5


@both
def test_assignment_sets_all_nested_fields(library: str) -> None:
    outer = make_outer(library)
    outer[1:3] = outer[[3, 0]]
    assert np.asarray(outer.inner.x)[:, 0].tolist() == [0, 9, 0, 9]
    assert np.asarray(outer.z).tolist() == [100, 103, 100, 103]


@both
def test_assignment_through_a_boolean_mask(library: str) -> None:
    outer = make_outer(library)
    where = np.array([False, True, False, True])
    outer[where] = 0
    assert np.asarray(outer.inner.x).sum(axis=1).tolist() == [3, 0, 21, 0]
    assert np.asarray(outer.z).tolist() == [100, 0, 102, 0]


@both
def test_scalar_is_assigned_to_every_field(library: str) -> None:
    outer = make_outer(library)
    outer[...] = 7
    assert (np.asarray(outer.inner.x) == 7).all()
    assert (np.asarray(outer.z) == 7).all()


def test_plain_tuple_is_assigned_field_by_field() -> None:
    outer = make_outer("numpy")
    outer[0] = ((1.0, None), 2)
    assert outer.inner.x[0].tolist() == [1, 1, 1]
    assert outer.z[0] == 2


def test_torch_rows_can_be_assigned_to_numpy_rows() -> None:
    ours, theirs = make_outer("numpy"), make_outer("torch")
    ours[0] = theirs[3]
    assert ours.inner.x[0].tolist() == [9, 10, 11]
    assert ours.z[0] == 103


def test_none_on_either_side_leaves_the_field_unchanged() -> None:
    mine = Point(x=np.zeros(3), y=None)
    mine[0] = Point(x=None, y=np.ones(()))
    assert mine.x.tolist() == [0, 0, 0]
    assert mine.y is None


@given(st.integers(1, 6), st.data())
def test_assigning_indexed_rows_back_restores_them(rows: int, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    tree = Outer(inner=Point(x=np.arange(rows * 2).reshape(rows, 2), y=None), z=np.arange(rows) * 10)
    before = copy.deepcopy(tree)
    taken = copy.deepcopy(tree[start:stop])
    tree[start:stop] = -1
    expected = [-1 if start <= row < stop else row * 10 for row in range(rows)]
    assert tree.z.tolist() == expected
    tree[start:stop] = taken
    np.testing.assert_array_equal(tree.inner.x, before.inner.x)
    np.testing.assert_array_equal(tree.z, before.z)


@both
def test_failing_index_names_the_nested_field(library: str) -> None:
    outer = make_outer(library)
    with pytest.raises(FieldError, match=r"^field inner\.x: ") as caught:
        outer[:, 7]
    assert caught.value.path == "inner.x"
    assert caught.value.__cause__ is not None


@both
def test_failing_assignment_names_the_nested_field(library: str) -> None:
    outer = make_outer(library)
    with pytest.raises(FieldError, match=r"^field inner\.x: "):
        outer[0] = Outer(inner=Point(x=np.zeros(5), y=None), z=0)
    with pytest.raises(FieldError, match=r"^field z: "):
        outer[0:2] = Outer(inner=None, z=np.zeros(3))


@pytest.mark.parametrize("kind", [IndexError, ValueError, TypeError])
def test_field_error_is_an_instance_of_common_array_errors(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Point(x=np.zeros(2), y=np.zeros(2))[9]


def test_field_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(FieldError("inner.x", "too short")))
    assert (str(error), error.path) == ("field inner.x: too short", "inner.x")


@pytest.mark.parametrize(
    "field", [(np.zeros(3), np.ones(3)), [np.zeros(3)], {0: np.zeros(3)}], ids=["tuple", "list", "dict"]
)
def test_plain_container_as_field_cannot_be_indexed(field: Any) -> None:
    point = Point(x=np.zeros(3), y=field)
    with pytest.raises(FieldError, match=r"^field y: .*has no axes.*named array tuple"):
        point[0]
    with pytest.raises(FieldError, match=r"^field y: .*has no axes"):
        point[0] = 1


def test_assignment_of_other_fields_or_numbers_of_values_is_refused() -> None:
    point = Point(x=np.zeros(2), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"cannot assign Declared\(first, second\) to Point\(x, y\)"):
        point[0] = Declared(1, 2)
    with pytest.raises(ValueError, match="Point has 2 fields, got 3 values"):
        point[0] = (1, 2, 3)
    assert not point.x.any()
    with pytest.raises(FieldError, match=r"^field inner: cannot assign Declared"):
        make_outer("numpy")[0] = (Declared(1, 2), 0)


def test_in_get_and_items_refer_to_fields() -> None:
    point = Point(x=np.ones(2), y=None)
    assert "x" in point
    assert "z" not in point
    assert 1 not in point
    assert point.get(0) is point.x
    assert point.get(-1) is None
    assert [name for name, _ in point.items()] == ["x", "y"]
    assert len(point) == 2
    x, y = point
    assert x is point.x
    assert y is None


def test_replace_returns_a_new_tuple_and_refuses_unknown_fields() -> None:
    point = Point(x=1, y=2)
    assert tuple(point.replace(y=3)) == (1, 3)
    assert tuple(point) == (1, 2)
    with pytest.raises(TypeError, match="Point has no field q"):
        point.replace(q=1)


@pytest.mark.parametrize("name", ["get", "items", "replace", "_hidden", "two words", "2nd"])
def test_reserved_and_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"field '{name}' of Bad"):
        namedarraytuple("Bad", ["fine", name])


@pytest.mark.parametrize("fields", ["", "x x"])
def test_no_fields_and_repeated_names_are_refused(fields: str) -> None:
    with pytest.raises(ValueError, match="at least one field and no name twice"):
        namedarraytuple("Bad", fields)


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((1,), {}, "got 1 of 2 values"),
        ((1, 2, 3), {}, "got 3 of 2 values"),
        ((), {"x": 1}, "needs a value for field 'y'"),
        ((1,), {"y": 2, "q": 3}, "unknown q"),
        ((1, 2), {"x": 3}, "unknown x"),
    ],
)
def test_construction_takes_every_field_exactly_once(values: Any, named: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(*values, **named)


def test_same_name_and_fields_give_the_same_type() -> None:
    assert namedarraytuple("Point", ("x", "y")) is Point
    assert namedarraytuple("Point", "x y z") is not Point
    assert namedarraytuple("Dot", "x y") is not Point


def test_repr_shows_names() -> None:
    assert repr(Outer(inner=Point(x=1, y=None), z=2)) == "Outer(inner=Point(x=1, y=None), z=2)"


def test_subclass_adds_its_fields_to_those_it_inherits() -> None:
    value = Extended(first=1, second=2, third=3)
    assert (value.first, value.second, value.third) == (1, 2, 3)
    assert Declared._fields == ("first", "second")


def test_declared_type_survives_pickle_and_copy() -> None:
    value = Declared(first=np.arange(3), second=Point(x=np.ones(2), y=None))
    for same in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert type(same) is Declared
        assert type(same.second) is Point
        assert same.first.tolist() == [0, 1, 2]
        assert same.first is not value.first


CHILD = """
import pickle, sys
value = pickle.loads(sys.stdin.buffer.read())
value[0] = value[1]
answer = type(value)._fields, value
sys.stdout.buffer.write(pickle.dumps(answer))
"""


def test_created_type_is_unpickled_in_a_process_that_never_defined_it() -> None:
    local = namedarraytuple("OnlyHere", "a b")  # no module has this name
    value = local(a=np.arange(4).reshape(2, 2), b=namedarraytuple("Deeper", "c")(c=np.array([5.0, 6.0])))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps(value), capture_output=True, timeout=60, check=True
    )
    fields, back = pickle.loads(done.stdout)
    assert fields == ("a", "b")
    assert type(back) is local
    assert back.a.tolist() == [[2, 3], [2, 3]]
    assert back.b.c.tolist() == [6, 6]
