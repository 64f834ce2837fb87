"""Arrays, trees, rollouts and shared memory. This package never imports torch, which saves memory in env workers."""

from remuda.data.arrays import Array, ArrayTuple, FieldError, namedarraytuple
from remuda.data.rollout import Batch, Rollout, Steps, resets
from remuda.data.shared import Fence, Layout, SharedArrays
from remuda.data.space import NumpyArray
from remuda.data.trees import Tree, buffer_like, leading_shape, leaves, map_tree, stack

__all__ = [
    "Array",
    "ArrayTuple",
    "Batch",
    "Fence",
    "FieldError",
    "Layout",
    "NumpyArray",
    "Rollout",
    "SharedArrays",
    "Steps",
    "Tree",
    "buffer_like",
    "leading_shape",
    "leaves",
    "map_tree",
    "namedarraytuple",
    "resets",
    "stack",
]
