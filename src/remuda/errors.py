"""The exceptions that Remuda raises.

RemudaError
├── UsageError           a mistake by the user: one sentence with value, rule and remedy; exit code 2
│   ├── ConfigError      an invalid value of an option, or two options that do not fit together
│   ├── EnvSpecError     an env that cannot be found or built, or that has unsupported spaces
│   └── CheckpointError  a run or checkpoint that is missing, damaged, or made for another env
│       └── DamagedReplay    a replay whose saved rows are missing or damaged
├── EnvError             an env that violates its contract; the message names env, index, seed and step
│   └── EnvFailed        an env that raised too often; `__cause__` is the env's last exception
├── WorkerError          a worker process that died or hung too often, or a rank that was lost
├── NoState              an env whose state cannot be saved; the message gives the reason
├── TrainingError        gradients that are not finite for too many updates in a row, or a benchmark that failed
│   └── RanksDiverged    ranks of one run that do not have the same parameters any more
└── Interrupted          a signal that stops the run

Abandoned                raised inside a call into an env that does not return after a stop signal; a BaseException,
                         so that neither the env's own handlers nor the rebuilding of failed envs catch it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RemudaError(Exception):
    """Base class of every error that Remuda raises deliberately."""


class UsageError(RemudaError):
    """A mistake by the user; the command line prints only the message and exits with code 2."""


class ConfigError(UsageError):
    """An option has an invalid value, or two options do not fit together."""


class EnvSpecError(UsageError):
    """An environment cannot be found or built, or has unsupported spaces."""


class CheckpointError(UsageError):
    """A run directory or checkpoint cannot be used."""


class DamagedReplay(CheckpointError):
    """Some of the saved rows of a replay are missing or damaged; an earlier checkpoint may be complete."""


class EnvError(RemudaError):
    """An environment returned a value outside its spaces, or raised too often (EnvFailed)."""


class EnvFailed(EnvError):
    """An environment raised too often, for example more than `envs.max_restarts` times. log.txt has the traceback."""


class WorkerError(RemudaError):
    """A worker process died or hung more often than its restart limit allows, or failed with an unexpected error.

    Under the scheme `replicas`, a rank raises this error if another rank is lost.
    """


class NoState(RemudaError):
    """The state of an environment cannot be saved."""


class TrainingError(RemudaError):
    """Gradients were not finite for too many updates in a row, or a benchmark could not run."""


class RanksDiverged(TrainingError):
    """The ranks of a run do not have the same parameters any more, although they should make the same updates."""


class Interrupted(RemudaError):
    """Raised between two steps or updates, or while waiting, when a signal asks the run to stop."""

    signal = 2  # number of the signal that asked the run to stop; 2 (SIGINT) if it is not known


class Abandoned(BaseException):
    """Raised by a signal handler inside a call into an env that does not return after a stop request."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return a remedy for a misspelled name: up to `count` similar names from `known`.

    If none is similar, return all known names, or only their number if there are more than 12.
    """
    known = list(known)
    lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lower, n=count, cutoff=0.5)
    if matches:
        return "did you mean " + " or ".join(lower[match] for match in matches) + "?"
    if len(known) <= 12:
        return "there are " + ", ".join(sorted(known)) + "."
    return f"{len(known)} are known, none of them similar."
