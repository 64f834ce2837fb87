"""The parts of a run from its configuration: net, envs, and episodes to evaluate with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from remuda.agents import NetFactory
from remuda.config.algo_options import OnPolicyOptions
from remuda.config.fields import parse_seeds
from remuda.config.run_config import RunConfig
from remuda.config.run_options import AgentOptions
from remuda.core import Envs, derive_seed
from remuda.data.packing import Unpackable, pack
from remuda.envs import EnvInfo, EnvSpec, choose_backend, make_envs, resolve_stats
from remuda.envs.import_paths import Unreachable, describe, find, import_named
from remuda.envs.previous import WithPrevious, with_previous
from remuda.errors import ConfigError
from remuda.machine import usable_cores
from remuda.nets import NETS, make_net
from remuda.runs.advice import as_written
from remuda.sampling.evaluation import Evaluation, evaluate
from remuda.schemes.learning_round import torch_threads

MAX_EVAL_ENVS = 8
WORKER_LIMITS = ("step_timeout", "build_timeout", "max_worker_restarts")


def agent_view(config: RunConfig, info: EnvInfo) -> EnvInfo:
    """The env as the agent sees it: with its previous action and reward, if it is shown them."""
    options = config.agent
    if not (options.prev_action or options.prev_reward):
        return info
    seen = with_previous(info.observation, info.action, options.prev_action, options.prev_reward)
    return replace(info, observation=seen)


def find_net(options: AgentOptions, reference: Mapping[str, str] | None = None) -> NetFactory:
    """Return the net that the options name; `reference` is what `describe_net` returned in the run's own process."""
    if reference is not None:
        found: NetFactory = find(reference)
        return found
    if options.net in NETS:
        return lambda shape: make_net(shape, options.net, options.hidden, options.activation, options.orthogonal_init)
    if options.net.startswith("<"):
        raise ConfigError(
            f"agent.net={options.net} has no import path: pass net={as_written(options.net)} from Python."
        )
    if ":" not in options.net:
        raise ConfigError(f"agent.net={options.net!r} is not known: use {', '.join(NETS)}, or package.module:Name.")
    made: NetFactory = import_named(options.net, "agent.net")
    return made


def describe_net(config: RunConfig, net: NetFactory | None) -> dict[str, str] | None:
    """Return how other processes find a net that was given as an object; None where the options name it."""
    if not config.agent.net.startswith("<"):
        return None
    remedy = "sampler.inference=central" if config.scheme == "parallel" else "--scheme parallel"
    try:
        return describe(net)
    except Unreachable as error:
        raise ConfigError(
            f"agent.net={config.agent.net} cannot be used in other processes, as {error.reason}: define it in a "
            f"module file, e.g. nets.py, and pass net=nets.{as_written(config.agent.net, 'Net')}, or use {remedy}."
        ) from None


def make_some_envs(
    config: RunConfig,
    spec: EnvSpec,
    num_envs: int,
    slots: int,
    num_workers: int,
    should_stop: Callable[[], bool],
    seeds: Sequence[Sequence[int]] | None = None,
) -> Envs:
    """Envs of this run, for training or, with the seeds of their episodes, for evaluation."""
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
        **{name: getattr(options, name) for name in ("max_restarts", *WORKER_LIMITS)},
    )
    agent = config.agent
    if not (agent.prev_action or agent.prev_reward):
        return envs
    return WithPrevious(envs, agent.prev_action, agent.prev_reward)


def check_envs(config: RunConfig, spec: EnvSpec) -> bool:
    """Whether envs will be native; ConfigError, before anything is started, for what does not fit this env."""
    options = config.envs
    resolve_stats(options.stats)
    backend = python_only(config, None) if config.sampler.wait_reset else options.backend
    return choose_backend(spec, backend, options.stats, levels=training_seeds(config)) is not None


def frame_skip_warning(spec: EnvSpec) -> str | None:
    """Return a sentence if this is an Atari game in which every frame is a step: it learns several times slower."""
    game = spec.game
    if game is None or game.frame_skip != 1:
        return None
    return (
        f"every frame of {spec.label} is a step (frame skip 1), while presets and published results repeat each "
        "action for 4 frames: use --envs.frame_skip 4."
    )


def why_no_state(config: RunConfig, info: EnvInfo, is_native: bool) -> str | None:
    """What keeps the state of envs from being saved; None if nothing does."""
    if is_native:
        return "native envs keep their state to themselves"
    try:
        pack(vars(resolve_stats(config.envs.stats)()))
    except Unpackable as error:
        return f"envs.stats={config.envs.stats}: {error}"
    return info.no_state


def rounds_between_cuts(config: RunConfig, no_state: str | None) -> int:
    """Return the rounds after which all episodes are cut (checkpoint.cut_episodes); 0 if they never are."""
    if no_state is None or not config.checkpoint.cut_episodes:
        return 0
    rows = config.sampler.envs * config.algo_options.rows_per_round
    return -(-config.checkpoint.every // rows)


def training_seeds(config: RunConfig) -> list[int] | None:
    return None if config.envs.seeds is None else parse_seeds(config.envs.seeds, "envs.seeds")


def python_only(config: RunConfig, seeds: Sequence[Sequence[int]] | None) -> str:
    """Single envs: native ones play no given seeds, and reset whether asked to or not."""
    if seeds is None and config.envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={config.envs.backend} with sampler.wait_reset: native envs cannot wait, use python."
        )
    return "python"


def num_workers(config: RunConfig) -> int:
    """As asked, or one per core that this process may use, but none without an env in every slot."""
    asked, per_slot = config.sampler.workers, config.sampler.envs // config.sampler.slots
    if asked > per_slot:
        raise ConfigError(
            f"sampler.workers={asked} is more than the {per_slot} envs of a slot: "
            f"use at most {per_slot} workers or more envs."
        )
    if config.scheme == "async":
        return num_async_workers(config, asked)
    return asked or min(usable_cores(), per_slot)


def num_async_workers(config: RunConfig, asked: int) -> int:
    """Workers with equal shares of the envs, whole numbers of which make a round."""
    envs, options = config.sampler.envs, config.algo_options
    # Of samplers that feed a replay, each share is a round by itself.
    columns = options.columns_per_round(envs) if isinstance(options, OnPolicyOptions) else envs
    fitting = [count for count in range(1, envs + 1) if envs % count == 0 and columns % (envs // count) == 0]
    if asked and asked not in fitting:
        near = " or ".join(map(str, sorted(fitting, key=lambda count: abs(count - asked))[:2]))
        of_round = f" so that whole shares make a round of {columns} sequences" if columns != envs else " evenly"
        raise ConfigError(f"sampler.workers={asked} cannot share {envs} envs{of_round}: use {near}.")
    return asked or max((count for count in fitting if count <= usable_cores()), default=min(fitting))


def play_episodes(
    config: RunConfig,
    spec: EnvSpec,
    episodes: int,
    agent: Any,
    should_stop: Callable[[], bool] = lambda: False,
    explore: bool = False,
    workers: int | None = None,
    threads: int | None = None,
) -> Evaluation:
    """Episodes with the seeds of the evaluation, in envs of their own: training is not disturbed.

    Their `workers`, and `threads` of torch, are by default those of the run; no workers if it has none.
    """
    count = min(episodes, MAX_EVAL_ENVS)
    seeds = [[eval_seed(config, k) for k in range(i, episodes, count)] for i in range(count)]
    if workers is None:
        workers = 0 if config.scheme == "serial" else min(num_workers(config), count)
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    envs = make_some_envs(config, limited, count, 1, workers, should_stop, seeds)
    # With more threads than it needs, a small net was 80 times slower on a busy machine of two cores.
    with closing(envs), torch_threads(config.scheme_options.threads if threads is None else threads):
        return evaluate(envs, agent, episodes, explore=explore, seed=config.eval.seed)


def eval_seed(config: RunConfig, number: int) -> int:
    """Of an evaluation's episode: one of those given, or drawn from eval.seed."""
    if config.eval.seeds is None:
        return derive_seed(config.eval.seed, number)
    given = parse_seeds(config.eval.seeds, "eval.seeds")
    return given[number % len(given)]


def eval_episodes(config: RunConfig) -> int:
    """Of each evaluation: as many as asked for, or one for each given seed."""
    given = config.eval.seeds
    return config.eval.episodes if given is None else len(parse_seeds(given, "eval.seeds"))
