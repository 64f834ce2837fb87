"""The mathematics of the algorithms, as pure functions of tensors: distributions, returns and losses."""

from remuda.maths.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    Joint,
    MultiCategorical,
    SquashedGaussian,
)
from remuda.maths.losses import MAX_LOG_RATIO, approximate_kl, clipped_surrogate, standardized, value_loss
from remuda.maths.returns import ExplainedVariance, discounted_returns, gae, n_step_returns
from remuda.maths.values import huber, project, rescale, unscale
from remuda.maths.vtrace import one_step_advantages, vtrace

__all__ = [
    "MAX_LOG_RATIO",
    "Bernoulli",
    "Categorical",
    "Distribution",
    "ExplainedVariance",
    "Gaussian",
    "Joint",
    "MultiCategorical",
    "SquashedGaussian",
    "approximate_kl",
    "clipped_surrogate",
    "discounted_returns",
    "gae",
    "huber",
    "n_step_returns",
    "one_step_advantages",
    "project",
    "rescale",
    "standardized",
    "unscale",
    "value_loss",
    "vtrace",
]
