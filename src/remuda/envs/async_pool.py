"""A pool of env workers in which each slot belongs to one worker, so that slots can be received in any order.

    with AsyncPooledEnvs(resolve("CartPole-v1"), num_envs=8, num_workers=8, slots=8) as envs:
        envs.reset(seed=1)
        while training:
            for slot in envs.ready(seconds=0.2):     # an empty list if no slot is ready within this time
                _, step = envs.recv(slot)
                envs.send(slot, act(step.obs))       # may be called later, and in any order of slots

A slow env delays only the slots of its own worker.
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
    """`core.AsyncEnvs` in worker processes. While a lost worker is replaced, the slots of other workers continue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "alone": True})
        self._building: list[Worker] = []  # restarted workers that have not built their envs yet
        self._polled_at = time.monotonic()
        self._answers = [0] * self.num_slots  # number of answers for each slot since its worker was last lost

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        if self._sent:
            wanted = self._sent[0][0] if slot is None else slot
            if any(sent == wanted for sent, _ in self._sent):
                self._sleep(lambda: wanted in self._answered(), math.inf)
        slot, step = super().recv(slot)
        self._answers[slot] += 1
        return slot, step

    def ready(self, seconds: float) -> list[int]:
        """Return the slots for which recv(slot) returns at once; wait up to `seconds` until there is one."""
        deadline = time.monotonic() + seconds
        if slots := self._answered():
            # If a slot is ready in every call, `_sleep` is never called, so lost workers have to be found here.
            if time.monotonic() - self._polled_at > POLL_SECONDS:
                self._poll_workers(0.0)
            return slots
        self._sleep(lambda: bool(self._answered()), deadline)
        return self._answered()

    def _sleep(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Wait until `is_over()` is true or the deadline is reached; replace workers that are lost or too slow."""
        if is_over():
            return
        self._requests.sleep(ANY)
        try:
            while not is_over() and time.monotonic() < deadline:
                self._poll_workers(min(POLL_SECONDS, deadline - time.monotonic()))
        finally:
            self._requests.wake()

    def _poll_workers(self, seconds: float) -> None:
        """Receive messages for up to `seconds` and supervise the workers.

        The time since the last poll is added to the clock that measures the time limits of workers. At most
        2 * POLL_SECONDS are added: in a longer gap this process was suspended or busy, and the workers were not slow.
        """
        self._worker_pool.clock += min(time.monotonic() - self._polled_at, 2 * POLL_SECONDS)
        self._worker_pool.listen(seconds)
        self._supervise()
        self._polled_at = time.monotonic()

    def _answered(self) -> list[int]:
        return [slot for slot, number in self._sent if not number or self._requests.is_done(slot, number)]

    def _supervise(self) -> None:
        """Replace lost workers, attach replacements that have built their envs, and enforce time limits."""
        for member in self._worker_pool.lost():
            self._discard(member)
            own = [slot for slot, servers in enumerate(self._requests.servers) if member.index in servers]
            # A new worker's first answer for each slot is a reset row, so only a second answer shows progress. The
            # return value of _discard is ignored, because it is computed from the requests to all workers together.
            was_useful = any(self._answers[slot] > 1 for slot in own)
            for slot in own:
                self._answers[slot] = 0
            member.inbox = [message for message in member.inbox if "built" not in message]
            self._worker_pool.relaunch(member, was_useful)
            self._building = [*(other for other in self._building if other is not member), member]
        for member in list(self._building):
            if member.take("built") is not None:
                self._building.remove(member)
                self._attach(member)
            else:
                self._worker_pool.reap_if_not_built(member)
        for slot, number in self._sent:
            for index in self._requests.pending(slot, number) if number else ():
                member = self._worker_pool.workers[index]
                if member not in self._building:
                    member.last_seen = max(member.last_seen, self._sent_at[slot])
                    self._worker_pool.reap_if_silent(member, self._step_timeout, "while it owed an answer")
