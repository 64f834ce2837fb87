"""Statistics that env workers send with their steps: finished episodes, and notices, for example of a rebuilt env.

    stats = encode(rows)                    # in the worker; removes the statistics from the rows
    worker_stats.add(stats)                 # in the parent
    worker_stats.take_episodes()

The first byte of encoded statistics is 1 if they contain notices, else 0. Statistics with notices are decoded on
arrival, so that the notices are logged at once. Statistics without notices are decoded when their episodes are
needed, because decoding many of them together is cheaper than decoding at every step.
"""

from __future__ import annotations

import logging

import msgspec

from remuda.core import Episode
from remuda.envs.rows import Rows
from remuda.processes.notices import Notice, Reporter

_encode = msgspec.msgpack.Encoder().encode


def encode(rows: Rows) -> bytes:
    """Encode finished episodes and notices, and remove them from the rows; return b"" if there are none."""
    if not (rows.episodes or rows.notices):
        return b""
    stats = (b"\1" if rows.notices else b"\0") + _encode((rows.episodes, rows.notices))
    rows.episodes.clear()
    rows.notices.clear()
    return stats


def decode(stats: bytes) -> tuple[list[tuple[int, dict[str, float]]], list[Notice]]:
    """Return a list of (env, values) of finished episodes, and a list of notices."""
    episodes, notices = msgspec.msgpack.decode(memoryview(stats)[1:])
    return episodes, notices


class WorkerStats:
    """Collects the statistics of all workers in the parent, and logs their notices."""

    def __init__(self, num_envs: int, logger: logging.Logger, first_env: int = 0) -> None:
        """`first_env` is the first env's index among all envs of the run; `Episode.env` is an index of this kind."""
        self.played = [0] * num_envs  # number of episodes of each env that were decoded since the last reset
        self._first_env = first_env
        self._undecoded: list[bytes] = []
        self._episodes: list[Episode] = []
        self._reporter = Reporter(logger)

    def add(self, stats: bytes, at_once: bool = False) -> None:
        """Add the statistics that came with one answer; decode them now if `at_once` or if they contain notices."""
        self._undecoded.append(stats)
        if stats[0] or at_once:
            self._decode()

    def _decode(self) -> None:
        for stats in self._undecoded:
            episodes, notices = decode(stats)
            for env, values in episodes:
                self.played[env - self._first_env] += 1
                self._episodes.append(Episode(env, values))
            self.report(notices)
        self._undecoded.clear()

    def report(self, notices: list[Notice]) -> None:
        """Log the notices; the `Reporter` leaves out most repetitions."""
        self._reporter.report(notices)

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that were added since the last call."""
        self._decode()
        finished, self._episodes = self._episodes, []
        return finished

    def clear(self) -> None:
        """Forget all episodes. The pool calls this when it resets the envs."""
        self._undecoded.clear()
        self._episodes.clear()
        self.played = [0] * len(self.played)
