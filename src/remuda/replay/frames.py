"""Images kept once: of a stack of frames every row adds the newest alone.

    ring = FrameRing(example, capacity=100_000, envs=16, frames=4)      # obs [4, 84, 84]; used like Ring

Frames lie in a ring of their own, in which every env moves at its own pace: one frame for each row, and the whole
stack where an episode begins, so what is put together again is what was seen. A row remembers where its newest
frame is; those before it are the ones before that. The frames of one env lie one after the other in memory, so a
stack is read in one go, and so is what an env has added since the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.data import SharedArrays
from remuda.errors import ConfigError
from remuda.replay.ring import Index, Ring, Row, Span, unbroken

ROWS_PER_EXTRA_FRAME = 64  # room for beginnings; if there are more, the oldest rows can no longer be drawn


class FrameRing(Ring):
    """Rows whose observation is a stack of frames, [frames * channels, H, W]."""

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
        """Of the first `checked_rows` it is looked whether what is put together again is what was given."""
        stack = np.asarray(example.obs)
        super().__init__(example.replace(obs=np.zeros((), np.int64)), capacity, envs, groups, fds, has_td_error)
        self.frames, self._shape = frames, stack.shape
        self.checked_rows = checked_rows
        self._room = capacity + capacity // ROWS_PER_EXTRA_FRAME + 2 * frames
        frame = (stack.shape[0] // frames, *stack.shape[1:])
        self._images = SharedArrays(
            {
                "frames": ((envs, self._room, *frame), str(stack.dtype)),
                "kept": ((envs,), "int64"),
                "promised": ((envs,), "int64"),
                "begins": ((envs,), "bool"),
            },
            fds[1] if fds else None,
        )
        self.images = self._images["frames"]
        self.kept = self._images["kept"]  # frames that each env was ever given
        self.promised = self._images["promised"]  # frames that are being written, those that are not counted too
        self.begins = self._images["begins"]  # whether an env's next row is the first of an episode
        if not fds:
            self._begin_empty()

    def append(self, rows: Row, next_obs: Any, group: int = 0) -> None:
        first = int(self.written[group])
        super().append(rows, next_obs, group)
        if first < self.checked_rows and len(rows.mask) < self.capacity:
            row, env = np.mgrid[first : int(self.written[group]), self.columns(group)].reshape(2, -1)
            given = np.asarray(rows.obs).reshape(len(row), *self._shape)
            if not (self.obs(row, env) == given)[self.is_stored(row, env)].all():
                raise ConfigError(
                    f"replay.frames={self.frames}, and observations are no stacks of so many frames, each the one "
                    "before it and one new frame: use replay.frames=1 to keep them whole."
                )

    def _write(self, places: slice, columns: slice, rows: Row) -> None:
        mask = np.asarray(rows.mask)
        begins = np.concatenate([self.begins[None, columns], ~mask[:-1]])
        newest = self._keep(np.asarray(rows.obs), begins, columns)
        self.kept[columns] = newest[-1] + 1
        self.begins[columns] = ~mask[-1]
        super()._write(places, columns, rows.replace(obs=newest))

    def _write_obs(self, place: int, columns: slice, obs: Any) -> None:
        """Not counted: if a row with it follows, it is written there once more."""
        newest = self._keep(np.asarray(obs)[None], self.begins[None, columns], columns)
        super()._write_obs(place, columns, newest[0])

    def _keep(self, stacks: NDArray[Any], begins: NDArray[np.bool_], columns: slice) -> Index:
        """Write what is new of [T, B] stacks; returns where the newest frame of each is."""
        T, B = begins.shape
        stacks = stacks.reshape(T, B, self.frames, *self.images.shape[2:])
        newest: Index = self.kept[columns] - 1 + np.where(begins, self.frames, 1).cumsum(0)
        env = np.broadcast_to(np.arange(columns.start, columns.stop), (T, B))
        self.promised[columns] = newest[-1] + 1  # before any of it is written
        self._fence()
        gone = newest[-1] - self._room  # frames up to here would be overwritten by later ones of the same rows
        t, b = np.nonzero(newest > gone)
        self.images[env[t, b], newest[t, b] % self._room] = stacks[t, b, -1]
        for back in range(1, self.frames):
            t, b = np.nonzero(begins & (newest - back > gone))
            self.images[env[t, b], (newest[t, b] - back) % self._room] = stacks[t, b, -1 - back]
        return newest

    def _leave_out(self, columns: slice) -> None:
        self.begins[columns] = True

    def _abandon(self, group: int) -> None:
        columns = self.columns(group)
        # Past all that was written: somebody may be reading what the newest row points to.
        self.kept[columns] = np.maximum(self.kept[columns] + self.frames, self.promised[columns])
        super()._abandon(group)

    def observed(self, group: int, first: int, end: int) -> Iterator[tuple[Any, NDArray[np.bool_]]]:
        """Yield stacked frames and masks; nothing for integer images, which have no running statistics."""
        if self.images.dtype.kind == "f":
            row, env = np.mgrid[first:end, self.columns(group)].reshape(2, -1)
            shape = (end - first, self.width)
            yield self.obs(row, env).reshape(*shape, *self._shape), self.is_real(row, env).reshape(shape)

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        self._fence()  # what was copied was read before this is asked
        oldest = self.rows.obs[row % self.capacity, env] - self.frames + 1
        # As many again may have been written without being counted.
        has_frames: NDArray[np.bool_] = oldest >= self.kept[env] + self.frames - self._room
        has_frames &= oldest >= self.promised[env] - self._room
        return (
            super().is_stored(row, env) & has_frames
        )  # last: of a row that is gone, the place of frames is another's

    def obs(self, row: Index, env: Index) -> NDArray[Any]:
        newest = self.rows.obs[row % self.capacity, env]
        place = (newest[:, None] + np.arange(1 - self.frames, 1)) % self._room
        stacks: NDArray[Any] = self.images[env[:, None], place].reshape(len(row), *self._shape)
        return stacks

    # --- for whoever saves it ---

    @property
    def memory(self) -> list[SharedArrays]:
        return [*super().memory, self._images]

    def layout(self) -> dict[str, Any]:
        stacks = f"{self.images.dtype.str}{list(self._shape)}"
        return {**super().layout(), "frames": self.frames, "room for frames": self._room, "stacks": stacks}

    def span(self, group: int, first: int, last: int) -> Span:
        """With the frames before the first row that its stack is made of: no other span is needed to draw it."""
        columns = self.columns(group)
        oldest = self.rows.obs[first % self.capacity, columns] - self.frames + 1
        end = self.rows.obs[(last - 1) % self.capacity, columns] + 1
        # Of many beginnings some frames are gone before their rows are: as in is_stored.
        begin = np.clip(self.kept[columns] + self.frames - self._room, oldest, end)
        return Span(group, first, last, np.stack([begin, end], -1))

    def views(self, span: Span) -> list[NDArray[Any]]:
        views, count = super().views(span), span.frames[:, 1] - span.frames[:, 0]
        if (
            len(span.frames) != self.width
            or (span.frames < 0).any()
            or (count < 0).any()
            or (count > self._room).any()
        ):
            raise ValueError(f"the frames of rows {span.first} to {span.last} have no place")
        columns = self.columns(span.group)
        for env, (begin, end) in zip(range(columns.start, columns.stop), span.frames.tolist(), strict=True):
            views += [self.images[env, places] for places, _ in unbroken(begin, end, self._room)]
        return views

    def get_tail(self) -> dict[str, Any]:
        """With the frames that are not counted yet."""
        env, place = self._uncounted(self.kept)
        frames = self.images[env, place]
        return {**super().get_tail(), "kept": self.kept.copy(), "begins": self.begins.copy(), "frames": frames}

    def set_tail(self, tail: Mapping[str, Any]) -> None:
        env, place = self._uncounted(tail["kept"])
        self.images[env, place] = tail["frames"]
        self.kept[:], self.begins[:] = tail["kept"], tail["begins"]
        self.promised[:] = self.kept
        super().set_tail(tail)

    def _uncounted(self, kept: Index) -> tuple[Index, Index]:
        """Env and place of what may have been written beyond `kept`."""
        return np.arange(self.envs)[:, None], (kept[:, None] + np.arange(self.frames)) % self._room

    def clear(self) -> None:
        super().clear()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self.kept[:], self.promised[:], self.begins[:] = 0, 0, True
        # What is seen before anything is: the first stack there can be, of a writer that is lost in its first rows.
        self.rows.obs[0] = self.frames - 1

    def close(self) -> None:
        super().close()
        self._images.close()
