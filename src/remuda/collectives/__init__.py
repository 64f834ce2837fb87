"""Collectives: operations in which all ranks of a run take part, with the same result at every rank.

    collective = SharedCollective.create(4, "host", send)    # in rank 0; all other ranks call SharedCollective.join
    messages = collective.gather(b"what this rank knows")    # the messages of all ranks, in rank order
    collective.vector(1000)[:] = gradient                    # writes the vector of this rank
    total = collective.sum()                                 # the sum of the vectors of all ranks

All ranks must call the same operations in the same order. Vectors are added in rank order, in float32. The bits of
the sum are therefore the same in every rank, and in a single process that adds the vectors one after another. This
package knows nothing about reinforcement learning.
"""

from remuda.collectives.base import Collective
from remuda.collectives.gloo import GlooCollective
from remuda.collectives.health import Health, RankInfo
from remuda.collectives.shared import SharedCollective

__all__ = ["Collective", "GlooCollective", "Health", "RankInfo", "SharedCollective"]
