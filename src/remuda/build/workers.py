"""What workers that act are told to build, and the module that they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from remuda.agents import NetFactory
from remuda.build.algorithm import make_algorithm, make_exploration
from remuda.build.envs import WORKER_LIMITS, describe_net, find_net, training_seeds
from remuda.build.replay import has_td_error, make_ring
from remuda.config.algo_options import OnPolicyOptions
from remuda.config.run_config import RunConfig, from_dict, to_dict
from remuda.core import Agent, Space, derive_seed
from remuda.data import Batch, Rollout, map_tree
from remuda.envs import AsyncPooledEnvs, EnvInfo, EnvSpec, LocalEnvs, NativeEnvs, choose_backend
from remuda.envs.previous import AsyncWithPrevious, WithPrevious
from remuda.errors import ConfigError, EnvSpecError
from remuda.learning.weights import FileWeights, SharedWeights
from remuda.processes.notices import Notice
from remuda.replay import RecurrentStates, Ring, SequencePriority, TransitionPriority, as_row
from remuda.sampling.exploration import Exploration
from remuda.sampling.replay_writers import ReplayWriterPool
from remuda.sampling.rollout_queue import RolloutQueue
from remuda.sampling.sampler_worker import serve
from remuda.sampling.worker_sampler import WorkerSampler


def make_worker_sampler(
    config: RunConfig,
    spec: EnvSpec,
    seen: EnvInfo,
    workers: int,
    agent: Any,
    weights: SharedWeights,
    first_row: int,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> WorkerSampler:
    """Workers of even shares of the envs; each is sent the configuration and builds its part."""
    if config.envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={config.envs.backend} with sampler.inference=workers: they step single envs, use python."
        )
    n_steps, seed = config.algo_options.rows_per_round, config.seed
    return WorkerSampler(
        __name__,
        make_blueprints(config, spec, seen, workers, net),
        agent,
        agent.observation,
        weights,
        n_steps,
        seed,
        first_row,
        should_stop=should_stop,
        **worker_limits(config),
    )


def make_rollout_queue(
    config: RunConfig,
    spec: EnvSpec,
    seen: EnvInfo,
    workers: int,
    agent: Any,
    weights: SharedWeights | FileWeights,
    first_row: int,
    max_lag: int | None,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> RolloutQueue:
    """Workers of equal shares of the envs, some of whose rollouts make a round; or one that acts for all of them."""
    options, envs = config.algo_options, config.sampler.envs
    assert isinstance(options, OnPolicyOptions)
    per_round = max(1, options.columns_per_round(envs) * workers // envs)
    return RolloutQueue(
        __name__,
        make_async_blueprints(config, spec, seen, workers, net),
        agent,
        agent.observation,
        weights,
        options.n_steps,
        per_round,
        # A resumed run draws other noise: workers are not equally fast, so that nobody knows what each has drawn.
        config.seed if first_row == 0 else derive_seed(config.seed, first_row),
        updates_per_round=options.updates_per_round(per_round * envs // workers),
        max_lag=max_lag,
        first_row=first_row,
        should_stop=should_stop,
        **worker_limits(config),
    )


def make_replay_writers(
    config: RunConfig,
    spec: EnvSpec,
    seen: EnvInfo,
    workers: int,
    weights: SharedWeights | FileWeights,
    replay: Any,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> ReplayWriterPool:
    """Workers of equal shares of the envs, each a group of the replay's; or one that acts for all groups."""
    return ReplayWriterPool(
        __name__,
        make_async_blueprints(config, spec, seen, workers, net),
        weights,
        replay.fds,
        config.algo_options.rows_per_round,
        config.seed,
        on_loss=replay.on_writer_lost,
        written=replay.ring.written,
        should_stop=should_stop,
        **worker_limits(config),
    )


def make_async_blueprints(
    config: RunConfig, spec: EnvSpec, seen: EnvInfo, workers: int, net: NetFactory | None
) -> list[dict[str, Any]]:
    """Return the orders of workers that act at their own pace; or of one, whose groups of envs have a worker each."""
    is_central = config.sampler.inference == "central"
    orders = make_blueprints(config, spec, seen, 1 if is_central else workers, net)
    return [{**order, "groups": workers if is_central else 1} for order in orders]


def make_blueprints(
    config: RunConfig, spec: EnvSpec, seen: EnvInfo, workers: int, net: NetFactory | None
) -> list[dict[str, Any]]:
    """Return what each worker builds; `seen` is the env as the agent of this process sees it."""
    bounds = [worker * config.sampler.envs // workers for worker in range(workers + 1)]
    common = {"config": to_dict(config), "spec": spec.to_json(), "wait_reset": config.sampler.wait_reset}
    common |= {"spaces": described(seen), "net": describe_net(config, net)}
    return [{**common, "first": first, "last": last} for first, last in pairwise(bounds)]


def described(seen: EnvInfo) -> dict[str, str]:
    """What nets and shared memory are laid out by, entry by entry."""
    spaces = [*seen.observation.leaves("observation"), *seen.action.leaves("action")]
    return {path: f"{leaf.kind} {leaf.dtype}{list(leaf.shape)}{values(leaf)}" for path, leaf in spaces}


def values(leaf: Space) -> str:
    """How many there are, where that is fixed."""
    if leaf.sizes is not None:
        return f" of {leaf.sizes.tolist()} values"
    return f" of {leaf.n} values" if leaf.kind == "discrete" else ""


def must_be_same(env: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """As where the run learns: memory that is shared would be taken for something else."""
    for path in [*there, *here]:
        mine, others = here.get(path, "missing"), there.get(path, "missing")
        if mine != others:
            raise EnvSpecError(
                f"{env}: {path} is {mine} in a worker, and {others} where the run learns: its spaces must be the "
                "same whenever and wherever it is built."
            )


def worker_limits(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config.envs, name) for name in WORKER_LIMITS}


def main(fds: Sequence[int]) -> int:
    worker = SamplerWorker()
    return serve(fds, worker.make_parts, worker.make_writer)


class SamplerWorker:
    """What one worker is made of."""

    def make_parts(
        self, order: Mapping[str, Any], beat: Callable[[], bool], tell: Callable[[Notice], None]
    ) -> tuple[Any, Agent, Exploration]:
        """Its envs and its agent, and how that explores."""
        self.config, self.beat = from_dict(order["config"]), beat
        config = self.config
        options = config.agent
        torch.set_num_threads(config.sampler.threads)
        envs: Any = make_own_envs(config, order, beat, tell)
        if options.prev_action or options.prev_reward:
            wrapper = AsyncWithPrevious if isinstance(envs, AsyncPooledEnvs) else WithPrevious
            envs = wrapper(envs, options.prev_action, options.prev_reward)
        self.seen = EnvInfo(config.env, envs.observation, envs.action, None, (), 0.0)
        must_be_same(config.env, described(self.seen), order["spaces"])
        self.algorithm: Any = make_algorithm(config, self.seen, find_net(options, order["net"]))
        return envs, self.algorithm.agent, make_exploration(config).columns(order["first"], order["last"])

    def make_writer(self, order: Mapping[str, Any], fds: Sequence[int]) -> RingWriter:
        config, algorithm = self.config, self.algorithm
        groups = range(order["group"], order["group"] + order["groups"])
        replay, gamma = config.replay, config.algo_options.gamma
        state = algorithm.agent.initial_state(1)
        ring = make_ring(config, self.seen, state, order["all_groups"], fds)
        ring.while_held = self.beat
        states, judges = None, list[TransitionPriority | SequencePriority]()
        if replay.sequence:  # an agent may have a state and no memory: noise that drifts
            states = RecurrentStates(ring, state, order["num_steps"], fds[-1], has_td_error(config))
        if has_td_error(config) and states is not None:
            lengths = (replay.burn_in, replay.sequence, replay.n_step)
            judges = [SequencePriority(states, group, lengths, gamma, algorithm.td_error) for group in groups]
        elif has_td_error(config):
            judges = [TransitionPriority(ring, group, replay.n_step, gamma, algorithm.td_error) for group in groups]
        return RingWriter(ring, states, groups, algorithm.prepare, judges)


class RingWriter:
    """Rollouts of one worker into its groups of a ring, with the state before each if the agent has memory."""

    def __init__(
        self,
        ring: Ring,
        states: RecurrentStates | None,
        groups: range,
        prepare: Callable[[Rollout], Batch],
        judges: Sequence[TransitionPriority | SequencePriority] = (),
    ) -> None:
        """`judges` are of its groups, where rows are judged."""
        self.ring, self.states, self.groups = ring, states, groups
        self.prepare, self.judges = prepare, judges

    def may_write(self) -> bool:
        return self.ring.may_write()

    def num_written(self) -> int:
        return int(self.ring.written[self.groups].sum())

    def write(self, rollout: Rollout, group: int = 0) -> None:
        batch, of_all = self.prepare(rollout), self.groups[group]
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.states is not None:
            self.states.store(batch.state, of_all)
        self.ring.append(rows, next_obs, of_all)
        if self.judges:
            self.judges[group].look()


def make_own_envs(
    config: RunConfig, order: Mapping[str, Any], beat: Callable[[], bool], tell: Callable[[Notice], None]
) -> LocalEnvs | NativeEnvs | AsyncPooledEnvs:
    """In this process; native ones only where no worker has to go on with another's episodes."""
    spec, count, levels = EnvSpec.from_json(order["spec"]), order["last"] - order["first"], training_seeds(config)
    options, gamma, first = config.envs, config.algo_options.gamma, order["first"]
    if config.scheme == "async" and config.sampler.inference == "central":
        limits = {"max_restarts": options.max_restarts, **worker_limits(config)}
        groups = order["groups"]
        return AsyncPooledEnvs(
            spec, count, groups, groups, gamma, options.stats, levels=levels, should_stop=beat, **limits
        )
    if config.scheme == "async" and not config.sampler.wait_reset:
        backend = choose_backend(spec, options.backend, options.stats, levels=levels)
        if backend is not None:
            return NativeEnvs(spec, backend, count, 1, 1, gamma, options.stats, beat, first_env=first)
    return LocalEnvs(
        spec,
        count,
        gamma=gamma,
        stats=options.stats,
        levels=levels,
        max_restarts=options.max_restarts,
        should_stop=beat,
        first_env=first,
        on_notice=tell,
    )
