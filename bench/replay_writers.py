"""Measure what receiving experience costs a learner: SAC on HalfCheetah-v5 with concurrent samplers.

    .venv/bin/python bench/replay_writers.py --batch 256             # updates and sampled rows per second
    .venv/bin/python bench/replay_writers.py --batch 8192 --seconds 6 --out docs/speed/replay-writers-8192.json

Four contenders take turns. Each is a process with samplers of its own, which are stopped between its turns:

| | |
|---|---|
| alone | no samplers: the speed of the learner with a core of its own |
| aside | samplers write to memory that is never read: the machine is as busy, but the learner receives nothing |
| ring | samplers write directly to the replay, as under --scheme async |
| queue | samplers send pickled rollouts through a pipe, and the learner adds them to its replay |

The cost of receiving is the rate of updates of `ring` and `queue` relative to `aside`. Spreeze reports a cost of 0 %
for shared memory and 20 % for a queue.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pickle
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from replay_writers_workers import HEADER

from remuda.bench.turns import Contender, give_out, median_and_interval, serve

ROOT = Path(__file__).parents[1]
KINDS = ("alone", "aside", "ring", "queue")
STORED = 5_000  # rows in the replay before anything is measured
PIPE_BYTES = 1 << 20


class Pipes:
    """The receiving end of the queue, with one pipe for each worker."""

    def __init__(self, workers: int, ring: Any) -> None:
        from remuda.replay import Row

        self._row, self.ring = Row, ring
        pairs = [os.pipe() for _ in range(workers)]
        self._read, self.write = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._data = [bytearray() for _ in pairs]
        for fd in self._read:
            os.set_blocking(fd, False)
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def take(self) -> None:
        """Move all rollouts that have arrived to the ring."""
        for group, (fd, data) in enumerate(zip(self._read, self._data, strict=True)):
            try:
                data += os.read(fd, PIPE_BYTES)
            except BlockingIOError:
                continue
            while len(data) >= HEADER.size and len(data) >= HEADER.size + (size := HEADER.unpack_from(data)[0]):
                rows, next_obs = pickle.loads(bytes(data[HEADER.size : HEADER.size + size]))
                del data[: HEADER.size + size]
                self.ring.append(self._row(*rows), next_obs, group)


def serve_one(kind: str, env: str, batch: int, envs: int, workers: int) -> None:
    import torch

    from remuda.build.blueprint import make_async_blueprints, worker_limits
    from remuda.build.recipe import make_recipe
    from remuda.build.replay import make_replay
    from remuda.config.resolve import resolve_config
    from remuda.learning.weights import SharedWeights
    from remuda.machine import keep_memory
    from remuda.sampling.replay_writers import ReplayWriterPool

    keep_memory()
    groups: dict[str, Any] = {
        "algo": {"batch_size": batch, "learning_starts": 0, "train_freq": 8},
        "replay": {"capacity": 1_000_000, "ratio": None},
        "sampler": {"envs": envs, "workers": workers},
        "envs": {"step_timeout": 3600.0},  # envs are stopped while other contenders have their turn
    }
    config, spec, info = resolve_config({"algo": "sac", "env": env, "scheme": "async", "seed": 1}, groups)
    learner = make_recipe(config, spec, info).make_learner()
    agent = learner.algorithm.agent
    torch.set_num_threads(1)
    weights = SharedWeights(agent, 0)
    replay: Any = make_replay(config, info, None, 0, workers)
    pipes = Pipes(workers, replay.ring)
    into = {"ring": "replay", "queue": "pipe"}.get(kind, "nowhere")
    orders = [{**order, "into": into} for order in make_async_blueprints(config, spec, info, workers)]
    fds = pipes.write if kind == "queue" else replay.fds
    feed = ReplayWriterPool(
        "replay_writers_workers", orders, weights, fds, 8, 1, on_lost=replay.on_writer_lost, **worker_limits(config)
    )
    pids = [member.pid for member in feed._worker_pool.workers]
    fill(replay, info)
    replay.sync()  # samplers may write from now on
    feed.start(1)

    def rest(is_resting: bool) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if is_resting or kind == "alone" else signal.SIGCONT)

    def take(seconds: float) -> dict[str, float]:
        rest(False)
        time.sleep(0.2)
        count, real = 0, int(replay.ring.real.sum())
        begin = now = time.perf_counter()
        while now < begin + seconds or count < 2:
            if kind == "queue":
                pipes.take()
            replay.sync()
            feed.poll(learner.version)
            drawn = replay.draw()
            replay.feedback(drawn.key, learner.step(drawn).priority)
            count += 1
            if count % 10 == 0:
                weights.publish(learner.version)
            now = time.perf_counter()
        took, fresh = now - begin, int(replay.ring.real.sum()) - real
        rest(True)
        return {"updates": count / took, "sampled": fresh / took, "redrawn": float(replay.counters.torn_rows)}

    rest(True)
    try:
        serve(take)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        feed.close()
        replay.close()
        weights.close()


def fill(replay: Any, info: Any) -> None:
    """Fill the replay with arbitrary rows, because the cost of an update does not depend on their values."""
    import numpy as np

    from remuda.replay import Row

    rng, width = np.random.default_rng(0), replay.ring.width
    for group in range(replay.ring.groups):
        rows = STORED // replay.ring.envs
        obs = rng.standard_normal((rows + 1, width, *info.observation.shape)).astype(np.float32)
        action = rng.uniform(-1, 1, (rows, width, int(np.prod(info.action.shape)))).astype(np.float32)
        ones = np.ones((rows, width), np.float32)
        replay.ring.append(Row(obs[:-1], action, ones, ones, ones.astype(bool)), obs[-1], group)
    replay.sync()


def compare(env: str, batch: int, envs: int, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--env", env, "--batch", batch, "--envs", envs, "--workers", workers]
    contenders = {kind: Contender([[*command, "--serve", kind]]) for kind in KINDS}
    found: dict[str, dict[str, list[float]]] = {kind: {"updates": [], "sampled": [], "cpu": []} for kind in KINDS}
    try:
        for turn in range(rounds + 1):
            for kind, each in contenders.items():
                (result,), cpu = each.slice(seconds)
                if turn:  # the first turn is a warm-up
                    found[kind]["updates"].append(result["updates"])
                    found[kind]["sampled"].append(result["sampled"])
                    found[kind]["cpu"].append(cpu)
    finally:
        for each in contenders.values():
            each.close()
    kept = {
        kind: median_and_interval(
            [a / b for a, b in zip(found[kind]["updates"], found["aside"]["updates"], strict=True)]
        )
        for kind in KINDS
    }
    return {
        "env": env,
        "batch": batch,
        "envs": envs,
        "workers": workers,
        "rounds": rounds,
        "seconds": seconds,
        "updates_per_second": {kind: statistics.median(found[kind]["updates"]) for kind in KINDS},
        "update_frames_per_second": {kind: batch * statistics.median(found[kind]["updates"]) for kind in KINDS},
        "sampled_per_second": {kind: statistics.median(found[kind]["sampled"]) for kind in KINDS},
        "updates_kept_beside_aside": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a slice")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_one(given.serve, given.env, given.batch, given.envs, given.workers)
        return
    report = compare(given.env, given.batch, given.envs, given.workers, given.rounds, given.seconds)
    give_out(report, given.out)


if __name__ == "__main__":
    main()
