"""Readers of another process's rows put a fence between reading its counters and reading the rows.

x86 does not reorder loads, so no test there could observe a missing fence: the order of calls is recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from remuda.data import Batch, Fence, map_tree
from remuda.replay import Priorities, RecurrentStates, Ring, Row, SequenceReplay, TransitionReplay
from remuda.replay.frames import FrameRing

ENVS, GROUPS, ROWS = 4, 2, 24


class Watch:
    """Records whether a counter was read since the last fence, and fails if rows are read then."""

    def __init__(self) -> None:
        self.is_open, self.rows_read, self.fence = False, 0, Fence()

    def __call__(self) -> None:
        self.fence()
        self.is_open = False

    def read(self, name: str) -> None:
        if name == "rows":
            assert not self.is_open, "rows were read after a counter, without a fence between them"
            self.rows_read += 1
        else:
            self.is_open = True

    def over(self, array: Any, name: str) -> Any:
        watched = array.view(Watched)
        watched.watch, watched.name = self, name
        return watched


class Watched(np.ndarray):  # type: ignore[type-arg]
    """An array that reports every read to its `Watch`."""

    watch: Watch | None = None
    name = ""

    def __array_finalize__(self, base: Any) -> None:
        self.watch, self.name = getattr(base, "watch", None), getattr(base, "name", "")

    def plain(self) -> Any:
        if self.watch is not None:
            self.watch.read(self.name)
        return self.view(np.ndarray)

    def __getitem__(self, index: Any) -> Any:
        return self.plain()[index]

    def take(self, *args: Any, **options: Any) -> Any:
        return self.plain().take(*args, **options)

    def copy(self, *args: Any) -> Any:
        return self.plain().copy(*args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [each.plain() if isinstance(each, Watched) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **options)


def example() -> Row:
    return Row(np.zeros((2, 3), np.float32), np.zeros((), np.int64), np.float32(0), np.float32(0), np.bool_(False))


def make_ring(kind: type[Ring], fds: Any = None, has_td_error: bool = False) -> Any:
    row = map_tree(np.asarray, example())
    if kind is FrameRing:
        return FrameRing(row, 64, ENVS, 2, GROUPS, fds)
    return Ring(row, 64, ENVS, GROUPS, fds, has_td_error)


def watched_ring(kind: type[Ring] = Ring, has_td_error: bool = False) -> tuple[Any, Watch]:
    """Return a shared ring of two groups whose counters and rows are watched."""
    ring = make_ring(kind, has_td_error=has_td_error)
    watch = Watch()
    counters = ring.counters
    counters.fence = watch
    counters.written = watch.over(counters.written, "counter")
    counters.td_errors = watch.over(counters.td_errors, "counter")
    if kind is FrameRing:
        ring.frame_counters.fence = watch
    ring.rows = map_tree(lambda x: watch.over(x, "rows"), ring.rows)
    ring.flat_rows = map_tree(lambda x: watch.over(x, "rows"), ring.flat_rows)
    if ring.td_error is not None:
        ring.td_error = watch.over(ring.td_error, "rows")
    return ring, watch


def append(ring: Any, group: int) -> None:
    """Append rows without an end of an episode, so that their frames are consecutive."""
    first = int(ring.written[group])
    time = np.arange(first, first + ROWS + 2, dtype=np.float32)
    stacks = np.stack([time[:-1], time[1:]], 1)[:, None, :, None] * np.ones((1, ENVS // GROUPS, 1, 3), np.float32)
    shape = (ROWS, ENVS // GROUPS)
    rows = Row(stacks[:-1], np.zeros(shape, np.int64), *np.ones((2, *shape), np.float32), np.ones(shape, bool))
    ring.append(rows, stacks[-1], group)
    if ring.td_error is not None:
        ring.set_td_error(group, first, np.ones(shape, np.float32))


COMMON: dict[str, Any] = {"batch_size": 8, "ratio": 4.0, "warm_up": 0, "gamma": 0.99, "seed": 1, "is_shared": True}


def uniform(n_step: int) -> tuple[Any, Watch]:
    ring, watch = watched_ring()
    return TransitionReplay(ring, n_step=n_step, **COMMON), watch


def prioritized(has_td_error: bool) -> tuple[Any, Watch]:
    ring, watch = watched_ring(has_td_error=has_td_error)
    return TransitionReplay(ring, n_step=3, priorities=Priorities(ring, 0.6, is_shared=True), **COMMON), watch


def frames() -> tuple[Any, Watch]:
    ring, watch = watched_ring(FrameRing)
    return TransitionReplay(ring, n_step=1, **COMMON), watch


def sequences() -> tuple[Any, Watch]:
    ring, watch = watched_ring()
    lengths = {"burn_in": 2, "length": 4, "interval": ROWS}
    replay: Any = SequenceReplay(ring, torch.zeros(1, 3), n_step=2, priorities=0.9, **lengths, **COMMON)
    states: RecurrentStates = replay.sequence_index.states
    states.counters.fence = watch
    states.counters.written = watch.over(states.counters.written, "counter")
    states.row = watch.over(states.row, "rows")
    states.states = watch.over(states.states, "rows")
    return replay, watch


KINDS: dict[str, Callable[[], tuple[Any, Watch]]] = {
    "one step": lambda: uniform(1),
    "three steps": lambda: uniform(3),
    "prioritized": lambda: prioritized(False),
    "TD errors": lambda: prioritized(True),
    "frames": frames,
    "sequences": sequences,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_after_a_fence(kind: str) -> None:
    replay, watch = KINDS[kind]()
    writer = make_ring(type(replay.ring), replay.ring.fds, replay.ring.td_error is not None)
    states = RecurrentStates(writer, torch.zeros(1, 3), ROWS, replay.fds[-1]) if kind == "sequences" else None
    for _ in range(4):  # enough rows to wrap around the ring
        for group in range(GROUPS):
            if states is not None:
                states.store(torch.zeros(ENVS // GROUPS, 3), group)
            append(writer, group)
        replay.sync()
        list(replay.new_observations())
        for batch in replay.batches():
            replay.feedback(batch.key, torch.ones(len(batch.key)))
    assert isinstance(batch, Batch)
    for group in range(GROUPS):
        replay.on_writer_lost(group)
    replay.cut()
    if states is not None:
        replay.get_state()
        states.memory.close()
    assert watch.rows_read > 20
    writer.close()
    replay.close()
