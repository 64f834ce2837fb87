"""The worker processes of a pool: started, listened to, buried and replaced, within a budget.

    crew = Crew("remuda.envs.worker", orders, build_timeout=120.0, max_restarts=10)
    spaces = crew.start()                         # every worker has built its envs
    crew.listen(0.2)                              # reads links into inboxes, notices who is lost
    for member in crew.lost():
        crew.revive(member)                       # a new process that has built its envs; WorkerError past the budget
    crew.close()                                  # nothing is left in the process table

Knows processes and messages, nothing of steps or memory: that is pool.py.
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
from typing import Any

from remuda.errors import ConfigError, EnvError, EnvFailed, EnvSpecError, Interrupted, RemudaError, WorkerError
from remuda.processes.fork_server import DEATH_SECONDS, ForkFailed, ForkServer
from remuda.processes.links import Bell, Link

logger = logging.getLogger("remuda.envs")

WINDOW_SECONDS = 60.0  # in which a budget of restarts counts
LOOK_SECONDS = 0.2  # longest sleep before `should_stop` is asked again
LEAVE_SECONDS = 1.0  # for workers to close their envs when the pool closes
# Messages of these are sentences for the user.
PASSED_ON_ERRORS = {kind.__name__: kind for kind in (ConfigError, EnvError, EnvFailed, EnvSpecError)}


class Worker:
    """One worker as its parent sees it; the process behind it may change."""

    def __init__(self, index: int, order: Mapping[str, Any]) -> None:
        self.index, self.order = index, order
        self.bell = Bell()
        self.link: Link | None = None
        self.pid = 0
        self.pidfd: int | None = None
        self.inbox: list[dict[str, Any]] = []
        self.heard = 0.0  # when it last said something, or was started, by the crew's clock
        self.lost: str | None = None  # how, once it is
        self.failure = ""  # the last traceback it sent
        self.deaths: deque[float] = deque()
        self.fruitless = 0  # losses in a row without a real step between them

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self.link is not None:
            with contextlib.suppress(OSError):  # it died: listening will tell
                self.link.send(message, fds)

    def take(self, key: str) -> dict[str, Any] | None:
        """The oldest message that has this key, taken from the inbox."""
        for place, message in enumerate(self.inbox):
            if key in message:
                return self.inbox.pop(place)
        return None


class WorkerPool:
    """Owns the fork server and every worker."""

    def __init__(
        self,
        module: str,
        orders: Sequence[Mapping[str, Any]],
        build_timeout: float,
        max_restarts: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.bell = Bell()  # every worker rings it
        self.members = [Worker(index, order) for index, order in enumerate(orders)]
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
        # Seconds spent listening: no worker is blamed for what passes while the parent learns or is suspended.
        self.clock = 0.0

    # --- starting and replacing ---------------------------------------------------------------------------------

    def start(self) -> Any:
        """All workers build at the same time; returns the spaces that the first one found."""
        for member in self.members:
            self._launch(member)
        built: dict[int, Any] = {}
        while len(built) < len(self.members):
            for member in self.members:
                if member.lost is not None:
                    self._spend(member)
                    self._launch(member)
                elif message := member.take("built"):
                    built[member.index] = message["built"]
                elif member.index not in built:
                    self.expect(member, self._build_timeout, "while building its envs")
            if len(built) < len(self.members):
                self.listen(LOOK_SECONDS)
        self._has_started = True
        return built[0]

    def revive(self, member: Worker, was_useful: bool) -> None:
        """A new process for a lost member, ready for its next order.

        One that hangs is lost too seldom for any budget per minute: if it `was_useful` for nothing, that counts too.
        """
        while True:
            self.relaunch(member, was_useful)
            was_useful = False
            while member.lost is None:
                if member.take("built"):
                    return
                self.listen(LOOK_SECONDS)
                self.expect(member, self._build_timeout, "while building its envs")

    def relaunch(self, member: Worker, was_useful: bool) -> None:
        """As `revive`, without waiting: it says "built" when it is ready."""
        if was_useful:
            member.fruitless = 0
        self._spend(member)
        self._launch(member)

    def _spend(self, member: Worker) -> None:
        assert member.lost is not None
        sentence = f"worker {member.index} (pid {member.pid}) {member.lost}"
        member.fruitless += 1
        is_too_often = self._is_over_budget(member.deaths)
        if is_too_often or member.fruitless > self._max_restarts:
            how = f"within {WINDOW_SECONDS:g} s" if is_too_often else "without a step in between"
            error = WorkerError(
                f"{sentence}, more than {self._max_restarts} times {how}: "
                "step the env in a single process to see what it does, or raise envs.max_worker_restarts."
            )
            if member.failure:
                error.add_note(member.failure)
            raise error
        logger.warning("%s; it is replaced.", sentence)

    def _is_over_budget(self, deaths: deque[float]) -> bool:
        now = time.monotonic()
        deaths.append(now)
        while deaths[0] < now - WINDOW_SECONDS:
            deaths.popleft()
        return len(deaths) > self._max_restarts

    def _launch(self, member: Worker) -> None:
        while True:
            link, theirs = Link.pair()
            try:
                if self._server is None:
                    self._server = ForkServer(self._module)
                pid = self._server.fork([theirs.fileno(), *member.bell.fds, *self.bell.fds])
                break
            except (EOFError, OSError) as error:
                link.close()
                if self._server is not None:
                    self._server.close()
                self._server = None
                if self._is_over_budget(self._server_deaths):
                    raise WorkerError(
                        f"the fork server of the env workers was lost more than {self._max_restarts} times within "
                        f"{WINDOW_SECONDS:g} s ({type(error).__name__}: {error}): see its output above."
                    ) from error
                logger.warning("the fork server of the env workers was lost; it is replaced.")
            except ForkFailed as error:
                link.close()
                if self._is_over_budget(self._failed_forks):
                    raise WorkerError(
                        f"worker {member.index} cannot be started, tried {len(self._failed_forks)} times ({error}): "
                        "allow more processes or memory (ulimit -u, or the limits of the container), or use fewer "
                        "sampler.workers."
                    ) from error
                self._pause(LOOK_SECONDS)
            except BaseException:
                link.close()
                raise
            finally:
                theirs.close()
        self._num_lost -= member.lost is not None
        member.link, member.pid, member.lost, member.heard = link, pid, None, self.clock
        if hasattr(os, "pidfd_open"):
            # a pid may be used again once its process is reaped; this is never anybody else's
            with contextlib.suppress(ProcessLookupError):
                member.pidfd = os.pidfd_open(pid)
        for fd in self._fds(member):
            self._poll.register(fd, select.POLLIN)
            self._by_fd[fd] = member
        member.tell({"do": "build", **member.order})

    @staticmethod
    def _fds(member: Worker) -> list[int]:
        fds = [] if member.link is None else [member.link.fileno()]
        return fds if member.pidfd is None else [*fds, member.pidfd]

    # --- listening ----------------------------------------------------------------------------------------------

    def listen(self, seconds: float) -> None:
        """Sleep until somebody rings, writes or dies, at most so long; raises what a worker could not handle."""
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while waiting for env workers")
        start = time.monotonic()
        events = self._poll.poll(max(0.0, min(seconds, LOOK_SECONDS)) * 1000)
        self.clock += min(time.monotonic() - start, 2 * LOOK_SECONDS)
        for fd, _ in events:
            if fd == self.bell.fileno():
                self.bell.clear()
            elif fd in self._by_fd:  # else its member was buried by an earlier event of this round
                member = self._by_fd[fd]
                self._read(member)
                if fd == member.pidfd or (member.link is not None and member.link.has_ended):
                    self.reap(member)

    def _pause(self, seconds: float) -> None:
        """Listen so long, whoever writes meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.listen(left)

    def _read(self, member: Worker) -> None:
        assert member.link is not None
        messages, _ = member.link.receive()
        if messages:
            member.heard = self.clock
        for message in messages:
            if "error" in message:
                self._raise_or_note(member, message)
            elif "alive" not in message:
                member.inbox.append(message)

    def _raise_or_note(self, member: Worker, message: Mapping[str, Any]) -> None:
        member.failure = message["traceback"]
        kind, text = message["error"], message["text"]
        if kind == EnvSpecError.__name__ and self._has_started:
            return  # it could be built before: the process is about to end, and that spends from its budget
        error: RemudaError
        if kind in PASSED_ON_ERRORS:
            error = PASSED_ON_ERRORS[kind](text)
        else:
            first = text.splitlines()[0] if text else ""
            error = WorkerError(f"worker {member.index} (pid {member.pid}) failed with {kind}: {first}")
        error.add_note(member.failure)
        raise error

    def ask(
        self, orders: Sequence[Mapping[str, Any]], key: str, seconds: float, replace: Callable[[Worker], None]
    ) -> list[dict[str, Any]]:
        """One order for each member; returns their answers, which are messages with this key.

        Whoever is lost meanwhile is replaced and asked again.
        """
        pairs = list(zip(self.members, orders, strict=True))
        answers: dict[int, dict[str, Any]] = {}
        for member, order in pairs:
            member.heard = self.clock
            member.tell(order)
        while len(answers) < len(pairs):
            for member, order in pairs:
                if member.index in answers:
                    continue
                if member.lost is not None:
                    replace(member)
                    member.tell(order)
                elif message := member.take(key):
                    answers[member.index] = message
                else:
                    self.expect(member, seconds, f"while it was asked to {order['do']}")
            if len(answers) < len(pairs):
                self.listen(LOOK_SECONDS)
        return [answers[member.index] for member in self.members]

    def expect(self, member: Worker, seconds: float, doing: str) -> None:
        """Bury a member that has said nothing for so long."""
        if member.lost is None and self.clock - member.heard > seconds:
            self.reap(member, f"was silent for {seconds:g} s {doing}")

    def lost(self) -> list[Worker]:
        return [member for member in self.members if member.lost is not None]

    @property
    def has_lost(self) -> bool:
        return self._num_lost > 0

    # --- ending -------------------------------------------------------------------------------------------------

    def reap(self, member: Worker, how: str | None = None) -> None:
        """Make sure that the process is dead, keep what it said, let go of its descriptors."""
        assert member.link is not None
        self._kill(member)
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._is_dead(member, 0.05):
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"worker {member.index} (pid {member.pid}) did not end within {DEATH_SECONDS:g} s of SIGKILL: "
                    "look for a device or file system that hangs."
                )
        self._read(member)
        self._forget(member)
        exit_reason = self._server.exit_reason(member.pid) if how is None and self._server is not None else "was lost"
        member.lost = how or exit_reason
        self._num_lost += 1

    def _kill(self, member: Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            if member.pidfd is not None:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            elif not hasattr(os, "pidfd_open"):
                os.kill(member.pid, signal.SIGKILL)

    @staticmethod
    def _is_dead(member: Worker, seconds: float) -> bool:
        """By its pidfd, and where there is none by the end of its link."""
        poll = select.poll()
        if member.pidfd is not None:
            poll.register(member.pidfd, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        assert member.link is not None
        poll.register(member.link, 0)  # POLLHUP is always told: the other end is closed
        return bool(poll.poll(seconds * 1000))

    def _forget(self, member: Worker) -> None:
        for fd in self._fds(member):
            self._poll.unregister(fd)
            del self._by_fd[fd]
        if member.link is not None:
            member.link.close()
        if member.pidfd is not None:
            os.close(member.pidfd)
        member.link = member.pidfd = None

    def close(self) -> None:
        """Ask all to leave, kill who stays, reap everything; calling it again does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        present = [member for member in self.members if member.link is not None]
        for member in present:
            member.tell({"do": "leave"})
        deadline = time.monotonic() + LEAVE_SECONDS
        for member in present:
            if not self._is_dead(member, max(0.0, deadline - time.monotonic())):
                self._kill(member)
        for member in present:
            self._is_dead(member, DEATH_SECONDS)
            self._forget(member)
        if self._server is not None:
            self._server.close()
        for bell in (self.bell, *(member.bell for member in self.members)):
            bell.close()
