"""Options that had another name in version 0.1. The old names are still accepted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from remuda.errors import ConfigError

RENAMED = {  # {group of options: {name in version 0.1: present name}}
    "agent": {"quick": "fast_path"},
    "eval": {"share": "cpu_fraction"},
    "replay": {"first_priority": "initial_priority"},
    "sampler": {"act": "inference"},
}


def rename_options(groups: Mapping[str, object], source: str = "") -> dict[str, Any]:
    """Return `groups` with the present names of all options, and log one warning that lists the old names found.

    `source` is the file that the options come from, if any. Raise ConfigError if both names of an option are given.
    """
    out, notices = dict(groups), []
    for group, names in RENAMED.items():
        values = groups.get(group)
        if not isinstance(values, Mapping):
            continue
        for old, new in names.items():
            if old in values and new in values:
                raise ConfigError(f"{group}.{old} is the old name of {group}.{new}, and both are given: use the new.")
            if old in values:
                notices.append(f"{group}.{old} is now {group}.{new}")
        out[group] = {names.get(name, name): value for name, value in values.items()}
    if notices:
        _notify(f"{source}: " * bool(source) + ", ".join(notices) + ".")
    return out


@cache
def _notify(notice: str) -> None:
    """Log a notice once, although a command may read the same configuration several times."""
    logging.getLogger("remuda").warning(notice)
