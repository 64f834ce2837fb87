"""What can be set of a run beside its algorithm, in frozen dataclasses: a sentence per field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remuda.config.fields import Checked, option, parse_seeds
from remuda.errors import ConfigError


@dataclass(frozen=True)
class ReplayOptions(Checked):
    """What the replay keeps and how batches are drawn from it; for algorithms that learn from a replay."""

    _group = "replay."
    capacity: int = option(100_000, "steps that are kept, over all envs", low=2)
    ratio: float | None = option(
        8.0, "rows drawn per env step; none, under async, learns as fast as possible", low=1e-6, high=1e6
    )
    prioritized: bool = option(False, "draw rows with a probability that grows with their last error")
    alpha: float = option(0.6, "power of the error; 0 draws uniformly", low=0.0, high=1.0)
    beta: str = option(
        "linear(0.4, 1)",
        "power of the importance weights that correct for it: a number or a schedule",
        schedule=True,
        high=1.0,
    )
    initial_priority: str = option(
        "largest",
        "priority of rows that were never drawn: the largest priority so far, or the TD error, which samplers "
        "compute (Q-learning under async)",
        choices=("largest", "error"),
    )
    n_step: int = option(1, "rewards that are summed before bootstrapping from a value", low=1)
    sequence: int = option(0, "rows of the sequences drawn for recurrent agents; 0 draws single rows", low=0)
    burn_in: int = option(0, "rows before each sequence that only warm up the recurrent state", low=0)
    frames: int = option(
        0, "images stacked in an observation, each stored once; 0 detects them, 1 stores whole observations", low=0
    )


@dataclass(frozen=True)
class SamplerOptions(Checked):
    """How experience is sampled."""

    _group = "sampler."
    envs: int = option(8, "environments, over all workers", low=1, high=100_000)
    workers: int = option(0, "worker processes of the schemes parallel and async; 0 takes one per core", low=0)
    slots: int = option(1, "groups of envs that take turns; 2 acts for one while the other steps", low=1, high=8)
    inference: str = option(
        "auto",
        "who runs the policy: one process for all envs, or the env workers themselves; auto is workers under async",
        choices=("auto", "central", "workers"),
    )
    threads: int = option(
        1, "async with inference=central: threads of torch in the process that acts for all envs", low=1
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
    fast_path: bool = option(True, "small mlps by hand instead of modules and autograd, which it is compared with")
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
    device: str = option(
        "cpu", "async: where the learner's nets are, such as cuda or cuda:1; those who act stay on the CPU"
    )
    max_lag: int | None = option(
        None, "async: updates by which a rollout may be behind, what is older is dropped; none uses all", low=0
    )
    publish_every: int = option(
        10,
        "async with a replay: updates after which weights are published at the latest; at once if none is due",
        low=1,
    )
    weights: str = option(
        "memory",
        "async: how weights reach those who act, through shared memory or the file weights.safetensors of the run",
        choices=("memory", "file"),
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
    cpu_fraction: float = option(
        0.0,
        "async: the share of a core that a process of its own takes to evaluate all the time; 0 has none",
        low=0.0,
        high=1.0,
    )
    video: bool = option(False, "with eval.cpu_fraction: film an episode after each evaluation, to videos/newest.mp4")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds is not None:
            parse_seeds(self.seeds, "eval.seeds")
        if self.cpu_fraction and not self.episodes:
            raise ConfigError(
                f"eval.cpu_fraction={self.cpu_fraction:g} with eval.episodes=0 has nothing to play: leave one out."
            )
        if self.video and not self.cpu_fraction:
            raise ConfigError(
                "eval.video without eval.cpu_fraction has nobody to film: set eval.cpu_fraction, for example to 0.1."
            )


@dataclass(frozen=True)
class CheckpointOptions(Checked):
    """Checkpoints."""

    _group = "checkpoint."
    every: int = option(50_000, "steps between checkpoints; 0 writes only the last", low=0)
    keep: str = option(
        "last", "last (the newest two), best (also the best evaluation's), all, or a number N: every Nth as well"
    )
    cut_episodes: bool = option(
        False,
        "envs whose state cannot be saved: end all episodes every checkpoint.every steps, so that a resumed run is "
        "bit-equal to one that was never stopped",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in ("last", "best", "all") and not (self.keep.isdigit() and int(self.keep) > 0):
            raise ConfigError(
                f"checkpoint.keep={self.keep!r} is not known: use last, best, all or a number N for every Nth."
            )
        if self.cut_episodes and not self.every:
            raise ConfigError(
                "checkpoint.cut_episodes with checkpoint.every=0 never cuts: set checkpoint.every, as to 50000."
            )


@dataclass(frozen=True)
class LogOptions(Checked):
    """Metrics."""

    _group = "log."
    every: int = option(0, "steps between two metrics lines; 0 writes about 200 lines in a run", low=0)
    window: int = option(100, "episodes over which rollout statistics are taken", low=1)
    tensorboard: bool = option(True, "also write TensorBoard event files")
    wandb: str | None = option(None, "also log to this Weights & Biases project")
