"""Everything that can be set, in frozen dataclasses: a sentence per field, checks where values meet.

The command line (`--algo.learning_rate 3e-4`), `config.yaml` and `remuda.train(algo={"learning_rate": 3e-4})` are
three ways to fill in the same fields. Presets (recipes/presets.py) change defaults, never what the user set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from remuda.errors import ConfigError
from remuda.recipes.algo_options import (
    ALGORITHMS,
    AlgoOptions,
    DQNOptions,
    OffPolicyOptions,
    OnPolicyOptions,
    PPOOptions,
    R2D1Options,
    ReplayOptions,
)
from remuda.recipes.values import Checked, fill, option, parse_seeds


@dataclass(frozen=True)
class SamplerOptions(Checked):
    """How experience is sampled."""

    _group = "sampler."
    envs: int = option(8, "environments, over all workers", low=1, high=100_000)
    workers: int = option(0, "env worker processes of the parallel scheme; 0 takes one per core", low=0)
    slots: int = option(1, "groups of envs that take turns; 2 acts for one while the other steps", low=1, high=8)
    act: str = option(
        "auto",
        "who runs the policy: one process for all envs, or the env workers themselves; auto is workers under async",
        choices=("auto", "central", "workers"),
    )
    wait_reset: bool = option(
        False, "reset an ended env only when the next rollout begins: one episode per column, padded"
    )
    decorrelate: int = option(0, "random steps per env before the first rollout, at most", low=0)


@dataclass(frozen=True)
class EnvsOptions(Checked):
    """How environments are made and watched."""

    _group = "envs."
    backend: str = option(
        "auto",
        "what steps the envs: python, ale, gymnasium or envpool; auto takes a native one where it is the same game",
    )
    kwargs: dict[str, Any] = option({}, "keyword arguments of the env, as JSON")
    seeds: str | None = option(None, "env seeds to train on, as 0-199 or 3,5,8; none draws a new one for each env")
    stats: str | None = option(None, "your own episode statistics, as package.module:Class")
    step_timeout: float = option(60.0, "seconds after which a silent env worker is replaced", above=0.0)
    build_timeout: float = option(120.0, "seconds that building a worker's envs may take", above=0.0)
    max_restarts: int = option(1000, "times that one env may raise and be rebuilt", low=0)
    max_worker_restarts: int = option(10, "times a minute that one env worker may be replaced", low=0)
    noop_max: int = option(30, "Atari: random no-ops at the start of a game, at most", low=0)
    frame_skip: int | None = option(None, "Atari: frames that an action lasts; none takes what the id says", low=1)
    sticky: float | None = option(
        None, "Atari: chance that the last action is repeated; none takes what the id says", low=0.0, high=1.0
    )
    screen_size: int = option(84, "Atari: height and width of a frame, in pixels", low=1)
    interpolation: str = option("area", "Atari: how frames are scaled", choices=("area", "linear"))
    frame_stack: int = option(4, "Atari: frames in an observation", low=1)
    episodic_life: bool = option(False, "Atari: a lost life ends the episode for the learner, not in the statistics")
    fire_reset: bool = option(False, "Atari: press fire at the start, in games that wait for it")
    full_action_set: bool | None = option(None, "Atari: all 18 actions; none takes what the id says")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds is not None:
            parse_seeds(self.seeds, "envs.seeds")


@dataclass(frozen=True)
class AgentOptions(Checked):
    """The network."""

    _group = "agent."
    net: str = option(
        "auto",
        "auto, mlp, nature, a3c, small, impala, impala-fixup, or your own module as package.module:Net; auto takes "
        "nature for images, small for little ones, mlp else",
    )
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers of an mlp, as 64,64", low=1)
    core: str | None = option(None, "memory on top of the net; none has no memory", choices=("lstm", "gru"))
    core_size: int = option(128, "width of the memory", low=1)
    prev_action: bool = option(False, "show the agent its previous action")
    prev_reward: bool = option(False, "show the agent its previous reward")
    activation: str = option("tanh", "activation of the mlp", choices=("tanh", "relu", "elu", "silu"))
    shared: bool = option(False, "one net for policy and value instead of two")
    orthogonal_init: bool = option(True, "orthogonal initial weights of mlp and heads")
    head_hidden: int | None = option(
        None,
        "width of a hidden layer in the heads of Q-learning, 0 for no such layer; none: as wide as the features in "
        "dueling and noisy heads, else 0",
        low=0,
    )
    log_std_init: float = option(0.0, "initial logarithm of the deviation of Box actions")
    normalize_obs: bool = option(False, "bring observations to mean 0, deviation 1 by running statistics")
    center_images: bool = option(False, "take the mean of each image away from it")
    quick: bool = option(True, "small mlps by hand instead of modules and autograd, which it is compared with")
    compile: bool = option(
        False, "nets by torch.compile where the run learns: up to a minute at the start, and on a CPU seldom faster"
    )


@dataclass(frozen=True)
class SchemeOptions(Checked):
    """How the run uses this machine."""

    _group = "scheme."
    threads: int = option(
        0, "threads of torch in the process that learns; 0 is one, or for large images one per core", low=0
    )
    max_lag: int | None = option(
        None, "async: updates by which a rollout may be behind, what is older is dropped; none uses all", low=0
    )
    publish_every: int = option(
        10, "async with a replay: updates between two publications of the weights that act", low=1
    )
    throttle: bool = option(
        True, "async with a replay: samplers wait for a learner that cannot keep up with replay.ratio"
    )


@dataclass(frozen=True)
class EvalOptions(Checked):
    """Evaluation during and after training: greedy episodes in envs of their own."""

    _group = "eval."
    every: int = option(0, "steps between evaluations; 0 evaluates only at the end", low=0)
    episodes: int = option(20, "episodes of each evaluation; 0 never evaluates", low=0)
    seed: int = option(
        1_000_000, "seed of the evaluation episodes, the same in every evaluation", low=0, high=2**63 - 1
    )
    seeds: str | None = option(
        None, "play each of these env seeds once, as 1000-1019, instead of eval.episodes drawn from eval.seed"
    )
    max_steps: int = option(30_000, "steps after which an episode is cut; 0 lets it run for ever", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds is not None:
            parse_seeds(self.seeds, "eval.seeds")


@dataclass(frozen=True)
class CheckpointOptions(Checked):
    """Checkpoints."""

    _group = "checkpoint."
    every: int = option(50_000, "steps between checkpoints; 0 writes only the last", low=0)
    keep: str = option("last", "last (the newest two), all, or a number N: every Nth as well")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in ("last", "all") and not (self.keep.isdigit() and int(self.keep) > 0):
            raise ConfigError(
                f"checkpoint.keep={self.keep!r} is not known: use last, all or a number N for every Nth."
            )


@dataclass(frozen=True)
class LogOptions(Checked):
    """Metrics."""

    _group = "log."
    every: int = option(0, "steps between two metrics lines; 0 writes about 200 lines in a run", low=0)
    window: int = option(100, "episodes over which rollout statistics are taken", low=1)
    tensorboard: bool = option(True, "also write TensorBoard event files")
    wandb: str | None = option(None, "also log to this Weights & Biases project")


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
        if self.sampler.act == "workers" and slots > 1:
            raise ConfigError(f"sampler.slots={slots} with sampler.act=workers: actors take no turns, use 1.")
        if isinstance(options, PPOOptions):
            check_minibatches(options, envs, self.agent.core)
        check_replay(options, self.replay, self.agent.core, envs)
        check_scheme(self)
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


def check_replay(options: AlgoOptions, replay: ReplayOptions, core: str | None, envs: int) -> None:
    """What does not fit together, in one sentence each."""
    if not isinstance(options, OffPolicyOptions):
        if replay != ReplayOptions():
            raise ConfigError("replay options are set, and this algorithm forgets each rollout: leave them out.")
        return
    default = ReplayOptions()
    for name in () if replay.prioritized else ("alpha", "beta"):
        if (value := getattr(replay, name)) != getattr(default, name):
            raise ConfigError(f"replay.{name}={value} without replay.prioritized means nothing: set both or neither.")
    if isinstance(options, DQNOptions) and options.atoms > 1 and options.v_min >= options.v_max:
        raise ConfigError(f"algo.v_min={options.v_min:g} is not below algo.v_max={options.v_max:g}: swap them.")
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
    for name in ("publish_every", "throttle"):
        if getattr(scheme, name) != getattr(default, name) and not (config.scheme == "async" and has_replay):
            raise ConfigError(
                f"scheme.{name}={getattr(scheme, name)} is for a replay under --scheme async: leave it out."
            )
    if config.scheme == "async" and has_replay:
        check_feed(config)
    elif config.scheme == "async":
        check_stream(config)


def check_stream(config: RunConfig) -> None:
    assert isinstance(config.algo_options, OnPolicyOptions)
    if config.algo_options.correction == "on-policy":
        raise ConfigError(
            f"{config.algo} is only right for rollouts of the newest weights, and under --scheme async they are "
            "older: use impala or appo, or --algo.correction none to learn from them as they are."
        )
    if config.sampler.act == "central":
        check_inference_process(config.sampler, config.envs)


def check_feed(config: RunConfig) -> None:
    """Samplers that write to the replay by themselves."""
    if (max_lag := config.scheme_options.max_lag) is not None:
        raise ConfigError(f"scheme.max_lag={max_lag} with a replay, where rows grow old anyway: leave it out.")
    if config.sampler.act == "central":
        raise ConfigError(
            f"sampler.act=central with {config.algo} under --scheme async, whose samplers act: use workers."
        )
    options = config.algo_options
    assert isinstance(options, OffPolicyOptions)
    if options.gradient_steps is not None:
        raise ConfigError(
            f"algo.gradient_steps={options.gradient_steps} under --scheme async has no rounds: set replay.ratio."
        )


def check_inference_process(sampler: SamplerOptions, envs: EnvsOptions) -> None:
    if sampler.wait_reset:
        raise ConfigError(
            "sampler.wait_reset with sampler.act=central under --scheme async: use sampler.act=workers."
        )
    if sampler.slots > 1:
        raise ConfigError(
            f"sampler.slots={sampler.slots} under --scheme async, where groups of envs need not take turns: use 1."
        )
    if envs.backend not in ("auto", "python"):
        raise ConfigError(
            f"envs.backend={envs.backend} with sampler.act=central under --scheme async: its env workers step single "
            "envs, use python or sampler.act=workers."
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
