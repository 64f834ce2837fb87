"""Build the samplers and replays of a run that is divided into parts (remuda.parts)."""

from __future__ import annotations

from remuda.build.envs import make_some_envs
from remuda.build.exploration import make_exploration
from remuda.build.replay import make_replay
from remuda.config.parts import share_of
from remuda.config.run_config import RunConfig
from remuda.core import Agent, DivisibleReplay, Replay, Weights
from remuda.data import Tree
from remuda.envs import EnvInfo, EnvSpec
from remuda.parts.group import Group
from remuda.parts.replay import PartedReplay
from remuda.parts.sampler import PartedSampler
from remuda.recipe import Sampler, ShouldStop
from remuda.sampling.sampler import EnvSampler


def make_parted_sampler(
    config: RunConfig,
    spec: EnvSpec,
    agent: Agent,
    weights: Weights,
    workers: int,
    first_row: int,
    should_stop: ShouldStop,
    group: Group,
) -> Sampler:
    """Return one sampler for the parts that `group` assigns to this process.

    Each part has its own envs, and its own `workers` env workers.
    """
    num_envs, samplers = config.sampler.envs // group.count, list[EnvSampler]()
    options, explore = config.algo_options, make_exploration(config)
    try:
        for part in group.local:
            first = part * num_envs
            envs = make_some_envs(config, spec, num_envs, config.sampler.slots, workers, should_stop, first_env=first)
            samplers.append(
                EnvSampler(
                    envs,
                    agent,
                    weights,
                    options.rows_per_round,
                    config.seed,
                    first_row,
                    wait_reset=config.sampler.wait_reset,
                    first_env=first,
                    explore=explore.columns(first, first + num_envs),
                )
            )
    except BaseException:
        for sampler in samplers:
            sampler.close()
        raise
    return PartedSampler(samplers, num_envs, group)


def make_parted_replay(config: RunConfig, info: EnvInfo, state: Tree, first_round: int, group: Group) -> Replay:
    """Return one replay for the parts that `group` assigns to this process.

    `config` is that of the whole run. The other arguments are those of `make_replay`.
    """
    share, replays = share_of(config), list[DivisibleReplay]()
    try:
        for part in group.local:
            replays.append(make_replay(share, info, state, first_round))
            replays[-1].set_part(part, group.count)
    except BaseException:
        for replay in replays:
            replay.close()
        raise
    return PartedReplay(replays, group)
