"""Find out which options a run uses, given its algorithm and scheme, and refuse unused options that the user sets.

An option that only some runs use declares all features that such a run must have:
`option(..., used_by="async replay")`. The options class of an algorithm declares what the algorithm learns from
(`data`), and which agent options (`unused_agent_options`) and inherited algorithm options (`unused_options`) the
algorithm does not use. tests/config/test_used_options.py compares these declarations with the options that runs read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from remuda.errors import ConfigError
from remuda.registry import find_scheme

GROUP_FEATURES = {"replay": "replay"}  # {group of options: feature that all its options require}
OWNERS = {  # {feature: phrase that names the runs with this feature}
    "replay": "algorithms with a replay",
    "rollouts": "algorithms without a replay",
    "workers": "--scheme parallel, async and replicas",
    "async": "--scheme async",
    "serial": "--scheme serial",
    "replicas": "--scheme replicas",
}


def required_features(kind: type[Any], group: str, name: str) -> list[str]:
    """Return the features that a run must have to use the option `group.name`.

    `kind` is the options class of the group, such as `ReplayOptions`.
    """
    rules = next(item.metadata for item in fields(kind) if item.name == name)
    return [*GROUP_FEATURES.get(group, "").split(), *rules.get("used_by", "").split()]


def data_feature(algo: type[Any]) -> str:
    """Return "replay" if an algorithm with options of class `algo` learns from a replay, otherwise "rollouts"."""
    return "replay" if algo.data == "replay" else "rollouts"


def scheme_features(scheme: str) -> list[str]:
    """Return the features of runs under a scheme: some of "workers", "async", "serial" and "replicas"."""
    entry = find_scheme(scheme)
    # Every rank may have env workers (sampler.workers), although it steps its envs itself by default.
    has = {
        "workers": entry.has_workers or entry.has_ranks,
        "async": entry.is_asynchronous,
        "replicas": entry.has_ranks,
    }
    has["serial"] = not any(has.values())
    return [feature for feature, is_there in has.items() if is_there]


def is_used_by(algo: type[Any], kind: type[Any], group: str, name: str) -> bool:
    """Return whether algorithms with options of class `algo` use the option `group.name` under at least one scheme.

    `kind` is the options class of the group, such as `ReplayOptions`.
    """
    if group == "algo":
        return name not in algo.unused_options
    if group == "agent" and name in algo.unused_agent_options:
        return False
    return {"replay", "rollouts"}.intersection(required_features(kind, group, name)) <= {data_feature(algo)}


def refuse_unused(
    given: Mapping[str, Mapping[str, object]], kinds: Mapping[str, type[Any]], algo: str, scheme: str
) -> None:
    """Raise ConfigError for the first of the `given` options that `algo` does not use under `scheme`.

    `kinds` holds the options class of each group; for the group "algo", it is that of the algorithm `algo`.
    """
    features = {data_feature(kinds["algo"]), *scheme_features(scheme)}
    for group, values in given.items():
        for name, value in values.items():
            setting = f"{group}.{name}={value}"
            if group in ("algo", "agent") and not is_used_by(kinds["algo"], kinds[group], group, name):
                raise ConfigError(f"{setting} has no effect on {algo}: leave it out.")
            missing = [] if group == "algo" else required_features(kinds[group], group, name)
            missing = [OWNERS[feature] for feature in missing if feature not in features]
            if missing:
                owners = " and ".join(missing)
                raise ConfigError(
                    f"{setting} has no effect on {algo} under --scheme {scheme}, it is for {owners}: leave it out."
                )
