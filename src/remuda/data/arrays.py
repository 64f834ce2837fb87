"""`namedarraytuple`: a tuple of arrays that is indexed, sliced and assigned as if it were one array.

    >>> import numpy as np
    >>> Point = namedarraytuple("Point", "x y")
    >>> points = Point(x=np.zeros((4, 2)), y=np.arange(8).reshape(4, 2))
    >>> points[1]
    Point(x=array([0., 0.]), y=array([2, 3]))
    >>> points[1:3] = 7
    >>> points[2].y
    array([7, 7])

Fields hold arrays (numpy or torch), other named array tuples, or None as a placeholder that every operation skips.
If the fields are known in advance, define a class, so that fields can have comments and type checkers know them:

    class Steps(ArrayTuple):
        obs: Tree
        reward: Array
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Self

Array = Any  # a numpy array or a torch tensor; Any, because this package must not import torch
RESERVED = ("get", "items", "replace")
PLAIN = frozenset((tuple, list, dict))
# Indexing a plain tuple would silently select one of its entries instead of a row.
PLAIN_RULE = "a plain tuple, list or dict has no axes; make it a named array tuple, or use map_tree"


class ArrayTuple(tuple[Any, ...]):
    """Base class of named array tuples. The names that a subclass annotates are added to the inherited fields."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # Use cls.__annotations__ and not cls.__dict__["__annotations__"], which Python 3.14 fills lazily.
        fields = tuple(name for name in cls.__annotations__ if name not in cls._fields)
        for name in fields:
            if not name.isidentifier() or name.startswith("_") or name in RESERVED:
                raise ValueError(
                    f"field {name!r} of {cls.__name__}: names are identifiers without a leading "
                    f"underscore and not {', '.join(RESERVED)}, which are methods"
                )
        cls._fields += fields
        for index, name in enumerate(cls._fields):
            setattr(cls, name, _getter(index))

    def __new__(cls, *values: object, **named: object) -> Self:
        if named:
            try:
                values += tuple(named.pop(name) for name in cls._fields[len(values) :])
            except KeyError as error:
                raise TypeError(f"{cls.__name__} needs a value for field {error}") from None
        if len(values) != len(cls._fields) or named:
            raise TypeError(
                f"{cls.__name__} takes {', '.join(cls._fields)}; "
                f"got {len(values)} of {len(cls._fields)} values"
                + (f" and unknown {', '.join(named)}" if named else "")
            )
        return tuple.__new__(cls, values)

    def __getitem__(self, where: Any) -> Self:
        """Return a tuple of the same type with every field indexed by `where`. Read single fields as attributes."""
        out = []
        for name, value in zip(self._fields, self, strict=True):
            try:
                if type(value) in PLAIN:
                    raise TypeError(PLAIN_RULE)
                out.append(None if value is None else value[where])
            except Exception as error:
                raise _at(name, error) from error
        return tuple.__new__(type(self), out)

    def __setitem__(self, where: Any, value: object) -> None:
        """Assign `value` to the index `where` of every field.

        If `value` is a tuple or list, its entries are assigned to the fields in order; any other value is assigned to
        all fields. A field that is None stays None, and a field whose new value is None stays unchanged.
        """
        if isinstance(value, ArrayTuple) and value._fields != self._fields:
            raise ValueError(
                f"cannot assign {type(value).__name__}({', '.join(value._fields)}) to "
                f"{type(self).__name__}({', '.join(self._fields)}): the fields differ"
            )
        if isinstance(value, (tuple, list)) and len(value) != len(self):
            raise ValueError(f"{type(self).__name__} has {len(self)} fields, got {len(value)} values")
        values: Sequence[object] = value if isinstance(value, (tuple, list)) else (value,) * len(self)
        for name, array, new in zip(self._fields, self, values, strict=True):
            if array is None or new is None:
                continue
            try:
                if type(array) in PLAIN:
                    raise TypeError(PLAIN_RULE)
                array[where] = new
            except Exception as error:
                raise _at(name, error) from error

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def get(self, index: int) -> Any:
        """Return the field at position `index`, as `[index]` does for an ordinary tuple."""
        return tuple.__getitem__(self, index)

    def items(self) -> Iterator[tuple[str, Any]]:
        return zip(self._fields, self, strict=True)

    def replace(self, **named: object) -> Self:
        unknown = named.keys() - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return tuple.__new__(type(self), (named.get(name, value) for name, value in self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __reduce__(self) -> tuple[Callable[..., ArrayTuple], tuple[object, ...]]:
        # A type made by namedarraytuple() is unpickled from its name and fields, so that it need not be importable.
        if type(self).__dict__.get("_is_made"):
            return _rebuild, (type(self).__name__, self._fields, tuple(self))
        return type(self), tuple(self)


@cache
def _getter(index: int) -> object:
    """Return a descriptor that reads the field at position `index` of a tuple."""
    # The descriptors of an ordinary named tuple are written in C and take a quarter of the time of a property with a
    # Python function. They do not call ArrayTuple.__getitem__, which would index every field.
    names = [f"field_{position}" for position in range(index + 1)]
    return vars(namedtuple("Fields", names))[names[-1]]


@cache
def _make(typename: str, fields: tuple[str, ...]) -> type[ArrayTuple]:
    if not fields or len(set(fields)) != len(fields):
        raise ValueError(f"{typename} needs at least one field and no name twice, got {fields}")
    body = {"__annotations__": dict.fromkeys(fields, Any), "_is_made": True}
    return type(typename, (ArrayTuple,), body)


def namedarraytuple(typename: str, fields: str | Sequence[str]) -> type[ArrayTuple]:
    """Return the named array tuple type with this name and these fields; equal arguments give the same type."""
    return _make(typename, tuple(fields.split() if isinstance(fields, str) else fields))


def _rebuild(typename: str, fields: tuple[str, ...], values: tuple[object, ...]) -> ArrayTuple:
    return _make(typename, fields)(*values)


class FieldError(IndexError, ValueError, TypeError):
    """An operation on a named array tuple failed in one field; the message names the field by its dotted path."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(path, cause)
        self.path, self.cause = path, cause

    def __str__(self) -> str:
        return f"field {self.path}: {self.cause}"


def _at(name: str, error: Exception) -> FieldError:
    if isinstance(error, FieldError):
        return FieldError(f"{name}.{error.path}", error.cause)
    return FieldError(name, str(error))
