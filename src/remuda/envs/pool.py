"""Envs in worker processes: `core.Envs` over shared memory.

    with PooledEnvs(resolve("CartPole-v1"), num_envs=32, num_workers=2, slots=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()             # slots come in the order of sending; step is a view of shared memory
            envs.send(slot, act(step.obs))       # copies the actions and wakes the workers

Every worker steps its share of every slot. With `alone`, each slot belongs to one worker (envs/async_pool.py). If a
worker dies or does not answer within `step_timeout`, it is replaced, and the pending or next step of its envs is a
reset row: a first observation with mask False. Results do not depend on timing: as long as no worker is lost, the
same seed and actions give the same bits as LocalEnvs.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

from remuda.core import Actions, Array, EnvsState, Episode, Step
from remuda.data.shared import SharedArrays
from remuda.data.trees import leaves
from remuda.env_workers import ENV_WORKERS
from remuda.envs import worker
from remuda.envs.env_group import rows_layout, slice_rows
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.import_paths import describe
from remuda.envs.local import logger
from remuda.envs.slots import check_seeds, envs_in, envs_per_slot, worker_blocks, write_actions
from remuda.envs.spaces import space_from_wire
from remuda.envs.spec import EnvSpec
from remuda.envs.worker_stats import WorkerStats, decode
from remuda.errors import Interrupted, NoState
from remuda.processes.requests import Requests, SpinWait, layout
from remuda.processes.worker_pool import POLL_SECONDS, Worker, WorkerPool

STATS_BYTES = 1024  # shared memory per env for an answer's statistics; longer statistics are sent over the `Link`


class PooledEnvs:
    """`core.Envs` in `num_workers` worker processes."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        num_workers: int,
        slots: int = 1,
        gamma: float = 0.99,
        stats: str | type[EpisodeStats] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_restarts: int = 1000,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
        levels: Sequence[int] | None = None,
        info: Sequence[str] = (),
        seed: int | None = None,  # if given, reset() is optional: the first send to a slot resets its envs
        alone: bool = False,
        first_env: int = 0,
    ) -> None:
        """`first_env` is the first env's index among all envs of the run; an env's seed is derived from its index."""
        if not alone:  # a worker must not start a pool, except for an inference server, which passes alone=True
            worker.refuse_in_worker()
        per_slot, self._is_alone = envs_per_slot(num_envs, slots), alone
        check_seeds(seeds, levels, info, num_envs)
        stats_class = resolve_stats(stats)
        order: dict[str, object] = {
            "spec": spec.to_json(),
            "stats": None if stats_class is EpisodeStats else describe(stats_class),
            "gamma": gamma,
            "max_restarts": max_restarts,
            "levels": None if levels is None else [int(level) for level in levels],
            "info": list(info),
            "first_env": first_env,
        }
        self._blocks = worker_blocks(num_envs, slots, num_workers, alone)
        self._seeds, self._worker_stats = seeds, WorkerStats(num_envs, logger, first_env)
        self._memory: SharedArrays | None = None
        self._sent: deque[tuple[int, int]] = deque()
        orders = [{**order, "worker": index, "blocks": blocks} for index, blocks in enumerate(self._blocks)]
        for index, own in enumerate(orders):
            own["seeds"] = self._seeds_left(index)
        self.num_envs, self.num_slots = num_envs, slots
        self._step_timeout, self._build_timeout = step_timeout, build_timeout
        self._number = 0  # number of the last request
        self._is_in_flight = [False] * slots  # for each slot, whether `recv` still has to return it
        self._sent_at, self._received_at = [0.0] * slots, 0.0  # times that `WorkerPool.clock` showed
        self._seed = seed
        self._restarts_before = 0
        self._waited = 0.0
        self._lost_at = [0] * num_workers  # number of the newest request when each worker was last lost
        self._worker_pool = WorkerPool(
            worker.__name__, orders, ENV_WORKERS, build_timeout, max_worker_restarts, should_stop
        )
        try:
            observation, action = self._worker_pool.start()
            self.observation, self.action = space_from_wire(observation), space_from_wire(action)
            self._allocate(num_workers, per_slot, info)
            for member in self._worker_pool.workers:
                self._attach(member)
        except BaseException:
            self.close()
            raise

    def _allocate(self, num_workers: int, per_slot: int, info: Sequence[str]) -> None:
        room = STATS_BYTES * (per_slot if self._is_alone else -(-per_slot // num_workers))
        memory = SharedArrays(
            {
                **rows_layout(self.observation, self.action, self.num_envs, info),
                **layout(self.num_slots, num_workers, room),
            }
        )
        self._memory = memory
        self._restarts = memory["restarts"]
        arrays = {name: memory[name] for name in memory.layout}
        self._requests, self._spin_wait = Requests(arrays, self._is_alone), SpinWait(num_workers)
        slices = [slice(slot * per_slot, (slot + 1) * per_slot) for slot in range(self.num_slots)]
        views = [slice_rows(arrays, own, self.observation, self.action, info) for own in slices]
        self._steps, self._infos = [rows.step for rows, _ in views], [rows.info for rows, _ in views]
        self._targets = [[leaf for _, leaf in leaves(actions)] for _, actions in views]

    @property
    def should_stop(self) -> Callable[[], bool] | None:
        """A function that is polled at least every 0.2 s while waiting; Interrupted is raised if it returns True."""
        return self._worker_pool.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: Callable[[], bool] | None) -> None:
        self._worker_pool.should_stop = should_stop

    # --- sending and receiving ----------------------------------------------------------------------------------

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start new episodes and take up to `warm_up` random steps in each env; return the total of these steps."""
        while self._sent:
            self._wait(*self._sent[0])
            self._sent.popleft()
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._seed = seed
        self._worker_stats.clear()
        for member in self._worker_pool.workers:
            member.inbox.clear()
        order = {"do": "reset", "seed": seed, "warm_up": warm_up}
        answers = self._order_all(order, "ready", self._build_timeout)
        for answer in answers:
            self._worker_stats.report(answer["notices"])
        for member in self._worker_pool.workers:
            member.inbox.clear()  # drops statistics of requests from before the reset
        # Request number 0 stands for this reset, which has already written the rows of every slot.
        self._sent.extend((slot, 0) for slot in range(self.num_slots))
        self._is_in_flight = [True] * self.num_slots
        return sum(answer["ready"] for answer in answers)

    def prepare(self, seed: int, restarts: int) -> NoReturn:
        raise RuntimeError("a pool replaces lost workers itself: call reset().")

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Send the actions of a slot to its envs; with `hold`, envs whose episode has ended are not reset."""
        self._require_received(slot)
        write_actions(self.action, self._targets[slot], action)
        self._request(slot, worker.HOLD if hold else worker.STEP)

    def renew(self, slot: int) -> None:
        """Start new episodes where the last one has ended; the slot's next step has mask False for all its envs."""
        self._require_received(slot)
        self._request(slot, worker.RENEW)

    def _require_received(self, slot: int) -> None:
        if self._is_in_flight[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")

    def _request(self, slot: int, kind: int) -> None:
        self._number += worker.KINDS
        number = self._number + kind
        self._sent.append((slot, number))
        self._is_in_flight[slot] = True
        self._sent_at[slot] = self._worker_pool.clock
        for index in self._requests.ask(slot, number):
            self._worker_pool.workers[index].bell.ring()

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        """Wait for `slot`, by default the one that was sent first; return the slot and its step."""
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        should_stop = self._worker_pool.should_stop
        if should_stop is not None and should_stop():
            raise Interrupted("asked to stop between two steps of the envs")
        if slot is not None and slot != self._sent[0][0]:
            self._put_first(slot)
        slot, number = self._sent[0]
        if number:
            start = time.perf_counter()
            self._wait(slot, number)
            self._waited += max(0.0, time.perf_counter() - start - self._requests.busy(slot))
        self._sent.popleft()
        self._is_in_flight[slot] = False
        self._received_at = self._worker_pool.clock
        if number and self._requests.has_stats(slot, number):
            self._take_stats(slot, number)
        return slot, self._steps[slot]

    def _put_first(self, slot: int) -> None:
        """Make this slot the next one to receive; raise RuntimeError if it was not sent."""
        for sent in self._sent:
            if sent[0] == slot:
                self._sent.remove(sent)
                self._sent.appendleft(sent)
                return
        raise RuntimeError(f"recv({slot}) without a send({slot}, ...) before it.")

    def is_ready(self, slot: int, seconds: float = 0.0) -> bool:
        """Return whether recv(slot) would return at once; wait up to `seconds` for this, replacing lost workers."""
        return all(self._wait(sent, number, seconds) for sent, number in self._sent if sent == slot)

    def _wait(self, slot: int, number: int, seconds: float = math.inf) -> bool:
        """Wait up to `seconds` for the answers of all workers to request `number`; return whether they have answered.

        Request number 0 stands for a reset, which is already complete.
        """
        requests, pool = self._requests, self._worker_pool
        if not number or requests.is_done(slot, number):
            return True
        if seconds and not pool.has_lost and self._spin_wait.poll(lambda: requests.is_done(slot, number)):
            return True
        requests.sleep(number)
        try:
            if not pool.has_lost:  # unless a worker is lost, sleeping once is nearly always enough
                if requests.is_done(slot, number):
                    return True
                pool.listen(min(seconds, POLL_SECONDS))
            return requests.is_done(slot, number) or self._wait_long(slot, number, seconds)
        finally:
            requests.wake()

    def _wait_long(self, slot: int, number: int, seconds: float) -> bool:
        """Wait like `_wait`, but without spinning; also replace workers that are lost or exceed `step_timeout`."""
        pool = self._worker_pool
        deadline = time.monotonic() + seconds
        # The time limit starts when this slot was sent, or when any slot was last received if that was later.
        start = max(self._sent_at[slot], self._received_at)
        while pending := self._requests.pending(slot, number):
            if pool.has_lost:
                self._replace(pool.lost()[0])
                continue
            for index in pending:
                member = pool.workers[index]
                member.last_seen = max(member.last_seen, start)
                pool.reap_if_silent(member, self._step_timeout, "while it owed an answer")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pool.listen(min(left, POLL_SECONDS))
        return True

    # --- statistics of workers ----------------------------------------------------------------------------------

    def _take_stats(self, slot: int, number: int) -> None:
        """Collect the statistics that workers sent with their answers to this request."""
        for index in self._requests.servers[slot]:
            member = self._worker_pool.workers[index]
            stats = self._requests.stats(member.index, slot, number)
            if stats is None:
                stats = self._receive_stats(member, slot, number)
            if stats:
                self._worker_stats.add(stats, at_once=self._seeds is not None)

    def _receive_stats(self, member: Worker, slot: int, number: int) -> bytes:
        """Return the statistics that a worker sent over its link for request `number`; b"" if the worker is lost."""
        while (stats := self._find_stats(member, slot, number)) is None and not member.is_lost:
            self._worker_pool.listen(POLL_SECONDS)
            self._worker_pool.reap_if_silent(member, self._step_timeout, "while it owed statistics")
        member.inbox = [message for message in member.inbox if message.get("number") != number]
        return stats or b""

    @staticmethod
    def _find_stats(member: Worker, slot: int, number: int) -> bytes | None:
        for message in member.inbox:
            if message.get("slot") == slot and message["number"] == number:
                return bytes(message["worker_stats"])
        return None

    # --- lost workers -------------------------------------------------------------------------------------------

    def _replace(self, member: Worker) -> None:
        """Start a new process for a lost worker; the process also answers the requests that are still unanswered."""
        self._worker_pool.restart(member, self._discard(member))
        self._attach(member)

    def _discard(self, member: Worker) -> bool:
        """Discard a lost worker's unfinished answers; count its envs' restarts; return whether it made progress."""
        index = member.index
        owed = self._requests.unanswered(index)
        for slot in owed:
            self._requests.discard_stats(index, slot)
        member.inbox = [message for message in member.inbox if "slot" in message and message["slot"] not in owed]
        for first, last in self._blocks[index]:
            self._restarts[first:last] += 1
        member.blueprint = {**member.blueprint, "seeds": self._seeds_left(index)}
        # A new worker's first answer for each slot is a reset row, so a second answer for any slot is progress. Each
        # slot has at most one unanswered request, so more than 2 * num_slots requests imply two answers for a slot.
        was_useful = self._number > self._lost_at[index] + 2 * self.num_slots * worker.KINDS
        self._lost_at[index] = self._number
        return was_useful

    def _seeds_left(self, index: int) -> dict[str, list[int]] | None:
        """Return the seeds that each env of a worker has not played yet, by env index; None if the pool has no seeds.

        Episodes count as played even if `recv` has not yet returned the step in which they ended.
        """
        if self._seeds is None:
            return None
        played: Counter[int] = Counter()
        for slot, number in self._sent:
            stats = self._requests.stats(index, slot, number)
            stats = self._find_stats(self._worker_pool.workers[index], slot, number) if stats is None else stats
            if number and stats:
                played.update(env for env, _ in decode(stats)[0])
        played.update(dict(enumerate(self._worker_stats.played)))
        return {str(env): list(self._seeds[env][played[env] :]) for env in envs_in(self._blocks[index])}

    def _attach(self, member: Worker) -> None:
        """Send the shared memory and the seed to a worker that has built its envs."""
        assert self._memory is not None
        # The message also carries the seed, because the worker's first request may require a reset of its envs.
        order = {"do": "attach", "layout": self._memory.layout, "seed": self._seed, "alone": self._is_alone}
        member.send(order, [self._memory.fd])
        member.last_seen = self._worker_pool.clock

    # --- reports and states -------------------------------------------------------------------------------------

    def info(self, slot: int) -> dict[str, Array]:
        """Return the entries of info requested at construction, for a slot's last step; nan where one is missing."""
        return dict(self._infos[slot])

    def episodes(self) -> list[Episode]:
        return self._worker_stats.take_episodes()

    def waited(self) -> float:
        """Return the seconds spent in `recv`, less the time that the fastest worker needed for stepping."""
        return self._waited

    def restarts(self) -> int:
        return self._restarts_before + int(self._restarts.sum())

    def inspect_workers(self) -> list[worker.WorkerInfo]:
        """Return every worker's process id, whether it has imported torch, and its peak memory."""
        return [answer["inspected"] for answer in self._order_all({"do": "inspect"}, "inspected", self._step_timeout)]

    def _order_all(self, order: Mapping[str, object], key: str, seconds: float) -> list[dict[str, Any]]:
        return self._worker_pool.ask([order] * len(self._worker_pool.workers), key, seconds, self._replace)

    def get_state(self) -> EnvsState:
        """Return the states of all envs and of every worker's global generators (`random` and `numpy.random`)."""
        answers = self._order_all({"do": "save"}, "saved", self._build_timeout)
        states: dict[int, Any] = {}
        for blocks, answer in zip(self._blocks, answers, strict=True):
            if answer["saved"] is None:
                raise NoState(answer["why"])
            states.update(zip(envs_in(blocks), answer["saved"], strict=True))
        return {
            "envs": [states[env] for env in range(self.num_envs)],
            "restarts": self._restarts.copy(),
            "restarts_before": self._restarts_before,
            "libraries": [answer["libraries"] for answer in answers],
            "seed": self._seed,
        }

    def set_state(self, state: EnvsState) -> None:
        """Continue from a state that LocalEnvs or a pool with any number of workers saved."""
        # The seed is kept for processes that replace lost workers later.
        libraries, self._seed = state.get("libraries", []), state.get("seed", 0)
        if len(libraries) != len(self._blocks):
            libraries = [None] * len(self._blocks)
        orders = [
            {"do": "load", "states": [state["envs"][env] for env in envs_in(blocks)], "libraries": own}
            for blocks, own in zip(self._blocks, libraries, strict=True)
        ]
        self._worker_pool.ask(orders, "loaded", self._build_timeout, self._replace)
        # The counts are set after loading, because the loss of a worker during loading increments them.
        self._restarts[:], self._restarts_before = state["restarts"], state["restarts_before"]
        self._sent.clear()
        self._is_in_flight = [False] * self.num_slots

    def close(self) -> None:
        """End all worker processes and release the shared memory; a second call does nothing."""
        self._worker_pool.close()
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
