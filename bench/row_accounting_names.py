"""Names of replay classes, methods, arguments and counts in the source trees that bench/row_accounting.py runs on.

Every table lists alternative names, the newest first and that of version 0.1 last. The first that exists is used.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import remuda.replay

CLASSES = {
    "TransitionReplay": ("TransitionReplay", "Experience"),
    "SequenceReplay": ("SequenceReplay", "Sequences"),
    "Ring": ("Ring",),
    "FrameRing": ("FrameRing",),
    "Row": ("Row",),
    "Priorities": ("Priorities",),
    "States": ("RecurrentStates", "States"),
}
METHODS = {
    "sync": ("sync", "follow"),
    "commit": ("commit", "settle"),
    "on_writer_lost": ("on_writer_lost", "lose"),
    "pause_writers": ("pause_writers", "still"),
    "set_td_error": ("set_td_error", "judge"),
    "fresh": ("new_observations", "fresh"),
    "may_write": ("may_write",),
}
ARGUMENTS = {
    "is_shared": ("is_shared",),
    "most_per_round": ("max_batches_per_round", "most_per_round"),
    "lead": ("max_lead", "lead"),
    "has_td_error": ("has_td_error", "is_judged"),
}
COUNTS = {
    "written": ("written",),
    "begun": ("begun",),
    "real": ("real",),
    "td_errors": ("td_errors", "judged"),
    "limit": ("limit",),
    "stored": ("stored",),
    "count": ("count",),
    "steps": ("steps",),
    "credit": ("credit",),
    "draws": ("draws",),
    "redrawn": ("torn_rows", "redrawn"),
    "is_throttled": ("is_throttled",),
    "priority_sum": ("priorities.tree.total", "starts.tree.total", "sequence_index.tree.total"),
    "largest_priority": ("priorities.largest", "starts.largest", "sequence_index.largest"),
}
HOMES = ("", "ring.", "counters.", "ring.counters.")  # where a replay has its counts


def find_class(name: str) -> Any:
    for each in CLASSES[name]:
        if hasattr(remuda.replay, each):
            return getattr(remuda.replay, each)
    raise LookupError(f"remuda.replay has none of {CLASSES[name]}: add the new name of {name}.")


def find_method(name: str, *things: Any) -> Callable[..., Any]:
    for thing in things:
        for each in METHODS.get(name, (name,)) if thing is not None else ():
            if hasattr(thing, each):
                method: Callable[..., Any] = getattr(thing, each)
                return method
    kinds = [type(thing).__name__ for thing in things]
    raise LookupError(f"{kinds} have none of {METHODS.get(name, (name,))}: add the new name of {name}.")


def construct(name: str, *arguments: Any, **options: Any) -> Any:
    """Make an object of class `name`, with the option names that its constructor accepts in this tree."""
    kind = find_class(name)
    known = inspect.signature(kind).parameters
    named = {}
    for option, value in options.items():
        for each in ARGUMENTS.get(option, (option,)):
            if each in known:
                named[each] = value
                break
        else:
            raise LookupError(f"{kind.__name__} takes no {option}: add the new name to ARGUMENTS.")
    return kind(*arguments, **named)


def counts_of(replay: Any) -> dict[str, Any]:
    """Return all counts of a replay, with None for a count that this tree or kind of replay does not have."""
    found: dict[str, Any] = {}
    for count, names in COUNTS.items():
        values = (look_up(replay, home + name) for name in names for home in HOMES)
        found[count] = next((plain(value) for value in values if value is not None), None)
    return {**found, "metrics": replay.metrics()}


def look_up(thing: Any, path: str) -> Any:
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
