"""Outcomes of work that every process of a run does at the same time: a result, or the error that ended the work.

    outcome = attempt(lambda: replay.save(directory))
    results = group.gather_outcomes(outcome)             # raises the error if the work failed in any process

A process that raised an error instead of sending its outcome would leave the sequence of exchanges, and the other
processes would take its next message for the one that is missing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda import errors
from remuda.errors import RemudaError, WorkerError

MAX_CHARACTERS = 8000  # longer error texts and tracebacks are cut before they are sent


@dataclass(frozen=True)
class Outcome:
    """What some work returned in this process, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None

    def message(self) -> dict[str, Any]:
        """Return the outcome as a dict to send to the other processes; `value` must be plain values and arrays."""
        if self.error is None:
            return {"value": self.value}
        trace = "".join(traceback.format_exception(self.error))
        return {
            "error": type(self.error).__name__,
            "is_os_error": isinstance(self.error, OSError),
            "text": str(self.error)[:MAX_CHARACTERS],
            "traceback": trace[-MAX_CHARACTERS:],
        }


def attempt(work: Callable[[], Any]) -> Outcome:
    """Return the outcome of `work`."""
    try:
        return Outcome(work())
    except Exception as error:
        return Outcome(error=error)


def results_of(own: Outcome, messages: Sequence[Mapping[str, Any]], names: Sequence[object]) -> list[Any]:
    """Return the results of all processes, given their messages; raise the error of one of them if any has failed.

    The error is that of this process (`own`), or else the first of the others, which begins with the name of its
    process.
    """
    if own.error is not None:
        raise own.error
    for name, message in zip(names, messages, strict=True):
        if "error" in message:
            raise _error_of(name, message)
    return [message["value"] for message in messages]


def _error_of(name: object, message: Mapping[str, Any]) -> Exception:
    """Return an error of the same class if Remuda or the operating system defines it, and otherwise a WorkerError."""
    kind, text = vars(errors).get(message["error"]), f"{name}: {message['text']}"
    error: Exception
    if message["is_os_error"]:
        error = OSError(text)
    elif isinstance(kind, type) and issubclass(kind, RemudaError):
        error = kind(text)
    else:
        error = WorkerError(f"{name}: {message['error']}: {message['text']}")
    error.add_note(message["traceback"])
    return error
