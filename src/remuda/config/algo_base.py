"""`AlgoOptions`: the options that all algorithms share, and what other modules need to know about an algorithm.

Class variables and methods tell other modules what the algorithm learns from, which builder makes it, and which
values of other options it excludes. To add an algorithm in another package, derive its options class from a
class of algo_options.py and override what differs (docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from remuda.config.fields import Checked, option

if TYPE_CHECKING:
    from remuda.config.run_config import RunConfig

Data = Literal["rollouts", "sequences", "replay"]


@dataclass(frozen=True)
class AlgoOptions(Checked):
    """Base class of the options of algorithms, with the options that all algorithms share."""

    _group = "algo."
    # What the algorithm learns from: rows of fresh rollouts, sequences of fresh rollouts, or a replay.
    data: ClassVar[Data]
    builder: ClassVar[str]  # import path of the `remuda.build.algorithm.Builder` that makes agent and algorithm
    actions: ClassVar[str] = "any"  # kind of action space that the algorithm supports
    unused_agent_options: ClassVar[tuple[str, ...]] = ()  # fields of `AgentOptions` that the agent ignores
    unused_options: ClassVar[tuple[str, ...]] = ()  # inherited options of this class that have no effect
    has_td_error: ClassVar[bool] = False  # whether samplers can compute TD errors of rows

    learning_rate: str = option("3e-4", "step size: a number or a schedule such as linear(3e-4, 0)", schedule=True)
    gamma: float = option(0.99, "discount per step", low=0.0, high=1.0)
    max_grad_norm: float = option(0.5, "largest norm of a gradient; 0 disables clipping", low=0.0)
    clip_reward: bool = option(False, "clip rewards to -1..1 for learning; logged returns are not clipped")
    optimizer: str = option("adam", "optimizer", choices=("adam", "adamw", "rmsprop"))
    optimizer_eps: float = option(1e-5, "epsilon of the optimizer", above=0.0)
    weight_decay: float = option(0.0, "weight decay of the optimizer", low=0.0)
    rms_alpha: float = option(0.99, "smoothing constant of RMSprop", low=0.0, high=1.0)
    momentum: float = option(0.0, "momentum of RMSprop", low=0.0, high=1.0)

    @property
    def uses_replay(self) -> bool:
        """Whether the algorithm draws its batches from a replay."""
        return self.data == "replay"

    @property
    def is_on_policy(self) -> bool:
        """Whether the algorithm may learn only from rollouts that were sampled with the newest weights."""
        return False

    @property
    def rows_per_round(self) -> int:
        """Number of rows of each env in a rollout, which samplers collect for one round of updates."""
        raise NotImplementedError

    @property
    def random_steps(self) -> int:
        """Number of env steps with random actions before the first update."""
        return 0

    @property
    def epsilon_greedy(self) -> tuple[str, float] | None:
        """Values of the options `epsilon` and `epsilon_power`; None if the algorithm is not epsilon-greedy."""
        return None

    @property
    def needs_returns(self) -> bool:
        """Whether the replay has to report observed returns, from which `v_min` and `v_max` are derived."""
        return False

    @property
    def group_learning_rates(self) -> dict[str, str]:
        """Learning rate schedules of the parameter groups that do not use `learning_rate`, by group name."""
        return {}

    @property
    def minibatch_size(self) -> int | None:
        """The option `batch_size`; None for algorithms without it, which learn from whole rollouts."""
        size: int | None = vars(self).get("batch_size")
        return size

    def share(self, parts: int) -> Self:
        """Return the options of one part of a run with `parts` equal parts, which share every minibatch equally."""
        size = self.minibatch_size
        return self if size is None else replace(self, batch_size=size // parts)  # type: ignore[call-arg]

    def agent_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for the agent's constructor that not all agents have."""
        return {}

    def algorithm_arguments(self) -> dict[str, object]:
        """Return the algorithm's keyword arguments that differ in name or form from the options that set them."""
        return {}

    def columns_per_round(self, envs: int) -> int:
        """Return the number of sequences (columns) in one round of an asynchronous scheme with `envs` envs."""
        return envs

    def updates_per_round(self, columns: int) -> int:
        """Return the number of updates in a round over `columns` sequences, unless the round ends early."""
        return 1

    def faster_updates(self) -> list[str]:
        """Return changes of options that save time on updates, as phrases for the advice at the end of a run."""
        return []

    def shortened(self, steps: int, envs: int) -> Self:
        """Return these options, changed so that a run of only `steps` steps with `envs` envs still makes updates."""
        return self

    def with_memory(self) -> Self:
        """Return these options with a batch size that fits a recurrent agent."""
        return self

    def check_run(self, config: RunConfig) -> None:
        """Raise ConfigError if these options do not fit the other options of the run."""
