"""Workers of bench/replay_writers.py: they write to the replay, to memory that nothing reads, or to a pipe."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from remuda.build.replay import make_ring
from remuda.build.workers import RingWriter, SamplerWorker
from remuda.data import Rollout, map_tree
from remuda.replay import as_row
from remuda.sampling.sampler_worker import serve
from remuda.sampling.worker_services import Writer

HEADER = struct.Struct("<I")


def main(fds: Sequence[int]) -> int:
    worker = SamplerWorker()

    def make_writer(order: Mapping[str, Any], given: Sequence[int]) -> Writer:
        if order["into"] == "replay":
            return worker.make_writer(order, given)
        prepare = worker.built.wrap_agent(needs_loss=False).prepare
        if order["into"] == "pipe":
            return PipeWriter(os.dup(given[order["group"]]), prepare)
        ring = make_ring(worker.built.config, worker.built.seen, None, order["all_groups"])
        return RingWriter(ring, None, range(order["group"], order["group"] + 1), prepare)

    return serve(fds, worker.make_parts, make_writer)


class PipeWriter:
    """Sends rollouts as pickles, as queues of multiprocessing do, and blocks while the pipe is full."""

    def __init__(self, fd: int, prepare: Any) -> None:
        self.fd, self.prepare = fd, prepare

    def may_write(self) -> bool:
        return True

    def num_written(self) -> int:
        return 0  # is not known, because rows go through a pipe

    def write(self, rollout: Rollout, group: int = 0) -> None:
        batch = self.prepare(rollout)
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        data = pickle.dumps((tuple(rows), next_obs), pickle.HIGHEST_PROTOCOL)
        left = memoryview(HEADER.pack(len(data)) + data)
        while left:
            left = left[os.write(self.fd, left) :]
