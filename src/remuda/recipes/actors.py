"""What workers that act are told to build, and the module that they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from remuda.core import Agent
from remuda.envs import EnvInfo, EnvSpec, LocalEnvs
from remuda.envs.previous import WithPrevious
from remuda.errors import ConfigError
from remuda.learning.weights import SharedWeights
from remuda.recipes.algorithms import make_algorithm, make_exploration
from remuda.recipes.config import RunConfig, from_dict, to_dict
from remuda.recipes.parts import WORKER_LIMITS, find_net, training_seeds
from remuda.sampling.acting import ActingSampler
from remuda.sampling.actor import serve
from remuda.sampling.exploration import Exploration


def make_acting_sampler(
    config: RunConfig,
    spec: EnvSpec,
    workers: int,
    agent: Any,
    weights: SharedWeights,
    first_row: int,
    should_stop: Callable[[], bool],
) -> ActingSampler:
    """Workers of even shares of the envs; each is sent the configuration and builds its part."""
    if config.envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={config.envs.backend} with sampler.act=workers: they step single envs, use python."
        )
    if config.agent.net.startswith("<"):
        raise ConfigError(
            f"agent.net={config.agent.net} has no import path, by which workers that act could find it: move it to a "
            "module, or use sampler.act=central."
        )
    bounds = [worker * config.sampler.envs // workers for worker in range(workers + 1)]
    orders = [
        {
            "config": to_dict(config),
            "spec": spec.to_json(),
            "wait_reset": config.sampler.wait_reset,
            "first": first,
            "last": last,
        }
        for first, last in pairwise(bounds)
    ]
    limits = {"should_stop": should_stop, **{name: getattr(config.envs, name) for name in WORKER_LIMITS}}
    n_steps, seed = config.algo_options.rows_per_round, config.seed
    return ActingSampler(
        __name__,
        orders,
        agent,
        agent.observation,
        weights,
        n_steps,
        seed,
        first_row,
        **limits,
    )


def main(fds: Sequence[int]) -> int:
    return serve(fds, make_parts)


def make_parts(
    order: Mapping[str, Any], beat: Callable[[], bool], tell: Callable[[str], None]
) -> tuple[Any, Agent, Exploration]:
    """The envs and the agent of one worker, and how that explores."""
    config = from_dict(order["config"])
    options = config.agent
    envs: Any = LocalEnvs(
        EnvSpec.from_json(order["spec"]),
        order["last"] - order["first"],
        gamma=config.algo_options.gamma,
        stats=config.envs.stats,
        levels=training_seeds(config),
        max_restarts=config.envs.max_restarts,
        should_stop=beat,
        first_env=order["first"],
        tell=tell,
    )
    if options.prev_action or options.prev_reward:
        envs = WithPrevious(envs, options.prev_action, options.prev_reward)
    seen = EnvInfo(config.env, envs.observation, envs.action, None, (), 0.0)
    agent: Any = make_algorithm(config, seen, find_net(options)).agent
    return envs, agent, make_exploration(config).columns(order["first"], order["last"])
