"""Envs in worker processes: `core.Envs` over shared memory.

    with PooledEnvs(resolve("CartPole-v1"), num_envs=32, num_workers=2, slots=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()             # in the order of sending; views of shared memory
            envs.send(slot, act(step.obs))       # copies the actions, rings the workers

Every worker serves its share of every slot; with `alone` it has slots of its own (envs/async_pool.py). A worker that
dies, or owes an answer for longer than `step_timeout`, is replaced; the envs it had answer their pending or next
request with a reset row. Answers do not depend on timing: the same seed and actions give what LocalEnvs gives, bit by
bit, as long as no worker is lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from remuda.core import Episode, Step
from remuda.data.shared import SharedArrays
from remuda.data.trees import leaves
from remuda.env_workers import ENV_WORKERS
from remuda.envs import worker
from remuda.envs.env_group import rows_layout, slice_rows
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.import_paths import describe
from remuda.envs.local import blocks_of, check_seeds, envs_of, envs_per_slot, logger, write_actions
from remuda.envs.spaces import space_from_wire
from remuda.envs.spec import EnvSpec
from remuda.errors import Interrupted, NoState
from remuda.processes.notices import Reporter
from remuda.processes.requests import Requests, SpinWait, layout
from remuda.processes.worker_pool import POLL_SECONDS, Worker, WorkerPool

NEWS_BYTES = 1024  # for the end of one episode; longer news go through the link


class PooledEnvs:
    """`core.Envs` with `num_workers` processes."""

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
        seed: int | None = None,  # with one, reset() may be left out: the first send to a slot resets it
        alone: bool = False,
    ) -> None:
        if not alone:  # an inference process is a worker, and has such a pool of its own
            worker.refuse_in_worker()
        per_slot, self._is_alone = envs_per_slot(num_envs, slots), alone
        check_seeds(seeds, levels, info, num_envs)
        stats_class = resolve_stats(stats)
        order = {
            "spec": spec.to_json(),
            "stats": None if stats_class is EpisodeStats else describe(stats_class),
            "gamma": gamma,
            "max_restarts": max_restarts,
            "levels": None if levels is None else [int(level) for level in levels],
            "info": list(info),
        }
        self._blocks = blocks_of(num_envs, slots, num_workers, alone)
        self._seeds, self._played = seeds, [0] * num_envs  # episodes that were told of, by env
        self._memory: SharedArrays | None = None
        self._sent: deque[tuple[int, int]] = deque()
        orders = [{**order, "worker": index, "blocks": blocks} for index, blocks in enumerate(self._blocks)]
        for index, own in enumerate(orders):
            own["seeds"] = self._seeds_left(index)
        self.num_envs, self.num_slots = num_envs, slots
        self._step_timeout, self._build_timeout = step_timeout, build_timeout
        self._number = 0  # of the last request
        self._is_owed = [False] * slots  # sent and not received
        self._asked_at, self._received_at = [0.0] * slots, 0.0  # by the crew's clock
        self._seed = seed
        self._episodes: list[Episode] = []
        self._news: list[bytes] = []  # not read yet
        self._restarts_before = 0
        self._reporter = Reporter(logger)
        self._waited = 0.0
        self._lost_at = [0] * num_workers  # number of the last request when a worker was last lost
        self._worker_pool = WorkerPool(
            worker.__name__, orders, ENV_WORKERS, build_timeout, max_worker_restarts, should_stop
        )
        try:
            observation, action = self._worker_pool.start()
            self.observation, self.action = space_from_wire(observation), space_from_wire(action)
            self._allocate(num_workers, per_slot, info)
            for member in self._worker_pool.workers:
                self._introduce(member)
        except BaseException:
            self.close()
            raise

    def _allocate(self, num_workers: int, per_slot: int, info: Sequence[str]) -> None:
        room = NEWS_BYTES * (per_slot if self._is_alone else -(-per_slot // num_workers))
        memory = SharedArrays(
            {
                **rows_layout(self.observation, self.action, self.num_envs, info),
                **layout(self.num_slots, num_workers, room),
            }
        )
        self._memory = memory
        self._restarts = memory["restarts"]
        arrays = {name: memory[name] for name in memory.layout}
        self._requests, self._patience = Requests(arrays, self._is_alone), SpinWait(num_workers)
        slices = [slice(slot * per_slot, (slot + 1) * per_slot) for slot in range(self.num_slots)]
        views = [slice_rows(arrays, own, self.observation, self.action, info) for own in slices]
        self._steps, self._infos = [rows.step for rows, _ in views], [rows.info for rows, _ in views]
        self._targets = [[leaf for _, leaf in leaves(actions)] for _, actions in views]

    @property
    def should_stop(self) -> Callable[[], bool] | None:
        """Asked at least every 0.2 s while waiting; True raises Interrupted."""
        return self._worker_pool.should_stop

    @should_stop.setter
    def should_stop(self, ask: Callable[[], bool] | None) -> None:
        self._worker_pool.should_stop = ask

    # --- the loop -----------------------------------------------------------------------------------------------

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Begin anew; every slot will answer with first observations. Returns the random steps taken."""
        while self._sent:
            self._wait(*self._sent[0])
            self._sent.popleft()
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._seed = seed
        self._episodes.clear()
        self._news.clear()
        self._played = [0] * self.num_envs
        for member in self._worker_pool.workers:
            member.inbox.clear()
        order = {"do": "reset", "seed": seed, "warm_up": warm_up}
        answers = self._order_all(order, "ready", self._build_timeout)
        for answer in answers:
            self._reporter.report(answer["notices"])
        for member in self._worker_pool.workers:
            member.inbox.clear()  # news of requests that were given up above
        # a slot that waits for no worker answers with what its rows hold
        self._sent.extend((slot, 0) for slot in range(self.num_slots))
        self._is_owed = [True] * self.num_slots
        return sum(answer["ready"] for answer in answers)

    def send(self, slot: int, action: Any, hold: bool = False) -> None:
        """Arrays [B of the slot], in the tree of the action space; with `hold`, envs that have ended do not reset."""
        self._require_received(slot)
        write_actions(self.action, self._targets[slot], action)
        self._ask(slot, worker.HOLD if hold else worker.STEP)

    def renew(self, slot: int) -> None:
        """Envs that have ended begin anew, no other is touched."""
        self._require_received(slot)
        self._ask(slot, worker.RENEW)

    def _require_received(self, slot: int) -> None:
        if self._is_owed[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")

    def _ask(self, slot: int, kind: int) -> None:
        self._number += worker.KINDS
        number = self._number + kind
        self._sent.append((slot, number))
        self._is_owed[slot] = True
        self._asked_at[slot] = self._worker_pool.clock
        for index in self._requests.ask(slot, number):
            self._worker_pool.workers[index].bell.ring()

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        """The next slot in the order of sending, or the one that is asked for."""
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
        self._is_owed[slot] = False
        self._received_at = self._worker_pool.clock
        if number and self._requests.has_stats(slot, number):
            self._take_news(slot, number)
        return slot, self._steps[slot]

    def _put_first(self, slot: int) -> None:
        for sent in self._sent:
            if sent[0] == slot:
                self._sent.remove(sent)
                self._sent.appendleft(sent)
                return
        raise RuntimeError(f"recv({slot}) without a send({slot}, ...) before it.")

    def is_ready(self, slot: int, seconds: float = 0.0) -> bool:
        """Whether recv(slot) would answer at once; waits for it so long. Lost workers are noticed and replaced."""
        return all(self._wait(sent, number, seconds) for sent, number in self._sent if sent == slot)

    def _wait(self, slot: int, number: int, seconds: float = math.inf) -> bool:
        """Until everybody has answered this request, at most so long; number 0 is a reset, which is over."""
        requests, crew = self._requests, self._worker_pool
        if not number or requests.is_done(slot, number):
            return True
        if seconds and not crew.has_lost and self._patience.poll(lambda: requests.is_done(slot, number)):
            return True
        requests.sleep(number)
        try:
            if not crew.has_lost:  # nearly always the first sleep is the last
                if requests.is_done(slot, number):
                    return True
                crew.listen(min(seconds, POLL_SECONDS))
            return requests.is_done(slot, number) or self._wait_long(slot, number, seconds)
        finally:
            requests.wake()

    def _wait_long(self, slot: int, number: int, seconds: float) -> bool:
        """With an eye on workers that are lost or late."""
        crew = self._worker_pool
        deadline = time.monotonic() + seconds
        # nobody is late before being asked, nor for this slot as long as answers for others come in
        start = max(self._asked_at[slot], self._received_at)
        while pending := self._requests.pending(slot, number):
            if crew.has_lost:
                self._replace(crew.lost()[0])
                continue
            for index in pending:
                member = crew.workers[index]
                member.last_seen = max(member.last_seen, start)
                crew.reap_if_silent(member, self._step_timeout, "while it owed an answer")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            crew.listen(min(left, POLL_SECONDS))
        return True

    # --- news and losses ----------------------------------------------------------------------------------------

    def _take_news(self, slot: int, number: int) -> None:
        for index in self._requests.servers[slot]:
            member = self._worker_pool.workers[index]
            news = self._requests.stats(member.index, slot, number)
            if news is None:
                news = self._receive_news(member, slot, number)
            if news:
                self._news.append(news)
                if news[0] or self._seeds is not None:
                    self._read_news()

    def _read_news(self) -> None:
        """Episodes may wait until somebody asks for them: reading many at once is cheaper than one at every step."""
        for news in self._news:
            episodes, notices = worker.decode_news(news)
            for env, values in episodes:
                self._played[env] += 1
                self._episodes.append(Episode(env, values))
            self._reporter.report(notices)
        self._news.clear()

    def _receive_news(self, member: Worker, slot: int, number: int) -> bytes:
        """Said before it was done, so it is in the inbox or on its way."""
        while (news := self._find_news(member, slot, number)) is None and not member.is_lost:
            self._worker_pool.listen(POLL_SECONDS)
            self._worker_pool.reap_if_silent(member, self._step_timeout, "while it owed statistics")
        member.inbox = [message for message in member.inbox if message.get("number") != number]
        return news or b""

    @staticmethod
    def _find_news(member: Worker, slot: int, number: int) -> bytes | None:
        for message in member.inbox:
            if message.get("slot") == slot and message["number"] == number:
                return bytes(message["news"])
        return None

    def _replace(self, member: Worker) -> None:
        """A new process; what the old one left half done is asked again, what it had done stays."""
        self._worker_pool.restart(member, self._give_up(member))
        self._introduce(member)

    def _give_up(self, member: Worker) -> bool:
        """On what a lost worker left; returns whether it was of any use."""
        index = member.index
        owed = self._requests.unanswered(index)
        for slot in owed:
            self._requests.discard_stats(index, slot)
        member.inbox = [message for message in member.inbox if "slot" in message and message["slot"] not in owed]
        for first, last in self._blocks[index]:
            self._restarts[first:last] += 1
        member.blueprint = {**member.blueprint, "seeds": self._seeds_left(index)}
        # A new worker answers every slot once with a reset row; only after that does it step.
        was_useful = self._number > self._lost_at[index] + 2 * self.num_slots * worker.KINDS
        self._lost_at[index] = self._number
        return was_useful

    def _seeds_left(self, index: int) -> dict[str, list[int]] | None:
        """The seeds that a worker's envs have still to play; episodes that it told of unheard are played already."""
        if self._seeds is None:
            return None
        played: Counter[int] = Counter()
        for slot, number in self._sent:
            news = self._requests.stats(index, slot, number)
            news = self._find_news(self._worker_pool.workers[index], slot, number) if news is None else news
            if number and news:
                played.update(env for env, _ in worker.decode_news(news)[0])
        left = {env: self._seeds[env][self._played[env] + played[env] :] for env in envs_of(self._blocks[index])}
        return {str(env): list(seeds) for env, seeds in left.items()}

    def _introduce(self, member: Worker) -> None:
        assert self._memory is not None
        # one message: with the seed in a second one, a pending request could be answered in between
        order = {"do": "attach", "layout": self._memory.layout, "seed": self._seed, "alone": self._is_alone}
        member.send(order, [self._memory.fd])
        member.last_seen = self._worker_pool.clock

    def info(self, slot: int) -> dict[str, NDArray[Any]]:
        """The entries of info that were asked for, [B of the slot], of its last answer; nan where there was none."""
        return dict(self._infos[slot])

    def episodes(self) -> list[Episode]:
        self._read_news()
        finished, self._episodes = self._episodes, []
        return finished

    def waited(self) -> float:
        """Seconds in recv beyond what the quickest worker stepped: hand-over, and waiting for the slowest."""
        return self._waited

    def restarts(self) -> int:
        return self._restarts_before + int(self._restarts.sum())

    def inspect_workers(self) -> list[dict[str, Any]]:
        """pid, whether torch is loaded, and the peak of resident memory in bytes, of every worker."""
        return [answer["inspected"] for answer in self._order_all({"do": "inspect"}, "inspected", self._step_timeout)]

    def _order_all(self, order: Mapping[str, Any], key: str, seconds: float) -> list[dict[str, Any]]:
        return self._worker_pool.ask([order] * len(self._worker_pool.workers), key, seconds, self._replace)

    def get_state(self) -> dict[str, Any]:
        """As of LocalEnvs, and the state of each worker's libraries."""
        answers = self._order_all({"do": "save"}, "saved", self._build_timeout)
        states: dict[int, Any] = {}
        for blocks, answer in zip(self._blocks, answers, strict=True):
            if answer["saved"] is None:
                raise NoState(answer["why"])
            states.update(zip(envs_of(blocks), answer["saved"], strict=True))
        return {
            "envs": [states[env] for env in range(self.num_envs)],
            "restarts": self._restarts.copy(),
            "restarts_before": self._restarts_before,
            "libraries": [answer["libraries"] for answer in answers],
            "seed": self._seed,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """As of LocalEnvs; saved by as many workers or by another number of them."""
        libraries, self._seed = state.get("libraries", []), state.get("seed", 0)  # for workers that will be lost
        if len(libraries) != len(self._blocks):
            libraries = [None] * len(self._blocks)
        orders = [
            {"do": "load", "states": [state["envs"][env] for env in envs_of(blocks)], "libraries": own}
            for blocks, own in zip(self._blocks, libraries, strict=True)
        ]
        self._worker_pool.ask(orders, "loaded", self._build_timeout, self._replace)
        # after the loading, in which a worker may have been lost too
        self._restarts[:], self._restarts_before = state["restarts"], state["restarts_before"]
        self._sent.clear()
        self._is_owed = [False] * self.num_slots

    def close(self) -> None:
        """End every process and give back the memory; calling it again does nothing."""
        self._worker_pool.close()
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
