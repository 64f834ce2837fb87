"""Rollouts as they fill: actors never wait for the learner as long as a slot is free, nor the learner for actors.

    stream = RolloutQueue("remuda.build.workers", orders, agent, observation, weights, ...)
    stream.start(seed)
    while training:
        rollout = stream.take(learner.version, should_stop)   # some slots side by side, none older than max_lag
        ...                                                   # learn, publish weights
        stream.release(learner.version)                       # these slots may be filled again

A slot is shared memory for one rollout of one worker. Who may write it is decided here alone, by messages to each
worker over its own link: there is no queue and no lock that a dying process could hold. What a lost worker had not
finished goes back to the free slots, and its successor begins new episodes.

A thread of its own deals slots, hears of full ones, replaces workers, and puts the next rollout together while the
learner is still busy with the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remuda.core import Agent, Space
from remuda.data import Rollout
from remuda.errors import Interrupted
from remuda.learning.weights import FileWeights, SharedWeights
from remuda.processes.worker_pool import LOOK_SECONDS, Worker
from remuda.sampling.async_workers import AsyncWorkers
from remuda.sampling.buffers import Buffers, allocate, share_slots

AHEAD = 2  # slots that a worker may hold for each of its groups of envs: the one that is filled and the next


@dataclass(frozen=True)
class Full:
    """A slot that a worker has filled."""

    slot: int
    first_env: int  # of its columns
    version: int  # of the weights that acted, the oldest


class RolloutQueue(AsyncWorkers):
    """A worker with `groups` of envs fills slots for each of them by itself."""

    answer_key = "filled"

    def __init__(
        self,
        module: str,
        orders: Sequence[Mapping[str, Any]],
        agent: Agent,
        observation: Space,
        weights: SharedWeights | FileWeights,
        num_steps: int,
        per_round: int,
        seed: int,
        *,
        updates_per_round: int = 1,
        max_lag: int | None = None,
        first_row: int = 0,
        **limits: Any,
    ) -> None:
        """`updates_per_round` are those of a round if none is left out; `limits` are of AsyncWorkers."""
        self._per_round, self._max_lag, self._num_steps = per_round, max_lag, num_steps
        self._held: list[list[int]] = [[] for _ in orders]  # slots that each worker fills, in this order
        self._rows = [first_row] * len(orders)  # of each worker, the first whose noise was not drawn
        self._full: deque[Full] = deque()
        self._staged: list[Full] | None = None  # what `take` will give
        self._taken: list[Full] = []
        self.dropped = 0
        self._waiting = list(range(len(orders)))  # workers, by when they were last given a slot
        self._taken_at, self._usual = 0, updates_per_round  # the version of the last `take`; updates of a round
        self._updates = updates_per_round  # of the next one, at most
        groups = orders[0]["groups"]
        self._most = AHEAD * groups
        num_slots = slots_for(per_round, groups * len(orders), max_lag)
        self._free = deque(range(num_slots))
        self._width = width = (orders[0]["last"] - orders[0]["first"]) // groups
        # memory first: it is what may not fit
        self._memory, self._slots = share_slots(allocate(agent, observation, num_steps, width), num_slots)
        self._stages = deque(allocate(agent, observation, num_steps, width * per_round) for _ in range(2))
        full = [{**order, "num_steps": num_steps, "seed": seed, "row": first_row} for order in orders]
        try:
            super().__init__(module, full, weights, seed, **limits)
        except BaseException:
            self._memory.close()
            raise

    # --- the learner's thread -----------------------------------------------------------------------------------

    def take(self, version: int, should_stop: Callable[[], bool]) -> Rollout:
        """The next rollout for a learner of this version; what is too old for it is dropped and counted."""
        with self._turn:
            while (taken := self._fresh(version)) is None:
                if self._error is not None:
                    raise self._error
                if should_stop():
                    raise Interrupted("asked to stop while waiting for rollouts")
                self._turn.wait(LOOK_SECONDS)
            self._taken, self._staged, self._taken_at = taken, None, version
            self._stages.rotate(1)
        self._worker_pool.bell.ring()
        stage = self._stages[0]
        envs = torch.tensor([full.first_env + env for full in taken for env in range(self._width)])
        return Rollout(stage.steps, stage.next_obs, stage.last_value, stage.state, envs, stage.begins)

    def _fresh(self, version: int) -> list[Full] | None:
        """What is staged, if all of it may be used; else what may be goes back to where it came from."""
        self._version = version
        if self._staged is None or not any(map(self._is_stale, self._staged)):
            return self._staged
        self._full.extendleft(reversed(self._staged))
        self._staged = None
        self._worker_pool.bell.ring()
        return None

    def _is_stale(self, full: Full) -> bool:
        return self._max_lag is not None and self._version - full.version > self._max_lag

    def release(self, version: int) -> None:
        """What was taken last is learned from, and the weights of this version are published."""
        with self._turn:
            self._free.extend(full.slot for full in self._taken)
            self._updates = max(self._usual, version - self._taken_at)
            self._taken, self._version = [], version
        self._worker_pool.bell.ring()

    def metrics(self) -> dict[str, float]:
        """Slots now, and by how many updates the weights were behind that acted in what has come in since."""
        with self._turn:
            free, full = len(self._free), len(self._full) + len(self._staged or ())
        return {
            "async/slots_free": float(free),
            "async/slots_full": float(full),
            "lag/acting_weights": self.take_ages(),
        }

    def close(self) -> None:
        """Also gives back the memory."""
        super().close()
        self._memory.close()

    # --- the stream's own thread --------------------------------------------------------------------------------

    def _attachment(self) -> tuple[dict[str, Any], list[int]]:
        return {"layout": self._memory.layout, "into": "slots"}, [self._memory.fd]

    def _take(self, index: int, answer: Mapping[str, Any]) -> None:
        self._held[index].remove(answer["filled"])
        self._full.append(Full(answer["filled"], answer["first"], answer["version"]))

    def _on_lost(self, index: int) -> None:
        self._free.extend(self._held[index])
        self._held[index].clear()

    def _owes(self, index: int) -> bool:
        return bool(self._held[index])

    def _next_row(self, index: int) -> int:
        return self._rows[index]

    def _set_going(self, member: Worker) -> None:
        """It goes when it is dealt a slot."""

    def _arrange(self) -> None:
        self._drop_stale()
        self._deal()

    def _drop_stale(self) -> None:
        kept = [full for full in self._full if not self._is_stale(full)]
        if len(kept) < len(self._full):
            self.dropped += len(self._full) - len(kept)
            self._free.extend(full.slot for full in self._full if self._is_stale(full))
            self._full = deque(kept)

    def _deal(self) -> None:
        """Free slots to whoever has the fewest, and among them to whoever has waited longest."""
        while self._free and len(self._slots) - len(self._free) < self._most_in_use():
            ready = [index for index in self._waiting if self._is_ready[index]]
            index = min(ready, key=lambda index: len(self._held[index]), default=None)
            if index is None or len(self._held[index]) >= self._most:
                return
            self._waiting.remove(index)
            self._waiting.append(index)
            member = self._worker_pool.members[index]
            if not self._held[index]:
                member.heard = self._worker_pool.clock
            slot = self._free.popleft()
            self._held[index].append(slot)
            self._rows[index] += self._num_steps
            member.tell({"do": "fill", "slot": slot})

    def _most_in_use(self) -> int:
        """Slots, where a round is of several updates: those for which max_lag leaves the time."""
        if self._max_lag is None:
            return len(self._slots)
        return (self._max_lag // self._updates + 1) * self._per_round

    def _afterwards(self) -> None:
        """Put the next rollout together, in the order of envs: what comes of equal rollouts is then equal."""
        with self._turn:
            if self._staged is not None or len(self._full) < self._per_round:
                return
            chosen = sorted((self._full.popleft() for _ in range(self._per_round)), key=lambda full: full.first_env)
            stage = self._stages[1]  # the other one is being learned from
        for place, full in enumerate(chosen):
            copy_columns(self._slots[full.slot], stage, place)
        with self._turn:
            self._staged = chosen
            self._turn.notify_all()


def slots_for(per_round: int, num_groups: int, max_lag: int | None) -> int:
    """For a round that is learned from, one that is ready, and what groups of envs fill.

    A rollout that begins has at most all other slots before it: with no more than this many, only one that others
    overtake can grow older than max_lag.
    """
    wanted = 2 * per_round + num_groups
    return wanted if max_lag is None else min(wanted, (max_lag + 1) * per_round)


def copy_columns(source: Buffers, target: Buffers, place: int) -> None:
    """All columns of a slot to that place among as many."""
    width = source.steps.mask.shape[1]
    own = target.columns(place * width, (place + 1) * width)
    own.steps[...] = source.steps
    for theirs, ours in zip(source[1:5], own[1:5], strict=True):
        if theirs is not None:
            ours[...] = theirs
