"""Options of the algorithms, as frozen dataclasses; those of DDPG, TD3 and SAC are in continuous_options.py.

An option that also exists in Stable-Baselines3 has the same name here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from remuda.config.algo_base import AlgoOptions, Data
from remuda.config.fields import Auto, option
from remuda.errors import ConfigError

if TYPE_CHECKING:
    from remuda.config.run_config import RunConfig


@dataclass(frozen=True)
class OnPolicyOptions(AlgoOptions):
    """Options common to all algorithms that learn from fresh rollouts, such as PPO and IMPALA."""

    data: ClassVar[Data] = "rollouts"
    builder: ClassVar[str] = "remuda.build.algorithm:ON_POLICY"
    unused_agent_options: ClassVar[tuple[str, ...]] = ("head_hidden",)

    n_steps: int = option(128, "rows of each env in one rollout", low=1, high=1_000_000)
    ent_coef: str = option("0", "weight of the entropy bonus: a number or a schedule", schedule=True)
    vf_coef: float = option(0.5, "weight of the value loss", low=0.0)
    normalize_reward: bool = option(False, "divide rewards by the running deviation of the discounted return")
    correction: str = option(
        "on-policy",
        "for rollouts of an older policy: on-policy refuses schemes with such rollouts, none uses them uncorrected",
        choices=("on-policy", "none"),
    )

    @property
    def is_on_policy(self) -> bool:
        return self.correction == "on-policy"

    @property
    def rows_per_round(self) -> int:
        return self.n_steps

    @property
    def minibatches(self) -> tuple[int, int | None]:
        """Number of epochs over each rollout, and rows (or sequences) per minibatch (None: the whole rollout)."""
        return 1, None

    def shortened(self, steps: int, envs: int) -> Self:
        return replace(self, n_steps=min(self.n_steps, max(2, steps // envs)))


@dataclass(frozen=True)
class GAEOptions(OnPolicyOptions):
    """Options that A2C and PPO share."""

    gae_lambda: float = option(0.95, "lambda of generalized advantage estimation", low=0.0, high=1.0)
    normalize_advantage: bool = option(True, "standardize the advantages of each minibatch to mean 0, deviation 1")


@dataclass(frozen=True)
class PPOOptions(GAEOptions):
    """Proximal policy optimization."""

    batch_size: int = option(256, "rows of a minibatch; must divide n_steps x envs", low=1)
    n_epochs: int = option(4, "passes over each rollout", low=1)
    clip_range: str = option("0.2", "clip range of the probability ratio: a number or a schedule", schedule=True)
    clip_range_vf: str | None = option(
        None, "clip range of the value's change, a number or a schedule; none does not clip", schedule=True
    )
    target_kl: float | None = option(
        None, "end the updates of a rollout when the KL exceeds 1.5 x this; none never ends them", above=0.0
    )

    @property
    def minibatches(self) -> tuple[int, int | None]:
        return self.n_epochs, self.batch_size

    def updates_per_round(self, columns: int) -> int:
        return self.n_epochs * max(1, self.n_steps * columns // self.batch_size)

    def faster_updates(self) -> list[str]:
        return [*_fewer_epochs(self.n_epochs), "larger minibatches (--algo.batch_size)"]

    def shortened(self, steps: int, envs: int) -> Self:
        short = super().shortened(steps, envs)
        if short.n_steps == self.n_steps:
            return self
        return replace(short, batch_size=short.n_steps * envs)  # a minibatch that is the whole rollout always fits

    def with_memory(self) -> Self:
        """Return these options with minibatches of at least one sequence of `n_steps` rows.

        The batch sizes in presets are meant for agents without memory, and may be smaller.
        """
        return replace(self, batch_size=max(self.batch_size, self.n_steps))

    def check_run(self, config: RunConfig) -> None:
        size, envs, rows = self.batch_size, config.sampler.envs, self.n_steps * config.sampler.envs
        if self.normalize_advantage and size < 2:
            raise ConfigError("algo.batch_size=1 leaves nothing to normalize advantages over: use 2 or more.")
        if config.agent.core is None:
            if rows % size:
                small = [divisor for divisor in range(1, math.isqrt(rows) + 1) if rows % divisor == 0]
                divisors = {*small, *(rows // divisor for divisor in small)}
                near = sorted(divisors, key=lambda divisor: (abs(divisor - size), divisor))
                raise ConfigError(
                    f"algo.batch_size={size} does not divide the {rows} rows of a rollout "
                    f"(n_steps={self.n_steps} x envs={envs}): use for example {' or '.join(map(str, near[:2]))}."
                )
        elif size % self.n_steps or envs % (size // self.n_steps):
            whole = sorted({self.n_steps * count for count in range(1, envs + 1) if envs % count == 0})
            raise ConfigError(
                f"algo.batch_size={size} is not a whole number of envs' sequences that divides envs={envs} "
                f"(n_steps={self.n_steps}): recurrent PPO splits along envs, use {' or '.join(map(str, whole))}."
            )


@dataclass(frozen=True)
class A2COptions(GAEOptions):
    """Advantage actor-critic."""

    learning_rate: str = option("7e-4", "step size: a number or a schedule such as linear(7e-4, 0)", schedule=True)
    n_steps: int = option(8, "rows of each env in one rollout", low=1, high=1_000_000)
    gae_lambda: float = option(1.0, "lambda of generalized advantage estimation", low=0.0, high=1.0)
    normalize_advantage: bool = option(False, "standardize the advantages of each rollout to mean 0, deviation 1")
    optimizer: str = option("rmsprop", "optimizer", choices=("adam", "adamw", "rmsprop"))


@dataclass(frozen=True)
class VTraceOptions(OnPolicyOptions):
    """Options that IMPALA and APPO share."""

    data: ClassVar[Data] = "sequences"

    learning_rate: str = option("6e-4", "step size: a number or a schedule such as linear(6e-4, 0)", schedule=True)
    n_steps: int = option(20, "rows of each env in one sequence", low=1, high=1_000_000)
    batch_size: int = option(8, "sequences of n_steps rows in one update", low=1)
    vtrace_lambda: float = option(1.0, "lambda of V-trace; the paper has 1", low=0.0, high=1.0)
    rho_clip: float | None = option(1.0, "largest ratio in the TD errors; none does not clip", above=0.0)
    c_clip: float | None = option(
        1.0, "largest ratio that carries errors back in time; none does not clip", above=0.0
    )
    correction: str = option(
        "vtrace",
        "for rollouts of an older policy: vtrace corrects for its age, none uses them uncorrected",
        choices=("vtrace", "none"),
    )

    @property
    def minibatches(self) -> tuple[int, int | None]:
        return 1, self.batch_size

    def columns_per_round(self, envs: int) -> int:
        """Return `batch_size`: the sequences (columns) of one round form one minibatch, for any number of `envs`."""
        return self.batch_size

    def updates_per_round(self, columns: int) -> int:
        return -(-columns // self.batch_size)


@dataclass(frozen=True)
class ImpalaOptions(VTraceOptions):
    """IMPALA: the policy gradient, corrected by V-trace."""

    max_grad_norm: float = option(40.0, "largest norm of a gradient; 0 disables clipping", low=0.0)
    pg_rho_clip: float | None = option(1.0, "largest ratio in the policy gradient; none does not clip", above=0.0)
    reduction: str = option("mean", "whether the losses of rows are summed or averaged", choices=("sum", "mean"))


@dataclass(frozen=True)
class APPOOptions(VTraceOptions):
    """Asynchronous PPO: a clipped surrogate with V-trace targets."""

    n_epochs: int = option(1, "passes over each batch", low=1)
    clip_range: str = option("0.2", "clip range of the probability ratio: a number or a schedule", schedule=True)
    clip_range_vf: str | None = option(
        None, "clip range of the value's change, a number or a schedule; none does not clip", schedule=True
    )
    target_kl: float | None = option(
        None, "end the updates of a rollout when the KL exceeds 1.5 x this; none never ends them", above=0.0
    )
    normalize_advantage: bool = option(True, "standardize the advantages of each minibatch to mean 0, deviation 1")

    @property
    def minibatches(self) -> tuple[int, int | None]:
        return self.n_epochs, self.batch_size

    def updates_per_round(self, columns: int) -> int:
        return self.n_epochs * super().updates_per_round(columns)

    def faster_updates(self) -> list[str]:
        return _fewer_epochs(self.n_epochs)


def _fewer_epochs(n_epochs: int) -> list[str]:
    return ["fewer epochs (--algo.n_epochs)"] if n_epochs > 1 else []


@dataclass(frozen=True)
class OffPolicyOptions(AlgoOptions):
    """Options common to all algorithms that learn from a replay, such as DQN and SAC."""

    data: ClassVar[Data] = "replay"
    unused_agent_options: ClassVar[tuple[str, ...]] = ("shared", "log_std_init", "head_hidden")

    train_freq: int = option(1, "rows of each env between two rounds of updates", low=1, high=1_000_000)
    batch_size: int = option(256, "rows, or sequences, drawn for one update", low=1, high=10_000_000)
    learning_starts: int = option(1000, "env steps with random actions before the first update", low=0)
    gradient_steps: int | None = option(
        None, "updates in one round; none makes as many as replay.ratio requires", low=1, high=1_000_000
    )
    tau: float = option(0.005, "fraction by which target nets move in each of their updates", above=0.0, high=1.0)
    target_update_interval: int = option(1, "updates between two updates of the target nets", low=1)
    max_grad_norm: float = option(0.0, "largest norm of a gradient; 0 disables clipping", low=0.0)

    @property
    def rows_per_round(self) -> int:
        return self.train_freq

    @property
    def random_steps(self) -> int:
        return self.learning_starts

    def algorithm_arguments(self) -> dict[str, object]:
        return {"target_interval": self.target_update_interval}

    def faster_updates(self) -> list[str]:
        return ["fewer drawn rows per step (--replay.ratio)"]

    def shortened(self, steps: int, envs: int) -> Self:
        return replace(self, learning_starts=min(self.learning_starts, steps // 2))


@dataclass(frozen=True)
class DQNOptions(OffPolicyOptions):
    """Deep Q-learning; Rainbow has the same options with other defaults."""

    builder: ClassVar[str] = "remuda.build.algorithm:Q_LEARNING"
    actions: ClassVar[str] = "Discrete"
    unused_agent_options: ClassVar[tuple[str, ...]] = ("shared", "log_std_init")
    has_td_error: ClassVar[bool] = True

    learning_rate: str = option("1e-3", "step size: a number or a schedule such as linear(1e-3, 0)", schedule=True)
    batch_size: int = option(64, "rows drawn for one update", low=1, high=10_000_000)
    tau: float = option(1.0, "fraction by which the target net moves in each of its updates", above=0.0, high=1.0)
    target_update_interval: int = option(500, "updates between two updates of the target net", low=1)
    max_grad_norm: float = option(10.0, "largest norm of a gradient; 0 disables clipping", low=0.0)
    epsilon: str = option(
        "piecewise(0:1, 0.1:0.05)", "probability of a random action: a number or a schedule", schedule=True, high=1.0
    )
    epsilon_power: float = option(
        0.0, "env i of B uses epsilon ** (1 + power * i / (B - 1)); Ape-X has 7, and 0 treats all envs alike", low=0.0
    )
    double: bool = option(True, "let the online net choose the action that the target net evaluates")
    dueling: bool = option(False, "a state value and action advantages instead of action values")
    noisy: bool = option(False, "explore by learned noise on the weights of the head; set epsilon to 0 with it")
    atoms: int = option(1, "atoms of the return distribution; 1 learns only its mean, C51 has 51", low=1)
    v_min: float | Auto = option("auto", "smallest return of the distribution; auto derives it when learning starts")
    v_max: float | Auto = option("auto", "largest return of the distribution; auto derives it when learning starts")
    huber: float | None = option(1.0, "error beyond which the loss is linear; none squares every error", above=0.0)

    @property
    def epsilon_greedy(self) -> tuple[str, float] | None:
        return self.epsilon, self.epsilon_power

    @property
    def needs_returns(self) -> bool:
        return self.atoms > 1

    def agent_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dueling", "noisy", "atoms", "v_min", "v_max")}

    def algorithm_arguments(self) -> dict[str, object]:
        return {**super().algorithm_arguments(), "delta": self.huber}

    def check_run(self, config: RunConfig) -> None:
        low, high = self.v_min, self.v_max
        if self.atoms > 1 and low != "auto" and high != "auto" and low >= high:
            raise ConfigError(f"algo.v_min={low:g} is not below algo.v_max={high:g}: swap them.")


@dataclass(frozen=True)
class RainbowOptions(DQNOptions):
    """Double, dueling, distributional, noisy DQN; presets add n-step returns and a prioritized replay."""

    epsilon: str = option("0", "probability of a random action: a number or a schedule", schedule=True, high=1.0)
    dueling: bool = option(True, "a state value and action advantages instead of action values")
    noisy: bool = option(True, "explore by learned noise on the weights of the head")
    atoms: int = option(51, "atoms of the return distribution; 1 learns only its mean", low=1)


@dataclass(frozen=True)
class R2D1Options(DQNOptions):
    """R2D1: deep Q-learning of a recurrent agent from sequences."""

    unused_options: ClassVar[tuple[str, ...]] = ("atoms", "v_min", "v_max")

    train_freq: int = option(
        20, "rows of each env between two rounds; the recurrent state is stored once per round", low=1
    )
    batch_size: int = option(32, "sequences drawn for one update", low=1, high=10_000_000)
    dueling: bool = option(True, "a state value and action advantages instead of action values")
    rescale: bool = option(True, "learn values on the compressed scale of arXiv 1805.11593")
    eta: float = option(
        0.9, "weight of the largest error in the priority of a sequence; the mean has the rest", low=0.0, high=1.0
    )
    huber: float | None = option(None, "error beyond which the loss is linear; none squares every error", above=0.0)

    def algorithm_arguments(self) -> dict[str, object]:
        return {**super().algorithm_arguments(), "rescaled": self.rescale}

    def check_run(self, config: RunConfig) -> None:
        super().check_run(config)
        if self.atoms > 1:
            raise ConfigError(
                f"algo.atoms={self.atoms} for r2d1, which learns values: use 1, or train dqn with memory."
            )
        if config.agent.core is None:
            raise ConfigError("r2d1 without agent.core has no memory: use agent.core=lstm or gru, or train dqn.")
