"""What can go wrong, as a tree.

RemudaError
├── UsageError           the user's mistake: one sentence with value, rule and remedy; exit code 2
│   ├── ConfigError      an option's value, or two options that do not fit together
│   ├── EnvSpecError     an env that cannot be found, built, or whose spaces are not supported
│   └── CheckpointError  a run or checkpoint that is missing, damaged, or of another env
├── EnvError             an env broke its contract while stepping: named with env, index, seed and step
│   └── EnvFailed        an env raised too often: its last exception is the cause
├── WorkerError          a worker process died, hung or failed more often than its budget allows
├── NoState              an env whose state cannot be saved, and why
├── TrainingError        losses or gradients were not finite for too many updates in a row
└── Interrupted          a signal asked the run to stop

Abandoned                an env did not return after a signal: raised inside its call, and no Exception, so that the
                         env's own handlers and the rebuilding of failed envs do not swallow it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RemudaError(Exception):
    """Root of every error that Remuda raises on purpose."""


class UsageError(RemudaError):
    """The user's mistake; the command line prints the message alone and exits with 2."""


class ConfigError(UsageError):
    """An option's value breaks a rule."""


class EnvSpecError(UsageError):
    """An environment cannot be found or built, or has spaces that are not supported."""


class CheckpointError(UsageError):
    """A run directory or checkpoint cannot be used."""


class EnvError(RemudaError):
    """An environment returned something that its spaces forbid, or raised too often (EnvFailed)."""


class EnvFailed(EnvError):
    """An environment raised an exception more often than a run survives; log.txt keeps a traceback."""


class WorkerError(RemudaError):
    """An env worker could not be kept alive."""


class NoState(RemudaError):
    """The state of an environment cannot be saved."""


class TrainingError(RemudaError):
    """The numbers went wrong for good."""


class Interrupted(RemudaError):
    """Raised inside a wait when a signal asks the run to stop."""

    signal = 2  # its number; SIGINT unless somebody knows better


class Abandoned(BaseException):
    """Raised by a signal handler inside an env of this process that did not return after a stop was requested."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The remedy for a misspelt name: the nearest known ones, or all when nothing is near."""
    known = list(known)
    lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lower, n=count, cutoff=0.5)
    if matches:
        return "did you mean " + " or ".join(lower[match] for match in matches) + "?"
    if len(known) <= 12:
        return "there are " + ", ".join(sorted(known)) + "."
    return f"{len(known)} are known, none of them similar."
