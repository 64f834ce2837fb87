"""A sampler whose workers run the policy: each has a copy of the agent and samples its columns of every rollout.

    sampler = WorkerSampler("remuda.build.workers", blueprints, agent, observation, weights, num_steps, seed)
    sampler.reset(seed)
    rollout = sampler.collect()          # every worker samples its columns, using the newest weights

Each worker receives one request and sends one answer per rollout instead of per step. This suits envs that step
faster than a message travels, machines with many cores, and networks that are small enough to run on each core. Steps
and weights are in shared memory (learning/weights.py). Exploration noise is keyed by env and row, so the actions are
those of central inference, except that matrix products of smaller batches may round differently.

If a worker is lost, its replacement samples the worker's columns of the current rollout again. The new envs are reset
in row 0 (with `wait_reset`, before row 0), which ends the previous episodes as truncations. No update is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from remuda.core import Agent, Episode, Space, Weights
from remuda.data import Rollout, map_tree
from remuda.data.packing import pack, unpack
from remuda.env_workers import ENV_WORKERS
from remuda.errors import ConfigError, NoState
from remuda.processes.links import Message
from remuda.processes.worker_pool import Blueprint, Worker, WorkerPool
from remuda.sampling.buffers import allocate, share
from remuda.sampling.worker_stats import WorkerStats


class WorkerSampler:
    """A sampler in the parent process. Each blueprint describes a worker that runs the envs `first` to `last - 1`."""

    def __init__(
        self,
        module: str,
        blueprints: Sequence[Blueprint],
        agent: Agent,
        observation: Space,
        weights: Weights,
        num_steps: int,
        seed: int,
        first_row: int = 0,
        *,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.num_envs, self.num_steps, self.row = blueprints[-1]["last"], num_steps, first_row
        self._weights, self._step_timeout, self._build_timeout = weights, step_timeout, build_timeout
        self._seed: int | None = None
        self._worker_stats = WorkerStats(len(blueprints))
        self._made_progress = [False] * len(blueprints)  # whether each worker has answered since it was last replaced
        self._waited, self._running = 0.0, 0
        common = {"num_steps": num_steps, "seed": seed}
        # Allocate the memory before starting processes, because the allocation may fail.
        self._memory, self._buffers = share(allocate(agent, observation, num_steps, self.num_envs))
        try:
            complete = [{**blueprint, **common} for blueprint in blueprints]
            self._worker_pool = WorkerPool(
                module, complete, ENV_WORKERS, build_timeout, max_worker_restarts, should_stop
            )
        except BaseException:
            self._memory.close()
            raise
        try:
            self._worker_pool.start()
            for worker in self._worker_pool.workers:
                self._attach(worker)
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Reset every env; return the number of random warm-up steps, of which each env takes at most `warm_up`."""
        self._seed = seed
        answers = self._ask({"do": "reset", "seed": seed, "warm_up": warm_up}, "ready", self._build_timeout)
        self._keep_next()
        return sum(int(answer["ready"]) for answer in answers)

    def collect(self) -> Rollout:
        """Sample num_steps rows of every env with the newest published weights."""
        start = time.perf_counter()
        answers = self._ask({"do": "collect", "row": self.row}, "collected", self._step_timeout)
        busy = [answer["seconds"]["env"] + answer["seconds"]["inference"] for answer in answers]
        self._waited += max(0.0, time.perf_counter() - start - sum(busy) / len(busy))
        for index, answer in enumerate(answers):
            self._worker_stats.add(index, answer)
        self._running = sum(answer["running"] for answer in answers)
        self._keep_next()
        self.row += self.num_steps
        buffers = self._buffers
        return Rollout(buffers.steps, buffers.next_obs, buffers.last_value, buffers.state, begins=buffers.begins)

    def _keep_next(self) -> None:
        """Copy the observations and states at which the next rollout begins.

        A worker may overwrite the originals in the shared buffers before it is lost.
        """
        self._next = map_tree(torch.clone, (self._buffers.next_obs, self._buffers.next_state))

    def _ask(self, request: Message, key: str, seconds: float) -> list[Message]:
        """Send a request to all workers, and return their answers; replacements of lost workers receive it, too."""
        continues = request["do"] in ("collect", "save")  # whether replacements continue where the last rollout ended
        requests = [request] * len(self._worker_pool.workers)
        answers = self._worker_pool.ask(requests, key, seconds, lambda worker: self._replace(worker, continues))
        self._made_progress = [True] * len(answers)
        for answer in answers:
            self._worker_stats.report(answer.get("notices", ()))
        return answers

    def get_state(self) -> bytes:
        """Return the packed states of all workers' samplers; raise NoState if an env's state cannot be saved."""
        answers = self._ask({"do": "save"}, "saved", self._build_timeout)
        for answer in answers:
            if answer["saved"] is None:
                raise NoState(answer["why"])
        kept = [self._seed, self._worker_stats.restarts_before, self._worker_stats.lost]
        return pack([*kept, *(answer["saved"] for answer in answers)])

    def set_state(self, state: bytes) -> None:
        seed, restarts_before, lost, *samplers = unpack(state)
        if len(samplers) != len(self._worker_pool.workers):
            raise ConfigError(
                f"this run was made by {len(samplers)} sampler workers, not by {len(self._worker_pool.workers)}: "
                f"resume it where sampler.workers can be {len(samplers)}."
            )
        requests = [{"do": "load", "state": state} for state in samplers]
        answers = self._worker_pool.ask(
            requests, "loaded", self._build_timeout, lambda worker: self._replace(worker, continues=False)
        )
        # Set the counts last, because a worker that is lost while loading changes them.
        self._seed = seed
        self._worker_stats.set_restarts(restarts_before, lost, [answer["loaded"] for answer in answers])
        self._keep_next()

    def _replace(self, worker: Worker, continues: bool) -> None:
        """Restart a lost worker; with `continues`, its replacement starts from the end of the last rollout."""
        index, own = worker.index, slice(worker.blueprint["first"], worker.blueprint["last"])
        worker.inbox.clear()
        self._worker_stats.on_lost(index, own.stop - own.start)
        self._worker_pool.restart(worker, self._made_progress[index])
        self._made_progress[index] = False
        if continues:
            for shared, kept in zip((self._buffers.next_obs, self._buffers.next_state), self._next, strict=True):
                if kept is not None:
                    shared[own] = kept[own]
        self._attach(worker, self._seed if continues else None)

    def _attach(self, worker: Worker, seed: int | None = None) -> None:
        """Give a worker access to the shared memory and to the weights.

        A `seed` makes the worker continue from the end of the last rollout, in place of a lost worker.
        """
        weights, fds = self._weights.invitation()
        message = {"do": "attach", "layout": self._memory.layout, "into": "columns", "seed": seed}
        message |= {"restarts": self._worker_stats.lost[worker.index], **weights, "fds": 1 + len(fds)}
        worker.send(message, [self._memory.fd, *fds])
        worker.last_seen = self._worker_pool.clock

    def take_seconds(self) -> dict[str, float]:
        """Return the mean seconds that a worker spent on each activity since the last call."""
        waited, self._waited = self._waited, 0.0
        return {"env": 0.0, "inference": 0.0, **self._worker_stats.take_seconds(), "wait": waited}

    def episodes(self) -> list[Episode]:
        return self._worker_stats.take_episodes()

    def restarts(self) -> int:
        return self._worker_stats.restarts()

    def running(self) -> int:
        """Return the number of envs that were in the middle of an episode when the last rollout ended."""
        return self._running

    def close(self) -> None:
        """End every process and free the memory. A second call does nothing."""
        self._worker_pool.close()
        self._memory.close()
