"""Remuda's own algorithms, schemes and env backends, registered by the functions that other packages use, too."""

from __future__ import annotations

from remuda import registry


def register_algorithms() -> None:
    """Register Remuda's own ten algorithms.

    The class DQN has two entries, dqn and rainbow. By default, subclasses of DQN have the options and presets of dqn,
    because that entry is registered first.
    """
    from remuda.config import algo_options as options
    from remuda.config import continuous_options as continuous
    from remuda.config.algo_base import AlgoOptions

    def register(name: str, kind: str, its: type[AlgoOptions], presets: str, description: str) -> None:
        path = f"remuda.config.{presets}"
        registry.register_algorithm(name, kind, options=its, presets=path, description=description)

    on_policy, replay = "rollout_presets", "replay_presets"
    register(
        "a2c",
        "remuda.algorithms.a2c:A2C",
        options.A2COptions,
        f"{on_policy}:A2C",
        "advantage actor-critic: one gradient of each rollout",
    )
    register(
        "appo",
        "remuda.algorithms.appo:APPO",
        options.APPOOptions,
        f"{on_policy}:APPO",
        "asynchronous PPO: clipped ratio, data of older policies corrected by V-trace",
    )
    register(
        "ddpg",
        "remuda.algorithms.ddpg:DDPG",
        continuous.DDPGOptions,
        f"{replay}:DDPG",
        "deep deterministic policy gradients, from a replay",
    )
    register(
        "dqn",
        "remuda.algorithms.dqn:DQN",
        options.DQNOptions,
        f"{replay}:DQN",
        "deep Q-learning: double, dueling, C51, noisy by an option each",
    )
    register(
        "impala",
        "remuda.algorithms.impala:IMPALA",
        options.ImpalaOptions,
        f"{on_policy}:IMPALA",
        "policy gradient, data of older policies corrected by V-trace",
    )
    register(
        "ppo",
        "remuda.algorithms.ppo:PPO",
        options.PPOOptions,
        f"{on_policy}:PPO",
        "proximal policy optimization: several epochs, clipped ratio",
    )
    register(
        "r2d1",
        "remuda.algorithms.r2d1:R2D1",
        options.R2D1Options,
        f"{replay}:R2D1",
        "deep Q-learning with memory, from sequences",
    )
    register(
        "rainbow",
        "remuda.algorithms.dqn:DQN",
        options.RainbowOptions,
        f"{replay}:RAINBOW",
        "deep Q-learning with all of these, n-step and prioritized",
    )
    register(
        "sac",
        "remuda.algorithms.sac:SAC",
        continuous.SACOptions,
        f"{replay}:SAC",
        "soft actor-critic: reward and entropy",
    )
    register(
        "td3",
        "remuda.algorithms.td3:TD3",
        continuous.TD3Options,
        f"{replay}:TD3",
        "DDPG with two critics, a delayed actor and smoothed targets",
    )


def register_schemes() -> None:
    """Register Remuda's own schemes."""
    registry.register_scheme(
        "serial",
        "remuda.build.schemes:make_serial",
        "envs, policy and learner in one process",
        has_workers=False,
    )
    registry.register_scheme(
        "parallel",
        "remuda.build.schemes:make_parallel",
        "envs in worker processes, policy and learner in this one; same parameters as serial",
    )
    registry.register_scheme(
        "async",
        "remuda.build.schemes:make_asynchronous",
        "samplers, learner and evaluator run asynchronously; for impala, appo and all with a replay",
        is_asynchronous=True,
    )
    registry.register_scheme(
        "replicas",
        "remuda.build.schemes:make_replicas",
        "scheme.ranks processes that each sample and learn, and add their gradients; also under torchrun",
        has_workers=False,
        has_ranks=True,
    )


def register_env_backends() -> None:
    """Register the libraries of native vector envs, in the order in which `envs.backend=auto` tries them."""
    for name, module in (("ale", "ale"), ("gymnasium", "gymnasium_vector"), ("envpool", "envpool")):
        registry.register_env_backend(name, f"remuda.envs.backends.{module}")
