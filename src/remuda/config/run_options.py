"""Options of a run apart from those of its algorithm, as frozen dataclasses; each field has its help text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remuda.config.fields import Checked, option, parse_seeds
from remuda.errors import ConfigError
from remuda.registry import env_backend_names


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
    workers: int = option(0, "worker processes of the schemes parallel and async; 0 starts one per core", low=0)
    slots: int = option(
        1,
        "groups of envs that take turns; with 2, the policy runs for one group while the other steps",
        low=1,
        high=8,
    )
    inference: str = option(
        "auto",
        "where the policy runs: in one process for all envs, or in the env workers; auto is workers under async",
        choices=("auto", "central", "workers"),
    )
    threads: int = option(1, "async with inference=central: threads of torch in the inference process", low=1)
    wait_reset: bool = option(
        False, "reset an ended env only when the next rollout begins, so that a column holds one episode and padding"
    )
    decorrelate: int = option(0, "largest number of random steps of each env before the first rollout", low=0)


@dataclass(frozen=True)
class EnvsOptions(Checked):
    """How environments are made and supervised."""

    _group = "envs."
    backend: str = option(
        "auto",
        f"library that steps the envs: python, {', '.join(env_backend_names())}; auto uses a native one that is the "
        "same game",
    )
    kwargs: dict[str, Any] = option({}, "keyword arguments of the env, as JSON")
    seeds: str | None = option(None, "env seeds to train on, as 0-199 or 3,5,8; none draws a new seed for each env")
    stats: str | None = option(None, "your own episode statistics, as package.module:Class")
    step_timeout: float = option(60.0, "seconds after which a silent env worker is replaced", above=0.0)
    build_timeout: float = option(120.0, "seconds that building a worker's envs may take", above=0.0)
    max_restarts: int = option(1000, "number of times that one env may raise and be rebuilt", low=0)
    max_worker_restarts: int = option(10, "number of times per minute that one env worker may be replaced", low=0)
    noop_max: int = option(30, "Atari: largest number of no-ops at the start of a game", low=0)
    frame_skip: int | None = option(
        None, "Atari: frames for which an action is repeated; none uses the value of the id", low=1
    )
    sticky: float | None = option(
        None, "Atari: probability that the last action is repeated; none uses the value of the id", low=0.0, high=1.0
    )
    screen_size: int = option(84, "Atari: height and width of a frame, in pixels", low=1)
    interpolation: str = option(
        "area", "Atari: interpolation with which frames are scaled", choices=("area", "linear")
    )
    frame_stack: int = option(4, "Atari: frames in an observation", low=1)
    episodic_life: bool = option(
        False, "Atari: a lost life ends the episode for the learner, but not in the statistics"
    )
    fire_reset: bool = option(False, "Atari: press fire at the start, in games that wait for it")
    full_action_set: bool | None = option(None, "Atari: use all 18 actions; none uses the value of the id")

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
        "auto, mlp, nature, a3c, small, impala, impala-fixup, or your own module as package.module:Net; auto is "
        "nature for images, small for images of a few pixels, mlp otherwise",
    )
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers of an mlp, as 64,64", low=1)
    core: str | None = option(None, "recurrent core on top of the net; none has no memory", choices=("lstm", "gru"))
    core_size: int = option(128, "width of the recurrent core", low=1)
    prev_action: bool = option(False, "add the previous action to the observation")
    prev_reward: bool = option(False, "add the previous reward to the observation")
    activation: str = option("tanh", "activation of the mlp", choices=("tanh", "relu", "elu", "silu"))
    shared: bool = option(False, "one net for policy and value instead of two")
    orthogonal_init: bool = option(True, "orthogonal initial weights of mlp and heads")
    head_hidden: int | None = option(
        None,
        "width of a hidden layer in the heads of Q-learning; 0 has no such layer; none is the width of the features "
        "in dueling and noisy heads, and 0 otherwise",
        low=0,
    )
    log_std_init: float = option(0.0, "initial logarithm of the deviation of Box actions")
    normalize_obs: bool = option(False, "standardize observations to mean 0, deviation 1 by running statistics")
    center_images: bool = option(False, "subtract the mean of each image from it")
    fast_path: bool = option(
        True, "use hand-written gradients for small mlps, which are compared with autograd's while they run"
    )
    compile: bool = option(
        False, "compile the nets of the learner by torch.compile; takes up to a minute, and is seldom faster on a CPU"
    )


@dataclass(frozen=True)
class SchemeOptions(Checked):
    """How the run uses this machine."""

    _group = "scheme."
    threads: int = option(
        0, "threads of torch in the learner's process; 0 is one, or one per core for large images", low=0
    )
    device: str = option("cpu", "async: device of the learner, such as cuda or cuda:1; samplers stay on the CPU")
    max_lag: int | None = option(
        None, "async: largest age of a rollout, in updates; older ones are dropped, none uses all", low=0
    )
    publish_every: int = option(
        10,
        "async with a replay: largest number of updates between two publications of the weights",
        low=1,
    )
    weights: str = option(
        "memory",
        "async: how weights reach the samplers, through shared memory or the file weights.safetensors of the run",
        choices=("memory", "file"),
    )
    throttle: bool = option(
        True, "async with a replay: let samplers wait for a learner that cannot keep up with replay.ratio"
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
    max_steps: int = option(30_000, "steps after which an episode is cut; 0 never cuts", low=0)
    cpu_fraction: float = option(
        0.0,
        "async: fraction of a core for a process that evaluates continuously; 0 starts none",
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
                "eval.video without eval.cpu_fraction has no process that films: set eval.cpu_fraction, for example "
                "to 0.1."
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
        "for envs whose state cannot be saved: end all episodes every checkpoint.every steps, so that a resumed run "
        "is bit-equal to one that was never stopped",
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
    window: int = option(100, "episodes over which rollout statistics are averaged", low=1)
    tensorboard: bool = option(True, "also write TensorBoard event files")
    wandb: str | None = option(None, "also log to this Weights & Biases project")
