"""Find environments by name and step them in this process or in worker processes, without importing torch.

    spec = resolve("CartPole-v1")                        # an id, "package.module:factory" or a callable
    with make_envs(spec, num_envs=8, num_workers=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()
            envs.send(slot, act(step.obs))

To follow the code from `make_envs` to a step of one env, read pool.py and worker.py (or local.py for envs in this
process), then env_group.py and single.py. Native vector envs, which a library steps with its own code, are in
native.py, native_slot.py and backends/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from remuda.core import Array, Space
from remuda.envs import backends
from remuda.envs.async_pool import AsyncPooledEnvs
from remuda.envs.atari_options import AtariOptions
from remuda.envs.check import EnvReport, examine
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.import_paths import sentence
from remuda.envs.local import LocalEnvs
from remuda.envs.native import NativeEnvs
from remuda.envs.pool import PooledEnvs
from remuda.envs.spec import EnvSpec, is_atari, resolve
from remuda.envs.worker import refuse_in_worker
from remuda.errors import ConfigError, EnvError, EnvSpecError, NoState

__all__ = [
    "AsyncPooledEnvs",
    "AtariOptions",
    "EnvInfo",
    "EnvReport",
    "EnvSpec",
    "EpisodeStats",
    "LocalEnvs",
    "NativeEnvs",
    "PooledEnvs",
    "choose_backend",
    "examine",
    "is_atari",
    "make_envs",
    "probe",
    "refuse_in_worker",
    "resolve",
    "resolve_stats",
]


@dataclass(frozen=True)
class EnvInfo:
    """Properties of one env, as found by `probe`."""

    label: str
    observation: Space
    action: Space
    max_episode_steps: int | None  # limit that is registered with Gymnasium, or None
    render_modes: tuple[str, ...]
    fps: float  # frames per second for videos; 0 if the env does not set this
    no_state: str | None = None  # why the env's state cannot be saved; None if it can be saved


def make_envs(
    spec: EnvSpec,
    num_envs: int,
    num_workers: int = 0,
    slots: int = 1,
    gamma: float = 0.99,
    stats: str | type[EpisodeStats] | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
    should_stop: Callable[[], bool] | None = None,
    backend: str = "auto",
    info: Sequence[str] = (),
    levels: Sequence[int] | None = None,
    first_env: int = 0,
    **limits: Any,
) -> LocalEnvs | PooledEnvs | NativeEnvs:
    """Make `num_envs` envs, in `num_workers` worker processes or, if `num_workers` is 0, in this process.

    `first_env` is the first env's index among all envs of the run; an env's seed is derived from its index.
    `limits` may contain max_restarts, step_timeout, build_timeout and max_worker_restarts, as in PooledEnvs. Single
    envs in this process use only max_restarts, and native envs use none of these limits. `seeds` and `levels` are
    explained in local.py.

    `backend` is "python" (single envs: Gymnasium envs that are stepped one by one), the name of a native backend
    (see `backends`), or "auto". "auto" chooses a native backend if its envs give exactly the same results as single
    envs (Atari), or if the id has no single env. Other native envs, such as Gymnasium's vectorized CartPole or the
    envs of envpool, give different results and are used only if `backend` names their backend. Single envs are
    needed for `seeds`, `levels`, `info`, `spec.max_steps`, and a class `stats` that overrides step().

    Native envs run in this process, with at most max(1, `num_workers`) threads for each slot.
    """
    if num_workers < 0:
        raise ConfigError(
            f"workers={num_workers}: use 0 for envs in this process, or the number of worker processes."
        )
    chosen = choose_backend(spec, backend, stats, seeds, info, levels)
    if chosen is not None:
        refuse_in_worker()
        threads = max(1, num_workers)
        return NativeEnvs(spec, chosen, num_envs, slots, threads, gamma, stats, should_stop, first_env)
    common: dict[str, Any] = {"should_stop": should_stop, "levels": levels, "info": info, "first_env": first_env}
    if num_workers == 0:
        local = {name: limit for name, limit in limits.items() if name == "max_restarts"}
        return LocalEnvs(spec, num_envs, slots, gamma, stats, seeds, **common, **local)
    return PooledEnvs(spec, num_envs, num_workers, slots, gamma, stats, seeds, **common, **limits)


def choose_backend(
    spec: EnvSpec,
    backend: str = "auto",
    stats: str | type[EpisodeStats] | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
    info: Sequence[str] = (),
    levels: Sequence[int] | None = None,
) -> backends.Backend | None:
    """Return the native backend for `make_envs`, or None for single envs.

    Raise ConfigError if `backend` is unknown or cannot make these envs.
    """
    return backends.choose(backend, spec, _needs_single(spec, stats, seeds, info, levels))


def _needs_single(
    spec: EnvSpec,
    stats: str | type[EpisodeStats] | None,
    seeds: Sequence[Sequence[int]] | None,
    info: Sequence[str],
    levels: Sequence[int] | None,
) -> str:
    """Return a phrase that names the first argument that only single envs support, or "" if there is none."""
    if seeds is not None:
        return "the seeds of an evaluation"
    if levels is not None:
        return f"envs.seeds, {len(levels)} of them"
    if info:
        return f"info={list(info)}"
    if resolve_stats(stats).step is not EpisodeStats.step:
        return f"envs.stats={stats}, whose step() is called at every step"
    return "" if spec.max_steps is None else f"a limit of {spec.max_steps} steps"


def probe(spec: EnvSpec, attempts: int = 3) -> EnvInfo:
    """Build one env, reset and step it, and return its properties; raise EnvSpecError if the env does not work.

    Observations that contradict their space are found here, before a run starts. If a single env fails, a new one is
    tried, up to `attempts` envs in total, because a run would also rebuild an env that fails.
    """
    if spec.is_vector_only:
        return _probe_native(spec)
    env = spec.build()
    known, metadata = env.spec, env.metadata
    try:
        # Warnings about the env are dropped here, because the envs of the run report them too.
        with LocalEnvs(EnvSpec(spec.name, {}, lambda: env), 1, max_restarts=0, on_notice=lambda _: None) as envs:
            _try_step(envs)
            return EnvInfo(
                spec.label,
                envs.observation,
                envs.action,
                None if known is None else known.max_episode_steps,
                tuple(metadata.get("render_modes", ())),
                float(metadata.get("render_fps") or 0.0),
                _why_no_state(envs),
            )
    except EnvError as error:
        if attempts > 1:
            return probe(spec, attempts - 1)
        raise EnvSpecError(str(error)) from error


def _probe_native(spec: EnvSpec) -> EnvInfo:
    chosen = backends.choose("auto", spec)
    assert chosen is not None
    try:
        with NativeEnvs(spec, chosen, 1) as envs:
            _try_step(envs)
            limit = gymnasium.spec(spec.id).max_episode_steps
            return EnvInfo(spec.label, envs.observation, envs.action, limit, (), 0.0, _why_no_state(envs))
    except EnvError as error:
        raise EnvSpecError(str(error)) from error


def _why_no_state(envs: LocalEnvs | NativeEnvs) -> str | None:
    """Return why the state of these envs cannot be saved, or None if it can be saved.

    Both get_state() and set_state() are tried, because an env may use these method names for something else.
    """
    try:
        envs.set_state(envs.get_state())
    except NoState as error:
        return str(error)
    except Exception as error:
        return f"its state could not be taken and put back ({sentence(error)})"
    return None


def _try_step(envs: LocalEnvs | NativeEnvs) -> None:
    envs.reset(seed=0)
    slot, _ = envs.recv()
    envs.send(slot, envs.action.tree(_zero_action))
    envs.recv()


def _zero_action(path: str, leaf: Space) -> Array:
    action = np.zeros((1, *leaf.shape), leaf.dtype)
    return np.clip(action, leaf.low, leaf.high) if leaf.kind == "box" else action
