"""Runs that are divided into parts, each with an equal share of the envs, of every minibatch and of the replay.

`serial --scheme.parts P` computes all parts in one process, one after another. Under `replicas`, every rank computes
one part, and a collective combines the results. Both schemes use the classes of this package, and give the same
parameters, bit for bit.

    group         `Group`: the parts of a run, and the operations that combine their numbers
    outcomes      `attempt`: errors of one process that all processes must know
    sampler       `PartedSampler`: samples the envs of each part
    metrics       `PartMetrics`, `merge`: metrics of the whole run from those of its parts
    replay        `PartedReplay`: one replay for each part; all parts draw equally often
    learner       `PartedLearner`, `PartedUpdates`: one gradient from the gradients of all parts

Every part computes the following from its own batch alone: the mean and deviation that standardize its advantages,
the largest importance weight, and the KL divergence that is compared with algo.target_kl. Running statistics are
those of the whole run.
"""

from remuda.parts.group import Group, LocalGroup, RankGroup
from remuda.parts.learner import PartedLearner, PartedUpdates
from remuda.parts.outcomes import attempt
from remuda.parts.replay import PartedReplay
from remuda.parts.sampler import PartedSampler

__all__ = [
    "Group",
    "LocalGroup",
    "PartedLearner",
    "PartedReplay",
    "PartedSampler",
    "PartedUpdates",
    "RankGroup",
    "attempt",
]
