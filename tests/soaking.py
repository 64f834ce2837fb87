"""Requirement R24: 10,000 updates with a worker killed every 30 seconds, and limits on the growth of resources.

soak = Soak(workers_below)
remuda.train(..., callbacks=soak)
soak.check()
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

UPDATES = 10_000
SETTLED = 2_000  # after this many updates all buffers and caches have their final size
KILL_SECONDS = 30.0
MIN_SECONDS = 150.0  # so that several workers are killed even on a fast machine
Processes = Callable[[psutil.Process], Sequence[psutil.Process]]


class Look(NamedTuple):
    """A measurement of the processes that must not grow."""

    updates: int
    memory: list[int]  # resident bytes of each
    descriptors: int
    threads: int


def this_one(me: psutil.Process) -> list[psutil.Process]:
    return [me]


class Soak:
    """A callback that kills processes of `workers`, measures those of `lasting`, and finally stops the training."""

    def __init__(self, workers: Processes, lasting: Processes = this_one) -> None:
        self.me, self.workers, self.lasting = psutil.Process(), workers, lasting
        self.looks: list[Look] = []
        self.killed = 0
        self._chance = random.Random(3)
        self._begin = time.monotonic()
        self._next_kill, self._next_look = self._begin + KILL_SECONDS, 0

    def __call__(self, round: Any) -> bool:
        now, updates = time.monotonic(), round.learner.version
        if now >= self._next_kill:
            if candidates := self.workers(self.me):
                with suppress(psutil.NoSuchProcess):
                    self._chance.choice(candidates).kill()
                    self.killed += 1
            self._next_kill = now + KILL_SECONDS
        if updates >= self._next_look and now < self._next_kill - KILL_SECONDS / 2:  # no worker is being replaced
            self._next_look = updates + 500
            lasting = self.lasting(self.me)
            memory = [int(process.memory_info().rss) for process in lasting]
            descriptors = sum(process.num_fds() for process in lasting)
            self.looks.append(Look(updates, memory, descriptors, threading.active_count()))
        return bool(updates >= UPDATES and now - self._begin >= MIN_SECONDS)

    def check(self) -> None:
        settled = [look for look in self.looks if look.updates >= SETTLED]
        first, last = settled[0], settled[-1]
        thousands = (last.updates - first.updates) / 1000
        grown = [(b - a) / 2**20 / thousands for a, b in zip(first.memory, last.memory, strict=True)]
        print(f"{self.killed} killed, MB per 1,000 updates {[round(one, 3) for one in grown]}, {first}, {last}")
        assert self.killed >= 4
        assert thousands >= (UPDATES - SETTLED) / 1000 - 0.5, self.looks
        assert max(grown) <= 1.0, self.looks
        assert abs(last.descriptors - first.descriptors) <= 2, self.looks
        assert abs(last.threads - first.threads) <= 2, self.looks
