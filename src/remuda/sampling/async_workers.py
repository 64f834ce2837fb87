"""Workers that sample asynchronously, and the thread of the learner's process that supervises them.

    class RolloutQueue(AsyncWorkers):           # collects rollouts in slots; see also ReplayWriterPool
        answer_key = "filled"                   # a key of the messages in which workers report what they have sampled
        def _attach_message(self): ...          # describes the memory that workers write to
        def _on_answer(self, index, answer): ...
        def _on_lost(self, index): ...
        ...                                     # and the other abstract methods

Each worker has its own link for requests and answers. No worker shares a lock with the learner (nor a queue, which
contains a lock), because the lock would stay locked if the worker died while holding it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from remuda.core import Episode, Weights
from remuda.env_workers import ENV_WORKERS
from remuda.processes.links import Message
from remuda.processes.worker_pool import POLL_SECONDS, Blueprint, Worker, WorkerPool
from remuda.sampling.worker_stats import WorkerStats


class AsyncWorkers(ABC):
    """Starts and supervises workers that sample asynchronously; all workers have equal shares of the envs."""

    answer_key: ClassVar[str]

    def __init__(
        self,
        module: str,
        blueprints: Sequence[Blueprint],
        weights: Weights,
        seed: int,
        *,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Start the workers. A subclass must create the shared memory first, because workers attach to it at once."""
        self._weights, self._seed = weights, seed
        self._step_timeout, self._build_timeout = step_timeout, build_timeout
        self._worker_stats = WorkerStats(len(blueprints))
        self._changed = threading.Condition()  # guards what the learner's thread and the supervising thread share
        self._is_ready = [True] * len(blueprints)  # False while the replacement of a lost worker builds envs
        self._made_progress = [False] * len(blueprints)  # whether each worker has answered since it was last replaced
        self._to_relaunch: list[Worker] = []
        # The learner's version, and the lags that `take_lag` summarizes. An answer's lag is the number of updates by
        # which the weights that acted were older than the learner's.
        self._version, self._lags = 0, [0]
        self._seconds: dict[str, float] = {}  # the last result of `take_seconds`
        self._is_closing = False
        self._error: BaseException | None = None
        self._worker_pool = WorkerPool(
            module, blueprints, ENV_WORKERS, build_timeout, max_worker_restarts, should_stop
        )
        self._thread = threading.Thread(target=self._supervise, name="remuda-workers", daemon=True)
        try:
            self._worker_pool.start()
            for worker in self._worker_pool.workers:
                self._attach(worker)
        except BaseException:
            self.close()
            raise

    # --- implemented by subclasses ------------------------------------------------------------------------------

    @abstractmethod
    def _attach_message(self) -> tuple[Message, list[int]]:
        """Return a message that describes the memory that workers write to, and the memory's file descriptors."""

    @abstractmethod
    def _on_answer(self, index: int, answer: Message) -> None:
        """Handle a message in which worker `index` reports what it has sampled."""

    @abstractmethod
    def _on_lost(self, index: int) -> None:
        """Discard the work that a lost worker had begun but not completed."""

    @abstractmethod
    def _must_answer(self, index: int) -> bool:
        """Return whether worker `index` owes an answer; the step time-out applies only while this is True."""

    @abstractmethod
    def _next_row(self, index: int) -> int:
        """Return the number of the first row for which worker `index` has not drawn exploration noise yet.

        If the worker is lost, its replacement starts at this row.
        """

    @abstractmethod
    def _on_ready(self, worker: Worker) -> None:
        """Let a worker begin to sample; it resets its envs before it handles any message that this method sends."""

    @abstractmethod
    def _dispatch(self) -> None:
        """Send work to the workers. This is called after their messages were handled, with `_changed` locked."""

    @abstractmethod
    def _assemble(self) -> None:
        """Assemble the data that the learner takes next. This is called without the lock of `_changed`."""

    # --- called by the learner's thread -------------------------------------------------------------------------

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int:
        """Reset every env, and start the supervising thread, for a learner at `version`.

        Returns the number of random warm-up steps over all envs, of which each env takes at most `warm_up`.
        """
        self._seed, self._version = seed, version
        requests = [{"do": "reset", "seed": seed, "warm_up": warm_up}] * len(self._is_ready)
        answers = self._worker_pool.ask(requests, "ready", self._build_timeout, self._replace_at_start)
        for answer in answers:
            self._worker_stats.report(answer["notices"])
        self._worker_pool.should_stop = None  # the supervising thread must not check for signals
        for worker in self._worker_pool.workers:
            self._on_ready(worker)
        self._thread.start()
        return sum(int(answer["ready"]) for answer in answers)

    def _replace_at_start(self, worker: Worker) -> None:
        self._worker_pool.restart(worker, made_progress=False)
        self._attach(worker)

    def take_lag(self) -> tuple[float, int]:
        """Return the mean and largest lag of acting weights behind the learner, in updates.

        They are computed from all answers since the last call, and from the last answer before it.
        """
        with self._changed:
            lags, self._lags = self._lags, self._lags[-1:]
        return sum(lags) / len(lags), max(lags)

    def take_seconds(self) -> dict[str, float]:
        """Return workers' mean seconds per activity since the last call.

        If no worker has answered since then, return the last result again.
        """
        with self._changed:
            self._seconds = self._worker_stats.take_seconds() or self._seconds
            return {"env": 0.0, "inference": 0.0, "wait": 0.0, **self._seconds}

    def episodes(self) -> list[Episode]:
        with self._changed:
            return self._worker_stats.take_episodes()

    def restarts(self) -> int:
        with self._changed:
            return self._worker_stats.restarts()

    def close(self) -> None:
        """End the supervising thread and all workers. A second call does nothing."""
        self._is_closing = True
        if self._thread.is_alive():
            self._worker_pool.bell.ring()
            self._thread.join()
        self._worker_pool.close()

    # --- the supervising thread ---------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while not self._is_closing:
                self._worker_pool.listen(POLL_SECONDS)
                with self._changed:
                    for worker in self._worker_pool.workers:
                        self._check(worker)
                    self._dispatch()
                while self._to_relaunch:  # without the lock, because it may take long to start a fork server
                    self._relaunch(self._to_relaunch.pop())
                self._assemble()
        except BaseException as error:  # the learner's thread raises this error at its next call
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _check(self, worker: Worker) -> None:
        """Handle the messages of one worker.

        Retire a lost worker, let a replacement sample once it has built its envs, and kill a worker that is silent
        for longer than its time-out.
        """
        index = worker.index
        while (answer := worker.take(self.answer_key)) is not None:
            self._made_progress[index] = True
            self._worker_stats.add(index, answer)
            self._worker_stats.report(answer["notices"])
            self._lags.append(self._version - answer["version"])
            self._on_answer(index, answer)
        if worker.is_lost:
            self._retire(worker)
        elif not self._is_ready[index] and worker.take("built") is not None:
            self._attach(worker, self._seed)
            self._is_ready[index] = True
            self._on_ready(worker)
        elif not self._is_ready[index]:
            self._worker_pool.reap_if_not_built(worker)
        elif self._must_answer(index):
            self._worker_pool.reap_if_silent(worker, self._step_timeout, "while it owed a rollout")

    def _retire(self, worker: Worker) -> None:
        """Discard the unfinished work of a lost worker, and schedule its replacement."""
        index = worker.index
        worker.inbox.clear()
        self._on_lost(index)
        self._worker_stats.on_lost(index, worker.blueprint["last"] - worker.blueprint["first"])
        self._is_ready[index] = False
        self._to_relaunch.append(worker)

    def _relaunch(self, worker: Worker) -> None:
        """Start a new process for the worker's envs, without waiting until the envs are built."""
        index = worker.index
        worker.blueprint = {**worker.blueprint, "row": self._next_row(index)}
        self._worker_pool.relaunch(worker, self._made_progress[index])
        self._made_progress[index] = False

    def _attach(self, worker: Worker, seed: int | None = None) -> None:
        """Give a worker access to the shared memory and to the weights.

        With `seed`, the worker resets its envs at once, with a seed derived from this one. Without it, the worker
        resets them when `start` asks it to.
        """
        (memory, fds), (weights, weights_fds) = self._attach_message(), self._weights.invitation()
        restarts = self._worker_stats.lost[worker.index]
        message = {"do": "attach", "seed": seed, "restarts": restarts, **memory, **weights}
        worker.send({**message, "fds": len(fds) + len(weights_fds)}, [*fds, *weights_fds])
        worker.last_seen = self._worker_pool.clock
