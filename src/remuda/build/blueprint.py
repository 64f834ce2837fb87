"""Blueprints: JSON from which another process builds its part of a run.

    blueprints = make_blueprints(config, spec, seen, workers=2, net=None)     # in the run's own process
    ...                                                                       # any transport that carries JSON
    built = build(blueprint, "sampler")                                       # in a worker
    built.envs, built.agent, built.exploration

A blueprint holds the configuration, the env, and which of the run's envs the process steps: those with indices from
`first` to `last`, exclusive. Noise and env seeds depend on these indices. A blueprint also holds the spaces, which
determine the layout of shared memory, and how to find the net and the algorithm if they were passed as objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from remuda.agents import NetFactory
from remuda.build.algorithm import make_agent, wrap_agent
from remuda.build.envs import WORKER_LIMITS, agent_view, training_seeds
from remuda.build.exploration import make_exploration
from remuda.build.nets import describe_net, find_net, find_plain_net
from remuda.config.run_config import RunConfig, from_dict, to_dict
from remuda.core import Space
from remuda.envs import AsyncPooledEnvs, EnvInfo, EnvSpec, LocalEnvs, NativeEnvs, choose_backend, probe
from remuda.envs.import_paths import Unreachable
from remuda.envs.previous import AsyncWithPrevious, WithPrevious
from remuda.errors import ConfigError, EnvSpecError
from remuda.processes.notices import Notice
from remuda.registry import algorithm_reference, register_reference
from remuda.sampling.exploration import Exploration

Blueprint = Mapping[str, Any]
Role = Literal["agent", "envs", "sampler"]  # a "sampler" has envs and an agent


@dataclass(frozen=True)
class Built:
    """The parts that a process has built from a blueprint; parts that its role does not need are None."""

    config: RunConfig
    seen: EnvInfo  # describes the env; observations may include the previous action and reward
    make_net: NetFactory
    envs: Any = None
    agent: Any = None
    exploration: Exploration | None = None

    def wrap_agent(self, needs_loss: bool) -> Any:
        """Return an algorithm around the agent, to prepare rollouts and, with `needs_loss`, to compute losses."""
        return wrap_agent(self.config, self.agent, self.seen, self.make_net, needs_loss)


def build(
    blueprint: Blueprint,
    role: Role,
    heartbeat: Callable[[], bool] = lambda: False,
    notify: Callable[[Notice], None] = lambda notice: None,
) -> Built:
    """Build what a process needs for its role in a run.

    Envs call `heartbeat` at every step and stop if it returns True; `notify` receives notices about rebuilt envs.
    """
    register_reference(blueprint.get("algorithm"))
    config = from_dict(blueprint["config"])
    make_net = find_net(config.agent, blueprint["net"])
    if role == "agent":
        seen = agent_view(config, probe(EnvSpec.from_json(blueprint["spec"])))
        return Built(config, seen, make_net, agent=make_agent(config, seen, make_net))
    envs = make_own_envs(config, blueprint, heartbeat, notify)
    seen = EnvInfo(config.env, envs.observation, envs.action, None, (), 0.0)
    must_be_same(config.env, described(seen), blueprint["spaces"])
    if role == "envs":
        return Built(config, seen, make_net, envs)
    exploration = make_exploration(config).columns(blueprint["first"], blueprint["last"])
    return Built(config, seen, make_net, envs, make_agent(config, seen, make_net), exploration)


def setup_of(blueprint: Blueprint) -> tuple[RunConfig, EnvSpec, EnvInfo, NetFactory]:
    """Return what `make_recipe` needs for the whole run: configuration, env spec, env properties and net."""
    register_reference(blueprint.get("algorithm"))
    config, spec = from_dict(blueprint["config"]), EnvSpec.from_json(blueprint["spec"])
    info = probe(spec)
    must_be_same(config.env, described(agent_view(config, info)), blueprint["spaces"])
    return config, spec, info, find_plain_net(config.agent, blueprint["net"])


def make_blueprints(
    config: RunConfig, spec: EnvSpec, seen: EnvInfo, workers: int, net: NetFactory | None
) -> list[dict[str, Any]]:
    """Return one blueprint for each worker; the workers share the envs evenly.

    `seen` describes the env as the agent sees it: observations may include the previous action and reward.
    """
    bounds = [worker * config.sampler.envs // workers for worker in range(workers + 1)]
    common = {
        "config": to_dict(config),
        "spec": spec.to_json(),
        "wait_reset": config.sampler.wait_reset,
        "spaces": described(seen),
        "net": describe_net(config, net),
        "algorithm": describe_algorithm(config),
    }
    return [{**common, "first": first, "last": last} for first, last in pairwise(bounds)]


def make_async_blueprints(
    config: RunConfig, spec: EnvSpec, seen: EnvInfo, workers: int, net: NetFactory | None = None
) -> list[dict[str, Any]]:
    """Return the blueprints of workers that sample asynchronously.

    With central inference, the only blueprint is that of the inference process, whose envs form `workers` groups.
    """
    is_central = config.sampler.inference == "central"
    blueprints = make_blueprints(config, spec, seen, 1 if is_central else workers, net)
    return [{**blueprint, "groups": workers if is_central else 1} for blueprint in blueprints]


def describe_algorithm(config: RunConfig) -> dict[str, Any] | None:
    """Return a description by which other processes find the algorithm, or None if its name is enough."""
    try:
        return algorithm_reference(config.algo)
    except Unreachable as error:
        raise ConfigError(
            f"algorithm {config.algo} cannot be used in other processes, as {error.reason}: define it in a module "
            "file and train it by its import path, package.module:Class."
        ) from None


def described(seen: EnvInfo) -> dict[str, str]:
    """Return a dict from the path of every leaf of the observation and action spaces to a description of the leaf."""
    spaces = [*seen.observation.leaves("observation"), *seen.action.leaves("action")]
    return {path: f"{leaf.kind} {leaf.dtype}{list(leaf.shape)}{num_values(leaf)}" for path, leaf in spaces}


def num_values(leaf: Space) -> str:
    """Return a phrase with the number of values that a space has, or "" for a space without a fixed number."""
    if leaf.sizes is not None:
        return f" of {leaf.sizes.tolist()} values"
    return f" of {leaf.n} values" if leaf.kind == "discrete" else ""


def must_be_same(env: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise EnvSpecError if the spaces in this worker (`here`) differ from those in the learner's process (`there`).

    The spaces determine the layout of shared memory, so different spaces would corrupt its contents.
    """
    for path in [*there, *here]:
        mine, others = here.get(path, "missing"), there.get(path, "missing")
        if mine != others:
            raise EnvSpecError(
                f"{env}: {path} is {mine} in a worker, and {others} where the run learns: its spaces must be the "
                "same whenever and wherever it is built."
            )


def worker_limits(config: RunConfig) -> dict[str, Any]:
    """Return the time-outs and the restart budget of worker processes."""
    return {name: getattr(config.envs, name) for name in WORKER_LIMITS}


def make_own_envs(
    config: RunConfig, blueprint: Blueprint, heartbeat: Callable[[], bool], notify: Callable[[Notice], None]
) -> Any:
    """Return the envs of one process, with the observations that the agent expects.

    The options `agent.prev_action` and `agent.prev_reward` add the previous action and reward to observations.
    """
    envs = make_plain_envs(config, blueprint, heartbeat, notify)
    shown = (config.agent.prev_action, config.agent.prev_reward)
    if not any(shown):
        return envs
    return AsyncWithPrevious(envs, *shown) if isinstance(envs, AsyncPooledEnvs) else WithPrevious(envs, *shown)


def make_plain_envs(
    config: RunConfig, blueprint: Blueprint, heartbeat: Callable[[], bool], notify: Callable[[Notice], None]
) -> LocalEnvs | NativeEnvs | AsyncPooledEnvs:
    """Return the envs of one process, without previous actions and rewards in observations.

    Native envs are used only under asynchronous schemes, in workers that run the policy without `sampler.wait_reset`.
    Under a synchronous scheme, the replacement of a lost worker calls `Envs.prepare`, which they do not support.
    """
    spec, levels = EnvSpec.from_json(blueprint["spec"]), training_seeds(config)
    first, count = blueprint["first"], blueprint["last"] - blueprint["first"]
    options, gamma = config.envs, config.algo_options.gamma
    if config.is_asynchronous and config.sampler.inference == "central":
        limits = {"max_restarts": options.max_restarts, **worker_limits(config)}
        groups = blueprint["groups"]
        return AsyncPooledEnvs(
            spec, count, groups, groups, gamma, options.stats, levels=levels, should_stop=heartbeat, **limits
        )
    if config.is_asynchronous and not config.sampler.wait_reset:
        backend = choose_backend(spec, options.backend, options.stats, levels=levels)
        if backend is not None:
            return NativeEnvs(spec, backend, count, 1, 1, gamma, options.stats, heartbeat, first_env=first)
    return LocalEnvs(
        spec,
        count,
        gamma=gamma,
        stats=options.stats,
        levels=levels,
        max_restarts=options.max_restarts,
        should_stop=heartbeat,
        first_env=first,
        on_notice=notify,
    )
