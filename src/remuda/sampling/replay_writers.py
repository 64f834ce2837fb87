"""Samplers that feed a replay by themselves: each writes its rows straight into the replay's memory.

    feed = ReplayWriterPool("remuda.build.workers", orders, weights, fds, num_steps, seed, on_loss=replay.lose)
    feed.start(seed)
    while training:
        feed.look(learner.version)             # raises what a sampler could not handle
        ...                                    # draw, learn, publish

Nothing passes through this process but news: episodes, where time went, who was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.learning.weights import FileWeights, SharedWeights
from remuda.processes.worker_pool import Worker
from remuda.sampling.async_workers import AsyncWorkers

TELL_SECONDS = 1.0  # longest wait for what was sampled last to be told of
LOOK_SECONDS = 0.005


class ReplayWriterPool(AsyncWorkers):
    """As many groups of the replay's envs for each worker as its order has."""

    answer_key = "sampled"

    def __init__(
        self,
        module: str,
        orders: Sequence[Mapping[str, Any]],
        weights: SharedWeights | FileWeights,
        fds: Sequence[int],
        num_steps: int,
        seed: int,
        *,
        on_loss: Callable[[int], int],
        written: NDArray[np.int64] | None = None,
        **limits: Any,
    ) -> None:
        """`fds` are of the replay; on_loss(group) makes it fit for another writer, and returns its next row.

        `written` are the rows that each group has, now and as they are written: noise and schedules of all go on
        from the largest.
        """
        self._fds, self._on_loss = list(fds), on_loss
        self._width = width = orders[0]["groups"]
        self._written = written if written is not None else np.zeros(width * len(orders), np.int64)
        before: list[int] = self._written.tolist()
        self._told = self._written.reshape(-1, width).sum(1)  # rows of its groups that each worker has spoken of
        first_row = max(before)
        self._rows = [first_row] * len(orders)
        self._ahead = [first_row - rows for rows in before]  # of each group
        common = {"num_steps": num_steps, "seed": seed, "row": first_row, "all_groups": len(before)}
        full = [{**order, **common, "group": width * index} for index, order in enumerate(orders)]
        super().__init__(module, full, weights, seed, **limits)

    def look(self, version: int) -> None:
        """For a learner of this version: whether all is well."""
        with self._turn:
            self._version = version
            if self._error is not None:
                raise self._error

    def receive_all(self) -> None:
        """Wait until all that was written is told of, with the episodes that ended in it; not for somebody lost."""
        end = time.monotonic() + TELL_SECONDS
        while time.monotonic() < end:
            with self._turn:
                written = self._written.reshape(-1, self._width).sum(1)
                if self._error is not None or (self._told >= written).all():
                    return
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        super().close()
        on_loss, self._on_loss = self._on_loss, lambda group: 0
        for group in range(len(self._ahead)):
            on_loss(group)  # who was stopped while it wrote has left rows that are not whole

    def _attachment(self) -> tuple[dict[str, Any], list[int]]:
        return {"into": "replay"}, self._fds

    def _set_going(self, member: Worker) -> None:
        member.tell({"do": "sample"})

    def _take(self, index: int, answer: Mapping[str, Any]) -> None:
        """The rows are where they belong already."""
        self._told[index] = answer["sampled"]

    def _arrange(self) -> None:
        """Nothing is dealt: samplers go on by themselves."""

    def _afterwards(self) -> None:
        """Nothing is put together."""

    def _on_lost(self, index: int) -> None:
        """Who replaces it goes on with all of its groups from the row of the one that had come furthest."""
        own = range(index * self._width, (index + 1) * self._width)
        written = [self._on_loss(group) for group in own]
        self._rows[index] = max(rows + self._ahead[group] for group, rows in zip(own, written, strict=True))
        for group, rows in zip(own, written, strict=True):
            self._ahead[group] = self._rows[index] - rows
        self._told[index] = sum(written)  # there is nobody any more who could speak of them

    def _next_row(self, index: int) -> int:
        return self._rows[index]

    def _owes(self, index: int) -> bool:
        return True
