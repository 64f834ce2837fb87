"""Arrays, trees, rollouts and shared memory. Torch is not imported, so that env workers need little memory."""

from remuda.data.arrays import Array, ArrayTuple, FieldError, namedarraytuple
from remuda.data.rollout import Batch, Rollout, Steps, resets
from remuda.data.shared import Fence, SharedArrays
from remuda.data.trees import Tree, buffer_like, leading_shape, leaves, map_tree, stack

__all__ = [
    "Array",
    "ArrayTuple",
    "Batch",
    "Fence",
    "FieldError",
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
