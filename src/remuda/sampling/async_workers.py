"""Workers that act by themselves, and a thread of the learner's process that hears of them and replaces the lost.

    class Fillers(AsyncWorkers):                  # stream.py: rollouts in slots; feed.py: rows straight into a replay
        answer_key = "filled"                   # of a worker's message that something was sampled
        def _attachment(self): ...              # what a worker is told of the memory it writes to, and descriptors
        def _take(self, index, answer): ...     # it sampled something
        def _lose(self, index): ...             # it is gone

No queue and no lock is shared with a worker: orders and answers go over a link of its own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from remuda.core import Episode
from remuda.learning.weights import FileWeights, SharedWeights
from remuda.processes.worker_pool import LOOK_SECONDS, Worker, WorkerPool
from remuda.sampling.worker_stats import WorkerStats


class AsyncWorkers(ABC):
    """The learner's side; `orders` say what each worker builds, all with equal shares of the envs."""

    answer_key: ClassVar[str]

    def __init__(
        self,
        module: str,
        orders: Sequence[Mapping[str, Any]],
        weights: SharedWeights | FileWeights,
        seed: int,
        *,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """A subclass has its memory ready by now: workers are told of it at once."""
        self._weights, self._seed = weights, seed
        self._step_timeout, self._build_timeout = step_timeout, build_timeout
        self._news = WorkerStats(len(orders))
        self._turn = threading.Condition()  # guards all that both threads touch
        self._is_ready = [True] * len(orders)  # False while a successor builds its envs
        self._was_useful = [False] * len(orders)
        self._to_relaunch: list[Worker] = []  # who are to be replaced now
        self._version, self._ages = 0, [0.0]  # of the learner; by how much acting weights were behind
        self._seconds: dict[str, float] = {}  # what workers did when they were last heard of
        self._is_closing = False
        self._error: BaseException | None = None
        self._worker_pool = WorkerPool(module, orders, build_timeout, max_worker_restarts, should_stop)
        self._thread = threading.Thread(target=self._serve, name="remuda-actors", daemon=True)
        try:
            self._worker_pool.start()
            for member in self._worker_pool.members:
                self._introduce(member)
        except BaseException:
            self.close()
            raise

    # --- what a kind of them adds -------------------------------------------------------------------------------

    @abstractmethod
    def _attachment(self) -> tuple[dict[str, Any], list[int]]:
        """What a worker is told of the memory that it writes to, and the descriptors of it."""

    @abstractmethod
    def _take(self, index: int, answer: Mapping[str, Any]) -> None:
        """A worker says that it has sampled something."""

    @abstractmethod
    def _on_lost(self, index: int) -> None:
        """A worker is gone, and what it had begun with it."""

    @abstractmethod
    def _owes(self, index: int) -> bool:
        """Whether a worker must be heard of."""

    @abstractmethod
    def _next_row(self, index: int) -> int:
        """The first of this worker whose noise was not drawn."""

    @abstractmethod
    def _set_going(self, member: Worker) -> None:
        """After its envs have begun."""

    @abstractmethod
    def _arrange(self) -> None:
        """With the lock, whenever something was heard."""

    @abstractmethod
    def _afterwards(self) -> None:
        """Without the lock."""

    # --- the learner's thread -----------------------------------------------------------------------------------

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int:
        """Start every env and the thread; returns the random steps that were taken to spread the envs."""
        self._seed, self._version = seed, version
        orders = [{"do": "reset", "seed": seed, "warm_up": warm_up}] * len(self._is_ready)
        answers = self._worker_pool.ask(orders, "ready", self._build_timeout, self._replace_at_start)
        for answer in answers:
            self._news.report(answer["notices"])
        self._worker_pool.should_stop = None  # from now on the learner asks
        for member in self._worker_pool.members:
            self._set_going(member)
        self._thread.start()
        return sum(int(answer["ready"]) for answer in answers)

    def _replace_at_start(self, member: Worker) -> None:
        self._worker_pool.revive(member, was_useful=False)
        self._introduce(member)

    def take_ages(self) -> float:
        """By how many updates acting weights were behind, on average since the last call."""
        with self._turn:
            ages, self._ages = self._ages, self._ages[-1:]
        return sum(ages) / len(ages)

    def take_seconds(self) -> dict[str, float]:
        """What the workers did since the last call, on average; what they did last, if nothing was heard since."""
        with self._turn:
            self._seconds = self._news.take_seconds() or self._seconds
            return {"env": 0.0, "inference": 0.0, "wait": 0.0, **self._seconds}

    def episodes(self) -> list[Episode]:
        with self._turn:
            return self._news.take_episodes()

    def restarts(self) -> int:
        with self._turn:
            return self._news.restarts()

    def close(self) -> None:
        """End the thread and every process; calling it again does nothing."""
        self._is_closing = True
        if self._thread.is_alive():
            self._worker_pool.bell.ring()
            self._thread.join()
        self._worker_pool.close()

    # --- the thread of its own ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._worker_pool.listen(LOOK_SECONDS)
                with self._turn:
                    for member in self._worker_pool.members:
                        self._hear(member)
                    self._arrange()
                while self._to_relaunch:  # without the lock: a fork server may have to be started first
                    self._relaunch(self._to_relaunch.pop())
                self._afterwards()
        except BaseException as error:  # for the learner, when it looks next
            with self._turn:
                self._error = error
                self._turn.notify_all()

    def _hear(self, member: Worker) -> None:
        index = member.index
        while (answer := member.take(self.answer_key)) is not None:
            self._was_useful[index] = True
            self._news.add(index, answer)
            self._news.report(answer["notices"])
            self._ages.append(self._version - answer["version"])
            self._take(index, answer)
        if member.lost is not None:
            self._retire(member)
        elif not self._is_ready[index] and member.take("built") is not None:
            self._introduce(member, self._seed)
            self._is_ready[index] = True
            self._set_going(member)
        elif not self._is_ready[index]:
            self._worker_pool.expect(member, self._build_timeout, "while building its envs")
        elif self._owes(index):
            self._worker_pool.expect(member, self._step_timeout, "while it owed a rollout")

    def _retire(self, member: Worker) -> None:
        """What it had begun is given up."""
        index = member.index
        member.inbox.clear()
        self._on_lost(index)
        self._news.on_lost(index, member.order["last"] - member.order["first"])
        self._is_ready[index] = False
        self._to_relaunch.append(member)

    def _relaunch(self, member: Worker) -> None:
        """Its envs go on in a successor, which is heard of once it has built them; nobody waits for that."""
        index = member.index
        member.order = {**member.order, "row": self._next_row(index)}
        self._worker_pool.relaunch(member, self._was_useful[index])
        self._was_useful[index] = False

    def _introduce(self, member: Worker, seed: int | None = None) -> None:
        (message, fds), (joining, more) = self._attachment(), self._weights.invitation()
        order = {"do": "attach", "seed": seed, "restarts": self._news.lost[member.index], **message, **joining}
        member.tell({**order, "fds": len(fds) + len(more)}, [*fds, *more])
        member.heard = self._worker_pool.clock
