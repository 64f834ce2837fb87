"""Collectives: operations in which all ranks of a run take part, with the same result at every rank.

    collective = SharedCollective.create(4, "host", send)    # rank 0; the others call SharedCollective.join
    messages = collective.gather(b"what this rank knows")    # the messages of all ranks, in their order
    collective.vector(1000)[:] = gradient                    # this rank's vector
    total = collective.sum()                                 # of all ranks, added in their order

All ranks must call the same operations in the same order. Sums are added rank by rank, in float32, so every rank
gets the same bits, and the same bits as a process that adds the vectors one after another. This package knows
nothing about reinforcement learning.
"""

from remuda.collectives.base import Collective
from remuda.collectives.gloo import GlooCollective
from remuda.collectives.health import Health, RankInfo
from remuda.collectives.shared import SharedCollective

__all__ = ["Collective", "GlooCollective", "Health", "RankInfo", "SharedCollective"]
