"""A queue of rollouts from workers, which sample while the learner learns, as long as a slot is free.

    queue = RolloutQueue("remuda.build.workers", blueprints, agent, observation, weights, ...)
    queue.start(seed)
    while training:
        rollout = queue.take(learner.version, should_stop)    # the data of `per_round` slots, none older than max_lag
        ...                                                   # learn, publish weights
        queue.release(learner.version)                        # lets workers fill the slots of this rollout again

A slot is shared memory for one rollout of one group of envs. The learner's process alone decides which worker may
write to which slot, and sends its decisions over each worker's own link. Processes share no lock, because a dying
process might hold it. If a worker is lost, the slots that it had not filled become free, and its replacement begins
new episodes.

The supervising thread hands out slots, replaces workers, and assembles the next rollout while the learner is still
busy with the previous one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remuda.core import Agent, Space, Weights
from remuda.data import Rollout
from remuda.errors import Interrupted
from remuda.processes.links import Message
from remuda.processes.worker_pool import POLL_SECONDS, Blueprint, Worker
from remuda.sampling.async_workers import AsyncWorkers
from remuda.sampling.buffers import Buffers, allocate, share_slots

SLOTS_PER_GROUP = 2  # for each group of envs, a worker holds the slot that it is filling and the slot to fill next


@dataclass(frozen=True)
class FullSlot:
    """A slot that a worker has filled with a rollout."""

    slot: int
    first_env: int  # the index of the env whose rows are in the slot's first column
    version: int  # the oldest version of the weights that acted in the rollout


class RolloutQueue(AsyncWorkers):
    """A `RolloutSource` whose workers fill slots; each worker runs one or more groups of envs."""

    answer_key = "filled"

    def __init__(
        self,
        module: str,
        blueprints: Sequence[Blueprint],
        agent: Agent,
        observation: Space,
        weights: Weights,
        num_steps: int,
        per_round: int,
        seed: int,
        *,
        updates_per_round: int = 1,
        max_lag: int | None = None,
        first_row: int = 0,
        **limits: Any,
    ) -> None:
        """Start workers. One call of `take` combines `per_round` of their rollouts.

        `updates_per_round` is the number of updates in a round if no update is skipped. `max_lag` is the largest lag
        of a rollout behind the learner, in updates; None sets no limit. The rows of every worker are numbered from
        `first_row` on. `limits` are keyword arguments of AsyncWorkers.
        """
        self._per_round, self._max_lag, self._num_steps = per_round, max_lag, num_steps
        self._held: list[list[int]] = [[] for _ in blueprints]  # for each worker, the slots to fill, in this order
        self._rows = [first_row] * len(blueprints)  # for each worker, the first row whose noise is not drawn yet
        self._full: deque[FullSlot] = deque()
        self._staged: list[FullSlot] | None = None  # slots of the rollout that the next `take` returns
        self._taken: list[FullSlot] = []  # slots of the rollout that the last `take` returned
        self.dropped = 0
        self._waiting = list(range(len(blueprints)))  # indices of workers, ordered by when each last got a slot
        self._taken_at, self._usual_updates = 0, updates_per_round  # `_taken_at` is the version at the last `take`
        self._updates = updates_per_round  # expected number of updates in the next round
        groups = blueprints[0]["groups"]
        self._max_held = SLOTS_PER_GROUP * groups
        num_slots = slots_for(per_round, groups * len(blueprints), max_lag)
        self._free = deque(range(num_slots))
        self._width = width = (blueprints[0]["last"] - blueprints[0]["first"]) // groups
        # Allocate the memory before starting processes, because the allocation may fail.
        self._memory, self._slots = share_slots(allocate(agent, observation, num_steps, width), num_slots)
        common = {"num_steps": num_steps, "seed": seed, "row": first_row}
        try:
            self._stages = deque(allocate(agent, observation, num_steps, width * per_round) for _ in range(2))
            super().__init__(module, [{**blueprint, **common} for blueprint in blueprints], weights, seed, **limits)
        except BaseException:
            self._memory.close()
            raise

    # --- called by the learner's thread -------------------------------------------------------------------------

    def take(self, version: int, should_stop: Callable[[], bool]) -> Rollout:
        """Wait for a rollout that is not too old for the learner at `version`, and return it.

        The arrays of the rollout are valid until the next call. Raises Interrupted if `should_stop` returns True, and
        the error that ended sampling, if there is one.
        """
        with self._changed:
            while (taken := self._usable(version)) is None:
                if self._error is not None:
                    raise self._error
                if should_stop():
                    raise Interrupted("asked to stop while waiting for rollouts")
                self._changed.wait(POLL_SECONDS)
            self._taken, self._staged, self._taken_at = taken, None, version
            self._stages.rotate(1)
        self._worker_pool.bell.ring()
        stage = self._stages[0]
        envs = torch.tensor([full.first_env + env for full in taken for env in range(self._width)])
        return Rollout(stage.steps, stage.next_obs, stage.last_value, stage.state, envs, stage.begins)

    def _usable(self, version: int) -> list[FullSlot] | None:
        """Return the staged slots, or None if there are none.

        If a staged slot lags by more than `max_lag`, move all staged slots back to the full slots and return None.
        """
        self._version = version
        if self._staged is None or not any(map(self._is_stale, self._staged)):
            return self._staged
        self._full.extendleft(reversed(self._staged))
        self._staged = None
        self._worker_pool.bell.ring()
        return None

    def _is_stale(self, full: FullSlot) -> bool:
        return self._max_lag is not None and self._version - full.version > self._max_lag

    def release(self, version: int) -> None:
        """Free the slots of the last `take`; call this after publishing the weights of `version`."""
        with self._changed:
            self._free.extend(full.slot for full in self._taken)
            self._updates = max(self._usual_updates, version - self._taken_at)
            self._taken, self._version = [], version
        self._worker_pool.bell.ring()

    def metrics(self) -> dict[str, float]:
        """Return the numbers of free and full slots, and the mean lag of the acting weights since the last call."""
        with self._changed:
            free, full = len(self._free), len(self._full) + len(self._staged or ())
        return {
            "async/slots_free": float(free),
            "async/slots_full": float(full),
            "lag/acting_weights": self.take_lag()[0],
        }

    def close(self) -> None:
        """End the supervising thread and all workers, and free the memory."""
        super().close()
        self._memory.close()

    # --- called in the supervising thread -----------------------------------------------------------------------

    def _attach_message(self) -> tuple[Message, list[int]]:
        return {"layout": self._memory.layout, "into": "slots"}, [self._memory.fd]

    def _on_answer(self, index: int, answer: Message) -> None:
        self._held[index].remove(answer["filled"])
        self._full.append(FullSlot(answer["filled"], answer["first"], answer["version"]))

    def _on_lost(self, index: int) -> None:
        self._free.extend(self._held[index])
        self._held[index].clear()

    def _must_answer(self, index: int) -> bool:
        return bool(self._held[index])

    def _next_row(self, index: int) -> int:
        return self._rows[index]

    def _on_ready(self, worker: Worker) -> None:
        """Do nothing, because a worker begins to sample when `_dispatch` gives it a slot."""

    def _dispatch(self) -> None:
        self._drop_stale()
        self._hand_out_slots()

    def _drop_stale(self) -> None:
        kept = [full for full in self._full if not self._is_stale(full)]
        if len(kept) < len(self._full):
            self.dropped += len(self._full) - len(kept)
            self._free.extend(full.slot for full in self._full if self._is_stale(full))
            self._full = deque(kept)

    def _hand_out_slots(self) -> None:
        """Give free slots to the workers with the fewest slots; a tie goes to the worker that waited longest."""
        while self._free and len(self._slots) - len(self._free) < self._max_in_use():
            ready = [index for index in self._waiting if self._is_ready[index]]
            index = min(ready, key=lambda index: len(self._held[index]), default=None)
            if index is None or len(self._held[index]) >= self._max_held:
                return
            self._waiting.remove(index)
            self._waiting.append(index)
            worker = self._worker_pool.workers[index]
            if not self._held[index]:
                worker.last_seen = self._worker_pool.clock
            slot = self._free.popleft()
            self._held[index].append(slot)
            self._rows[index] += self._num_steps
            worker.send({"do": "fill", "slot": slot})

    def _max_in_use(self) -> int:
        """Return how many slots may be in use, so that every rollout is learned from before it exceeds `max_lag`."""
        if self._max_lag is None:
            return len(self._slots)
        return (self._max_lag // self._updates + 1) * self._per_round

    def _assemble(self) -> None:
        """Copy full slots into the next rollout, sorted by env, so that their order of completion has no effect."""
        with self._changed:
            if self._staged is not None or len(self._full) < self._per_round:
                return
            chosen = sorted((self._full.popleft() for _ in range(self._per_round)), key=lambda full: full.first_env)
            stage = self._stages[1]  # the learner may still use stage 0, which the last `take` returned
        for place, full in enumerate(chosen):
            copy_columns(self._slots[full.slot], stage, place)
        with self._changed:
            self._staged = chosen
            self._changed.notify_all()


def slots_for(per_round: int, num_groups: int, max_lag: int | None) -> int:
    """Return the number of slots: `per_round` each for the current and the next round, and one per group of envs.

    With `max_lag`, the number is limited to the slots of `max_lag + 1` rounds. While a worker fills one of them, the
    learner can make at most `max_lag` rounds from the others, unless some of these are filled a second time. If each
    round is one update, the worker's rollout then lags by at most `max_lag`.
    """
    wanted = 2 * per_round + num_groups
    return wanted if max_lag is None else min(wanted, (max_lag + 1) * per_round)


def copy_columns(source: Buffers, target: Buffers, place: int) -> None:
    """Copy a slot's buffers, except `next_state`, to position `place` of `target`, which holds several slots."""
    width = source.steps.mask.shape[1]
    own = target.columns(place * width, (place + 1) * width)
    own.steps[...] = source.steps
    for theirs, ours in zip(source[1:5], own[1:5], strict=True):
        if theirs is not None:
            ours[...] = theirs
