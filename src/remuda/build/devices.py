"""Devices of a run: where the learner and the policy run, in each process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from remuda.algorithms.impala import describes
from remuda.build.fast_path import find_fast_policy
from remuda.config.continuous_options import ActorCriticOptions
from remuda.config.run_config import RunConfig
from remuda.core import ActorCriticAlgorithm, Algorithm, Weights
from remuda.errors import ConfigError
from remuda.learning.copied_weights import CopiedWeights
from remuda.parts import Group
from remuda.sampling.device_agent import as_on_cpu
from remuda.torchrun import read_torchrun


def check_devices(config: RunConfig) -> None:
    """Raise ConfigError if a device of the run is not on this machine."""
    devices = {"device": config.device, "sampler.device": config.sampler_device}
    actor, critic = split_devices(config)
    devices |= {} if actor is None else {"algo.actor_device": actor, "algo.critic_device": critic}
    for option, device in devices.items():
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError, ImportError):  # device is unknown, absent, or has no storage ("meta")
            raise ConfigError(f"{option}={device} is not on this machine: use cpu.") from None
    if config.scheme_entry.has_ranks and shares_devices(config) and read_torchrun() is None:
        own_device(config, config.scheme_options.ranks - 1)  # the last rank needs the highest device index


def split_devices(config: RunConfig) -> tuple[str | None, str]:
    """Return the device of the actor's gradients, and the device of the critics' gradients.

    The first device is None if the gradients of actor and critics are not computed separately.
    """
    options = config.algo_options
    if not isinstance(options, ActorCriticOptions) or (options.actor_device, options.critic_device) == (None, None):
        return None, config.device
    return options.actor_device or config.device, options.critic_device or config.device


def has_halves(algorithm: Algorithm) -> bool:
    """Return whether the algorithm's `actor_losses` and `critic_losses` together are the same as its `losses`.

    This is False for an algorithm without these two methods, and for a class that overrides `losses` but not both.
    """
    kind = type(algorithm)
    halves = ("actor_losses", "critic_losses")
    return isinstance(algorithm, ActorCriticAlgorithm) and all(describes(kind, half, "losses") for half in halves)


def shares_devices(config: RunConfig) -> bool:
    """Return whether every rank of a host gets a device of its own, as with `--device cuda` without an index."""
    return ":" not in config.device and config.device not in ("cpu", "mps")


def own_device(config: RunConfig, local_rank: int) -> str:
    """Return the device of a rank, which is the `local_rank`-th rank on its host."""
    if not shares_devices(config):
        return config.device
    if local_rank >= (count := torch.accelerator.device_count()):
        raise ConfigError(
            f"scheme.ranks={config.scheme_options.ranks} with --device {config.device} needs one device for each "
            f"rank of a host, and there are {count}: use fewer ranks, or --device {config.device}:0 to share one."
        )
    return f"{config.device}:{local_rank}"


def for_rank(config: RunConfig, group: Group) -> RunConfig:
    """Return the configuration with which one rank builds its part of the run, on its own device."""
    torchrun = read_torchrun()
    return replace(config, device=own_device(config, torchrun.local_rank if torchrun else group.local.start))


def place_policy(config: RunConfig, agent: Any, version: int) -> Weights | None:
    """Return weights that copy the agent to `sampler.device`, or None if the learner uses the same device."""
    if torch.device(config.sampler_device) == torch.device(split_devices(config)[1]):
        return None
    weights = CopiedWeights(agent, torch.device(config.sampler_device), version)
    weights.copy.fast_policy = find_fast_policy(config.agent, weights.copy)
    return weights


def acting_agent(agent: Any, weights: Weights) -> Any:
    """Return the agent with which a sampler in the learner's process acts, with inputs and outputs on the CPU."""
    return as_on_cpu(weights.copy if isinstance(weights, CopiedWeights) else agent)
