"""Pure functions of tensors; nothing here knows of networks, devices or processes."""

from remuda.maths.distributions import Bernoulli, Categorical, Distribution, Gaussian, Joint, MultiCategorical
from remuda.maths.losses import approximate_kl, clipped_surrogate, standardised, value_loss
from remuda.maths.returns import discounted_returns, explained_variance, gae, n_step_returns

__all__ = [
    "Bernoulli",
    "Categorical",
    "Distribution",
    "Gaussian",
    "Joint",
    "MultiCategorical",
    "approximate_kl",
    "clipped_surrogate",
    "discounted_returns",
    "explained_variance",
    "gae",
    "n_step_returns",
    "standardised",
    "value_loss",
]
