"""A whole run as a frozen dataclass of option groups, with checks where values of several groups meet.

The command line (`--algo.learning_rate 3e-4`), `config.yaml` and `remuda.train(algo={"learning_rate": 3e-4})` are
three ways to fill in the same fields. Presets (config/presets.py) change defaults, never what the user set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from remuda.config.algo_options import (
    ALGORITHMS,
    AlgoOptions,
    DQNOptions,
    OffPolicyOptions,
    OnPolicyOptions,
    PPOOptions,
    R2D1Options,
    ReplayOptions,
)
from remuda.config.fields import Checked, fill
from remuda.config.run_options import (
    AgentOptions,
    CheckpointOptions,
    EnvsOptions,
    EvalOptions,
    LogOptions,
    SamplerOptions,
    SchemeOptions,
)
from remuda.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """A whole run: what to learn and how to run it."""

    algo: str
    env: str
    steps: int
    seed: int
    scheme: str
    algo_options: OnPolicyOptions | OffPolicyOptions
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    envs: EnvsOptions = field(default_factory=EnvsOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    scheme_options: SchemeOptions = field(default_factory=SchemeOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} is too small: a run takes at least 1 step.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} is out of range: use 0 to 2^63 - 1.")
        envs, slots, options = self.sampler.envs, self.sampler.slots, self.algo_options
        if envs % slots:
            raise ConfigError(f"sampler.slots={slots} does not divide sampler.envs={envs}: slots are of equal size.")
        if self.sampler.inference == "workers" and slots > 1:
            raise ConfigError(f"sampler.slots={slots} with sampler.inference=workers: actors take no turns, use 1.")
        if isinstance(options, PPOOptions):
            check_minibatches(options, envs, self.agent.core)
        check_replay(options, self.replay, self.agent.core, self.sampler)
        check_scheme(self)
        check_checkpoints(self)
        check_heads(self.algo, options, self.agent)


def check_minibatches(options: PPOOptions, envs: int, core: str | None) -> None:
    size, rows = options.batch_size, options.n_steps * envs
    if options.normalize_advantage and size < 2:
        raise ConfigError("algo.batch_size=1 leaves nothing to normalise advantages over: use 2 or more.")
    if core is None and rows % size:
        near = [size for size in range(1, rows + 1) if rows % size == 0]
        near.sort(key=lambda size: abs(size - options.batch_size))
        raise ConfigError(
            f"algo.batch_size={options.batch_size} does not divide the {rows} rows of a rollout "
            f"(n_steps={options.n_steps} x envs={envs}): use for example {' or '.join(map(str, near[:2]))}."
        )
    if core is not None and (size % options.n_steps or envs % (size // options.n_steps)):
        whole = sorted({options.n_steps * count for count in range(1, envs + 1) if envs % count == 0})
        raise ConfigError(
            f"algo.batch_size={size} is not a whole number of envs' sequences that divides envs={envs} "
            f"(n_steps={options.n_steps}): recurrent PPO splits along envs, use {' or '.join(map(str, whole))}."
        )


def check_replay(options: AlgoOptions, replay: ReplayOptions, core: str | None, sampler: SamplerOptions) -> None:
    """What does not fit together, in one sentence each."""
    if not isinstance(options, OffPolicyOptions):
        if replay != ReplayOptions():
            raise ConfigError("replay options are set, and this algorithm forgets each rollout: leave them out.")
        return
    if sampler.wait_reset:
        raise ConfigError(
            "sampler.wait_reset with a replay, whose rows would not say where an episode begins: leave it out."
        )
    default = ReplayOptions()
    for name in () if replay.prioritized else ("alpha", "beta", "initial_priority"):
        if (value := getattr(replay, name)) != getattr(default, name):
            raise ConfigError(f"replay.{name}={value} without replay.prioritized means nothing: set both or neither.")
    if isinstance(options, DQNOptions) and options.atoms > 1:
        low, high = options.v_min, options.v_max
        if low != "auto" and high != "auto" and low >= high:
            raise ConfigError(f"algo.v_min={low:g} is not below algo.v_max={high:g}: swap them.")
    if isinstance(options, R2D1Options) and options.atoms > 1:
        raise ConfigError(
            f"algo.atoms={options.atoms} for r2d1, which learns values: use 1, or train dqn with memory."
        )
    if isinstance(options, R2D1Options) and core is None:
        raise ConfigError("r2d1 without agent.core has no memory: use agent.core=lstm or gru, or train dqn.")
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
    envs = sampler.envs
    rows, wanted = replay.capacity // envs, replay.burn_in + replay.sequence + replay.n_step
    if rows - 1 < wanted:
        raise ConfigError(
            f"replay.capacity={replay.capacity} keeps {rows} rows of each of {envs} envs, and one draw is over "
            f"{wanted}: use at least {(wanted + 1) * envs}."
        )


def check_scheme(config: RunConfig) -> None:
    """Which algorithms may learn from what older weights have sampled, and which options mean something there."""
    options, scheme, default = config.algo_options, config.scheme_options, SchemeOptions()
    has_replay = isinstance(options, OffPolicyOptions)
    if config.scheme != "async":
        if scheme.max_lag is not None:
            raise ConfigError(
                f"scheme.max_lag={scheme.max_lag} under --scheme {config.scheme}, where nothing lags: leave it out."
            )
        if has_replay and config.replay.ratio is None:
            raise ConfigError(
                f"replay.ratio=none under --scheme {config.scheme}, where updates wait for steps: give a number."
            )
    kind, colon, number = scheme.device.partition(":")
    if kind == "gpu":
        raise ConfigError(f"scheme.device={scheme.device} is not a device of PyTorch: use cuda{colon}{number}.")
    if config.scheme != "async" and scheme.device != default.device:
        is_on_policy = isinstance(options, OnPolicyOptions) and options.correction == "on-policy"
        others = "train impala or appo with --scheme async, or leave the device out"
        raise ConfigError(
            f"scheme.device={scheme.device} under --scheme {config.scheme}, whose nets act and learn on the CPU: "
            f"{others if is_on_policy else 'use --scheme async'}."
        )
    for name in ("publish_every", "throttle"):
        if getattr(scheme, name) != getattr(default, name) and not (config.scheme == "async" and has_replay):
            raise ConfigError(
                f"scheme.{name}={getattr(scheme, name)} is for a replay under --scheme async: leave it out."
            )
    if config.scheme != "async" and scheme.weights != default.weights:
        raise ConfigError(f"scheme.weights={scheme.weights} is for --scheme async: leave it out.")
    if config.eval.cpu_fraction and config.scheme != "async":
        raise ConfigError(
            f"eval.cpu_fraction={config.eval.cpu_fraction:g} under --scheme {config.scheme}: use --scheme async, "
            "or eval.every."
        )
    if config.replay.initial_priority == "error" and (
        config.scheme != "async" or not isinstance(options, DQNOptions)
    ):
        raise ConfigError(
            "replay.initial_priority=error needs samplers that know the values of actions: use largest, or --scheme "
            "async with dqn, rainbow or r2d1."
        )
    if (threads := config.sampler.threads) != 1 and (
        config.scheme != "async" or config.sampler.inference != "central"
    ):
        raise ConfigError(
            f"sampler.threads={threads} is for --scheme async with sampler.inference=central: leave it out; the "
            "learner has scheme.threads."
        )
    if config.scheme == "async" and has_replay:
        check_feed(config)
    elif config.scheme == "async":
        check_stream(config)


def check_checkpoints(config: RunConfig) -> None:
    options = config.checkpoint
    if options.keep == "best" and not (config.eval.every and config.eval.episodes):
        raise ConfigError("checkpoint.keep=best needs evaluations to compare: set eval.every to a number of steps.")
    if options.cut_episodes and config.scheme == "async":
        raise ConfigError(
            "checkpoint.cut_episodes under --scheme async, which is never resumed bit for bit: leave it out."
        )


def check_stream(config: RunConfig) -> None:
    assert isinstance(config.algo_options, OnPolicyOptions)
    if config.algo_options.correction == "on-policy":
        raise ConfigError(
            f"{config.algo} is only right for rollouts of the newest weights, and under --scheme async they are "
            "older: use impala or appo, or --algo.correction none to learn from them as they are."
        )
    if config.sampler.inference == "central":
        check_inference_process(config.sampler, config.envs)


def check_feed(config: RunConfig) -> None:
    """Samplers that write to the replay by themselves."""
    if (max_lag := config.scheme_options.max_lag) is not None:
        raise ConfigError(f"scheme.max_lag={max_lag} with a replay, where rows grow old anyway: leave it out.")
    if config.sampler.inference == "central":
        check_inference_process(config.sampler, config.envs)
    options = config.algo_options
    assert isinstance(options, OffPolicyOptions)
    if options.gradient_steps is not None:
        raise ConfigError(
            f"algo.gradient_steps={options.gradient_steps} under --scheme async has no rounds: set replay.ratio."
        )


def check_inference_process(sampler: SamplerOptions, envs: EnvsOptions) -> None:
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


def check_heads(algo: str, options: AlgoOptions, agent: AgentOptions) -> None:
    """What belongs to agents of another kind."""
    default = AgentOptions()
    foreign = ("shared", "log_std_init") if isinstance(options, OffPolicyOptions) else ()
    foreign = foreign if isinstance(options, DQNOptions) else (*foreign, "head_hidden")
    for name in foreign:
        if getattr(agent, name) != getattr(default, name):
            raise ConfigError(f"agent.{name}={getattr(agent, name)} means nothing to {algo}: leave it out.")


# Group of options: its dataclass. The options of `algo` depend on the algorithm.
KINDS: dict[str, type[Checked]] = {
    "replay": ReplayOptions,
    "sampler": SamplerOptions,
    "envs": EnvsOptions,
    "agent": AgentOptions,
    "scheme": SchemeOptions,
    "eval": EvalOptions,
    "checkpoint": CheckpointOptions,
    "log": LogOptions,
}
# Group of options: its field of RunConfig, where `algo` and `scheme` are names already.
GROUPS = {group: f"{group}_options" if group in ("algo", "scheme") else group for group in ("algo", *KINDS)}


def to_dict(config: RunConfig) -> dict[str, Any]:
    """As config.yaml holds it: short settings, then one mapping per group."""
    out: dict[str, Any] = {name: getattr(config, name) for name in ("algo", "env", "steps", "seed", "scheme")}
    out["options"] = {group: _plain(getattr(config, attribute)) for group, attribute in GROUPS.items()}
    return out


def _plain(options: Any) -> dict[str, Any]:
    values = {item.name: getattr(options, item.name) for item in fields(options)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The inverse of `to_dict`: nothing is looked up or probed, as a worker needs it."""
    short = {name: values[name] for name in ("algo", "env", "steps", "seed", "scheme")}
    kinds: dict[str, type[Any]] = {"algo": ALGORITHMS[values["algo"]], **KINDS}
    groups = {GROUPS[group]: fill(kinds[group](), values["options"].get(group, {}), group) for group in GROUPS}
    return RunConfig(**short, **groups)
