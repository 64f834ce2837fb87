"""Environments: found by name, stepped in this process or in workers, and never with torch.

    spec = resolve("CartPole-v1")                        # an id, "package.module:factory" or a callable
    with make_envs(spec, num_envs=8, num_workers=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()
            envs.send(slot, act(step.obs))

From the command to an env's step: make_envs, pool.py (or local.py), worker.py, lane.py, single.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remuda.core import Space
from remuda.envs.check import EnvReport, examine
from remuda.envs.episodes import EpisodeStats
from remuda.envs.local import LocalEnvs
from remuda.envs.pool import PooledEnvs
from remuda.envs.spec import EnvSpec, resolve
from remuda.envs.worker import refuse_in_worker
from remuda.errors import ConfigError, EnvError, EnvSpecError

__all__ = [
    "EnvInfo",
    "EnvReport",
    "EnvSpec",
    "EpisodeStats",
    "LocalEnvs",
    "PooledEnvs",
    "examine",
    "make_envs",
    "probe",
    "refuse_in_worker",
    "resolve",
]


@dataclass(frozen=True)
class EnvInfo:
    """What one env says of itself."""

    label: str
    observation: Space
    action: Space
    max_episode_steps: int | None  # None: no limit that Gymnasium knows of
    render_modes: tuple[str, ...]
    fps: float  # at which it wants to be shown; 0: it does not say


def make_envs(
    spec: EnvSpec,
    num_envs: int,
    num_workers: int = 0,
    slots: int = 1,
    gamma: float = 0.99,
    stats: str | type[EpisodeStats] | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **limits: Any,
) -> LocalEnvs | PooledEnvs:
    """In this process for 0 workers; `limits` are max_restarts and, with workers, those of PooledEnvs."""
    if num_workers < 0:
        raise ConfigError(
            f"workers={num_workers}: use 0 for envs in this process, or the number of worker processes."
        )
    if num_workers == 0:
        local = {name: limit for name, limit in limits.items() if name == "max_restarts"}
        return LocalEnvs(spec, num_envs, slots, gamma, stats, seeds, should_stop=should_stop, **local)
    return PooledEnvs(spec, num_envs, num_workers, slots, gamma, stats, seeds, should_stop=should_stop, **limits)


def probe(spec: EnvSpec, attempts: int = 3) -> EnvInfo:
    """Build one env, look at it, and try a reset and a step: spaces that lie are found before a run begins.

    An env that only fails now and then gets another chance, as it would in a run.
    """
    env = spec.build()
    known, metadata = env.spec, env.metadata
    try:
        with LocalEnvs(EnvSpec(spec.name, {}, lambda: env), 1, max_restarts=0) as envs:
            envs.reset(seed=0)
            slot, _ = envs.recv()
            action = np.zeros((1, *envs.action.shape), envs.action.dtype)
            if envs.action.kind == "box":
                action = np.clip(action, envs.action.low, envs.action.high)
            envs.send(slot, action)
            envs.recv()
            return EnvInfo(
                spec.label,
                envs.observation,
                envs.action,
                None if known is None else known.max_episode_steps,
                tuple(metadata.get("render_modes", ())),
                float(metadata.get("render_fps") or 0.0),
            )
    except EnvError as error:
        if attempts > 1:
            return probe(spec, attempts - 1)
        raise EnvSpecError(str(error)) from error
