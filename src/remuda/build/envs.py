"""Build the envs of a run from its configuration, and choose the number of workers that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from remuda.config.fields import parse_seeds
from remuda.config.run_config import RunConfig
from remuda.core import Envs
from remuda.data.packing import Unpackable, pack
from remuda.envs import EnvInfo, EnvSpec, choose_backend, make_envs, resolve_stats
from remuda.envs.previous import WithPrevious, with_previous
from remuda.errors import ConfigError
from remuda.machine import usable_cores

WORKER_LIMITS = ("step_timeout", "build_timeout", "max_worker_restarts")


def agent_view(config: RunConfig, info: EnvInfo) -> EnvInfo:
    """Return `info` with the observation space of the agent, which may include the previous action and reward."""
    options = config.agent
    if not (options.prev_action or options.prev_reward):
        return info
    seen = with_previous(info.observation, info.action, options.prev_action, options.prev_reward)
    return replace(info, observation=seen)


def make_some_envs(
    config: RunConfig,
    spec: EnvSpec,
    num_envs: int,
    slots: int,
    num_workers: int,
    should_stop: Callable[[], bool],
    seeds: Sequence[Sequence[int]] | None = None,
    first_env: int = 0,
) -> Envs:
    """Return envs of this run: for training, or for evaluation if `seeds` holds the episode seeds of each env.

    `first_env` is the index of the first of these envs among all envs of the run.
    """
    options = config.envs
    levels = training_seeds(config) if seeds is None else None
    backend = options.backend if seeds is None and not config.sampler.wait_reset else python_only(config, seeds)
    envs = make_envs(
        spec,
        num_envs,
        num_workers,
        slots,
        config.algo_options.gamma,
        options.stats,
        seeds,
        backend=backend,
        levels=levels,
        should_stop=should_stop,
        first_env=first_env,
        **{name: getattr(options, name) for name in ("max_restarts", *WORKER_LIMITS)},
    )
    agent = config.agent
    if not (agent.prev_action or agent.prev_reward):
        return envs
    return WithPrevious(envs, agent.prev_action, agent.prev_reward)


def check_envs(config: RunConfig, spec: EnvSpec) -> bool:
    """Return whether the envs will be native; raise ConfigError for options that this env does not support."""
    options = config.envs
    resolve_stats(options.stats)
    backend = python_only(config, None) if config.sampler.wait_reset else options.backend
    return choose_backend(spec, backend, options.stats, levels=training_seeds(config)) is not None


def frame_skip_warning(spec: EnvSpec) -> str | None:
    """Return a warning if every frame of an Atari game is a step, which makes learning several times slower."""
    game = spec.game
    if game is None or game.frame_skip != 1:
        return None
    return (
        f"every frame of {spec.label} is a step (frame skip 1), while presets and published results repeat each "
        "action for 4 frames: use --envs.frame_skip 4."
    )


def why_no_state(config: RunConfig, info: EnvInfo, is_native: bool) -> str | None:
    """Return the reason why the state of the envs cannot be saved, or None if it can be saved."""
    if is_native:
        return "native envs keep their state to themselves"
    try:
        pack(vars(resolve_stats(config.envs.stats)()))
    except Unpackable as error:
        return f"envs.stats={config.envs.stats}: {error}"
    return info.no_state


def rounds_between_cuts(config: RunConfig, no_state: str | None) -> int:
    """Return the number of rounds after which all episodes are ended (checkpoint.cut_episodes), or 0 for never.

    `no_state` is the result of `why_no_state`. If `no_state` is None, a checkpoint can save the state of the envs, so
    episodes need not be ended.
    """
    if no_state is None or not config.checkpoint.cut_episodes:
        return 0
    rows = config.sampler.envs * config.algo_options.rows_per_round
    return -(-config.checkpoint.every // rows)


def training_seeds(config: RunConfig) -> list[int] | None:
    """Return the env seeds to train on (envs.seeds), or None if every env has seeds of its own."""
    return None if config.envs.seeds is None else parse_seeds(config.envs.seeds, "envs.seeds")


def python_only(config: RunConfig, seeds: Sequence[Sequence[int]] | None) -> str:
    """Return "python", which is the only backend that supports evaluation and `sampler.wait_reset`.

    Native envs cannot play the given `seeds` of an evaluation, and cannot wait after the end of an episode. For
    training, `seeds` is None, and ConfigError is raised if `envs.backend` names a native backend. Evaluations ignore
    `envs.backend`.
    """
    if seeds is None and config.envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={config.envs.backend} with sampler.wait_reset: native envs cannot wait, use python."
        )
    return "python"


def num_workers(config: RunConfig) -> int:
    """Return the number of env workers: `sampler.workers` or, if this is 0, a default based on the usable cores.

    Raise ConfigError if `sampler.workers` exceeds the number of envs in a slot.
    """
    asked, per_slot = config.sampler.workers, config.sampler.envs // config.sampler.slots
    if asked > per_slot:
        raise ConfigError(
            f"sampler.workers={asked} is more than the {per_slot} envs of a slot: "
            f"use at most {per_slot} workers or more envs."
        )
    if config.is_asynchronous:
        return num_async_workers(config, asked)
    return asked or min(usable_cores(), per_slot)


def num_async_workers(config: RunConfig, asked: int) -> int:
    """Return the number of workers of an asynchronous scheme, which is `asked` or, if `asked` is 0, a default.

    A number is valid if all workers then have equally many envs, and if the sequences of one round are the rollouts
    of a whole number of workers. `asked` is the option `sampler.workers`; raise ConfigError if it is not valid. The
    default is the largest valid number that does not exceed the number of usable cores. If there is none, the default
    is the smallest valid number.
    """
    envs = config.sampler.envs
    columns = config.algo_options.columns_per_round(envs)
    fitting = [count for count in range(1, envs + 1) if envs % count == 0 and columns % (envs // count) == 0]
    if asked and asked not in fitting:
        near = " or ".join(map(str, sorted(fitting, key=lambda count: abs(count - asked))[:2]))
        of_round = f" so that whole shares make a round of {columns} sequences" if columns != envs else " evenly"
        raise ConfigError(f"sampler.workers={asked} cannot share {envs} envs{of_round}: use {near}.")
    return asked or max((count for count in fitting if count <= usable_cores()), default=min(fitting))
