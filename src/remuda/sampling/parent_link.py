"""The link of a sampler worker to its parent: it carries heartbeats, answers and statistics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from remuda.core import Envs
from remuda.processes.links import Link, Message
from remuda.processes.notices import collect_warnings

BEAT_SECONDS = 0.25  # a busy worker that has sent nothing for this long sends a heartbeat


class ParentLink:
    """Sends messages to the parent; collects this process's warnings, which the parent writes to the run's log."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.notices = collect_warnings()
        self._last_sent = 0.0

    def beat(self) -> bool:
        """Send a heartbeat if nothing was sent for BEAT_SECONDS, and return False.

        Envs call this method as their `should_stop`; False tells them to continue.
        """
        if time.monotonic() - self._last_sent > BEAT_SECONDS:
            self.send({"alive": True})
        return False

    def send(self, message: Message) -> None:
        """Send a message without a time-out, because the parent may be busy learning."""
        self._last_sent = time.monotonic()
        self.link.send(message, seconds=None)

    def send_with_notices(self, message: Message) -> None:
        self.send({**message, "notices": self.notices})
        self.notices.clear()

    def send_with_stats(self, message: Message, envs: Envs, seconds: Mapping[str, float]) -> None:
        """Send a message with new episodes, the number of env restarts so far, and the `seconds` per activity."""
        episodes = [(episode.env, episode.values) for episode in envs.episodes()]
        stats = {"episodes": episodes, "restarts": envs.restarts(), "seconds": seconds}
        self.send_with_notices({**message, **stats})
