"""The states of replays in checkpoints, without the rows. The keys are part of the file format."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from remuda.data import NumpyArray
from remuda.replay.counters import Index


class SumTreeState(TypedDict):
    """The state of a `SumTree`."""

    places: NDArray[np.float64]
    groups: NDArray[np.float64]
    blocks: NDArray[np.float64]


class PrioritiesState(TypedDict):
    """The state of `Priorities`."""

    tree: SumTreeState
    largest: float


class RecurrentStatesState(TypedDict):
    """The state of `RecurrentStates`."""

    states: dict[str, NumpyArray]  # the arrays of recurrent states, by path
    row: Index  # number of the row that follows each state, [room, groups]
    stored: Index  # number of states that were ever stored for each group
    interval: int


class SequenceIndexState(TypedDict):
    """The state of a `SequenceIndex`."""

    row: Index
    complete: Index
    first: Index
    largest: float
    tree: SumTreeState
    states: RecurrentStatesState
