"""The environment variables with which `torchrun` starts the ranks of a run."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from remuda.errors import ConfigError
from remuda.processes.identity import machine_id, parent_of, start_time

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Torchrun:
    """The values that torchrun gives to one of the processes that it starts."""

    rank: int
    size: int  # number of ranks
    local_rank: int  # rank among the processes on this host
    address: str  # host name of the store through which the ranks find each other
    port: int
    launch: str  # an identity of the torchrun process, which stays the same when it starts the ranks again


def read_torchrun() -> Torchrun | None:
    """Return the values of torchrun's environment variables, or None if torchrun has not started this process.

    Raises ConfigError if only some of the variables are set, or if their values are invalid or contradictory.
    """
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    if "RANK" not in found and "LOCAL_RANK" not in found:  # other launchers set WORLD_SIZE or MASTER_ADDR alone
        return None
    if missing := [name for name in NAMES if name not in found]:
        raise ConfigError(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set, as torchrun does, but not "
            f"{', '.join(missing)}: start with torchrun, or unset them and use --scheme.ranks."
        )
    numbers = {name: found[name] for name in NAMES if name != "MASTER_ADDR"}
    if wrong := [f"{name}={text}" for name, text in numbers.items() if not text.isdecimal()]:
        raise ConfigError(f"{', '.join(wrong)}: torchrun sets numbers; start with torchrun, or unset the variables.")
    rank, size, local_rank, port = (int(numbers[name]) for name in numbers)
    if not found["MASTER_ADDR"] or not 0 < port < 1 << 16:
        raise ConfigError(
            f"MASTER_ADDR={found['MASTER_ADDR']} MASTER_PORT={port} is not a host name and a port from 1 to 65535: "
            "start with torchrun, or unset the variables and use --scheme.ranks."
        )
    if not local_rank <= rank < size:
        raise ConfigError(
            f"RANK={rank}, LOCAL_RANK={local_rank} and WORLD_SIZE={size} contradict each other: start with torchrun, "
            "or unset them and use --scheme.ranks."
        )
    return Torchrun(rank, size, local_rank, found["MASTER_ADDR"], port, launch_id())


def is_torchrun() -> bool:
    """Return whether torchrun itself has started this process, not another program that sets the same variables."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch_id() -> str:
    """Return a text that is the same in all processes that one torchrun process starts, also when it restarts them.

    The run id alone is not unique: it is `none` unless the user sets it. TORCHELASTIC_RESTART_COUNT does not tell
    whether a process is started again, because torchrun does not count restarts after another machine has joined.
    """
    run_id, process = os.environ.get("TORCHELASTIC_RUN_ID"), os.getpid()
    if is_torchrun():
        # torchrun starts every command in a new session, so the leader's parent is torchrun, even if a shell script
        # lies between torchrun and this process.
        process = parent_of(os.getsid(0))
    text = f"{run_id} {machine_id()} {process} {start_time(process)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def refuse_many_processes(scheme: str) -> None:
    """Raise ConfigError if torchrun started several processes, each of which would train the same run on its own."""
    is_complete = all(name in os.environ for name in NAMES)
    if is_complete and (torchrun := read_torchrun()) is not None and torchrun.size > 1:
        raise ConfigError(
            f"torchrun started {torchrun.size} processes, and --scheme {scheme} uses one: add --scheme replicas, or "
            "start without torchrun."
        )
