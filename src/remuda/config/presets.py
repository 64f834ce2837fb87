"""Presets: defaults per algorithm and family of envs, so that `remuda train ALGO --env ID` needs no options.

A table of presets maps patterns of env ids to the values that differ from the defaults of the options, by group:

    {"CartPole-*": {"run": {"steps": 200_000}, "sampler": {"envs": 8}, "algo": {"n_steps": 32}}, "discrete": {...}}

The first pattern that matches an id is used. If no pattern matches, the action space of the env selects the preset
"discrete" or "box". The tables are in rollout_presets.py and replay_presets.py; an algorithm from another package
provides its own table.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from remuda.config.replay_presets import Preset
from remuda.core import Space
from remuda.envs import is_atari
from remuda.registry import find_algorithm

DEFAULT_STEPS = 1_000_000  # number of env steps for presets that do not set it


def find_preset(algo: str, env: str, action: Space) -> Preset:
    """Return the preset for an env, selected by the env's id (without a module prefix) or else by its action space.

    All ids of Atari games, such as PongNoFrameskip-v4 and Pong-v4, match `ALE/*`.
    """
    found = _matching(find_algorithm(algo).presets, env, action)
    return found if "steps" in found.get("run", {}) else {**found, "run": {"steps": DEFAULT_STEPS}}


def _matching(table: Mapping[str, Preset], env: str, action: Space) -> Preset:
    name = env.rpartition(":")[2]
    if is_atari(name) and not name.startswith("ALE/"):
        name = f"ALE/{name}"
    for pattern, preset in table.items():
        if fnmatchcase(name, pattern):
            return preset
    is_continuous = all(leaf.kind == "box" for _, leaf in action.leaves())
    # A built-in algorithm without a preset for the action space does not support the space. Any preset will do then,
    # because building the agent raises an error.
    return table.get("box" if is_continuous else "discrete", next(iter(table.values()), {}))
