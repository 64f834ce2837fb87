"""A worker without envs, for tests of the worker pool. It echoes messages, and hangs or fails on request."""

import time
from collections.abc import Sequence

from remuda.errors import ConfigError, TrainingError
from remuda.processes import worker_main
from remuda.processes.links import Link, Message

FAILURES = {"config": ConfigError("a bad option"), "training": TrainingError("not finite"), "other": KeyError("k")}


class Echo:
    def __init__(self, link: Link) -> None:
        self._link, self._is_leaving = link, False

    def run(self) -> None:
        while not self._is_leaving and not self._link.has_ended:
            if self._link.wait(1.0):
                for message in self._link.receive()[0]:
                    self._handle(message)

    def _handle(self, message: Message) -> None:
        match message["do"]:
            case "build" if message.get("hangs"):
                time.sleep(60)
            case "build":
                self._link.send({"built": message["name"]})
            case "echo":
                self._link.send({"echo": message["text"]})
            case "fail":
                raise FAILURES[message["how"]]
            case "leave":
                self._is_leaving = True

    def close(self) -> None:
        pass


def main(fds: Sequence[int]) -> int:
    link = Link.from_fd(fds[0])
    return worker_main.serve(link, Echo(link))
