"""Statistics that sampler workers send with their answers: episodes, rebuilt envs, and the time per activity."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from remuda.core import Episode
from remuda.processes.links import Message
from remuda.processes.notices import Notice, Reporter

logger = logging.getLogger("remuda.sampling")


class WorkerStats:
    """The statistics of all workers, accumulated until `take_episodes` and `take_seconds` return them."""

    def __init__(self, num_workers: int) -> None:
        self.lost = [0] * num_workers  # number of times that each worker was replaced
        self.restarts_before = 0  # number of envs of lost workers, plus the rebuilt envs that these workers reported
        self._restarts = [0] * num_workers  # number of envs rebuilt by each worker, from its last answer
        self._episodes: list[Episode] = []
        self._seconds: dict[str, float] = {}
        self._reporter = Reporter(logger)

    def add(self, worker: int, answer: Message) -> None:
        """Add the statistics in an answer of a worker."""
        self._restarts[worker] = answer["restarts"]
        self._episodes += [Episode(env, values) for env, values in answer["episodes"]]
        for name, seconds in answer["seconds"].items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds / len(self.lost)

    def report(self, notices: Sequence[Notice]) -> None:
        """Log the notices of a worker, except notices that the `Reporter` suppresses as too frequent."""
        self._reporter.report(notices)

    def on_lost(self, worker: int, num_envs: int) -> None:
        """Add all envs of a lost worker to the number of rebuilt envs."""
        self.lost[worker] += 1
        self.restarts_before += self._restarts[worker] + num_envs
        self._restarts[worker] = 0

    def set_restarts(self, before: int, lost: list[int], by_worker: list[int]) -> None:
        """Set the counts of lost workers and rebuilt envs to those of the run that is resumed."""
        self.restarts_before, self.lost, self._restarts = before, lost, by_worker

    def restarts(self) -> int:
        return self.restarts_before + sum(self._restarts)

    def take_episodes(self) -> list[Episode]:
        finished, self._episodes = self._episodes, []
        return finished

    def take_seconds(self) -> dict[str, float]:
        """Return the mean seconds that a worker spent on each activity since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
