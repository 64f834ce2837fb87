"""Workers that act: each holds a copy of the agent and some of the envs, and samples its columns of every rollout.

    sampler = WorkerSampler("remuda.build.workers", orders, agent, observation, weights, num_steps, seed)
    sampler.reset(seed)
    rollout = sampler.collect()          # every worker fills its columns, with the weights published last

One question and one answer per rollout instead of per step: what suits envs that are cheap beside the hand-over,
machines with many cores, and networks small enough to run on each of them. Steps lie in shared memory, weights come
through it (learning/weights.py). Exploration noise is keyed by env and row, so the actions are those that central
inference would take, up to the rounding of matrix products of another height.

A worker that is lost is replaced, and the new one samples its columns of the running rollout again: its envs answer
row 0 with a reset, which ends their episodes as truncations, and no update is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remuda.core import Agent, Episode, Space
from remuda.data import Rollout, map_tree
from remuda.data.packing import pack, unpack
from remuda.errors import ConfigError, NoState
from remuda.learning.weights import SharedWeights
from remuda.processes.worker_pool import Worker, WorkerPool
from remuda.sampling.buffers import allocate, share
from remuda.sampling.worker_stats import WorkerStats


class WorkerSampler:
    """The parent's side; `orders` say what each worker builds, with its share of the envs as `first` and `last`."""

    def __init__(
        self,
        module: str,
        orders: Sequence[Mapping[str, Any]],
        agent: Agent,
        observation: Space,
        weights: SharedWeights,
        num_steps: int,
        seed: int,
        first_row: int = 0,
        *,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.num_envs, self.num_steps, self.row = orders[-1]["last"], num_steps, first_row
        self._weights, self._step_timeout, self._build_timeout = weights, step_timeout, build_timeout
        self._seed: int | None = None
        self._news = WorkerStats(len(orders))
        self._was_useful = [False] * len(orders)  # whether each worker has answered since it was last replaced
        self._waited, self._running = 0.0, 0
        common = {"num_steps": num_steps, "seed": seed}
        # memory first: it is what may not fit
        self._memory, self._buffers = share(allocate(agent, observation, num_steps, self.num_envs))
        try:
            full = [{**order, **common} for order in orders]
            self._worker_pool = WorkerPool(module, full, build_timeout, max_worker_restarts, should_stop)
        except BaseException:
            self._memory.close()
            raise
        try:
            self._worker_pool.start()
            for member in self._worker_pool.members:
                self._introduce(member)
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env; returns the random steps that were taken to spread them over their episodes."""
        self._seed = seed
        answers = self._ask({"do": "reset", "seed": seed, "warm_up": warm_up}, "ready", self._build_timeout)
        self._keep_end()
        return sum(int(answer["ready"]) for answer in answers)

    def collect(self) -> Rollout:
        """T rows of every env with the weights published last."""
        start = time.perf_counter()
        answers = self._ask({"do": "collect", "row": self.row}, "collected", self._step_timeout)
        busy = [answer["seconds"]["env"] + answer["seconds"]["inference"] for answer in answers]
        self._waited += max(0.0, time.perf_counter() - start - sum(busy) / len(busy))
        for index, answer in enumerate(answers):
            self._news.add(index, answer)
        self._running = sum(answer["running"] for answer in answers)
        self._keep_end()
        self.row += self.num_steps
        buffers = self._buffers
        return Rollout(buffers.steps, buffers.next_obs, buffers.last_value, buffers.state, begins=buffers.begins)

    def _keep_end(self) -> None:
        """Where the next rollout begins: a worker may be lost after it has written the end of that one already."""
        self._end = map_tree(torch.clone, (self._buffers.next_obs, self._buffers.next_state))

    def _ask(self, order: Mapping[str, Any], key: str, seconds: float) -> list[dict[str, Any]]:
        """The same of every worker; whoever is lost meanwhile is replaced and asked again."""
        is_underway = order["do"] in ("collect", "save")  # a worker that is lost goes on from the last rollout's end
        orders = [order] * len(self._worker_pool.members)
        answers = self._worker_pool.ask(orders, key, seconds, lambda member: self._replace(member, is_underway))
        self._was_useful = [True] * len(answers)
        for answer in answers:
            self._news.report(answer.get("notices", ()))
        return answers

    def get_state(self) -> bytes:
        """Of every worker's sampler."""
        answers = self._ask({"do": "save"}, "saved", self._build_timeout)
        for answer in answers:
            if answer["saved"] is None:
                raise NoState(answer["why"])
        kept = [self._seed, self._news.restarts_before, self._news.lost]
        return pack([*kept, *(answer["saved"] for answer in answers)])

    def set_state(self, state: bytes) -> None:
        seed, restarts_before, lost, *samplers = unpack(state)
        if len(samplers) != len(self._worker_pool.members):
            raise ConfigError(
                f"this run was made by {len(samplers)} acting workers, not by {len(self._worker_pool.members)}: "
                f"resume it where sampler.workers can be {len(samplers)}."
            )
        orders = [{"do": "load", "state": state} for state in samplers]
        answers = self._worker_pool.ask(
            orders, "loaded", self._build_timeout, lambda member: self._replace(member, is_underway=False)
        )
        # after the loading, in which a worker may have been lost too
        self._seed = seed
        self._news.set_restarts(restarts_before, lost, [answer["loaded"] for answer in answers])
        self._keep_end()

    def _replace(self, member: Worker, is_underway: bool) -> None:
        index = member.index
        member.inbox.clear()
        self._news.on_lost(index, member.order["last"] - member.order["first"])
        self._worker_pool.revive(member, self._was_useful[index])
        self._was_useful[index] = False
        if is_underway:
            own = slice(member.order["first"], member.order["last"])
            for shared, kept in zip((self._buffers.next_obs, self._buffers.next_state), self._end, strict=True):
                if kept is not None:
                    shared[own] = kept[own]
        self._introduce(member, self._seed if is_underway else None)

    def _introduce(self, member: Worker, seed: int | None = None) -> None:
        order = {
            "do": "attach",
            "layout": self._memory.layout,
            "seed": seed,
            "restarts": self._news.lost[member.index],
        }
        member.tell(order, [self._memory.fd, self._weights.fd])
        member.heard = self._worker_pool.clock

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call, on average over the workers."""
        waited, self._waited = self._waited, 0.0
        return {"env": 0.0, "inference": 0.0, **self._news.take_seconds(), "wait": waited}

    def episodes(self) -> list[Episode]:
        return self._news.take_episodes()

    def restarts(self) -> int:
        return self._news.restarts()

    def running(self) -> int:
        """Return the number of envs that were in the middle of an episode when the last rollout ended."""
        return self._running

    def close(self) -> None:
        """End every process and give back the memory; calling it again does nothing."""
        self._worker_pool.close()
        self._memory.close()
