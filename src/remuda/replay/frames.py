"""Images kept once: of a stack of frames every row adds the newest alone.

    ring = FrameRing(example, capacity=100_000, envs=16, frames=4)      # obs [4, 84, 84]; used like Ring

Frames lie in a ring of their own, in which every env moves at its own pace: one frame for each row, and the whole
stack where an episode begins, so what is put together again is what was seen. A row remembers where its newest
frame is; those before it are the ones before that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.data import SharedArrays
from remuda.replay.ring import Index, Ring, Row

ROWS_PER_EXTRA_FRAME = 64  # room for beginnings; if there are more, the oldest rows can no longer be drawn


class FrameRing(Ring):
    """Rows whose observation is a stack of frames, [frames * channels, H, W]."""

    def __init__(self, example: Row, capacity: int, envs: int, frames: int, groups: int = 1) -> None:
        stack = np.asarray(example.obs)
        super().__init__(example.replace(obs=np.zeros((), np.int64)), capacity, envs, groups)
        self.frames, self._shape = frames, stack.shape
        self._room = capacity + capacity // ROWS_PER_EXTRA_FRAME + 2 * frames
        frame = (stack.shape[0] // frames, *stack.shape[1:])
        self._images = SharedArrays(
            {
                "frames": ((self._room, envs, *frame), str(stack.dtype)),
                "kept": ((envs,), "int64"),
                "begins": ((envs,), "bool"),
            }
        )
        self.images = self._images["frames"]
        self.kept = self._images["kept"]  # frames that each env was ever given
        self.begins = self._images["begins"]  # whether an env's next row is the first of an episode
        self.begins[:] = True

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
        gone = newest[-1] - self._room  # frames up to here would be overwritten by later ones of the same rows
        t, b = np.nonzero(newest > gone)
        self.images[newest[t, b] % self._room, env[t, b]] = stacks[t, b, -1]
        for back in range(1, self.frames):
            t, b = np.nonzero(begins & (newest - back > gone))
            self.images[(newest[t, b] - back) % self._room, env[t, b]] = stacks[t, b, -1 - back]
        return newest

    def _leave_out(self, columns: slice) -> None:
        self.begins[columns] = True

    def is_stored(self, row: Index, env: Index) -> NDArray[np.bool_]:
        oldest = self.rows.obs[row % self.capacity, env] - self.frames + 1
        # As many again may have been written without being counted.
        has_frames: NDArray[np.bool_] = oldest >= self.kept[env] + self.frames - self._room
        return super().is_stored(row, env) & has_frames

    def obs(self, row: Index, env: Index) -> NDArray[Any]:
        newest = self.rows.obs[row % self.capacity, env]
        place = (newest[:, None] + np.arange(1 - self.frames, 1)) % self._room
        stacks: NDArray[Any] = self.images[place, env[:, None]].reshape(len(row), *self._shape)
        return stacks

    def close(self) -> None:
        super().close()
        self._images.close()
