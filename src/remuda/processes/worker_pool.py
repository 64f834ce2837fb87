"""Start, supervise and replace worker processes, within a budget of restarts.

    pool = WorkerPool("package.worker", blueprints, kind, build_timeout=120.0, max_restarts=10)
    built = pool.start()                          # waits until each worker has built what its blueprint describes
    pool.listen(0.2)                              # reads messages into inboxes and reaps workers that died
    for worker in pool.lost():
        pool.restart(worker, made_progress=True)  # raises WorkerError once the budget is exhausted
    pool.close()                                  # ends and reaps every process

The pool handles only processes and messages. The caller's `WorkerKind` contains the words with which errors and log
lines refer to the workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.errors import Interrupted, RemudaError, WorkerError
from remuda.processes.fork_server import DEATH_SECONDS, ForkFailed, ForkServer
from remuda.processes.links import Bell, Link, Message

WINDOW_SECONDS = 60.0  # each worker may be restarted at most `max_restarts` times within any period of this length
POLL_SECONDS = 0.2  # longest sleep between two calls of `should_stop`
LEAVE_SECONDS = 1.0  # time for workers to clean up when the pool closes

Blueprint = Mapping[str, Any]  # plain values that describe what a worker builds


@dataclass(frozen=True)
class WorkerKind:
    """How errors and log lines refer to the workers of a pool, and which of their errors reach the user unchanged."""

    name: str  # in the plural, such as "env workers"
    building: str  # what a worker does until it sends "built", such as "building its envs"
    remedy: str  # advice for a user whose workers are lost repeatedly
    count_option: str  # the option that sets the number of workers
    logger: logging.Logger
    errors: tuple[type[RemudaError], ...] = ()  # classes of errors that the parent raises again, unchanged
    build_errors: tuple[type[RemudaError], ...] = ()  # like `errors`, but only until all workers have been built once


class Worker:
    """The parent's view of one worker. If the worker's process is lost, the Worker object gets a new process."""

    def __init__(self, index: int, blueprint: Blueprint) -> None:
        self.index, self.blueprint = index, blueprint
        self.bell = Bell()
        self.link: Link | None = None
        self.pid = 0
        self.pidfd: int | None = None
        self.inbox: list[Message] = []
        self.last_seen = 0.0  # value of `WorkerPool.clock` when the worker started, got work or last sent a message
        self.exit_reason: str | None = None  # a phrase such as "was killed by SIGKILL"; None while the worker lives
        self.traceback = ""  # the traceback that the worker sent last
        self.deaths: deque[float] = deque()
        self.losses_without_progress = 0

    @property
    def is_lost(self) -> bool:
        return self.exit_reason is not None

    def send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send a message. Do nothing if the worker has died; `WorkerPool.listen` will notice this."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send(message, fds)

    def take(self, key: str) -> Message | None:
        """Remove and return the oldest message in the inbox that has this key, or return None."""
        for place, message in enumerate(self.inbox):
            if key in message:
                return self.inbox.pop(place)
        return None


class WorkerPool:
    """Owns the fork server and all workers."""

    def __init__(
        self,
        module: str,
        blueprints: Sequence[Blueprint],
        kind: WorkerKind,
        build_timeout: float,
        max_restarts: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.bell = Bell()  # rung by all workers
        self.workers = [Worker(index, blueprint) for index, blueprint in enumerate(blueprints)]
        self.kind = kind
        self.should_stop = should_stop
        self._build_timeout, self._max_restarts = build_timeout, max_restarts
        self._poll = select.poll()
        self._poll.register(self.bell, select.POLLIN)
        self._by_fd: dict[int, Worker] = {}
        self._module = module
        self._server: ForkServer | None = None
        self._server_deaths: deque[float] = deque()
        self._failed_forks: deque[float] = deque()
        self._num_lost = 0
        self._has_started = False
        self._is_open = True
        # Seconds spent in `listen`, plus those that the pool's owner adds. Time-outs are measured by this clock, so
        # that time in which the parent process is busy or suspended does not count as a worker's silence.
        self.clock = 0.0

    # --- starting and replacing ---------------------------------------------------------------------------------

    def start(self) -> Any:
        """Start all workers and wait until each has sent "built"; return what worker 0 sent under this key."""
        for worker in self.workers:
            self._launch(worker)
        built: dict[int, Any] = {}
        while len(built) < len(self.workers):
            for worker in self.workers:
                if worker.is_lost:
                    self._count_loss(worker)
                    self._launch(worker)
                elif message := worker.take("built"):
                    built[worker.index] = message["built"]
                elif worker.index not in built:
                    self.reap_if_not_built(worker)
            if len(built) < len(self.workers):
                self.listen(POLL_SECONDS)
        self._has_started = True
        return built[0]

    def restart(self, worker: Worker, made_progress: bool) -> None:
        """Start a new process for a lost worker and wait until the process has sent "built".

        `made_progress` is whether the worker completed any work since its last restart. Consecutive losses without
        progress have their own limit, because a worker that hangs after every restart is lost too rarely to exceed
        the limit per minute.
        """
        while True:
            self.relaunch(worker, made_progress)
            made_progress = False
            while not worker.is_lost:
                if worker.take("built"):
                    return
                self.listen(POLL_SECONDS)
                self.reap_if_not_built(worker)

    def relaunch(self, worker: Worker, made_progress: bool) -> None:
        """Start a new process for a lost worker without waiting; the process sends "built" when it is ready."""
        if made_progress:
            worker.losses_without_progress = 0
        self._count_loss(worker)
        self._launch(worker)

    def _count_loss(self, worker: Worker) -> None:
        """Count the loss of a worker; raise WorkerError if the worker was lost too often."""
        assert worker.is_lost
        sentence = f"worker {worker.index} (pid {worker.pid}) {worker.exit_reason}"
        worker.losses_without_progress += 1
        is_too_often = self._is_over_budget(worker.deaths)
        if is_too_often or worker.losses_without_progress > self._max_restarts:
            how = f"within {WINDOW_SECONDS:g} s" if is_too_often else "without a step in between"
            error = WorkerError(f"{sentence}, more than {self._max_restarts} times {how}: {self.kind.remedy}")
            if worker.traceback:
                error.add_note(worker.traceback)
            raise error
        self.kind.logger.warning("%s; it is replaced.", sentence)

    def _is_over_budget(self, deaths: deque[float]) -> bool:
        now = time.monotonic()
        deaths.append(now)
        while deaths[0] < now - WINDOW_SECONDS:
            deaths.popleft()
        return len(deaths) > self._max_restarts

    def _launch(self, worker: Worker) -> None:
        link, pid = self._fork(worker)
        self._num_lost -= worker.is_lost
        worker.link, worker.pid, worker.exit_reason, worker.last_seen = link, pid, None, self.clock
        if hasattr(os, "pidfd_open"):
            # The system may reuse a pid once its process is reaped; a pidfd always refers to the same process.
            with contextlib.suppress(ProcessLookupError):
                worker.pidfd = os.pidfd_open(pid)
        for fd in self._fds(worker):
            self._poll.register(fd, select.POLLIN)
            self._by_fd[fd] = worker
        worker.send({"do": "build", **worker.blueprint})

    def _fork(self, worker: Worker) -> tuple[Link, int]:
        """Fork a process and return its link and pid; retry after failures, up to a limit."""
        while True:
            link, theirs = Link.pair()
            try:
                if self._server is None:
                    self._server = ForkServer(self._module)
                return link, self._server.fork([theirs.fileno(), *worker.bell.fds, *self.bell.fds])
            except (EOFError, OSError) as error:
                link.close()
                if self._server is not None:
                    self._server.close()
                self._server = None
                if self._is_over_budget(self._server_deaths):
                    raise WorkerError(
                        f"the fork server of the {self.kind.name} was lost more than {self._max_restarts} times "
                        f"within {WINDOW_SECONDS:g} s ({type(error).__name__}: {error}): see its output above."
                    ) from error
                self.kind.logger.warning("the fork server of the %s was lost; it is replaced.", self.kind.name)
            except ForkFailed as error:
                link.close()
                if self._is_over_budget(self._failed_forks):
                    raise WorkerError(
                        f"worker {worker.index} cannot be started, tried {len(self._failed_forks)} times ({error}): "
                        "allow more processes or memory (ulimit -u, or the limits of the container), or use fewer "
                        f"{self.kind.count_option}."
                    ) from error
                self._pause(POLL_SECONDS)
            except BaseException:
                link.close()
                raise
            finally:
                theirs.close()

    @staticmethod
    def _fds(worker: Worker) -> list[int]:
        fds = [] if worker.link is None else [worker.link.fileno()]
        return fds if worker.pidfd is None else [*fds, worker.pidfd]

    # --- messages -----------------------------------------------------------------------------------------------

    def listen(self, seconds: float) -> None:
        """Wait for a worker to ring the bell, send a message or die; then read messages and reap dead workers.

        Waits up to `seconds`, but at most POLL_SECONDS. Raises Interrupted if `should_stop` returns True, and a
        worker's error if a restart cannot fix that error.
        """
        if self.should_stop is not None and self.should_stop():
            raise Interrupted(f"asked to stop while waiting for {self.kind.name}")
        start = time.monotonic()
        events = self._poll.poll(max(0.0, min(seconds, POLL_SECONDS)) * 1000)
        self.clock += min(time.monotonic() - start, 2 * POLL_SECONDS)
        for fd, _ in events:
            if fd == self.bell.fileno():
                self.bell.clear()
            elif fd in self._by_fd:  # false if the worker was reaped because of an earlier event in this list
                worker = self._by_fd[fd]
                self._read(worker)
                if fd == worker.pidfd or (worker.link is not None and worker.link.has_ended):
                    self.reap(worker)

    def _pause(self, seconds: float) -> None:
        """Listen for the whole of `seconds`, even if messages arrive earlier."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.listen(left)

    def _read(self, worker: Worker) -> None:
        assert worker.link is not None
        messages, _ = worker.link.receive()
        if messages:
            worker.last_seen = self.clock
        for message in messages:
            if "error" in message:
                self._on_error(worker, message)
            elif "alive" not in message:
                worker.inbox.append(message)

    def _on_error(self, worker: Worker, message: Message) -> None:
        """Raise the error that ended a worker, unless a restart of the worker may succeed."""
        worker.traceback = message["traceback"]
        name, text = message["error"], message["text"]
        build_errors = {error.__name__: error for error in self.kind.build_errors}
        if name in build_errors and self._has_started:
            return  # the process ends and is replaced; this may succeed, because all workers were built before
        known = {error.__name__: error for error in self.kind.errors} | build_errors
        error: RemudaError
        if name in known:
            error = known[name](text)
        else:
            first = text.splitlines()[0] if text else ""
            error = WorkerError(f"worker {worker.index} (pid {worker.pid}) failed with {name}: {first}")
        error.add_note(worker.traceback)
        raise error

    def ask(
        self, requests: Sequence[Mapping[str, object]], key: str, seconds: float, on_lost: Callable[[Worker], None]
    ) -> list[Message]:
        """Send one request to each worker; return for each worker its next message that contains the key `key`.

        A worker that is lost, or silent for `seconds`, is replaced by `on_lost` and receives its request again.
        """
        pairs = list(zip(self.workers, requests, strict=True))
        answers: dict[int, Message] = {}
        for worker, request in pairs:
            worker.last_seen = self.clock
            worker.send(request)
        while len(answers) < len(pairs):
            for worker, request in pairs:
                if worker.index in answers:
                    continue
                if worker.is_lost:
                    on_lost(worker)
                    worker.send(request)
                elif message := worker.take(key):
                    answers[worker.index] = message
                else:
                    self.reap_if_silent(worker, seconds, f"while it was asked to {request['do']}")
            if len(answers) < len(pairs):
                self.listen(POLL_SECONDS)
        return [answers[worker.index] for worker in self.workers]

    def lost(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_lost]

    @property
    def has_lost(self) -> bool:
        return self._num_lost > 0

    # --- ending -------------------------------------------------------------------------------------------------

    def reap_if_silent(self, worker: Worker, seconds: float, doing: str) -> None:
        """Kill and reap a worker that has sent nothing for `seconds`."""
        if not worker.is_lost and self.clock - worker.last_seen > seconds:
            self.reap(worker, f"was silent for {seconds:g} s {doing}")

    def reap_if_not_built(self, worker: Worker) -> None:
        """Kill and reap a worker that is still building and has been silent for longer than the build time-out."""
        self.reap_if_silent(worker, self._build_timeout, f"while {self.kind.building}")

    def reap(self, worker: Worker, exit_reason: str | None = None) -> None:
        """Kill the process if alive, read its last messages, and record `exit_reason` (None: ask the fork server)."""
        assert worker.link is not None
        self._kill(worker)
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._wait_for_death(worker, 0.05):
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"worker {worker.index} (pid {worker.pid}) did not end within {DEATH_SECONDS:g} s of SIGKILL: "
                    "look for a device or file system that hangs."
                )
        self._read(worker)
        self._close_fds(worker)
        if exit_reason is None:
            exit_reason = "was lost" if self._server is None else self._server.exit_reason(worker.pid)
        worker.exit_reason = exit_reason
        self._num_lost += 1

    def _kill(self, worker: Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            if worker.pidfd is not None:
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            elif not hasattr(os, "pidfd_open"):
                os.kill(worker.pid, signal.SIGKILL)

    @staticmethod
    def _wait_for_death(worker: Worker, seconds: float) -> bool:
        """Return whether the process ends within `seconds`. Poll its pidfd or, if it has none, its link."""
        poll = select.poll()
        if worker.pidfd is not None:
            poll.register(worker.pidfd, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        assert worker.link is not None
        poll.register(worker.link, 0)  # even if no event is asked for, poll() reports when the other end closes
        return bool(poll.poll(seconds * 1000))

    def _close_fds(self, worker: Worker) -> None:
        for fd in self._fds(worker):
            self._poll.unregister(fd)
            del self._by_fd[fd]
        if worker.link is not None:
            worker.link.close()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        worker.link = worker.pidfd = None

    def close(self) -> None:
        """Ask all workers to leave, kill those that do not, and reap all of them. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        present = [worker for worker in self.workers if worker.link is not None]
        for worker in present:
            worker.send({"do": "leave"})
        deadline = time.monotonic() + LEAVE_SECONDS
        for worker in present:
            if not self._wait_for_death(worker, max(0.0, deadline - time.monotonic())):
                self._kill(worker)
        for worker in present:
            self._wait_for_death(worker, DEATH_SECONDS)
            self._close_fds(worker)
        if self._server is not None:
            self._server.close()
        for bell in (self.bell, *(worker.bell for worker in self.workers)):
            bell.close()
