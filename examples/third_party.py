"""Advantage-weighted regression (arXiv 1910.00177) on V-trace advantages: an algorithm in a file of its own.

remuda train examples.third_party:AdvantageWeighted --env CartPole-v1
"""

from dataclasses import dataclass
from typing import ClassVar

from remuda.algorithms import IMPALA
from remuda.config.algo_options import ImpalaOptions
from remuda.config.fields import option
from remuda.core import Losses
from remuda.maths import standardized


@dataclass(frozen=True)
class AdvantageWeightedOptions(ImpalaOptions):
    """Advantage-weighted regression."""

    temperature: float = option(
        0.5, "advantage, in deviations, by which the weight of an action grows e-fold", above=0.0
    )
    max_weight: float = option(20.0, "largest weight of an action", above=0.0)


class AdvantageWeighted(IMPALA):
    """Regression towards the actions that were taken, weighted by the exponential of their advantages."""

    Options = AdvantageWeightedOptions
    presets: ClassVar = {
        "CartPole-*": {
            "run": {"steps": 300_000},
            "sampler": {"envs": 8},
            "algo": {"n_steps": 32, "batch_size": 8, "gamma": 0.98, "learning_rate": "linear(2e-3, 0)"},
        },
    }

    def __init__(self, agent, num_envs, *, temperature, max_weight, **options):
        super().__init__(agent, num_envs, **options)
        self.temperature, self.max_weight = temperature, max_weight

    def losses(self, batch, clock):
        rows = self.corrected_rows(batch)
        weight = (standardized(rows.advantage) / self.temperature).exp().clamp(max=self.max_weight)
        policy_loss = self.reduced(-weight * rows.log_prob)
        value_loss = self.reduced(0.5 * (rows.target - rows.value).square())
        entropy = self.reduced(rows.policy.entropy())
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef(clock.progress) * entropy
        metrics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "weight": weight.mean()}
        return Losses({"policy": loss}, {name: value.detach() for name, value in metrics.items()})
