"""Build the agent and the algorithm of a run from its configuration.

`make_algorithm` makes both. `make_agent` makes the agent alone, with the same initial weights, for processes that act
and do not learn. Each family of algorithms has a `Builder`. The options class of an algorithm names the builder by
its import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from remuda.agents import ActorAgent, Critic, NetFactory, PolicyAgent, QAgent
from remuda.algorithms import OffPolicy
from remuda.build.exploration import HARDLY
from remuda.build.fast_path import find_fast_policy
from remuda.config.algo_base import AlgoOptions
from remuda.config.continuous_options import ActorCriticOptions
from remuda.config.run_config import RunConfig
from remuda.config.run_options import AgentOptions
from remuda.core import Algorithm, Space
from remuda.envs import EnvInfo
from remuda.errors import ConfigError
from remuda.learning.schedules import parse_schedule
from remuda.nets import Bfloat16
from remuda.registry import find_algorithm
from remuda.schemes.learning_round import torch_threads

FARTHEST = 1e30  # a Box with bounds of this magnitude or larger counts as unbounded


@dataclass(frozen=True)
class Builder:
    """Two functions for one family of algorithms: one makes the agent, the other makes the algorithm.

    The agent is made first, so that its initial weights are the same in processes that make only an agent.
    """

    make_agent: Callable[[RunConfig, EnvInfo, NetFactory], Any]
    # The first argument is the class of the algorithm. The second argument is the agent.
    make_algorithm: Callable[[type[Algorithm], Any, RunConfig, EnvInfo, NetFactory], Algorithm]


def make_algorithm(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> Algorithm:
    """Return the algorithm of a run with its agent. Initial weights depend on the run's seed alone."""
    entry = find_algorithm(config.algo)
    builder = entry.load_builder()
    with drawn_from_seed(config), net_must_fit(config, info):
        agent = builder.make_agent(config, info, make_net)
        return builder.make_algorithm(entry.load_class(), agent, config, info, make_net)


def make_agent(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> Any:
    """Return the agent of a run with its initial weights, without critics and target networks."""
    with drawn_from_seed(config), net_must_fit(config, info):
        return find_algorithm(config.algo).load_builder().make_agent(config, info, make_net)


def wrap_agent(config: RunConfig, agent: Any, info: EnvInfo, make_net: NetFactory, needs_loss: bool) -> Any:
    """Return an algorithm around an existing agent, for a process that writes to a replay.

    The algorithm can `prepare` rollouts. If `needs_loss` is True, it can also compute losses, with newly initialized
    target networks and critics. If `needs_loss` is False and the algorithm's class does not override `prepare`, the
    result is an instance of the base class `OffPolicy`, which has neither target networks nor critics.
    """
    entry = find_algorithm(config.algo)
    kind, options = entry.load_class(), config.replay_algo_options
    if not needs_loss and kind.prepare is OffPolicy.prepare:
        names = {"tau", "clip_reward", "reward_scale"} & {item.name for item in fields(options)}
        shared = {name: getattr(options, name) for name in names}
        return OffPolicy(agent, config.seed, target_interval=options.target_update_interval, **shared)
    with drawn_from_seed(config), net_must_fit(config, info):
        return entry.load_builder().make_algorithm(kind, agent, config, info, make_net)


@contextmanager
def drawn_from_seed(config: RunConfig) -> Iterator[None]:
    """In the context, seed torch's generator with the run's seed, and use the learner's number of torch threads.

    The generator's state and the number of threads are restored at the end of the context.
    """
    with torch.random.fork_rng(devices=[]), torch_threads(config.scheme_options.threads):
        torch.manual_seed(config.seed)
        yield


@contextmanager
def net_must_fit(config: RunConfig, info: EnvInfo) -> Iterator[None]:
    """Turn exceptions in the context into ConfigErrors that say that the net does not fit; let ConfigErrors pass."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        space = info.observation
        shapes = space.shape if space.is_leaf else [path for path, _ in space.leaves()]
        raise ConfigError(
            f"agent.net={config.agent.net} does not fit observations of shape {shapes} "
            f"({type(error).__name__}: {error}): Net(shape) must map [N, *shape] to features [N, F]."
        ) from error


# --- keyword arguments of an algorithm ------------------------------------------------------------------------------


def keyword_arguments(kind: type[object], options: AlgoOptions, **given: object) -> dict[str, object]:
    """Return the keyword arguments with which an algorithm is constructed.

    Every option that has the same name as a keyword-only parameter of the class `kind` is included, so that an
    algorithm outside of this package receives its own options. Schedules become functions of the progress. Values in
    `options.algorithm_arguments()` take precedence over the options. Values in `given` take precedence over both.
    """
    accepted = keyword_parameters(kind)
    values: dict[str, object] = {}
    for item in fields(options):
        value = getattr(options, item.name)
        is_schedule = item.metadata.get("schedule") and value is not None
        values[item.name] = parse_schedule(value, f"algo.{item.name}") if is_schedule else value
    values |= options.algorithm_arguments()
    return {name: value for name, value in values.items() if name in accepted} | given


def keyword_parameters(kind: type[object]) -> set[str]:
    """Return the names of the keyword-only parameters of a class's constructor.

    If the constructor accepts `**options`, the parameters of the base class's constructor are included.
    """
    names: set[str] = set()
    for each in kind.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def replay_arguments(kind: type[object], config: RunConfig, **given: object) -> dict[str, object]:
    """Return the keyword arguments with which an algorithm that learns from a replay is constructed."""
    beta = parse_schedule(config.replay.beta, "replay.beta")
    return keyword_arguments(kind, config.algo_options, beta=beta, burn_in=config.replay.burn_in, **given)


def construct(kind: type[Algorithm], *arguments: object, **options: object) -> Algorithm:
    """Return an algorithm of this class; raise ConfigError if its constructor does not accept these arguments."""
    try:
        inspect.signature(kind).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__module__}:{kind.__qualname__} cannot be constructed ({error}): name keyword-only parameters "
            "after its options, and pass **options on to the base class."
        ) from error
    made: Algorithm = kind(*arguments, **options)
    return made


def agent_arguments(options: AgentOptions) -> dict[str, Any]:
    """Return the keyword arguments that the constructors of all kinds of agents accept."""
    return {name: getattr(options, name) for name in ("normalize_obs", "center_images", "core", "core_size")}


# --- learning from fresh rollouts -----------------------------------------------------------------------------------


def make_policy_agent(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> PolicyAgent:
    agent = PolicyAgent(
        info.observation,
        info.action,
        make_net,
        shared=config.agent.shared,
        orthogonal_init=config.agent.orthogonal_init,
        log_std_init=config.agent.log_std_init,
        **agent_arguments(config.agent),
    )
    agent.fast_policy = find_fast_policy(config.agent, agent)
    return agent


def make_on_policy(
    kind: type[Algorithm], agent: PolicyAgent, config: RunConfig, info: EnvInfo, make_net: NetFactory
) -> Algorithm:
    return construct(kind, agent, config.sampler.envs, **keyword_arguments(kind, config.algo_options))


# --- Q-learning, from a replay --------------------------------------------------------------------------------------


def make_q_agent(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> QAgent:
    if info.action.kind != "discrete":
        raise ConfigError(
            f"{config.algo} chooses among a few actions, and those of {config.env} are {described(info.action)}: "
            + ("use sac, td3 or ppo." if info.action.kind == "box" else "use ppo.")
        )
    return QAgent(
        info.observation,
        info.action,
        make_net,
        head_hidden=config.agent.head_hidden,
        exploration=final_epsilon(config.algo_options),
        **config.algo_options.agent_arguments(),
        **agent_arguments(config.agent),
    )


def final_epsilon(options: AlgoOptions) -> float:
    """Return the probability of a random action at the end of a run.

    An agent that is loaded from a run explores with this probability.
    """
    epsilon, _ = options.epsilon_greedy or ("0", 0.0)
    return max(HARDLY, parse_schedule(epsilon)(1.0))


def make_q_learning(
    kind: type[Algorithm], agent: QAgent, config: RunConfig, info: EnvInfo, make_net: NetFactory
) -> Algorithm:
    return construct(kind, agent, config.seed, **replay_arguments(kind, config))


# --- an actor and critics, from a replay ----------------------------------------------------------------------------


def make_actor_agent(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> ActorAgent:
    action = info.action
    if action.kind != "box" or not is_bounded(action):
        raise ConfigError(
            f"{config.algo} needs a Box of bounded actions, and those of {config.env} are {described(action)}: "
            f"use {'dqn' if action.kind == 'discrete' else 'ppo'}."
        )
    return ActorAgent(
        info.observation,
        action,
        make_net,
        **config.algo_options.agent_arguments(),
        **agent_arguments(config.agent),
    )


def make_continuous(
    kind: type[Algorithm], agent: ActorAgent, config: RunConfig, info: EnvInfo, make_net: NetFactory
) -> Algorithm:
    options = config.algo_options
    assert isinstance(options, ActorCriticOptions)
    # By default, a critic concatenates a vector observation with the action. Other observations, and those of agents
    # with a core or another net, first pass through a network made by `own_net`.
    is_vector = info.observation.kind == "box" and len(info.observation.shape) == 1
    own_net = None if is_vector and config.agent.net in ("auto", "mlp") and config.agent.core is None else make_net
    width = {"core": config.agent.core, "core_size": config.agent.core_size}
    critics = [
        Critic(
            agent.inputs,
            info.observation,
            info.action,
            own_net,
            config.agent.hidden or (64,),
            config.agent.activation,
            **width,  # type: ignore[arg-type]
        )
        for _ in range(options.critics)
    ]
    if config.agent.precision == "bf16":
        for critic in critics:
            critic.body = Bfloat16(critic.body)
    return construct(kind, agent, critics, config.seed, **replay_arguments(kind, config))


def is_bounded(box: Space) -> bool:
    """Return whether a Box has lower and upper bounds, all with a magnitude below FARTHEST."""
    return all(bound is not None and bool((np.abs(bound) < FARTHEST).all()) for bound in (box.low, box.high))


def described(action: Space) -> str:
    """Describe an action space in words, for an error message."""
    if action.kind == "box":
        return "a Box" if is_bounded(action) else "a Box without bounds"
    return {"discrete": "Discrete", "multidiscrete": "MultiDiscrete", "multibinary": "MultiBinary"}.get(
        action.kind, f"a {action.kind.capitalize()} of several"
    )


ON_POLICY = Builder(make_policy_agent, make_on_policy)
Q_LEARNING = Builder(make_q_agent, make_q_learning)
CONTINUOUS = Builder(make_actor_agent, make_continuous)
