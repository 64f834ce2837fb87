"""A pool in which every slot belongs to one worker and is received when it is ready: a slow env delays no other slot.

with AsyncPooledEnvs(resolve("CartPole-v1"), num_envs=8, num_workers=8, slots=8) as envs:
    envs.reset(seed=1)
    while training:
        for slot in envs.ready(seconds=0.2):     # one or more, or none within that time
            _, step = envs.recv(slot)
            ...
        envs.send(slot, actions)                 # of as many slots as one likes, whenever one likes
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from remuda.core import Step
from remuda.envs.pool import PooledEnvs
from remuda.processes.requests import ANY
from remuda.processes.worker_pool import POLL_SECONDS, Worker


class AsyncPooledEnvs(PooledEnvs):
    """As PooledEnvs; nobody waits while a lost worker's successor builds its envs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "alone": True})
        self._building: list[Worker] = []
        self._looked_at = time.monotonic()
        self._answers = [0] * self.num_slots  # received since the slot's worker was lost

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        if self._sent:
            wanted = self._sent[0][0] if slot is None else slot
            if any(sent == wanted for sent, _ in self._sent):
                self._sleep(lambda: wanted in self._answered(), math.inf)
        slot, step = super().recv(slot)
        self._answers[slot] += 1
        return slot, step

    def ready(self, seconds: float) -> list[int]:
        """Slots for which recv(slot) would answer at once; waits so long for the first of them."""
        deadline = time.monotonic() + seconds
        if slots := self._answered():
            if time.monotonic() - self._looked_at > POLL_SECONDS:  # quick slots must not hide that others are lost
                self._look(0.0)
            return slots
        self._sleep(lambda: bool(self._answered()), deadline)
        return self._answered()

    def _sleep(self, is_over: Callable[[], bool], deadline: float) -> None:
        """With an eye on workers; successors that have built their envs are told what to do."""
        if is_over():
            return
        self._requests.sleep(ANY)
        try:
            while not is_over() and time.monotonic() < deadline:
                self._look(min(POLL_SECONDS, deadline - time.monotonic()))
        finally:
            self._requests.wake()

    def _look(self, seconds: float) -> None:
        """What passed since the last look counts for whoever is late, but not if this process was suspended."""
        self._worker_pool.clock += min(time.monotonic() - self._looked_at, 2 * POLL_SECONDS)
        self._worker_pool.listen(seconds)
        self._look_after_workers()
        self._looked_at = time.monotonic()

    def _answered(self) -> list[int]:
        return [slot for slot, number in self._sent if not number or self._requests.is_done(slot, number)]

    def _look_after_workers(self) -> None:
        for member in self._worker_pool.lost():
            self._give_up(member)
            own = [slot for slot, servers in enumerate(self._requests.servers) if member.index in servers]
            # a new worker's first answer is a reset row; how far others have come meanwhile says nothing of it
            was_useful = any(self._answers[slot] > 1 for slot in own)
            for slot in own:
                self._answers[slot] = 0
            member.inbox = [message for message in member.inbox if "built" not in message]
            self._worker_pool.relaunch(member, was_useful)
            self._building = [*(other for other in self._building if other is not member), member]
        for member in list(self._building):
            if member.take("built") is not None:
                self._building.remove(member)
                self._introduce(member)
            else:
                self._worker_pool.reap_if_not_built(member)
        for slot, number in self._sent:
            for index in self._requests.pending(slot, number) if number else ():
                member = self._worker_pool.workers[index]
                if member not in self._building:
                    member.last_seen = max(member.last_seen, self._asked_at[slot])
                    self._worker_pool.reap_if_silent(member, self._step_timeout, "while it owed an answer")
