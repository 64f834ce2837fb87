"""How the ranks that torchrun has started find each other, and how a rank that fails before that ends the others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from remuda.collectives import Collective, GlooCollective, SharedCollective
from remuda.collectives.sessions import Session, publish_failure
from remuda.collectives.shared import JOIN_SECONDS
from remuda.collectives.stores import StoreBoard, open_tcp_store, wait_for_keys
from remuda.config.run_config import RunConfig
from remuda.errors import ConfigError, WorkerError
from remuda.torchrun import Torchrun, is_torchrun

PUBLISH_SECONDS = 3.0  # time limit for telling other ranks that this one has failed


def open_store(torchrun: Torchrun, while_waiting: Callable[[], object], seconds: float = JOIN_SECONDS) -> Any:
    """Return a connection to the store through which the ranks find each other; wait for it up to `seconds`.

    The agent of torchrun hosts the store. If a program without such an agent started the ranks, rank 0 hosts it.
    """
    is_host = torchrun.rank == 0 and not has_agent_store()
    return open_tcp_store(torchrun.address, torchrun.port, is_host, while_waiting, seconds)


def has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_torchrun(torchrun: Torchrun, config: RunConfig, while_waiting: Callable[[], object]) -> Collective:
    """Return the collective of all ranks that torchrun started."""
    ranks, exchange, host = config.scheme_options.ranks, config.scheme_options.exchange, socket.gethostname()
    if ranks != torchrun.size:
        raise ConfigError(f"scheme.ranks={ranks}, but torchrun started {torchrun.size} processes: leave it out.")
    check = watching_torchrun(while_waiting)
    try:
        store = open_store(torchrun, check)
        session = Session(store, torchrun.rank, torchrun.size, host, check, JOIN_SECONDS)
        if exchange == "gloo" or len(session.machines) > 1:
            # The board has a connection of its own, because gloo blocks that of `session` while it waits for a key.
            other = session.part_of(open_tcp_store(torchrun.address, torchrun.port, False, check, JOIN_SECONDS))
            collective: Collective = GlooCollective(
                session.store,
                torchrun.rank,
                torchrun.size,
                host,
                while_waiting=session.check,
                make_board=lambda: StoreBoard(other, torchrun.rank, torchrun.size, session.check, JOIN_SECONDS),
            )
        elif torchrun.rank:
            wait_for_keys(session.store, ["address"], session.check, JOIN_SECONDS)
            address = json.loads(session.store.get("address"))
            collective = SharedCollective.join(address, torchrun.rank, host, session.check)
        else:
            collective = SharedCollective.create(
                torchrun.size, host, lambda address: session.store.set("address", json.dumps(address)), session.check
            )
    except RuntimeError as error:  # a store also raises this after its time limit
        where = f"MASTER_ADDR={torchrun.address} MASTER_PORT={torchrun.port}"
        raise ConfigError(
            f"rank {torchrun.rank} could not reach the other ranks at {where} ({str(error).splitlines()[0]}): "
            "another program may use the port, or a rank is missing."
        ) from None
    collective.while_waiting = check
    return collective


def watching_torchrun(while_waiting: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls `while_waiting`, and raises WorkerError if torchrun itself has ended."""
    parent = os.getppid()

    def check() -> None:
        if is_torchrun() and os.getppid() != parent:
            raise WorkerError(
                "torchrun, which started this rank, has ended. Continue from the last checkpoint with --resume."
            )
        while_waiting()

    return check


class FailureNotice:
    """Publishes the error of this rank if it fails while the other ranks of torchrun wait for it to join them."""

    def __init__(self) -> None:
        self.is_awaited = False  # whether other ranks wait for this one
        self._has_run = False

    @contextmanager
    def published(self, torchrun: Torchrun) -> Iterator[None]:
        """Publish an error that leaves the context while `is_awaited` is True, which is set at the start.

        Raise ConfigError if this process has entered the context before.
        """
        if self._has_run:
            raise ConfigError(
                "this process has already trained a run, with which the other ranks of torchrun have ended: start "
                "torchrun once per run."
            )
        self.is_awaited = self._has_run = True
        try:
            yield
        except BaseException as error:
            if self.is_awaited and has_agent_store() and not isinstance(error, GeneratorExit):
                with suppress(RuntimeError, OSError):  # the other ranks then wait until their time limit
                    store = open_store(torchrun, lambda: None, PUBLISH_SECONDS)
                    publish_failure(store, torchrun.rank, socket.gethostname(), error)
            raise
        finally:
            self.is_awaited = False


FAILURE_NOTICE = FailureNotice()
