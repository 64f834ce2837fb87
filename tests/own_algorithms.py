"""Algorithms as a third-party package would define them. Some contain mistakes that error messages must explain."""

from dataclasses import dataclass
from typing import ClassVar

from remuda.algorithms import A2C, DQN, SAC, OffPolicy
from remuda.config.algo_options import A2COptions, DQNOptions
from remuda.config.fields import option


@dataclass(frozen=True)
class BonusOptions(A2COptions):
    """A2C with a bonus."""

    # This module does not postpone annotations, so these are types and not strings.
    bonus: float = option(0.5, "reward that is added to every step", low=0.0)
    schedule: str = option("linear(1, 0)", "a schedule", schedule=True)
    is_loud: bool = option(False, "a flag")


class Bonus(A2C):
    """A2C whose rewards are larger by a bonus. A second sentence."""

    Options = BonusOptions
    presets: ClassVar = {"CartPole-*": {"run": {"steps": 4321}, "algo": {"bonus": 0.25, "n_steps": 4}}}

    def __init__(self, agent, num_envs, *, bonus, schedule, **options):
        super().__init__(agent, num_envs, **options)
        self.bonus, self.schedule = bonus, schedule

    def rewards(self, rollout):
        return super().rewards(rollout) + self.bonus


class Quieter(Bonus):
    """A subclass that inherits options, presets and constructor."""


class Plain(A2C):
    """A subclass without options of its own."""


class Unchanged(DQN):
    """DQN by another name."""


class Prepared(SAC):
    """A subclass that prepares rollouts in its own way."""

    def prepare(self, rollout):
        return super().prepare(rollout)


class Rigid(A2C):
    """A constructor with a parameter that is not an option."""

    def __init__(self, agent, num_envs, *, gamma, width):
        super().__init__(agent, num_envs, gamma=gamma, gae_lambda=1.0)


class Homeless(OffPolicy):
    """An algorithm without options, because its base class has none."""

    def losses(self, batch, clock):
        raise NotImplementedError


class Undecorated(A2COptions):
    """Options without the decorator."""

    other: int = option(1, "an option")


class WithUndecorated(A2C):
    """Options that are not a dataclass of their own."""

    Options = Undecorated


@dataclass(frozen=True)
class WithoutHelp(DQNOptions):
    """An option without text."""

    bare: int = 3


class WithBareOption(DQN):
    """Options that the command line cannot show."""

    Options = WithoutHelp
