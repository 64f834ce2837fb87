"""Training from a configuration: build what it names, run it under its scheme, leave a run directory.

`remuda train` and `remuda.train` both end here. From here to the loss: `scheme.run` (schemes/synchronous.py) calls
`learner.step` (learning/learner.py), which calls `algorithm.losses` (algorithms/ppo.py).
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch

from remuda.agents import NetFactory
from remuda.build.algorithm import make_algorithm, make_exploration
from remuda.build.envs import (
    agent_view,
    check_envs,
    eval_episodes,
    find_net,
    frame_skip_warning,
    make_some_envs,
    num_workers,
    play_episodes,
    rounds_between_cuts,
    why_no_state,
)
from remuda.build.replay import make_replay, refuse_too_large
from remuda.build.workers import make_replay_writers, make_rollout_queue, make_worker_sampler
from remuda.config.algo_options import OffPolicyOptions, OnPolicyOptions
from remuda.config.run_config import RunConfig, to_dict
from remuda.envs import EnvInfo, EnvSpec, refuse_in_worker
from remuda.errors import ConfigError, EnvFailed, Interrupted, RemudaError, nearest
from remuda.learning.checkpoint import Checkpoint, load_newest
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import FileWeights, LocalWeights, SharedWeights
from remuda.logs.terminal import Terminal
from remuda.machine import has_compiler, keep_memory
from remuda.recipe import Recipe, ReplayWriters, RolloutSource, Sampler, Scheme
from remuda.replay.ring_files import DamagedReplay
from remuda.runs.checkpoints import find_checkpoint
from remuda.runs.directory import SPACES, WEIGHTS, RunDirectory
from remuda.runs.evaluator import EvaluatorProcess
from remuda.runs.journal import Callback, Journal
from remuda.runs.profile import profiled
from remuda.runs.signals import STOPPING, StopSignals
from remuda.runs.spaces import write_spaces
from remuda.runs.video import require_codecs
from remuda.sampling.sampler import EnvSampler
from remuda.schemes.asynchronous import Asynchronous, AsynchronousReplay
from remuda.schemes.synchronous import Synchronous

SCHEMES: dict[str, Callable[[RunConfig], Scheme]] = {
    "serial": lambda config: Synchronous(workers=0),
    "parallel": lambda config: Synchronous(workers=num_workers(config)),
    "async": lambda config: make_async(config),
}


def has_replay_writers(config: RunConfig) -> bool:
    """Whether samplers write to its replay by themselves."""
    return config.scheme == "async" and isinstance(config.algo_options, OffPolicyOptions)


def make_async(config: RunConfig) -> Scheme:
    if has_replay_writers(config):
        return AsynchronousReplay(num_workers(config))
    return Asynchronous(num_workers(config), config.scheme_options.max_lag)


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
    if has_replay_writers(config) or (config.scheme != "serial" and config.sampler.inference == "workers"):
        # states of acting workers and groups of a replay are saved as so many, and other machines have other cores
        config = replace(config, sampler=replace(config.sampler, workers=num_workers(config)))
    refuse_unfilmable(config, spec, info)
    recipe = make_recipe(config, spec, info, net)
    scheme = SCHEMES[config.scheme](config)
    exact_until = config.steps if config.checkpoint.cut_episodes else 0
    found = find_checkpoint(Path(out), exact_until) if resume and out is not None else None
    while True:
        try:
            return train_from(found, scheme, recipe, config, spec, info, net, out, resume, callbacks, quiet, profile)
        except DamagedReplay as error:  # found when it is read, once there is a replay to read it into
            assert found is not None
            found = load_newest(found.path.parent, found.step, [*found.skipped, str(error)])


def train_from(
    found: Checkpoint | None,
    scheme: Scheme,
    recipe: Recipe,
    config: RunConfig,
    spec: EnvSpec,
    info: EnvInfo,
    net: NetFactory | None,
    out: str | Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    quiet: bool,
    profile: bool,
) -> dict[str, Any]:
    """Most of what the user may have got wrong is known by now: only then does a directory appear, or change."""
    name = f"{config.algo}-{config.env}-{config.seed}"
    with (
        RunDirectory.create(out, name, to_dict(config), resume=resume) as directory,
        StopSignals(STOPPING) as signals,
    ):
        title, done = f"{config.algo} {config.env} {config.scheme}", found.step if found is not None else 0
        terminal = Terminal(config.steps, title, start_steps=done, file=sink(quiet))
        play = partial(play_episodes, config, spec, eval_episodes(config))
        journal = Journal(directory, config, play, terminal, signals)
        try:
            if not (directory.path / SPACES).exists():  # a resumed env may turn out not to fit
                write_spaces(directory.path, info.observation, info.action)
            with (
                journal.open(resume, found),
                profiled(directory.path / "profile" if profile else None) as count_round,
            ):
                journal.callbacks = [*callbacks, count_round]
                keep_memory()
                # What was imported stays: it need not be looked through for garbage again and again.
                gc.collect()
                gc.freeze()
                if config.scheme_options.weights == "file":
                    path = directory.path / WEIGHTS
                    recipe = replace(recipe, make_weights=lambda agent, version: FileWeights(agent, path, version))
                if config.eval.cpu_fraction:
                    video = directory.videos / "newest.mp4" if config.eval.video else None
                    stop = journal.must_stop
                    watched = partial(EvaluatorProcess, config, spec, video=video, should_stop=stop, net=net)
                    recipe = replace(recipe, make_evaluator=watched)
                warn_if_nothing_is_learned(config, journal)
                if warning := frame_skip_warning(spec):
                    journal.log(f"warning: {warning}")
                learner = scheme.run(recipe, journal)
                result = journal.finish(learner)
        except Interrupted as error:  # before there was a learner to save
            if not resume:
                directory.discard()
            stopped = Interrupted(f"stopped by {signals.name} before training began: nothing was kept.")
            stopped.signal = signals.received or stopped.signal
            raise stopped from error
        except RemudaError as error:
            has_failed = isinstance(error, EnvFailed)
            if journal.progress.rounds == 0 and not resume and not has_failed:
                directory.discard()  # a run that learned nothing leaves nothing behind
            else:
                with suppress(OSError):  # a full disk: why the run failed is what the user has to know
                    directory.write_result({"status": "failed", "error": str(error), "steps": journal.progress.steps})
                is_new = has_failed and not directory.has_traceback
                directory.log(f"failed: {error}", "".join(format_exception(error)) if is_new else "")
            raise
        except OSError:  # as of too many open files
            if journal.progress.rounds == 0 and not resume:
                directory.discard()
            raise
        finally:
            gc.unfreeze()
        directory.write_result(result)
    return {**result, "path": str(directory.path), "signal": signals.received}


def warn_if_nothing_is_learned(config: RunConfig, journal: Journal) -> None:
    options, steps = config.algo_options, config.steps
    if isinstance(options, OffPolicyOptions) and steps <= options.learning_starts:
        starts = f"algo.learning_starts={options.learning_starts:,}"
        journal.log(f"warning: learning would begin after {starts} steps, and there are {steps:,}.")


def refuse_unfilmable(config: RunConfig, spec: EnvSpec, info: EnvInfo) -> None:
    if config.eval.video:
        require_codecs()
    if config.eval.video and "rgb_array" not in info.render_modes:
        raise ConfigError(
            f"eval.video: {spec.label} has no render mode rgb_array and cannot be filmed: leave it out."
        )


def sink(quiet: bool) -> io.StringIO | None:
    """Where the terminal view goes: nowhere if quiet, else to standard output."""
    return io.StringIO() if quiet else None


def make_recipe(config: RunConfig, spec: EnvSpec, info: EnvInfo, net: NetFactory | None = None) -> Recipe:
    """What to learn, as factories."""
    options, seed = config.algo_options, config.seed
    acts_in_workers = config.sampler.inference == "workers"
    if acts_in_workers and config.scheme == "serial":
        raise ConfigError("sampler.inference=workers has no workers under --scheme serial: use --scheme parallel.")
    no_state = why_no_state(config, info, is_native=check_envs(config, spec))
    make_net = net or find_net(config.agent)
    seen = agent_view(config, info)
    if config.agent.compile and not has_compiler():
        raise ConfigError("agent.compile=true needs a C++ compiler: install g++, or leave it out.")
    try:
        torch.zeros(1, device=config.scheme_options.device).cpu()
    except (RuntimeError, AssertionError, ImportError):  # torch does not know it, it is not there, or holds nothing
        raise ConfigError(f"scheme.device={config.scheme_options.device} is not on this machine: use cpu.") from None
    # A net or a replay that does not fit shows itself before anything is started.
    algorithm = make_algorithm(config, seen, make_net)
    refuse_too_large(config, seen, algorithm.agent.initial_state(1))

    # Beside busy actors, parts of a batch on a thread each are quicker than products on several.
    num_threads = config.scheme_options.threads
    adds_up = getattr(algorithm, "adds_up", None) is not None
    num_parts, device = 1, config.scheme_options.device
    if config.scheme == "async" and device == "cpu" and adds_up and isinstance(options, OnPolicyOptions):
        # No more parts than a batch has columns: the threads that are left are torch's.
        num_parts = min(num_threads, options.columns_per_round(config.sampler.envs))
        num_threads = max(1, num_threads // max(1, num_parts))

    def make_learner() -> Learner:
        optimizer = OptimizerOptions(
            options.optimizer, options.optimizer_eps, options.weight_decay, options.rms_alpha, options.momentum
        )
        rate = parse_schedule(options.learning_rate, "algo.learning_rate")
        of_actor = getattr(options, "actor_learning_rate", None)
        own_rates = {} if of_actor is None else {"actor": parse_schedule(of_actor, "algo.actor_learning_rate")}
        algorithm = make_algorithm(config, seen, make_net)
        if config.agent.compile:
            algorithm.agent.compile_nets()
        return Learner(algorithm, optimizer, rate, options.max_grad_norm or None, num_parts, own_rates, device)

    def make_sampler(agent: Any, weights: Any, workers: int, rounds: int, should_stop: Callable[[], bool]) -> Sampler:
        first_row = rounds * options.rows_per_round
        if acts_in_workers:
            return make_worker_sampler(config, spec, seen, workers, agent, weights, first_row, should_stop, net)
        envs = make_some_envs(config, spec, config.sampler.envs, config.sampler.slots, workers, should_stop)
        wait_reset = config.sampler.wait_reset
        explore = make_exploration(config)
        return EnvSampler(
            envs, agent, weights, options.rows_per_round, seed, first_row, wait_reset=wait_reset, explore=explore
        )

    def make_source(
        agent: Any, weights: Any, workers: int, rounds: int, max_lag: int | None, should_stop: Callable[[], bool]
    ) -> RolloutSource:
        first_row = rounds * options.rows_per_round
        return make_rollout_queue(config, spec, seen, workers, agent, weights, first_row, max_lag, should_stop, net)

    def make_writers(
        weights: Any, replay: Any, workers: int, rounds: int, should_stop: Callable[[], bool]
    ) -> ReplayWriters:
        return make_replay_writers(config, spec, seen, workers, weights, replay, should_stop, net)

    writers = num_workers(config) if has_replay_writers(config) else 0

    return Recipe(
        seed=seed,
        steps=config.steps,
        make_learner=make_learner,
        make_weights=SharedWeights
        if acts_in_workers or config.scheme == "async"
        else lambda _, version: LocalWeights(version),
        make_replay=lambda agent, first: make_replay(config, seen, agent.initial_state(1), first, writers),
        make_sampler=make_sampler,
        make_source=make_source,
        make_writers=make_writers,
        num_threads=num_threads,
        warm_up=config.sampler.decorrelate,
        cut_every=rounds_between_cuts(config, no_state),
    )
