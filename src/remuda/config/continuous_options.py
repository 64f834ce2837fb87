"""Options of the algorithms for continuous actions that learn from a replay: DDPG, TD3 and SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from remuda.config.algo_options import OffPolicyOptions
from remuda.config.fields import option
from remuda.errors import ConfigError


@dataclass(frozen=True)
class ActorCriticOptions(OffPolicyOptions):
    """Options that DDPG, TD3 and SAC share."""

    builder: ClassVar[str] = "remuda.build.algorithm:CONTINUOUS"
    actions: ClassVar[str] = "Box"

    critics: int = option(2, "critics, of which the smallest value is used", low=1, high=10)
    actor_learning_rate: str | None = option(
        None, "step size of the actor, a number or a schedule; none takes learning_rate", schedule=True
    )
    reward_scale: float = option(1.0, "factor of the rewards for learning", above=0.0)
    actor_device: str | None = option(
        None,
        "compute the actor's gradients on this device, at the same time as the critics'; on cpu, in a second thread",
    )
    critic_device: str | None = option(
        None, "device of the critics' gradients and of all parameters, instead of --device"
    )

    @property
    def group_learning_rates(self) -> dict[str, str]:
        return {} if self.actor_learning_rate is None else {"actor": self.actor_learning_rate}


@dataclass(frozen=True)
class DDPGOptions(ActorCriticOptions):
    """Deep deterministic policy gradients."""

    learning_rate: str = option("1e-3", "step size: a number or a schedule such as linear(1e-3, 0)", schedule=True)
    critics: int = option(1, "critics, of which the smallest value is used", low=1, high=10)
    noise: str = option(
        "gaussian", "noise on actions; ou is an Ornstein-Uhlenbeck process", choices=("gaussian", "ou")
    )
    noise_std: float = option(
        0.1, "deviation of that noise, for actions scaled to -1..1; for ou its stationary deviation", low=0.0
    )
    policy_delay: int = option(1, "updates of the critics per update of the actor", low=1)
    target_update_interval: int = option(1, "updates of the actor between two updates of the target nets", low=1)
    target_noise: float = option(0.0, "deviation of the noise on target actions", low=0.0)
    target_noise_clip: float = option(0.5, "bound of the noise on target actions", low=0.0)

    def agent_arguments(self) -> dict[str, Any]:
        return {"stochastic": False, "noise": self.noise, "noise_std": self.noise_std}


@dataclass(frozen=True)
class TD3Options(DDPGOptions):
    """DDPG with two critics, a delayed actor and smoothed targets."""

    critics: int = option(2, "critics, of which the smallest value is used", low=1, high=10)
    policy_delay: int = option(2, "updates of the critics per update of the actor", low=1)
    target_noise: float = option(0.2, "deviation of the noise on target actions", low=0.0)


@dataclass(frozen=True)
class SACOptions(ActorCriticOptions):
    """Soft actor-critic."""

    ent_coef: str = option(
        "auto", "weight of the entropy: a number, auto to learn it, or auto_0.1 to start learning at 0.1"
    )
    target_entropy: float | None = option(
        None, "entropy that auto aims at; none is minus the number of action dimensions"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.entropy_weight()

    def agent_arguments(self) -> dict[str, Any]:
        return {"stochastic": True}

    def algorithm_arguments(self) -> dict[str, object]:
        fixed, start = self.entropy_weight()
        return {**super().algorithm_arguments(), "ent_coef": fixed, "ent_coef_init": start}

    def entropy_weight(self) -> tuple[float | None, float]:
        """Return the fixed weight, or None if the weight is learned, and the initial value for learning it.

        Raise ConfigError unless `ent_coef` is a number above 0, auto, or auto_ followed by a number above 0.
        """
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
