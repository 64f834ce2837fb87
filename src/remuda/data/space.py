"""`Space`: the shape, dtype and meaning of observations and actions, independent of Gymnasium.

>>> image, gear = Space("box", (2, 2), "uint8"), Space("discrete", (), "int64", n=3)
>>> space = Space("dict", entries={"image": image, "gear": gear})
>>> [(path, leaf.kind) for path, leaf in space.leaves("obs")]
[('obs.image', 'box'), ('obs.gear', 'discrete')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from remuda.data.arrays import namedarraytuple

NumpyArray: TypeAlias = NDArray[Any]  # a numpy array of any dtype
Array: TypeAlias = NumpyArray
# Observations or actions of a batch of envs: one numpy array, or a named array tuple with one value per entry of the
# space.
ArrayTree: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Space:
    """The description of an observation or action: what agents need to know about a Gymnasium space.

    A leaf (any kind except dict and tuple) describes one array per env. A dict or tuple space describes a named array
    tuple with one value per entry.
    """

    kind: Literal["box", "discrete", "multidiscrete", "multibinary", "dict", "tuple"]
    shape: tuple[int, ...] = ()
    # Dtype in rollouts: float32 for boxes of floats, the dtype of the env for other boxes, int64 for discrete and
    # multidiscrete, int8 for multibinary.
    dtype: str = ""
    low: Array | None = None  # box only: the lower bound of each element
    high: Array | None = None  # box only: the upper bound of each element
    n: int = 0  # discrete only: the number of values
    start: int = 0  # discrete only: the smallest value in the env; in rollouts, the smallest value is 0
    sizes: Array | None = None  # multidiscrete only: the number of values of each element
    starts: Array | None = None  # multidiscrete only: the smallest value of each element in the env
    entries: Mapping[str, Space] = field(default_factory=dict)  # dict and tuple only: spaces by field name
    keys: tuple[str, ...] = ()  # dict only: the keys that the env itself uses, in the order of `entries`
    env_dtype: str = ""  # discrete and multidiscrete only: the dtype of the env's own space

    @property
    def is_leaf(self) -> bool:
        return self.kind not in ("dict", "tuple")

    def leaves(self, path: str = "") -> Iterator[tuple[str, Space]]:
        """Yield (dotted path, leaf) for every leaf, or for this space if it is a leaf; paths start with `path`."""
        if self.is_leaf:
            yield path, self
        for name, entry in self.entries.items():
            yield from entry.leaves(f"{path}.{name}" if path else name)

    def tree(self, make: Callable[[str, Space], object], path: str = "") -> ArrayTree:
        """Return a named array tuple of `make(path, leaf)` for all leaves, or one value if this space is a leaf."""
        if self.is_leaf:
            return make(path, self)
        values = [entry.tree(make, f"{path}.{name}" if path else name) for name, entry in self.entries.items()]
        return namedarraytuple("Entries", tuple(self.entries))(*values)
