"""What can be set of each algorithm, in frozen dataclasses; names are those of Stable-Baselines3 where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remuda.config.fields import Auto, Checked, option
from remuda.errors import ConfigError


@dataclass(frozen=True)
class AlgoOptions(Checked):
    """What all algorithms have in common."""

    _group = "algo."
    data: ClassVar[str] = "rollouts"  # what the algorithm learns from: rollouts or replay
    unused_agent_options: ClassVar[tuple[str, ...]] = ()  # names in `AgentOptions` that its agent does not have
    unused_options: ClassVar[tuple[str, ...]] = ()  # inherited options that have no effect

    learning_rate: str = option("3e-4", "step size: a number or a schedule such as linear(3e-4, 0)", schedule=True)
    gamma: float = option(0.99, "discount per step", low=0.0, high=1.0)
    max_grad_norm: float = option(0.5, "largest norm of a gradient; 0 never clips", low=0.0)
    clip_reward: bool = option(False, "clip rewards to -1..1 when learning; what is logged stays as the env gave it")
    optimizer: str = option("adam", "optimizer", choices=("adam", "adamw", "rmsprop"))
    optimizer_eps: float = option(1e-5, "the optimizer's epsilon", above=0.0)
    weight_decay: float = option(0.0, "weight decay of the optimizer", low=0.0)
    rms_alpha: float = option(0.99, "smoothing constant of RMSprop", low=0.0, high=1.0)
    momentum: float = option(0.0, "momentum of RMSprop", low=0.0, high=1.0)
    variant: str | None = option(None, "your own subclass of the algorithm, as package.module:Class")


@dataclass(frozen=True)
class OnPolicyOptions(AlgoOptions):
    """What algorithms that learn from fresh rollouts have in common."""

    unused_agent_options: ClassVar[tuple[str, ...]] = ("head_hidden",)

    n_steps: int = option(128, "rows of each env in one rollout", low=1, high=1_000_000)
    ent_coef: str = option("0", "weight of the entropy bonus: a number or a schedule", schedule=True)
    vf_coef: float = option(0.5, "weight of the value loss", low=0.0)
    normalize_reward: bool = option(False, "divide rewards by the running deviation of the discounted return")
    correction: str = option(
        "on-policy",
        "data of an older policy: on-policy refuses schemes that give it, none learns from it as it is",
        choices=("on-policy", "none"),
    )

    @property
    def rows_per_round(self) -> int:
        """Rows of each env in one rollout."""
        return self.n_steps

    def columns_per_round(self, envs: int) -> int:
        """Sequences that one round of an asynchronous scheme learns from."""
        return envs

    def updates_per_round(self, columns: int) -> int:
        """Of so many sequences, if none is left out."""
        return 1


@dataclass(frozen=True)
class GAEOptions(OnPolicyOptions):
    """What A2C and PPO have in common."""

    gae_lambda: float = option(0.95, "lambda of generalised advantage estimation", low=0.0, high=1.0)
    normalize_advantage: bool = option(True, "bring advantages of each minibatch to mean 0, deviation 1")


@dataclass(frozen=True)
class PPOOptions(GAEOptions):
    """Proximal policy optimisation."""

    batch_size: int = option(256, "rows of a minibatch; must divide n_steps x envs", low=1)
    n_epochs: int = option(4, "passes over each rollout", low=1)
    clip_range: str = option("0.2", "clip range of the probability ratio: a number or a schedule", schedule=True)
    clip_range_vf: str | None = option(
        None, "clip range of the value's change, a number or a schedule; none does not clip", schedule=True
    )
    target_kl: float | None = option(
        None, "end a rollout's updates when the KL passes 1.5 x this; none never", above=0.0
    )

    def updates_per_round(self, columns: int) -> int:
        return self.n_epochs * max(1, self.n_steps * columns // self.batch_size)


@dataclass(frozen=True)
class A2COptions(GAEOptions):
    """Advantage actor-critic."""

    learning_rate: str = option("7e-4", "step size: a number or a schedule such as linear(7e-4, 0)", schedule=True)
    n_steps: int = option(8, "rows of each env in one rollout", low=1, high=1_000_000)
    gae_lambda: float = option(1.0, "lambda of generalised advantage estimation", low=0.0, high=1.0)
    normalize_advantage: bool = option(False, "bring advantages of each rollout to mean 0, deviation 1")
    optimizer: str = option("rmsprop", "optimizer", choices=("adam", "adamw", "rmsprop"))


@dataclass(frozen=True)
class VTraceOptions(OnPolicyOptions):
    """What IMPALA and APPO have in common."""

    learning_rate: str = option("6e-4", "step size: a number or a schedule such as linear(6e-4, 0)", schedule=True)
    n_steps: int = option(20, "rows of each env in one sequence", low=1, high=1_000_000)
    batch_size: int = option(8, "sequences of n_steps rows in one update", low=1)
    vtrace_lambda: float = option(1.0, "lambda of V-trace: 1 is that of the paper", low=0.0, high=1.0)
    rho_clip: float | None = option(1.0, "largest ratio in errors of the values; none does not clip", above=0.0)
    c_clip: float | None = option(1.0, "largest ratio that carries errors back; none does not clip", above=0.0)
    correction: str = option(
        "vtrace",
        "data of an older policy: vtrace corrects for it, none learns from it as it is",
        choices=("vtrace", "none"),
    )

    def columns_per_round(self, envs: int) -> int:
        """Those of one update, whoever they come from."""
        return self.batch_size

    def updates_per_round(self, columns: int) -> int:
        return -(-columns // self.batch_size)


@dataclass(frozen=True)
class ImpalaOptions(VTraceOptions):
    """IMPALA: the policy gradient, corrected by V-trace."""

    max_grad_norm: float = option(40.0, "largest norm of a gradient; 0 never clips", low=0.0)
    pg_rho_clip: float | None = option(1.0, "largest ratio in the policy gradient; none does not clip", above=0.0)
    reduction: str = option("mean", "losses of rows are added up or averaged", choices=("sum", "mean"))


@dataclass(frozen=True)
class APPOOptions(VTraceOptions):
    """Asynchronous PPO: its clipped surrogate on targets of V-trace."""

    n_epochs: int = option(1, "passes over each batch", low=1)
    clip_range: str = option("0.2", "clip range of the probability ratio: a number or a schedule", schedule=True)
    clip_range_vf: str | None = option(
        None, "clip range of the value's change, a number or a schedule; none does not clip", schedule=True
    )
    target_kl: float | None = option(
        None, "end a rollout's updates when the KL passes 1.5 x this; none never", above=0.0
    )
    normalize_advantage: bool = option(True, "bring advantages of each minibatch to mean 0, deviation 1")

    def updates_per_round(self, columns: int) -> int:
        return self.n_epochs * super().updates_per_round(columns)


@dataclass(frozen=True)
class OffPolicyOptions(AlgoOptions):
    """What algorithms that learn from a replay have in common."""

    data: ClassVar[str] = "replay"
    unused_agent_options: ClassVar[tuple[str, ...]] = ("shared", "log_std_init", "head_hidden")

    train_freq: int = option(1, "rows of each env between two rounds of updates", low=1, high=1_000_000)
    batch_size: int = option(256, "drawn rows, or sequences, in one update", low=1, high=10_000_000)
    learning_starts: int = option(1000, "env steps with random actions before the first update", low=0)
    gradient_steps: int | None = option(
        None, "updates in one round; none takes what replay.ratio makes due", low=1, high=1_000_000
    )
    tau: float = option(0.005, "share of the way that target nets move in each of their updates", above=0.0, high=1.0)
    target_update_interval: int = option(1, "updates between two updates of the target nets", low=1)
    max_grad_norm: float = option(0.0, "largest norm of a gradient; 0 never clips", low=0.0)

    @property
    def rows_per_round(self) -> int:
        """Rows of each env in one rollout."""
        return self.train_freq


@dataclass(frozen=True)
class DQNOptions(OffPolicyOptions):
    """Deep Q-learning; Rainbow is the same with other defaults."""

    unused_agent_options: ClassVar[tuple[str, ...]] = ("shared", "log_std_init")

    learning_rate: str = option("1e-3", "step size: a number or a schedule such as linear(1e-3, 0)", schedule=True)
    batch_size: int = option(64, "drawn rows in one update", low=1, high=10_000_000)
    tau: float = option(1.0, "share of the way that the target net moves in each of its updates", above=0.0, high=1.0)
    target_update_interval: int = option(500, "updates between two updates of the target net", low=1)
    max_grad_norm: float = option(10.0, "largest norm of a gradient; 0 never clips", low=0.0)
    epsilon: str = option(
        "piecewise(0:1, 0.1:0.05)", "chance of a random action: a number or a schedule", schedule=True, high=1.0
    )
    epsilon_power: float = option(
        0.0, "env i of B has epsilon ** (1 + power * i / (B - 1)): 7 is Ape-X's, 0 gives all the same", low=0.0
    )
    double: bool = option(True, "let the online net choose the action that the target net judges")
    dueling: bool = option(False, "a value of the state and advantages of actions instead of values of actions")
    noisy: bool = option(False, "explore by learned noise on the weights of the head; set epsilon to 0 with it")
    atoms: int = option(1, "atoms of a distribution over returns; 1 learns its mean alone, C51 has 51", low=1)
    v_min: float | Auto = option("auto", "smallest return of the distribution; auto derives it before learning")
    v_max: float | Auto = option("auto", "largest return of the distribution; auto derives it before learning")
    huber: float | None = option(1.0, "error beyond which the loss is straight; none squares every error", above=0.0)


@dataclass(frozen=True)
class RainbowOptions(DQNOptions):
    """Double, dueling, distributional, noisy, n-step, prioritized DQN."""

    epsilon: str = option("0", "chance of a random action: a number or a schedule", schedule=True, high=1.0)
    dueling: bool = option(True, "a value of the state and advantages of actions instead of values of actions")
    noisy: bool = option(True, "explore by learned noise on the weights of the head")
    atoms: int = option(51, "atoms of a distribution over returns; 1 learns its mean alone", low=1)


@dataclass(frozen=True)
class R2D1Options(DQNOptions):
    """Deep Q-learning with memory, from sequences."""

    unused_options: ClassVar[tuple[str, ...]] = ("atoms", "v_min", "v_max")

    train_freq: int = option(20, "rows of each env between two rounds; recurrent state is stored as often", low=1)
    batch_size: int = option(32, "drawn sequences in one update", low=1, high=10_000_000)
    dueling: bool = option(True, "a value of the state and advantages of actions instead of values of actions")
    rescale: bool = option(True, "learn values on the compressed scale of 1805.11593")
    eta: float = option(0.9, "share of the largest error in a sequence's priority", low=0.0, high=1.0)
    huber: float | None = option(None, "error beyond which the loss is straight; none squares every error", above=0.0)


@dataclass(frozen=True)
class ActorCriticOptions(OffPolicyOptions):
    """What DDPG, TD3 and SAC have in common."""

    critics: int = option(2, "critics, of which the smallest value counts", low=1, high=10)
    actor_learning_rate: str | None = option(
        None, "step size of the actor, a number or a schedule; none takes learning_rate", schedule=True
    )
    reward_scale: float = option(1.0, "what rewards are multiplied by when learning", above=0.0)


@dataclass(frozen=True)
class DDPGOptions(ActorCriticOptions):
    """Deep deterministic policy gradients."""

    learning_rate: str = option("1e-3", "step size: a number or a schedule such as linear(1e-3, 0)", schedule=True)
    critics: int = option(1, "critics, of which the smallest value counts", low=1, high=10)
    noise: str = option("gaussian", "kind of noise on actions, ou drifts", choices=("gaussian", "ou"))
    noise_std: float = option(
        0.1, "its deviation, where actions go from -1 to 1; of ou noise the one it comes to", low=0.0
    )
    policy_delay: int = option(1, "updates of the critics for one of the actor", low=1)
    target_update_interval: int = option(1, "updates of the actor between two updates of the target nets", low=1)
    target_noise: float = option(0.0, "deviation of the noise on target actions", low=0.0)
    target_noise_clip: float = option(0.5, "largest noise on target actions", low=0.0)


@dataclass(frozen=True)
class TD3Options(DDPGOptions):
    """DDPG with two critics, a delayed actor and smoothed targets."""

    critics: int = option(2, "critics, of which the smallest value counts", low=1, high=10)
    policy_delay: int = option(2, "updates of the critics for one of the actor", low=1)
    target_noise: float = option(0.2, "deviation of the noise on target actions", low=0.0)


@dataclass(frozen=True)
class SACOptions(ActorCriticOptions):
    """Soft actor-critic."""

    ent_coef: str = option("auto", "weight of the entropy: auto learns it, auto_0.1 from that value on, or a number")
    target_entropy: float | None = option(None, "entropy that auto aims at; none is minus the number of actions")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.entropy_weight()

    def entropy_weight(self) -> tuple[float | None, float]:
        """The fixed weight, None if it is learned; and where learning it begins."""
        learned, _, start = self.ent_coef.partition("_")
        try:
            found = (None, float(start or 1.0)) if learned == "auto" else (float(self.ent_coef), 1.0)
        except ValueError:
            found = (None, -1.0)
        if not all(value is None or 0 < value < float("inf") for value in found):
            raise ConfigError(
                f"algo.ent_coef={self.ent_coef!r} is not a weight: give auto, auto_0.1 or a number above 0."
            )
        return found


@dataclass(frozen=True)
class ReplayOptions(Checked):
    """Size of the replay, and how batches are drawn from it."""

    _group = "replay."
    capacity: int = option(100_000, "steps that are kept, over all envs", low=2)
    ratio: float | None = option(
        8.0, "drawn rows for every env step; none, under async, learns as fast as it can", low=1e-6, high=1e6
    )
    prioritized: bool = option(False, "draw rows in proportion to their last error")
    alpha: float = option(0.6, "power of the error: 0 draws all alike", low=0.0, high=1.0)
    beta: str = option(
        "linear(0.4, 1)", "how much of that is corrected for: a number or a schedule", schedule=True, high=1.0
    )
    initial_priority: str = option(
        "largest",
        "of what was never drawn: that of the likeliest so far, or, of Q-learning under async, its own error, which "
        "samplers find",
        choices=("largest", "error"),
    )
    n_step: int = option(1, "rewards that are added up before a value is taken", low=1)
    sequence: int = option(0, "rows of the drawn sequences of recurrent agents; 0 draws single rows", low=0)
    burn_in: int = option(0, "rows before each sequence that only bring its state up to date", low=0)
    frames: int = option(
        0, "images in an observation, each of which is kept once; 0 finds out, 1 keeps observations whole", low=0
    )


ALGORITHMS: dict[str, type[AlgoOptions]] = {
    "a2c": A2COptions,
    "appo": APPOOptions,
    "ddpg": DDPGOptions,
    "dqn": DQNOptions,
    "impala": ImpalaOptions,
    "ppo": PPOOptions,
    "r2d1": R2D1Options,
    "rainbow": RainbowOptions,
    "sac": SACOptions,
    "td3": TD3Options,
}
