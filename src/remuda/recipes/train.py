"""Training from a configuration: build what it names, run it under its scheme, leave a run directory.

`remuda train` and `remuda.train` both end here. From here to the loss: `scheme.run` (schemes/synchronous.py) calls
`learner.step` (learning/learner.py), which calls `algorithm.losses` (algorithms/ppo.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from remuda.agents import NetFactory, PolicyAgent
from remuda.algorithms import A2C, PPO
from remuda.core import Algorithm, Envs, Recipe, Scheme, env_seed
from remuda.envs import EnvInfo, EnvSpec, make_envs, refuse_in_worker
from remuda.envs.paths import import_named
from remuda.errors import ConfigError, Interrupted, RemudaError, nearest
from remuda.learning.checkpoint import Checkpoint, load_newest
from remuda.learning.learner import Learner, OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.logs.rundir import RunDirectory
from remuda.logs.terminal import Terminal
from remuda.nets import MLP
from remuda.recipes.config import AgentOptions, PPOOptions, RunConfig, to_dict
from remuda.recipes.journal import Callback, Journal
from remuda.recipes.machine import usable_cores
from remuda.recipes.profile import profiled
from remuda.recipes.signals import StopSignals
from remuda.replay import Fresh
from remuda.sampling.evaluation import Evaluation, evaluate
from remuda.sampling.sampler import EnvSampler
from remuda.schemes.synchronous import Synchronous, torch_threads

SCHEMES: dict[str, Callable[[RunConfig], Scheme]] = {
    "serial": lambda config: Synchronous(workers=0),
    "parallel": lambda config: Synchronous(workers=num_workers(config)),
}
MAX_EVAL_ENVS = 8


def train(
    config: RunConfig,
    spec: EnvSpec,
    info: EnvInfo,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    net: NetFactory | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Run a configuration to its end (or until a signal); returns what result.json holds, with the run's path."""
    refuse_in_worker()
    if config.scheme not in SCHEMES:
        raise ConfigError(f"scheme={config.scheme!r} is not known: {nearest(config.scheme, SCHEMES)}")
    recipe = make_recipe(config, spec, info, net)
    scheme = SCHEMES[config.scheme](config)
    found: Checkpoint | None = load_newest(Path(out) / "checkpoints") if resume and out is not None else None
    # Most of what the user may have got wrong is known by now: only then does a directory appear, or change.
    name = f"{config.algo}-{config.env}-{config.seed}"
    with RunDirectory.create(out, name, to_dict(config), resume=resume) as directory, StopSignals() as signals:
        title, done = f"{config.algo} {config.env} {config.scheme}", found.step if found is not None else 0
        terminal = Terminal(config.steps, title, start_steps=done, file=sink(quiet))
        play = partial(play_episodes, config, spec, config.eval.episodes)
        journal = Journal(directory, config, play, terminal, signals)
        try:
            with journal.open(found), profiled(directory.path / "profile" if profile else None) as count_round:
                journal.callbacks = [*callbacks, count_round]
                learner = scheme.run(recipe, journal)
                result = journal.finish(learner)
        except Interrupted as error:  # before there was a learner to save
            if not resume:
                directory.discard()
            stopped = Interrupted(f"stopped by {signals.name} before training began: nothing was kept.")
            stopped.signal = signals.received or stopped.signal
            raise stopped from error
        except RemudaError as error:
            if journal.progress.rounds == 0 and not resume:
                directory.discard()  # a run that learned nothing leaves nothing behind
            else:
                journal.save_after_failure()
                directory.write_result({"status": "failed", "error": str(error), "steps": journal.progress.steps})
                directory.log(f"failed: {error}")
            raise
        directory.write_result(result)
    return {**result, "path": str(directory.path), "signal": signals.received}


def sink(quiet: bool) -> io.StringIO | None:
    """Where the terminal view goes: nowhere if quiet, else to standard output."""
    return io.StringIO() if quiet else None


def make_recipe(config: RunConfig, spec: EnvSpec, info: EnvInfo, net: NetFactory | None = None) -> Recipe:
    """What to learn, as factories."""
    options, seed = config.algo_options, config.seed
    if isinstance(options, PPOOptions):
        epochs, batch_size = options.n_epochs, options.batch_size
    else:
        epochs, batch_size = 1, None  # A2C: one gradient of each rollout
    make_net = net or find_net(config.agent)
    make_algorithm(config, info, make_net)  # a net that does not fit shows itself before anything is started

    def make_learner() -> Learner:
        optimizer = OptimizerOptions(
            options.optimizer, options.optimizer_eps, options.weight_decay, options.rms_alpha, options.momentum
        )
        rate = parse_schedule(options.learning_rate, "algo.learning_rate")
        return Learner(make_algorithm(config, info, make_net), optimizer, rate, options.max_grad_norm or None)

    def make_sampler(envs: Envs, agent: Any, weights: Any, rounds: int) -> EnvSampler:
        return EnvSampler(envs, agent, weights, options.n_steps, seed, first_row=rounds * options.n_steps)

    return Recipe(
        seed=seed,
        steps=config.steps,
        make_envs=partial(make_some_envs, config, spec, config.sampler.envs, config.sampler.slots),
        make_learner=make_learner,
        make_replay=lambda first_round: Fresh(epochs, batch_size, seed, first_round),
        make_sampler=make_sampler,
        num_threads=config.scheme_options.threads,
        warm_up=config.sampler.decorrelate,
    )


def make_algorithm(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> Algorithm:
    """Networks are drawn from the run's seed, without touching the caller's generator."""
    options, envs = config.algo_options, config.sampler.envs
    with torch.random.fork_rng(devices=[]), torch_threads(config.scheme_options.threads):
        torch.manual_seed(config.seed)
        agent = make_agent(config.agent, info, make_net)
    common: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("gamma", "gae_lambda", "ent_coef", "vf_coef", "normalize_advantage", "normalize_reward")
    }
    if not isinstance(options, PPOOptions):
        return A2C(agent, envs, **common)
    value_clip = options.clip_range_vf
    return PPO(
        agent,
        envs,
        clip_range=parse_schedule(options.clip_range, "algo.clip_range"),
        clip_range_vf=None if value_clip is None else parse_schedule(value_clip, "algo.clip_range_vf"),
        target_kl=options.target_kl,
        **common,
    )


def make_agent(options: AgentOptions, info: EnvInfo, make_net: NetFactory) -> PolicyAgent:
    try:
        return PolicyAgent(
            info.observation,
            info.action,
            make_net,
            shared=options.shared,
            orthogonal_init=options.orthogonal_init,
            log_std_init=options.log_std_init,
            normalize_obs=options.normalize_obs,
        )
    except Exception as error:
        raise ConfigError(
            f"agent.net={options.net} does not fit observations of shape {info.observation.shape} "
            f"({type(error).__name__}: {error}): Net(shape) must map [N, *shape] to features [N, F]."
        ) from error


def find_net(options: AgentOptions) -> NetFactory:
    if options.net == "mlp":
        return lambda shape: MLP(shape, options.hidden, options.activation, options.orthogonal_init)
    if options.net.startswith("<"):
        raise ConfigError(f"agent.net={options.net} has no import path: pass net=... again.")
    made: NetFactory = import_named(options.net, "agent.net")
    return made


def make_some_envs(
    config: RunConfig,
    spec: EnvSpec,
    num_envs: int,
    slots: int,
    num_workers: int,
    should_stop: Callable[[], bool],
    seeds: Sequence[Sequence[int]] | None = None,
) -> Envs:
    """Envs of this run, for training or for evaluation."""
    options = config.envs
    return make_envs(
        spec,
        num_envs,
        num_workers,
        slots,
        config.algo_options.gamma,
        options.stats,
        seeds,
        should_stop=should_stop,
        step_timeout=options.step_timeout,
        build_timeout=options.build_timeout,
        max_restarts=options.max_restarts,
        max_worker_restarts=options.max_worker_restarts,
    )


def num_workers(config: RunConfig) -> int:
    """As asked, or one per core that this process may use, but none without an env in every slot."""
    asked, per_slot = config.sampler.workers, config.sampler.envs // config.sampler.slots
    if asked > per_slot:
        raise ConfigError(
            f"sampler.workers={asked} is more than the {per_slot} envs of a slot: "
            f"use at most {per_slot} workers or more envs."
        )
    return asked or min(usable_cores(), per_slot)


def play_episodes(
    config: RunConfig,
    spec: EnvSpec,
    episodes: int,
    agent: Any,
    should_stop: Callable[[], bool] = lambda: False,
    explore: bool = False,
) -> Evaluation:
    """Episodes with the seeds of the evaluation, in envs of their own: training is not disturbed."""
    count = min(episodes, MAX_EVAL_ENVS)
    seeds = [[env_seed(config.eval.seed, k) for k in range(i, episodes, count)] for i in range(count)]
    workers = min(num_workers(config), count) if config.scheme == "parallel" else 0
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    envs = make_some_envs(config, limited, count, 1, workers, should_stop, seeds)
    # With more threads than it needs, a small net was 80 times slower on a busy machine of two cores.
    with closing(envs), torch_threads(config.scheme_options.threads):
        return evaluate(envs, agent, episodes, explore=explore, seed=config.eval.seed)
