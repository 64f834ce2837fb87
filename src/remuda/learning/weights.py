"""Weights: a versioned cell between the learner and whoever acts."""

from __future__ import annotations


class LocalWeights:
    """For an agent that acts in the learner's own process: the parameters are the same, only the version moves."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def publish(self, version: int) -> None:
        self.version = version

    def pull(self, have: int) -> int:
        return self.version
