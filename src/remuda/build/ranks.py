"""The ranks of a run under `replicas`: how they start, find each other, and build their parts of the run.

Without torchrun, the user's process is rank 0. It starts all other ranks on this host, as forks of a server that has
imported torch, and sends them a blueprint. Under torchrun, all ranks run the same command. Either way, the ranks then
communicate through a collective (remuda.collectives): shared memory on one host, or gloo, also between hosts.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]

from remuda import errors
from remuda.build.blueprint import setup_of
from remuda.build.recipe import make_recipe
from remuda.build.torchrun_ranks import FAILURE_NOTICE, join_torchrun
from remuda.collectives import Collective, GlooCollective, SharedCollective
from remuda.collectives.shared import SharedBoard, layout, open_memory
from remuda.collectives.stores import keep_open
from remuda.config.run_config import RunConfig
from remuda.data import SharedArrays
from remuda.errors import ConfigError, DamagedReplay, Interrupted, RemudaError, WorkerError
from remuda.logs.notices import warnings_go_to
from remuda.machine import existing_objects_frozen, keep_memory
from remuda.parts import RankGroup
from remuda.processes.fork_server import ForkFailed, ForkServer
from remuda.processes.links import Link
from remuda.recipe import Recipe
from remuda.schemes.replicas import Replicas
from remuda.torchrun import read_torchrun

STOP_SECONDS = 4.0  # time for other ranks to cut their round short, once rank 0 has asked them to
LEAVE_SECONDS = 2.0  # time for other ranks to close their envs at the end of a run


class StopRequest:
    """Sends the user's request to stop to all ranks, which then have STOP_SECONDS to end their round."""

    def __init__(self, must_stop: Callable[[], bool]) -> None:
        self.collective: Collective | None = None
        self._must_stop = must_stop
        self._deadline: float | None = None

    def poll(self) -> None:
        """Send the request, if any; raise WorkerError if it was sent more than STOP_SECONDS ago.

        Raise Interrupted if the other ranks have not joined yet.

        Rank 0 calls this repeatedly while it waits for other ranks.
        """
        if not self._must_stop():
            return
        if self.collective is None:
            raise Interrupted("asked to stop while the ranks were joining")
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + STOP_SECONDS
            self.collective.health.ask_to_stop()
        elif now > self._deadline:
            raise WorkerError(
                f"{self.collective.late()} did not end its round within {STOP_SECONDS:g} s of the stop request, "
                "because its env or its update takes longer: the last checkpoint is kept."
            )


class RankProcesses:
    """The processes of ranks 1 to `count`, which rank 0 starts on this host."""

    def __init__(self, count: int, must_stop: Callable[[], bool]) -> None:
        self._count, self._stop = count, StopRequest(must_stop)
        self._links, self._pids, self._poll = list[Link](), list[int](), select.poll()
        self._rank_of: dict[int, int] = {}  # rank by pidfd of its process
        self._board: SharedArrays | None = None  # heartbeats, if gradients are exchanged by gloo
        with starting(f"the fork server of {count} ranks"):
            self._server = ForkServer(__name__)

    def connect(self, blueprint: Mapping[str, Any], exchange: str) -> Collective:
        """Start the ranks, and return the collective of rank 0."""
        size, host = self._count + 1, socket.gethostname()
        if exchange == "gloo":
            # Memory without a name, which the other ranks open under /proc, so that nothing is left behind.
            fd, self._board = os.memfd_create("remuda-store"), SharedArrays(layout(size))
            store = f"/proc/{os.getpid()}/fd/{fd}"
            board = {"pid": os.getpid(), "fd": self._board.fd}
            self._start({"blueprint": blueprint, "store": store, "board": board, "size": size})
            self._stop.collective = connect_by_gloo(fd, self._board, 0, size, self.check)
        else:
            self._stop.collective = SharedCollective.create(
                size, host, lambda address: self._start({"blueprint": blueprint, "address": address}), self.check
            )
        return self._stop.collective

    def _start(self, order: Mapping[str, Any]) -> None:
        for rank in range(1, self._count + 1):
            ours, theirs = Link.pair()
            self._links.append(ours)
            try:
                with starting(f"rank {rank}"):
                    pid = self._server.fork([theirs.fileno()])
            finally:
                theirs.close()
            pidfd = os.pidfd_open(pid)
            self._pids.append(pid)
            self._rank_of[pidfd] = rank
            self._poll.register(pidfd, select.POLLIN)
            ours.send({**order, "rank": rank})

    def check(self) -> None:
        """Raise an error if a rank has ended, and send a stop request of the user. Called repeatedly during waits."""
        for pidfd, _ in self._poll.poll(0):
            raise self._error_of(self._rank_of[pidfd])
        self._stop.poll()

    def _error_of(self, rank: int) -> RemudaError:
        """Return the error that a rank sent before it joined, or else an error that says how its process ended."""
        pid, link = self._pids[rank - 1], self._links[rank - 1]
        with suppress(OSError):
            for message in link.receive()[0]:
                kind = getattr(errors, message["error"])
                error: RemudaError = kind(f"rank {rank}: {message['text']}")
                return error
        reason = self._server.exit_reason(pid)
        return WorkerError(
            f"rank {rank} (pid {pid} on {socket.gethostname()}) {reason}: continue from the last checkpoint with "
            "--resume."
        )

    def close(self) -> None:
        """Wait at most LEAVE_SECONDS until the other ranks have ended, and kill those that still run."""
        deadline, left = time.monotonic() + LEAVE_SECONDS, set(self._rank_of)
        while left and time.monotonic() < deadline:
            for pidfd, _ in self._poll.poll(100):
                self._poll.unregister(pidfd)
                left.discard(pidfd)
        for pidfd in self._rank_of:
            os.close(pidfd)
        for link in self._links:
            link.close()
        self._server.close()  # kills the ranks that still run
        if self._board is not None:
            self._board.close()


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Raise ConfigError if the system refuses to create a process."""
    try:
        yield
    except (ForkFailed, EOFError, OSError) as error:
        raise ConfigError(
            f"{what} could not be started ({error}): allow more processes or memory (ulimit -u, or the limits of the "
            "container), or use fewer --scheme.ranks."
        ) from error


@contextmanager
def open_group(
    config: RunConfig, recipe: Recipe, must_stop: Callable[[], bool], pass_signal: Callable[[int], None]
) -> Iterator[RankGroup]:
    """Start all other ranks, or connect to those that torchrun started, and yield the group of rank 0.

    `pass_signal` is called with the number of a stop signal that only another rank has received.
    """
    blueprint, torchrun = recipe.describe(), read_torchrun()
    if torchrun is None:
        processes = RankProcesses(config.scheme_options.ranks - 1, must_stop)
        try:
            with closing(processes.connect(blueprint, config.scheme_options.exchange)) as collective:
                yield agreed_group(collective, blueprint)
        finally:
            processes.close()
    else:
        stop = StopRequest(must_stop)
        with closing(join_torchrun(torchrun, config, stop.poll)) as collective:
            FAILURE_NOTICE.is_awaited = False
            stop.collective = collective
            collective.health.on_signal, collective.health.ends_process = pass_signal, True
            try:
                yield agreed_group(collective, blueprint)
            except DamagedReplay:
                FAILURE_NOTICE.is_awaited = True  # the other ranks now wait for another start
                raise


def agreed_group(collective: Collective, blueprint: Mapping[str, Any]) -> RankGroup:
    """Return the group of all ranks; raise ConfigError in every rank if their versions or configurations differ."""
    group = RankGroup(collective)
    own = {"version": version("remuda"), **{name: blueprint[name] for name in ("config", "spec", "spaces")}}
    for rank, other in enumerate(group.gather([own])):
        if (found := difference(other, own)) is not None:
            raise ConfigError(f"rank {rank} differs from rank {collective.rank} in {found}: start all ranks alike.")
    return group


def difference(there: Any, here: Any, path: str = "") -> str | None:
    """Describe the first difference between two trees of plain values, or return None if they are equal."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        found = (difference(there.get(name), here.get(name), f"{path}.{name}") for name in {**there, **here})
        return next((each for each in found if each is not None), None)
    return None if there == here else f"{path[1:]} ({there} there, {here} here)"


# --- the process of another rank ------------------------------------------------------------------------------------


def main(fds: Sequence[int]) -> int:
    """Run a rank that rank 0 has started: receive the blueprint, join the collective, and learn until the run ends.

    Return the exit code of the process.
    """
    link = Link.from_fd(fds[0])
    messages, _ = link.receive()
    while not messages and not link.has_ended:
        link.wait(1.0)
        messages, _ = link.receive()
    if not messages:
        return 1
    order = messages[0]
    collective: Collective | None = None
    try:
        keep_memory()
        config, spec, info, net = setup_of(order["blueprint"])
        recipe = make_recipe(config, spec, info, net)
        rank = order["rank"]
        if "store" in order:
            board = open_memory(order["board"], layout(order["size"]))
            try:
                store = os.open(order["store"], os.O_RDWR)
            except OSError:
                raise WorkerError("rank 0 ended before this rank had started.") from None
            collective = connect_by_gloo(store, board, rank, order["size"])
        else:
            collective = SharedCollective.join(order["address"], rank, socket.gethostname())
        follow(config, recipe, collective)
        return 0
    except RemudaError as error:
        if collective is None:
            link.send({"error": type(error).__name__, "text": str(error)})
        return 1
    finally:
        if collective is not None:
            collective.close()


def connect_by_gloo(
    fd: int, board: SharedArrays, rank: int, size: int, while_waiting: Callable[[], object] = lambda: None
) -> GlooCollective:
    """Return a gloo collective for `rank`, when all ranks are on this host.

    The ranks find each other through the file `fd`, communicate over loopback, and share the memory `board`. The
    caller must not close `fd`: the store opens the file by its number, and does so even in its destructor.
    """
    store, host = FileStore(f"/proc/self/fd/{fd}", size), socket.gethostname()
    make_board = partial(SharedBoard, board, rank)
    collective = GlooCollective(store, rank, size, host, "127.0.0.1", while_waiting, make_board)
    keep_open(fd, collective.group)
    return collective


def follow(config: RunConfig, recipe: Recipe, collective: Collective) -> None:
    """Run the scheme in a rank other than rank 0; warnings go to the log of rank 0."""
    scheme = config.scheme_entry.make_scheme(config)
    assert isinstance(scheme, Replicas)
    group = agreed_group(collective, recipe.describe())
    with warnings_go_to(lambda text, trace: group.lines.append(text)), existing_objects_frozen():
        scheme.follow(recipe, group)
