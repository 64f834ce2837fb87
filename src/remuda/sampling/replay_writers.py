"""Sampler workers that write their rows straight into the memory of a replay.

    writers = ReplayWriterPool("remuda.build.workers", blueprints, weights, fds, num_steps, seed, on_lost=...)
    writers.start(seed)
    while training:
        writers.poll(learner.version)          # raises the error that ended sampling, if there is one
        ...                                    # draw, learn, publish

Workers send only statistics and warnings to the learner's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.core import Weights
from remuda.processes.links import Message
from remuda.processes.worker_pool import Blueprint, Worker
from remuda.sampling.async_workers import AsyncWorkers

DRAIN_SECONDS = 1.0  # longest time for which `drain` waits for statistics
DRAIN_POLL_SECONDS = 0.005


class ReplayWriterPool(AsyncWorkers):
    """Workers that write to a replay. The entry `groups` of a blueprint tells how many env groups the worker has."""

    answer_key = "sampled"

    def __init__(
        self,
        module: str,
        blueprints: Sequence[Blueprint],
        weights: Weights,
        fds: Sequence[int],
        num_steps: int,
        seed: int,
        *,
        on_lost: Callable[[int], int],
        written: NDArray[np.int64] | None = None,
        **limits: Any,
    ) -> None:
        """Start workers that write to the replay whose memory has the file descriptors `fds`.

        `on_lost(group)` prepares the replay for a new writer of the group, and returns the group's number of rows.
        `written` is the replay's own array, which counts the rows that were ever written to each group; None stands
        for counts of 0, with which `drain` does not wait. The noise and the exploration schedules of all groups
        continue from the largest of these counts. `limits` are keyword arguments of AsyncWorkers.
        """
        self._fds, self._on_writer_lost = list(fds), on_lost
        self._width = width = blueprints[0]["groups"]
        self._written = written if written is not None else np.zeros(width * len(blueprints), np.int64)
        before: list[int] = self._written.tolist()
        # For each worker, the number of rows whose statistics have arrived.
        self._reported = self._written.reshape(-1, width).sum(1)
        first_row = max(before)
        self._rows = [first_row] * len(blueprints)
        # For each group, the row number that noise and schedules use, minus the row number in the replay. The numbers
        # differ, because the noise and schedules of all groups continue from the same `first_row`.
        self._ahead = [first_row - rows for rows in before]
        common = {"num_steps": num_steps, "seed": seed, "row": first_row, "all_groups": len(before)}
        complete = [{**blueprint, **common, "group": width * i} for i, blueprint in enumerate(blueprints)]
        super().__init__(module, complete, weights, seed, **limits)

    def poll(self, version: int) -> None:
        """Record the learner's version; raise the error that ended sampling, if there is one."""
        with self._changed:
            self._version = version
            if self._error is not None:
                raise self._error

    def drain(self) -> None:
        """Wait until the statistics of all written rows have arrived, but at most DRAIN_SECONDS."""
        end = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < end:
            with self._changed:
                written = self._written.reshape(-1, self._width).sum(1)
                if self._error is not None or (self._reported >= written).all():
                    return
            time.sleep(DRAIN_POLL_SECONDS)

    def close(self) -> None:
        super().close()
        on_writer_lost, self._on_writer_lost = self._on_writer_lost, lambda group: 0
        for group in range(len(self._ahead)):
            on_writer_lost(group)  # discards incomplete rows, which a worker may have left when it was stopped

    def _attach_message(self) -> tuple[Message, list[int]]:
        return {"into": "replay"}, self._fds

    def _on_ready(self, worker: Worker) -> None:
        worker.send({"do": "sample"})

    def _on_answer(self, index: int, answer: Message) -> None:
        self._reported[index] = answer["sampled"]

    def _dispatch(self) -> None:
        """Do nothing, because these workers sample without being asked."""

    def _assemble(self) -> None:
        """Do nothing, because the workers write their rows to the replay themselves."""

    def _on_lost(self, index: int) -> None:
        """Prepare a lost worker's groups for its replacement.

        Noise and schedules of the replacement continue from the largest row number of these groups.
        """
        own = range(index * self._width, (index + 1) * self._width)
        written = [self._on_writer_lost(group) for group in own]
        self._rows[index] = max(rows + self._ahead[group] for group, rows in zip(own, written, strict=True))
        for group, rows in zip(own, written, strict=True):
            self._ahead[group] = self._rows[index] - rows
        self._reported[index] = sum(written)  # `drain` must not wait for statistics that were lost with the worker

    def _next_row(self, index: int) -> int:
        return self._rows[index]

    def _must_answer(self, index: int) -> bool:
        return True
