"""Worker processes that run the policy: how a run starts them, and the code that they run.

The run sends every worker a blueprint (build/blueprint.py). A worker runs `main` of this module, which serves
requests to build and to sample (sampling/sampler_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remuda.agents import NetFactory
from remuda.build.blueprint import Blueprint, Built, build, make_async_blueprints, make_blueprints, worker_limits
from remuda.build.replay import has_td_error, make_ring
from remuda.config.run_config import RunConfig
from remuda.core import Agent, Weights, derive_seed
from remuda.data import Batch, Rollout, map_tree
from remuda.envs import EnvInfo, EnvSpec
from remuda.errors import ConfigError
from remuda.processes.notices import Notice
from remuda.replay import RecurrentStates, Ring, SequencePriority, TransitionPriority, as_row
from remuda.sampling.device_agent import as_on_cpu
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
    weights: Weights,
    first_row: int,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> WorkerSampler:
    """Return a sampler for a synchronous scheme, in which each worker runs the policy for some of the envs."""
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
    weights: Weights,
    first_row: int,
    max_lag: int | None,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> RolloutQueue:
    """Return the queue of rollouts, which asynchronous workers or one inference process fill.

    All workers have the same number of envs. The learner takes a fixed number of rollouts in each round.
    """
    options, envs = config.algo_options, config.sampler.envs
    per_round = max(1, options.columns_per_round(envs) * workers // envs)
    return RolloutQueue(
        __name__,
        make_async_blueprints(config, spec, seen, workers, net),
        agent,
        agent.observation,
        weights,
        options.rows_per_round,
        per_round,
        # A resumed run draws different noise, because checkpoints do not store how many rows each worker sampled.
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
    weights: Weights,
    replay: Any,
    should_stop: Callable[[], bool],
    net: NetFactory | None = None,
) -> ReplayWriterPool:
    """Return the workers, or the inference process, that write the rows of their envs directly to the replay.

    All workers have the same number of envs. The replay stores the envs of each worker as one group.
    """
    return ReplayWriterPool(
        __name__,
        make_async_blueprints(config, spec, seen, workers, net),
        weights,
        replay.fds,
        config.algo_options.rows_per_round,
        config.seed,
        on_lost=replay.on_writer_lost,
        written=replay.ring.counters.written,
        should_stop=should_stop,
        **worker_limits(config),
    )


def main(fds: Sequence[int]) -> int:
    """Serve the parent's requests until the worker is told to exit; return the exit code of the process."""
    worker = SamplerWorker()
    return serve(fds, worker.make_parts, worker.make_writer)


class SamplerWorker:
    """Builds the parts of one worker: its envs, its agent and, if it writes to a replay, its writer."""

    def make_parts(
        self, blueprint: Blueprint, heartbeat: Callable[[], bool], notify: Callable[[Notice], None]
    ) -> tuple[Any, Agent, Exploration]:
        """Build the envs and the agent of a blueprint; return the envs, the agent and the envs' exploration."""
        self.built, self.heartbeat = build(blueprint, "sampler", heartbeat, notify), heartbeat
        config = self.built.config
        torch.set_num_threads(config.sampler.threads)
        if config.sampler_device != "cpu":
            self.built.agent.to(config.sampler_device)
        assert self.built.exploration is not None
        return self.built.envs, self.built.agent, self.built.exploration

    def make_writer(self, blueprint: Blueprint, fds: Sequence[int]) -> RingWriter:
        """Return a writer to the replay whose memory has the file descriptors `fds`."""
        return make_ring_writer(self.built, blueprint, fds, self.heartbeat)


def make_ring_writer(
    built: Built, blueprint: Blueprint, fds: Sequence[int], heartbeat: Callable[[], bool]
) -> RingWriter:
    """Return a writer that appends one worker's rows to the learner's replay, whose memory has the descriptors `fds`.

    While the learner pauses the writer, the writer calls `heartbeat` repeatedly.
    """
    config = built.config
    algorithm = built.wrap_agent(needs_loss=has_td_error(config))
    groups = range(blueprint["group"], blueprint["group"] + blueprint["groups"])
    replay, gamma = config.replay, config.algo_options.gamma
    state = as_on_cpu(built.agent).initial_state(1)
    ring = make_ring(config, built.seen, state, blueprint["all_groups"], fds)
    ring.counters.while_paused = heartbeat
    states, priorities = None, list[TransitionPriority | SequencePriority]()
    # Only a replay of sequences stores states. `state is not None` would be the wrong condition, because the agent of
    # another replay may have a state, too, such as that of Ornstein-Uhlenbeck noise.
    if replay.sequence:
        states = RecurrentStates(ring, state, blueprint["num_steps"], fds[-1], has_td_error(config))
    if has_td_error(config) and states is not None:
        lengths = (replay.burn_in, replay.sequence, replay.n_step)
        priorities = [SequencePriority(states, group, lengths, gamma, algorithm.td_error) for group in groups]
    elif has_td_error(config):
        priorities = [TransitionPriority(ring, group, replay.n_step, gamma, algorithm.td_error) for group in groups]
    return RingWriter(ring, states, groups, algorithm.prepare, priorities)


class RingWriter:
    """Appends the rollouts of one worker's env groups to a ring.

    If `states` is not None, the writer also stores the recurrent state before each rollout.
    """

    def __init__(
        self,
        ring: Ring,
        states: RecurrentStates | None,
        groups: range,
        prepare: Callable[[Rollout], Batch],
        priorities: Sequence[TransitionPriority | SequencePriority] = (),
    ) -> None:
        """Create a writer for `groups`, which are indices among all env groups of the run.

        `priorities` holds one object per group, which computes the initial priorities of the group's rows. If the
        learner assigns initial priorities, `priorities` is empty.
        """
        self.ring, self.states, self.groups = ring, states, groups
        self.prepare, self.priorities = prepare, priorities

    def may_write(self) -> bool:
        """Return whether rows may be written now; if not, samplers have to wait for the learner."""
        return self.ring.counters.may_write()

    def num_written(self) -> int:
        """Return the number of rows that all groups of this writer have received since the replay was created."""
        return int(self.ring.counters.written[self.groups].sum())

    def write(self, rollout: Rollout, group: int = 0) -> None:
        """Append a rollout to the ring. `group` is the rollout's group, as an index into `self.groups`."""
        batch, of_all = self.prepare(rollout), self.groups[group]
        rows, next_obs = map_tree(lambda x: x.numpy(), (as_row(batch.steps), batch.next_obs))
        if self.states is not None:
            self.states.store(batch.state, of_all)
        self.ring.append(rows, next_obs, of_all)
        if self.priorities:
            self.priorities[group].update()
