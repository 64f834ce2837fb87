"""Checks that involve options of several groups. A ConfigError names the value, the rule and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remuda.config.parts import check_parts
from remuda.config.run_options import EnvsOptions, ReplayOptions, SamplerOptions, SchemeOptions
from remuda.errors import ConfigError

if TYPE_CHECKING:
    from remuda.config.run_config import RunConfig


def check_run(config: RunConfig) -> None:
    """Raise ConfigError if the options of a run do not fit together."""
    if config.steps < 1:
        raise ConfigError(f"steps={config.steps} is too small: a run takes at least 1 step.")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed} is out of range: use 0 to 2^63 - 1.")
    envs, slots = config.sampler.envs, config.sampler.slots
    if envs % slots:
        raise ConfigError(f"sampler.slots={slots} does not divide sampler.envs={envs}: slots are of equal size.")
    if config.sampler.inference == "workers" and slots > 1:
        raise ConfigError(f"sampler.slots={slots} with sampler.inference=workers: workers take no turns, use 1.")
    config.algo_options.check_run(config)
    if config.algo_options.uses_replay:
        check_replay(config)
    elif config.replay != ReplayOptions():
        raise ConfigError(f"replay options are set, and {config.algo} does not use a replay: leave them out.")
    check_scheme(config)
    check_checkpoints(config)
    check_devices(config)
    check_parts(config)


def check_replay(config: RunConfig) -> None:
    """Check that the replay options fit together, and that they fit the agent's memory and the number of envs."""
    replay, core, envs = config.replay, config.agent.core, config.sampler.envs
    if config.sampler.wait_reset:
        raise ConfigError(
            "sampler.wait_reset with a replay, whose rows would not say where an episode begins: leave it out."
        )
    default = ReplayOptions()
    for name in () if replay.prioritized else ("alpha", "beta", "initial_priority"):
        if (value := getattr(replay, name)) != getattr(default, name):
            raise ConfigError(f"replay.{name}={value} without replay.prioritized means nothing: set both or neither.")
    if core is not None and not replay.sequence:
        raise ConfigError(
            f"agent.core={core} cannot learn from single rows: set replay.sequence, for example replay.sequence=40."
        )
    if replay.sequence and core is None:
        raise ConfigError(
            f"replay.sequence={replay.sequence} without memory: set agent.core=lstm, or leave the sequence out."
        )
    if replay.burn_in and not replay.sequence:
        raise ConfigError(f"replay.burn_in={replay.burn_in} without replay.sequence: it is a part of sequences.")
    if replay.sequence and replay.n_step > replay.sequence:
        raise ConfigError(
            f"replay.n_step={replay.n_step} is longer than replay.sequence={replay.sequence}: "
            f"use at most {replay.sequence}."
        )
    rows, wanted = replay.capacity // envs, replay.burn_in + replay.sequence + replay.n_step
    if rows - 1 < wanted:
        raise ConfigError(
            f"replay.capacity={replay.capacity} keeps {rows} rows of each of {envs} envs, and one draw is over "
            f"{wanted}: use at least {(wanted + 1) * envs}."
        )


def check_scheme(config: RunConfig) -> None:
    """Check that all options that were set apply to the scheme, and that the algorithm may run under the scheme."""
    if config.is_asynchronous:
        check_asynchronous(config)
    else:
        check_synchronous(config)
    options, scheme, default = config.algo_options, config.scheme_options, SchemeOptions()
    for name in () if config.has_replay_writers else ("publish_every", "throttle"):
        if getattr(scheme, name) != getattr(default, name):
            raise ConfigError(
                f"scheme.{name}={getattr(scheme, name)} is for a replay under --scheme async: leave it out."
            )
    has_td_error = config.is_asynchronous and options.has_td_error
    if config.replay.initial_priority == "error" and not has_td_error:
        raise ConfigError(
            "replay.initial_priority=error needs samplers that know the values of actions: use largest, or --scheme "
            "async with dqn, rainbow or r2d1."
        )
    has_inference_process = config.is_asynchronous and config.sampler.inference == "central"
    if (threads := config.sampler.threads) != 1 and not has_inference_process:
        raise ConfigError(
            f"sampler.threads={threads} is for --scheme async with sampler.inference=central: leave it out; the "
            "learner has scheme.threads."
        )
    if has_inference_process:
        check_inference_process(config.sampler, config.envs)


def check_synchronous(config: RunConfig) -> None:
    """Refuse values of options that only asynchronous schemes support."""
    options, scheme = config.algo_options, config.scheme_options
    if scheme.max_lag is not None:
        raise ConfigError(
            f"scheme.max_lag={scheme.max_lag} under --scheme {config.scheme}, where nothing lags: leave it out."
        )
    if options.uses_replay and config.replay.ratio is None:
        raise ConfigError(
            f"replay.ratio=none under --scheme {config.scheme}, where updates wait for steps: give a number."
        )
    if scheme.weights != SchemeOptions().weights:
        raise ConfigError(f"scheme.weights={scheme.weights} is for --scheme async: leave it out.")
    if config.eval.cpu_fraction:
        raise ConfigError(
            f"eval.cpu_fraction={config.eval.cpu_fraction:g} under --scheme {config.scheme}: use --scheme async, "
            "or eval.every."
        )


def check_asynchronous(config: RunConfig) -> None:
    """Refuse algorithms that need rollouts of the newest policy; with a replay, refuse max_lag and gradient_steps."""
    if config.algo_options.is_on_policy:
        raise ConfigError(
            f"{config.algo} is only right for rollouts of the newest weights, and under --scheme {config.scheme} "
            "they are older: use impala or appo, or --algo.correction none to learn from them as they are."
        )
    if not config.algo_options.uses_replay:
        return
    if (max_lag := config.scheme_options.max_lag) is not None:
        raise ConfigError(f"scheme.max_lag={max_lag} with a replay, where rows grow old anyway: leave it out.")
    gradient_steps = config.replay_algo_options.gradient_steps
    if gradient_steps is not None:
        raise ConfigError(
            f"algo.gradient_steps={gradient_steps} under --scheme {config.scheme} has no rounds: set replay.ratio."
        )


def check_devices(config: RunConfig) -> None:
    """Refuse the device name gpu, and any device but the CPU for workers that run the policy.

    build/devices.py checks whether the devices exist on this machine.
    """
    for option, device in (("device", config.device), ("sampler.device", config.sampler_device)):
        kind, colon, number = device.partition(":")
        if kind == "gpu":
            raise ConfigError(f"{option}={device} is not a device of PyTorch: use cuda{colon}{number}.")
    if config.sampler_device != "cpu" and config.sampler.inference == "workers":
        raise ConfigError(
            f"sampler.device={config.sampler_device} with sampler.inference=workers, which use the CPU: use "
            "sampler.inference=central."
        )


def check_inference_process(sampler: SamplerOptions, envs: EnvsOptions) -> None:
    """Refuse options that are not supported with central inference under an asynchronous scheme."""
    if sampler.wait_reset:
        raise ConfigError(
            "sampler.wait_reset with sampler.inference=central under --scheme async: use sampler.inference=workers."
        )
    if sampler.slots > 1:
        raise ConfigError(
            f"sampler.slots={sampler.slots} under --scheme async, where groups of envs need not take turns: use 1."
        )
    if envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={envs.backend} with sampler.inference=central under --scheme async: its env workers step "
            "single envs, use python or sampler.inference=workers."
        )


def check_checkpoints(config: RunConfig) -> None:
    """Check that the checkpoint options fit the evaluation options and the scheme."""
    options = config.checkpoint
    if options.keep == "best" and not (config.eval.every and config.eval.episodes):
        raise ConfigError("checkpoint.keep=best needs evaluations to compare: set eval.every to a number of steps.")
    if options.cut_episodes and config.is_asynchronous:
        raise ConfigError(
            f"checkpoint.cut_episodes under --scheme {config.scheme}, which is never resumed bit for bit: leave it "
            "out."
        )
