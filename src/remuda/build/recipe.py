"""The recipe of a run: factories for everything that a scheme needs to run it."""

from __future__ import annotations

from functools import partial
from typing import Any

from remuda.agents import NetFactory
from remuda.build.algorithm import make_algorithm
from remuda.build.blueprint import make_blueprints
from remuda.build.devices import acting_agent, check_devices, for_rank, has_halves, place_policy, split_devices
from remuda.build.envs import (
    agent_view,
    check_envs,
    make_some_envs,
    num_workers,
    rounds_between_cuts,
    why_no_state,
)
from remuda.build.exploration import make_exploration
from remuda.build.fast_path import find_fast_path
from remuda.build.nets import find_net
from remuda.build.parts import make_parted_replay, make_parted_sampler
from remuda.build.replay import make_replay, refuse_too_large
from remuda.build.workers import make_replay_writers, make_rollout_queue, make_worker_sampler
from remuda.config.run_config import RunConfig
from remuda.core import Agent, Algorithm, FastAgent, Replay, SeparableAlgorithm, SharedReplay, Weights
from remuda.envs import EnvInfo, EnvSpec
from remuda.errors import ConfigError
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import LocalWeights, SharedWeights
from remuda.machine import has_compiler
from remuda.parts import Group, LocalGroup, PartedLearner, PartedUpdates
from remuda.recipe import Recipe, ReplayWriters, RolloutSource, Sampler, ShouldStop
from remuda.sampling.device_agent import as_on_cpu
from remuda.sampling.sampler import EnvSampler


def make_recipe(
    config: RunConfig, spec: EnvSpec, info: EnvInfo, net: NetFactory | None = None, group: Group | None = None
) -> Recipe:
    """Return the recipe of a run; raise ConfigError before any process is started if the run cannot be built.

    If the run is divided into parts, `group` determines which parts belong to this process. If `group` is None, they
    all belong to this process.
    """
    if group is None and config.num_parts > 1:
        group = LocalGroup(config.num_parts)
    options, seed = config.algo_options, config.seed
    has_worker_inference = config.sampler.inference == "workers"
    if has_worker_inference and not config.has_workers:
        raise ConfigError(
            f"sampler.inference=workers has no workers under --scheme {config.scheme}: use --scheme parallel."
        )
    no_state = why_no_state(config, info, is_native=check_envs(config, spec))
    make_net = find_net(config.agent, given=net)
    seen = agent_view(config, info)
    check_machine(config)
    # Build the algorithm once here, so that a net or a replay that does not fit is refused before a process starts.
    algorithm = make_algorithm(config, seen, make_net)
    refuse_too_large(config, seen, algorithm.agent.initial_state(1))
    if split_devices(config)[0] is not None and not has_halves(algorithm):
        raise ConfigError(
            f"algo.actor_device or algo.critic_device is set, and {config.algo} does not compute the losses of actor "
            "and critics apart: leave them out, or define actor_losses and critic_losses."
        )
    num_pieces, num_threads = split_threads(config, algorithm)

    def make_learner() -> Learner:
        optimizer = OptimizerOptions(
            options.optimizer, options.optimizer_eps, options.weight_decay, options.rms_alpha, options.momentum
        )
        rate = parse_schedule(options.learning_rate, "algo.learning_rate")
        own_rates = {
            group: parse_schedule(text, f"algo.{group}_learning_rate")
            for group, text in options.group_learning_rates.items()
        }
        algorithm = make_algorithm(config, seen, make_net)
        if config.agent.compile:
            algorithm.agent.compile_nets()
        actor_device, device = split_devices(config)
        if device != "cpu" and isinstance(algorithm.agent, FastAgent):
            algorithm.agent.fast_policy = None  # a fast policy needs parameters in the CPU's memory
        together = actor_device is None or actor_device == device == "cpu"
        fast = find_fast_path(config.agent, algorithm, actor_device is not None) if together else None
        make = Learner if group is None else partial(PartedLearner, group)
        return make(
            algorithm,
            optimizer,
            rate,
            options.max_grad_norm or None,
            num_pieces,
            own_rates,
            device,
            fast,
            actor_device,
        )

    def make_weights(agent: Any, version: int) -> Weights:
        if has_worker_inference or config.is_asynchronous:
            return SharedWeights(agent, version)
        return place_policy(config, agent, version) or LocalWeights(version)

    def make_sampler(agent: Agent, weights: Weights, workers: int, rounds: int, should_stop: ShouldStop) -> Sampler:
        first_row, agent = rounds * options.rows_per_round, acting_agent(agent, weights)
        if has_worker_inference:
            return make_worker_sampler(config, spec, seen, workers, agent, weights, first_row, should_stop, net)
        if group is not None:
            return make_parted_sampler(config, spec, agent, weights, workers, first_row, should_stop, group)
        envs = make_some_envs(config, spec, config.sampler.envs, config.sampler.slots, workers, should_stop)
        wait_reset = config.sampler.wait_reset
        explore = make_exploration(config)
        return EnvSampler(
            envs, agent, weights, options.rows_per_round, seed, first_row, wait_reset=wait_reset, explore=explore
        )

    def make_source(
        agent: Agent,
        weights: Weights,
        workers: int,
        rounds: int,
        max_lag: int | None,
        should_stop: ShouldStop,
    ) -> RolloutSource:
        first_row = rounds * options.rows_per_round
        return make_rollout_queue(config, spec, seen, workers, agent, weights, first_row, max_lag, should_stop, net)

    def make_writers(
        weights: Weights, replay: SharedReplay, workers: int, rounds: int, should_stop: ShouldStop
    ) -> ReplayWriters:
        return make_replay_writers(config, spec, seen, workers, weights, replay, should_stop, net)

    writers = num_workers(config) if config.has_replay_writers else 0

    def make_any_replay(agent: Agent, first_round: int) -> Replay:
        state = as_on_cpu(agent).initial_state(1)
        if group is not None:
            return make_parted_replay(config, seen, state, first_round, group)
        return make_replay(config, seen, state, first_round, writers)

    return Recipe(
        seed=seed,
        steps=config.steps,
        make_learner=make_learner,
        make_weights=make_weights,
        make_replay=make_any_replay,
        make_sampler=make_sampler,
        make_source=make_source,
        make_writers=make_writers,
        num_threads=num_threads,
        warm_up=config.sampler.decorrelate,
        cut_every=rounds_between_cuts(config, no_state),
        updates=None if group is None else PartedUpdates(group),
        divide=lambda group: make_recipe(for_rank(config, group), spec, info, net, group),
        describe=lambda: make_blueprints(config, spec, seen, 1, net)[0],
    )


def check_machine(config: RunConfig) -> None:
    """Raise ConfigError if this machine lacks the compiler or a device that the options ask for."""
    if config.agent.compile and not has_compiler():
        raise ConfigError("agent.compile=true needs a C++ compiler: install g++, or leave it out.")
    check_devices(config)


def split_threads(config: RunConfig, algorithm: Algorithm) -> tuple[int, int]:
    """Return the number of parts into which the learner splits a batch, and the number of torch threads per part.

    A batch is split only if rollouts are sampled asynchronously, the learner uses the CPU, and the algorithm supports
    it. While samplers keep the cores busy, this is faster than to split every matrix product among the threads.
    """
    threads = config.scheme_options.threads
    is_separable = isinstance(algorithm, SeparableAlgorithm) and algorithm.gradient_reduction is not None
    is_split = config.is_asynchronous and config.device == "cpu" and is_separable
    if not is_split or config.algo_options.uses_replay:
        return 1, threads
    # A batch cannot have more parts than columns. If there are more threads than parts, torch uses several of them
    # for each part.
    parts = min(threads, config.algo_options.columns_per_round(config.sampler.envs))
    return parts, max(1, threads // max(1, parts))
