"""Options of a run except those of its algorithm, as frozen dataclasses with a help text for each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remuda.config.fields import Checked, option, parse_seeds
from remuda.errors import ConfigError
from remuda.registry import env_backend_names


@dataclass(frozen=True)
class ReplayOptions(Checked):
    """Size of the replay, and how batches are drawn from it."""

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
    """Number of envs and worker processes, and where the policy runs."""

    _group = "sampler."
    envs: int = option(8, "number of environments, over all workers", low=1, high=100_000)
    workers: int = option(
        0,
        "number of worker processes; 0 starts one per core; under replicas, of each rank, and 0 starts none",
        low=0,
        high=10_000,
        used_by="workers",
    )
    slots: int = option(
        1,
        "number of groups of envs that take turns: with 2, one group steps while the policy runs for the other",
        low=1,
        high=8,
    )
    inference: str = option(
        "auto",
        "where the policy runs: central, in one process for all envs, or in the workers; auto is workers under async",
        choices=("auto", "central", "workers"),
    )
    device: str = option(
        "auto", "device where the policy runs, such as cuda or cpu; auto is --device, but the CPU in worker processes"
    )
    threads: int = option(
        1,
        "number of torch threads of the inference process, under async with sampler.inference=central",
        low=1,
        high=1_000,
        used_by="async",
    )
    wait_reset: bool = option(
        False, "reset an env only at the start of the next rollout; the rest of its rows is padding"
    )
    decorrelate: int = option(
        0, "maximum number of random steps in each env before the first rollout", low=0, high=1_000_000
    )


@dataclass(frozen=True)
class EnvsOptions(Checked):
    """How envs are built, restarted and preprocessed."""

    _group = "envs."
    backend: str = option(
        "auto",
        f"implementation of the envs: python, {', '.join(env_backend_names())}; auto uses a native one that is "
        "equivalent",
    )
    kwargs: dict[str, Any] = option({}, "keyword arguments of the env, as JSON")
    seeds: str | None = option(
        None, "seeds of the envs to train on, such as 0-199 or 3,5,8; none draws a seed for each env"
    )
    stats: str | None = option(None, "class for additional episode statistics, as package.module:Class")
    step_timeout: float = option(
        60.0, "seconds without an answer after which a worker is replaced", above=0.0, high=1e7
    )
    build_timeout: float = option(
        120.0, "time limit for building the envs of a worker, in seconds", above=0.0, high=1e7
    )
    max_restarts: int = option(
        1000, "number of exceptions of one env after which the run fails; the env is rebuilt until then", low=0
    )
    max_worker_restarts: int = option(10, "number of times per minute that one worker may be replaced", low=0)
    noop_max: int = option(
        30,
        "Atari: a game starts with a random number of no-ops below this one; 0 and 1: with none",
        low=0,
        high=1_000_000,
    )
    frame_skip: int | None = option(
        None, "Atari: number of frames that each action is repeated; none: by env id", low=1, high=1_000_000
    )
    sticky: float | None = option(
        None, "Atari: probability of repeating the previous action; none: by env id", low=0.0, high=1.0
    )
    screen_size: int = option(84, "Atari: height and width of a frame in pixels", low=1, high=10_000)
    interpolation: str = option("area", "Atari: interpolation for resizing frames", choices=("area", "linear"))
    frame_stack: int = option(4, "Atari: number of frames in an observation", low=1, high=1_000)
    episodic_life: bool = option(
        False, "Atari: end the episode at each lost life for the learner; statistics are of whole games"
    )
    fire_reset: bool = option(False, "Atari: press fire at the start of games that wait for it")
    full_action_set: bool | None = option(None, "Atari: use all 18 actions; none: by env id")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds is not None:
            parse_seeds(self.seeds, "envs.seeds")


@dataclass(frozen=True)
class AgentOptions(Checked):
    """Architecture, memory and normalization of the network."""

    _group = "agent."
    net: str = option(
        "auto",
        "auto, mlp, nature, a3c, small, impala, impala-fixup, or your own module as package.module:Net; auto is "
        "nature for images, small for images below 36 pixels, and mlp otherwise",
    )
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers, such as 64,64", low=1, high=1_000_000)
    core: str | None = option(None, "recurrent layer on top of the net; none: no memory", choices=("lstm", "gru"))
    core_size: int = option(128, "width of the recurrent layer", low=1, high=100_000)
    prev_action: bool = option(False, "add the previous action to the agent's input")
    prev_reward: bool = option(False, "add the previous reward to the agent's input")
    activation: str = option(
        "tanh", "activation function of the hidden layers", choices=("tanh", "relu", "elu", "silu")
    )
    shared: bool = option(False, "use one net for policy and value instead of two")
    orthogonal_init: bool = option(True, "initialize weights of hidden layers and heads orthogonally")
    head_hidden: int | None = option(
        None,
        "width of the hidden layer in the heads of Q-learning; 0: no hidden layer; none: as wide as the features in "
        "dueling and noisy heads, otherwise 0",
        low=0,
        high=1_000_000,
    )
    log_std_init: float = option(
        0.0, "initial logarithm of the standard deviation of Box actions", low=-20.0, high=20.0
    )
    normalize_obs: bool = option(False, "normalize observations by their running mean and standard deviation")
    center_images: bool = option(False, "subtract the mean of each image from it")
    fast_path: bool = option(True, "use hand-written gradients for small mlps; they are checked against autograd")
    precision: str = option(
        "fp32", "bf16 computes the nets in bfloat16 and all else in float32", choices=("fp32", "bf16")
    )
    compile: bool = option(
        False, "use torch.compile in the learner; takes up to a minute to start, and is seldom faster on a CPU"
    )


@dataclass(frozen=True)
class SchemeOptions(Checked):
    """Threads of the learner, ranks, and options of asynchronous learning."""

    _group = "scheme."
    threads: int = option(
        0, "number of torch threads of the learner; 0: one, or one per core for large images", low=0, high=1_000
    )
    parts: int = option(
        1,
        "number of parts with an equal share of envs, minibatches and replay; ranks of replicas compute the same",
        low=1,
        high=10_000,
        used_by="serial",
    )
    ranks: int = option(
        0,
        "number of processes that sample and learn; 0: as torchrun says, otherwise one per core",
        low=0,
        high=10_000,
        used_by="replicas",
    )
    exchange: str = option(
        "auto",
        "how ranks exchange gradients; auto: through shared memory on one host, by gloo between hosts",
        choices=("auto", "gloo"),
        used_by="replicas",
    )
    max_lag: int | None = option(
        None,
        "maximum age of a rollout, in updates; older rollouts are dropped; none: no maximum",
        low=0,
        used_by="async rollouts",
    )
    publish_every: int = option(
        10,
        "maximum number of updates between two publications of the weights to samplers",
        low=1,
        used_by="async replay",
    )
    weights: str = option(
        "memory",
        "how samplers receive weights: through shared memory or the file weights.safetensors of the run",
        choices=("memory", "file"),
        used_by="async",
    )
    throttle: bool = option(
        True, "let samplers wait for a learner that cannot keep up with replay.ratio", used_by="async replay"
    )


@dataclass(frozen=True)
class EvalOptions(Checked):
    """Greedy episodes in separate envs, during and after training."""

    _group = "eval."
    every: int = option(0, "number of steps between evaluations; 0: only at the end", low=0)
    episodes: int = option(20, "number of episodes in each evaluation; 0: no evaluation", low=0, high=1_000_000)
    seed: int = option(1_000_000, "seed of the episodes, the same in every evaluation", low=0, high=2**63 - 1)
    seeds: str | None = option(
        None, "env seeds to play once each, such as 1000-1019, instead of eval.episodes and eval.seed"
    )
    max_steps: int = option(30_000, "maximum length of an episode in steps; 0: no maximum", low=0)
    cpu_fraction: float = option(
        0.0,
        "fraction of a core for a process that evaluates continuously; 0: no such process",
        low=0.0,
        high=1.0,
        used_by="async",
    )
    video: bool = option(
        False,
        "with eval.cpu_fraction: record an episode after each evaluation as videos/newest.mp4",
        used_by="async",
    )

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
                "eval.video needs eval.cpu_fraction, whose process records the video: set it, for example to 0.1."
            )


@dataclass(frozen=True)
class CheckpointOptions(Checked):
    """How often checkpoints are written, and which are kept."""

    _group = "checkpoint."
    every: int = option(50_000, "number of steps between checkpoints; 0: only at the end", low=0)
    keep: str = option(
        "last",
        "checkpoints to keep: last (the newest two), best (also that of the best evaluation), all, or a "
        "number N (also every Nth)",
    )
    cut_episodes: bool = option(
        False,
        "end all episodes every checkpoint.every steps, so that runs resume exactly even if the state of the env "
        "cannot be saved",
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
    """How often metrics are written, and where."""

    _group = "log."
    every: int = option(0, "number of steps between two lines of metrics; 0: about 200 lines in a run", low=0)
    window: int = option(100, "number of episodes over which rollout statistics are averaged", low=1, high=10_000_000)
    tensorboard: bool = option(True, "write TensorBoard event files as well")
    wandb: str | None = option(None, "Weights & Biases project to log to as well")
