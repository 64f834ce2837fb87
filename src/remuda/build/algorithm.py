"""The algorithm of a run, with its agent, from its configuration; and how that agent explores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from remuda.agents import ActorAgent, Critic, NetFactory, PolicyAgent, QAgent
from remuda.algorithms import A2C, APPO, DDPG, DQN, IMPALA, PPO, R2D1, SAC, TD3
from remuda.config.algo_options import (
    ActorCriticOptions,
    AlgoOptions,
    APPOOptions,
    DDPGOptions,
    DQNOptions,
    OffPolicyOptions,
    OnPolicyOptions,
    PPOOptions,
    R2D1Options,
    SACOptions,
    TD3Options,
    VTraceOptions,
)
from remuda.config.run_config import RunConfig
from remuda.config.run_options import AgentOptions
from remuda.core import Algorithm, Space
from remuda.envs import EnvInfo
from remuda.envs.import_paths import import_named
from remuda.errors import ConfigError
from remuda.learning.schedules import parse_schedule
from remuda.sampling.exploration import Exploration
from remuda.schemes.learning_round import torch_threads

HARDLY = 1e-9  # a chance of random actions that none comes of
FARTHEST = 1e30  # bounds beyond which a Box has none
Kind = TypeVar("Kind", bound=Algorithm)


def make_algorithm(config: RunConfig, info: EnvInfo, make_net: NetFactory) -> Algorithm:
    """Networks are drawn from the run's seed, without touching the caller's generator."""
    options = config.algo_options
    with torch.random.fork_rng(devices=[]), torch_threads(config.scheme_options.threads), net_must_fit(config, info):
        torch.manual_seed(config.seed)
        if isinstance(options, OnPolicyOptions):
            return on_policy(options, config, info, make_net)
        if isinstance(options, DQNOptions):
            return q_learning(options, config, info, make_net)
        assert isinstance(options, ActorCriticOptions)
        return q_policy_gradient(options, config, info, make_net)


class net_must_fit:
    """Around the making of agents: a net that cannot be made, or does not take these observations, is a mistake."""

    def __init__(self, config: RunConfig, info: EnvInfo) -> None:
        self.net, self.observation = config.agent.net, info.observation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return
        space = self.observation
        shapes = space.shape if space.is_leaf else [path for path, _ in space.leaves()]
        raise ConfigError(
            f"agent.net={self.net} does not fit observations of shape {shapes} "
            f"({type(error).__name__}: {error}): Net(shape) must map [N, *shape] to features [N, F]."
        ) from error


def on_policy(options: OnPolicyOptions, config: RunConfig, info: EnvInfo, make_net: NetFactory) -> Algorithm:
    agent = PolicyAgent(
        info.observation,
        info.action,
        make_net,
        shared=config.agent.shared,
        orthogonal_init=config.agent.orthogonal_init,
        log_std_init=config.agent.log_std_init,
        quick=config.agent.fast_path,
        **common_of(config.agent),
    )
    names = ("gamma", "vf_coef", "normalize_reward", "clip_reward")
    common: dict[str, Any] = {name: getattr(options, name) for name in names}
    common["ent_coef"] = parse_schedule(options.ent_coef, "algo.ent_coef")
    if isinstance(options, PPOOptions | APPOOptions):
        common |= near_old_policy(options)
    if isinstance(options, VTraceOptions):
        return by_vtrace(options, agent, config.sampler.envs, common)
    common |= {name: getattr(options, name) for name in ("gae_lambda", "normalize_advantage")}
    kind: type[A2C] | type[PPO] = PPO if isinstance(options, PPOOptions) else A2C
    return variant_of(kind, options)(agent, config.sampler.envs, **common)


def by_vtrace(options: VTraceOptions, agent: PolicyAgent, envs: int, common: dict[str, Any]) -> IMPALA:
    is_clipped = isinstance(options, APPOOptions)
    own = ("normalize_advantage",) if is_clipped else ("pg_rho_clip", "reduction")
    names = ("vtrace_lambda", "rho_clip", "c_clip", "correction", *own)
    kind: type[IMPALA] = APPO if is_clipped else IMPALA
    return variant_of(kind, options)(agent, envs, **common, **{name: getattr(options, name) for name in names})


def near_old_policy(options: PPOOptions | APPOOptions) -> dict[str, Any]:
    """What keeps a policy near the one that acted."""
    value_clip = options.clip_range_vf
    return {
        "clip_range": parse_schedule(options.clip_range, "algo.clip_range"),
        "clip_range_vf": None if value_clip is None else parse_schedule(value_clip, "algo.clip_range_vf"),
        "target_kl": options.target_kl,
    }


def q_learning(options: DQNOptions, config: RunConfig, info: EnvInfo, make_net: NetFactory) -> DQN:
    if info.action.kind != "discrete":
        raise ConfigError(
            f"{config.algo} chooses among a few actions, and those of {config.env} are {described(info.action)}: "
            + ("use sac, td3 or ppo." if info.action.kind == "box" else "use ppo.")
        )
    agent = QAgent(
        info.observation,
        info.action,
        make_net,
        **{name: getattr(options, name) for name in ("dueling", "noisy", "atoms", "v_min", "v_max")},
        head_hidden=config.agent.head_hidden,
        exploration=max(HARDLY, parse_schedule(options.epsilon)(1.0)),
        **common_of(config.agent),
    )
    settings = {"double": options.double, "delta": options.huber, **off_policy(options, config)}
    if isinstance(options, R2D1Options):
        return variant_of(R2D1, options)(agent, config.seed, rescaled=options.rescale, eta=options.eta, **settings)
    return variant_of(DQN, options)(agent, config.seed, **settings)


def q_policy_gradient(
    options: ActorCriticOptions, config: RunConfig, info: EnvInfo, make_net: NetFactory
) -> DDPG | SAC:
    action = info.action
    if action.kind != "box" or not is_bounded(action):
        raise ConfigError(
            f"{config.algo} needs a Box of bounded actions, and those of {config.env} are {described(action)}: "
            f"use {'dqn' if action.kind == 'discrete' else 'ppo'}."
        )
    noise = {"noise": options.noise, "noise_std": options.noise_std} if isinstance(options, DDPGOptions) else {}
    agent = ActorAgent(
        info.observation,
        action,
        make_net,
        stochastic=isinstance(options, SACOptions),
        **noise,  # type: ignore[arg-type]  # one of its choices
        **common_of(config.agent),
    )
    # A vector goes beside the action as it is, through one net; what is no vector is made one by a net of its own.
    is_vector = info.observation.kind == "box" and len(info.observation.shape) == 1
    own_net = None if is_vector and config.agent.net in ("auto", "mlp") and config.agent.core is None else make_net
    width = {"core": config.agent.core, "core_size": config.agent.core_size}
    critics = [
        Critic(
            agent.inputs,
            info.observation,
            action,
            own_net,
            config.agent.hidden or (64,),
            config.agent.activation,
            **width,  # type: ignore[arg-type]
        )
        for _ in range(options.critics)
    ]
    settings = off_policy(options, config) | {"reward_scale": options.reward_scale}
    if isinstance(options, SACOptions):
        fixed, start = options.entropy_weight()
        settings |= {"ent_coef": fixed, "ent_coef_init": start, "target_entropy": options.target_entropy}
        quick = config.agent.fast_path and not config.agent.compile
        return variant_of(SAC, options)(agent, critics, config.seed, quick=quick, **settings)
    assert isinstance(options, DDPGOptions)
    settings |= {name: getattr(options, name) for name in ("policy_delay", "target_noise", "target_noise_clip")}
    kind = TD3 if isinstance(options, TD3Options) else DDPG
    return variant_of(kind, options)(agent, critics, config.seed, **settings)


def variant_of(kind: type[Kind], options: AlgoOptions) -> type[Kind]:
    """The algorithm, or the user's own subclass of it."""
    if options.variant is None:
        return kind
    found = import_named(options.variant, "algo.variant")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(
            f"algo.variant={options.variant} is not a subclass of {kind.__name__}: derive it from "
            f"{kind.__module__}:{kind.__name__}."
        )
    return found


def off_policy(options: OffPolicyOptions, config: RunConfig) -> dict[str, Any]:
    return {
        "tau": options.tau,
        "target_interval": options.target_update_interval,
        "clip_reward": options.clip_reward,
        "beta": parse_schedule(config.replay.beta, "replay.beta"),
        "burn_in": config.replay.burn_in,
    }


def common_of(options: AgentOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("normalize_obs", "center_images", "core", "core_size")}


def is_bounded(box: Space) -> bool:
    return all(bound is not None and bool((np.abs(bound) < FARTHEST).all()) for bound in (box.low, box.high))


def described(action: Space) -> str:
    if action.kind == "box":
        return "a Box" if is_bounded(action) else "a Box without bounds"
    return {"discrete": "Discrete", "multidiscrete": "MultiDiscrete", "multibinary": "MultiBinary"}.get(
        action.kind, f"a {action.kind.capitalize()} of several"
    )


def make_exploration(config: RunConfig) -> Exploration:
    """Of all envs of a run, by the number of a row: progress as it is if no row is a reset row."""
    options, envs = config.algo_options, config.sampler.envs
    if not isinstance(options, OffPolicyOptions):
        return Exploration()
    random_rows = -(-options.learning_starts // envs)
    if not isinstance(options, DQNOptions):
        return Exploration(None, random_rows)
    return Exploration(epsilons(options, envs, config.steps), random_rows)


def epsilons(options: DQNOptions, envs: int, steps: int) -> Callable[[int], Tensor]:
    """Chances of a random action [B]; with a power, log-spaced over all envs of the run, as of Ape-X (1803.00933)."""
    schedule = parse_schedule(options.epsilon, "algo.epsilon")
    powers = 1 + options.epsilon_power * torch.arange(envs) / max(1, envs - 1)
    # Never quite 0, which would be greedy: a noisy net explores by its weights.
    return lambda row: torch.pow(schedule(min(1.0, row * envs / steps)), powers).clamp(min=HARDLY)
