"""A replay ring for stacked frames that stores every frame once: each row adds its newest frame only.

    ring = FrameRing(example, capacity=100_000, envs=16, frames=4)      # obs [4, 84, 84]; used like Ring

Frames are stored in a second ring, where the frames of each env are numbered from 0. Each row adds one frame, except
that the first row of an episode adds its whole stack, so that every observation is restored exactly. Instead of its
observation, a row stores the number of its newest frame; the older frames of its stack have the preceding numbers.
The frames of one env are contiguous in memory, so a stack is read in one piece, and a checkpoint reads all new frames
of an env in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.data import NumpyArray, SharedArrays, Tree
from remuda.errors import ConfigError
from remuda.replay.counters import Index, Layout
from remuda.replay.ring import Ring, Row, Span, unbroken

# A ring has room for one frame per row, and for one extra frame per 64 rows, because the first row of an episode adds
# a whole stack. If many short episodes need more room, newer frames overwrite those of the oldest rows, which can
# then no longer be drawn.
ROWS_PER_EXTRA_FRAME = 64


class FrameCounters:
    """Counters of frames, one entry per env. Each env has room for `room` frames; a stack has `frames` frames.

    - `kept`: number of frames that belong to written rows. The writer increases it after the frames are stored.
    - `announced`: number of frames that are stored or about to be stored. Between appends it exceeds `kept` by up to
      `frames`, because the observation after the newest row is stored, too. The next row, which has this observation,
      stores the same frames again.
    """

    def __init__(self, memory: SharedArrays, room: int, frames: int, fence: Callable[[], None]) -> None:
        self.kept, self.announced = memory["kept"], memory["announced"]
        self.room, self.frames, self.fence = room, frames, fence

    @staticmethod
    def layout(envs: int) -> Layout:
        return dict.fromkeys(("kept", "announced"), ((envs,), "int64"))

    def newest(self, columns: slice, begins: NDArray[np.bool_]) -> Index:
        """Return the numbers [T, B] that the newest frames of the next T rows of B envs will have.

        A row adds a whole stack where `begins` [T, B] is True, and one frame elsewhere.
        """
        newest: Index = self.kept[columns] - 1 + np.where(begins, self.frames, 1).cumsum(0)
        return newest

    def announce(self, columns: slice, newest: Index) -> None:
        """Announce the frames of each env up to number `newest`, before any of these frames is stored."""
        self.announced[columns] = newest + 1
        self.fence()

    def keep(self, columns: slice, newest: Index) -> None:
        """Count the frames of each env up to number `newest` as frames of written rows."""
        self.kept[columns] = newest + 1

    def skip_announced(self, columns: slice) -> None:
        """Advance `kept` past all frames that a lost writer may have stored.

        The reset rows that `Ring.abandon` writes need some of these frames, which must therefore not be overwritten.
        """
        self.kept[columns] = np.maximum(self.kept[columns] + self.frames, self.announced[columns])

    def oldest(self, env: Index | slice) -> Index:
        """Return the number of the oldest frame that stays intact even if the next observation adds a whole stack."""
        found: Index = self.kept[env] + self.frames - self.room
        return found

    def is_intact(self, frame: Index, env: Index) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = frame >= self.oldest(env)
        found &= frame >= self.announced[env] - self.room
        return found

    def reset(self, kept: Index | int = 0) -> None:
        self.kept[:] = kept
        self.announced[:] = self.kept


class FrameRing(Ring):
    """A ring for observations that are stacks of frames, [frames * channels, H, W]."""

    def __init__(
        self,
        example: Row,
        capacity: int,
        envs: int,
        frames: int,
        groups: int = 1,
        fds: Sequence[int] | None = None,
        has_td_error: bool = False,
        checked_rows: int = 0,
    ) -> None:
        """Create a ring as `Ring` does; `append` checks that the first `checked_rows` rows are restored exactly."""
        stack = np.asarray(example.obs)
        super().__init__(example.replace(obs=np.zeros((), np.int64)), capacity, envs, groups, fds, has_td_error)
        self.frames, self._shape = frames, stack.shape
        self.checked_rows = checked_rows
        self._room = capacity + capacity // ROWS_PER_EXTRA_FRAME + 2 * frames
        frame = (stack.shape[0] // frames, *stack.shape[1:])
        self._images = SharedArrays(
            {
                "frames": ((envs, self._room, *frame), str(stack.dtype)),
                **FrameCounters.layout(envs),
                "begins": ((envs,), "bool"),
            },
            fds[1] if fds else None,
        )
        self.images = self._images["frames"]
        self.frame_counters = FrameCounters(self._images, self._room, frames, self.counters.fence)
        self.begins = self._images["begins"]  # for each env, whether its next row is the first of an episode
        if not fds:
            self._begin_empty()

    # --- writing ---

    def append(self, rows: Row, next_obs: Tree, group: int = 0) -> None:
        first = int(self.written[group])
        super().append(rows, next_obs, group)
        if first < self.checked_rows and len(rows.mask) < self.capacity:
            row, env = np.mgrid[first : int(self.written[group]), self.columns(group)].reshape(2, -1)
            given = np.asarray(rows.obs).reshape(len(row), *self._shape)
            if not (self.obs(row, env) == given)[self.is_stored(row, env)].all():
                raise ConfigError(
                    f"replay.frames={self.frames}, and observations are not stacks of {self.frames} frames, each the "
                    "one before it plus one new frame: use replay.frames=1 to keep them whole."
                )

    def _write(self, places: slice, columns: slice, rows: Row) -> None:
        mask = np.asarray(rows.mask)
        begins = np.concatenate([self.begins[None, columns], ~mask[:-1]])
        newest = self._write_frames(np.asarray(rows.obs), begins, columns)
        self.frame_counters.keep(columns, newest[-1])
        self.begins[columns] = ~mask[-1]
        super()._write(places, columns, rows.replace(obs=newest))

    def _write_obs(self, place: int, columns: slice, obs: Tree) -> None:
        """Store the observation after the newest row, but do not count its frames. The next row stores them again."""
        newest = self._write_frames(np.asarray(obs)[None], self.begins[None, columns], columns)
        super()._write_obs(place, columns, newest[0])

    def _write_frames(self, stacks: NumpyArray, begins: NDArray[np.bool_], columns: slice) -> Index:
        """Store the frames that the stacks [T, B] add, and return the number of the newest frame of each stack."""
        T, B = begins.shape
        stacks = stacks.reshape(T, B, self.frames, *self.images.shape[2:])
        newest = self.frame_counters.newest(columns, begins)
        env = np.broadcast_to(np.arange(columns.start, columns.stop), (T, B))
        self.frame_counters.announce(columns, newest[-1])
        gone = newest[-1] - self._room  # skip frames up to this number, because later stacks would overwrite them
        t, b = np.nonzero(newest > gone)
        self.images[env[t, b], newest[t, b] % self._room] = stacks[t, b, -1]
        for back in range(1, self.frames):
            t, b = np.nonzero(begins & (newest - back > gone))
            self.images[env[t, b], (newest[t, b] - back) % self._room] = stacks[t, b, -1 - back]
        return newest

    def _mark_gap(self, columns: slice) -> None:
        self.begins[columns] = True

    def abandon(self, group: int) -> None:
        self.frame_counters.skip_announced(self.columns(group))
        super().abandon(group)

    # --- reading ---

    def observed(self, group: int, rows: range) -> Iterator[tuple[Tree, NDArray[np.bool_]]]:
        """Yield a group's observations and masks [T, B]; nothing for integer frames, which are not normalized."""
        if self.images.dtype.kind == "f":
            row, env = np.mgrid[rows.start : rows.stop, self.columns(group)].reshape(2, -1)
            shape = (len(rows), self.width)
            yield self.obs(row, env).reshape(*shape, *self._shape), self.is_real(row, env).reshape(shape)

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        self.counters.fence()  # lets the caller's copies complete before the memory is read below
        oldest = self.rows.obs[row % self.capacity, env] - self.frames + 1
        has_frames = self.frame_counters.is_intact(oldest, env)
        # Rows are checked last: if a row was overwritten before `oldest` was read, `oldest` belongs to another row.
        return super().is_stored(row, env) & has_frames

    def obs(self, row: Index, env: Index) -> NumpyArray:
        newest = self.rows.obs[row % self.capacity, env]
        place = (newest[:, None] + np.arange(1 - self.frames, 1)) % self._room
        stacks: NumpyArray = self.images[env[:, None], place].reshape(len(row), *self._shape)
        return stacks

    # --- saving ---

    @property
    def memory(self) -> list[SharedArrays]:
        return [*super().memory, self._images]

    def layout(self) -> dict[str, int | str]:
        stacks = f"{self.images.dtype.str}{list(self._shape)}"
        return {**super().layout(), "frames": self.frames, "room for frames": self._room, "stacks": stacks}

    def span(self, group: int, first: int, last: int) -> Span:
        """Return the span of rows `first` to `last - 1`, including frames of their stacks that earlier rows added."""
        columns = self.columns(group)
        oldest = self.rows.obs[first % self.capacity, columns] - self.frames + 1
        end = self.rows.obs[(last - 1) % self.capacity, columns] + 1
        # After many short episodes, some frames are overwritten earlier than the rows that use them. The span leaves
        # these frames out.
        begin = np.clip(self.frame_counters.oldest(columns), oldest, end)
        return Span(group, first, last, np.stack([begin, end], -1))

    def views(self, span: Span) -> list[NumpyArray]:
        views, count = super().views(span), span.frames[:, 1] - span.frames[:, 0]
        is_possible = len(span.frames) == self.width and (span.frames >= 0).all()
        if not (is_possible and (count >= 0).all() and (count <= self._room).all()):
            raise ValueError(f"the frames of rows {span.first} to {span.last} have no place")
        columns = self.columns(span.group)
        for env, (begin, end) in zip(range(columns.start, columns.stop), span.frames.tolist(), strict=True):
            views += [self.images[env, places] for places, _ in unbroken(begin, end, self._room)]
        return views

    def get_tail(self) -> dict[str, object]:
        """Return the result of `Ring.get_tail`, frame counters, and the stored frames that are not counted yet."""
        kept = self.frame_counters.kept
        env, place = self._uncounted(kept)
        frames = self.images[env, place]
        return {**super().get_tail(), "kept": kept.copy(), "begins": self.begins.copy(), "frames": frames}

    def set_tail(self, tail: Mapping[str, Any]) -> None:
        env, place = self._uncounted(tail["kept"])
        self.images[env, place] = tail["frames"]
        self.begins[:] = tail["begins"]
        self.frame_counters.reset(tail["kept"])
        super().set_tail(tail)

    def _uncounted(self, kept: Index) -> tuple[Index, Index]:
        """Return the indices (env, place in the ring) of the `self.frames` frames after each env's counted frames.

        `kept` holds the number of counted frames of each env. In the returned places, `_write_obs` stores the
        observation after the newest row, without counting its frames.
        """
        return np.arange(self.envs)[:, None], (kept[:, None] + np.arange(self.frames)) % self._room

    def clear(self) -> None:
        super().clear()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self.frame_counters.reset()
        self.begins[:] = True
        # If a writer dies during its first append, `abandon` writes reset rows with the frame number in row 0. Row 0
        # therefore has a valid number from the start: that of the newest frame of the first stack.
        self.rows.obs[0] = self.frames - 1

    def close(self) -> None:
        super().close()
        self._images.close()
