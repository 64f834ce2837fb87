"""Envs in worker processes: `core.Envs` over shared memory.

    with PooledEnvs(resolve("CartPole-v1"), num_envs=32, num_workers=2, slots=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()             # in the order of sending; views of shared memory
            envs.send(slot, act(step.obs))       # copies the actions, rings the workers

Every worker serves its share of every slot. A worker that dies, or owes an answer for longer than `step_timeout`,
is replaced; the envs it had answer their pending or next request with a reset row. Answers do not depend on timing:
the same seed and actions give what LocalEnvs gives, bit by bit, as long as no worker is lost.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from numpy.typing import NDArray

from remuda.core import Episode, Step
from remuda.data.shared import SharedArrays
from remuda.envs import worker
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.lane import rows_layout
from remuda.envs.local import check_action, check_seeds, envs_per_slot, report
from remuda.envs.paths import describe
from remuda.envs.spaces import space_from_wire
from remuda.envs.spec import EnvSpec
from remuda.errors import ConfigError, Interrupted
from remuda.transport.crew import LOOK_SECONDS, Crew, Member


class PooledEnvs:
    """`core.Envs` with `num_workers` processes."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        num_workers: int,
        slots: int = 1,
        gamma: float = 0.99,
        stats: str | type[EpisodeStats] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        step_timeout: float = 60.0,
        build_timeout: float = 120.0,
        max_restarts: int = 1000,
        max_worker_restarts: int = 10,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        worker.refuse_in_worker()
        per_slot = envs_per_slot(num_envs, slots)
        if not 1 <= num_workers <= per_slot:
            raise ConfigError(
                f"workers={num_workers} for {per_slot} envs per slot: every worker serves every slot, "
                f"so use 1 to {per_slot} workers."
            )
        check_seeds(seeds, num_envs)
        stats_class = resolve_stats(stats)
        order = {
            "spec": spec.to_json(),
            "stats": None if stats_class is EpisodeStats else describe(stats_class),
            "gamma": gamma,
            "max_restarts": max_restarts,
        }
        self._blocks = [
            [(slot * per_slot + first, slot * per_slot + last) for slot in range(slots)]
            for first, last in _split(per_slot, num_workers)
        ]
        self._seeds, self._played = seeds, [0] * num_envs  # episodes that were told of, by env
        orders = [{**order, "worker": index, "blocks": blocks} for index, blocks in enumerate(self._blocks)]
        for index, own in enumerate(orders):
            own["seeds"] = self._seeds_left(index)
        self.num_envs, self.num_slots = num_envs, slots
        self._step_timeout, self._build_timeout = step_timeout, build_timeout
        self._number = 0  # of the last request
        self._sent: deque[tuple[int, int]] = deque()
        self._is_owed = [False] * slots  # sent and not received
        self._seed: int | None = None
        self._episodes: list[Episode] = []
        self._restarts_before = 0
        self._notices = 0
        self._waited = 0.0
        self._lost_at = [0] * num_workers  # number of the last request when a worker was last lost
        self._fence = threading.Lock()  # taking it orders memory between processes: 50 ns
        self._memory: SharedArrays | None = None
        self._crew = Crew(worker.__name__, orders, build_timeout, max_worker_restarts, should_stop)
        try:
            observation, action = self._crew.start()
            self.observation, self.action = space_from_wire(observation), space_from_wire(action)
            self._action_shape = (per_slot, *self.action.shape)
            self._allocate(num_workers, per_slot)
            for member in self._crew.members:
                self._introduce(member)
        except BaseException:
            self.close()
            raise

    def _allocate(self, num_workers: int, per_slot: int) -> None:
        talk = ((num_workers, self.num_slots), "int64")
        layout = rows_layout(self.observation, self.action, self.num_envs)
        busy = ((num_workers, self.num_slots), "float64")
        memory = SharedArrays({**layout, "todo": talk, "done": talk, "said": talk, "busy": busy})
        self._memory = memory
        self._todo, self._done, self._said = memory["todo"], memory["done"], memory["said"]
        self._busy = memory["busy"]  # seconds that each worker stepped for its last answer
        self._restarts = memory["restarts"]
        slices = [slice(slot * per_slot, (slot + 1) * per_slot) for slot in range(self.num_slots)]
        self._steps = [Step(*(memory[name][own] for name in Step._fields)) for own in slices]
        self._actions = [memory["action"][own] for own in slices]

    @property
    def should_stop(self) -> Callable[[], bool] | None:
        """Asked at least every 0.2 s while waiting; True raises Interrupted."""
        return self._crew.should_stop

    @should_stop.setter
    def should_stop(self, ask: Callable[[], bool] | None) -> None:
        self._crew.should_stop = ask

    # --- the loop -----------------------------------------------------------------------------------------------

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Begin anew; every slot will answer with first observations. Returns the random steps taken."""
        while self._sent:
            self._wait(*self._sent[0])
            self._sent.popleft()
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._said.fill(0)
        self._seed = seed
        self._episodes.clear()
        self._played = [0] * self.num_envs
        order = {"do": "reset", "seed": seed, "warm_up": warm_up}
        taken: dict[int, int] = {}
        for member in self._crew.members:
            member.inbox.clear()
            member.heard = self._crew.clock
            member.tell(order)
        while len(taken) < len(self._crew.members):
            for member in self._crew.members:
                if member.lost is not None and member.index not in taken:
                    self._replace(member)
                    member.tell(order)
                elif message := member.take("ready"):
                    taken[member.index] = message["ready"]
                    self._take_notices(message)
                elif member.index not in taken:
                    self._crew.expect(member, self._build_timeout, "while resetting an env")
            if len(taken) < len(self._crew.members):
                self._crew.listen(LOOK_SECONDS)
        for member in self._crew.members:
            member.inbox.clear()  # news of requests that were given up above
        # a slot that waits for no worker answers with what its rows hold
        self._sent.extend((slot, int(self._done[0, slot])) for slot in range(self.num_slots))
        self._is_owed = [True] * self.num_slots
        return sum(taken.values())

    def send(self, slot: int, action: NDArray[Any]) -> None:
        if self._is_owed[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")
        check_action(action, self._action_shape)
        self._actions[slot][...] = action
        self._number += 1
        with self._fence:
            pass  # actions before the number that asks for them, on every kind of processor
        self._todo[:, slot] = self._number
        self._sent.append((slot, self._number))
        self._is_owed[slot] = True
        for member in self._crew.members:
            member.bell.ring()

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop between two steps of the envs")
        slot, number = self._sent[0]
        start = time.perf_counter()
        self._wait(slot, number)
        with self._fence:
            pass  # rows are read after the number that says they are there
        busy = self._busy[:, slot].tolist()
        self._waited += max(0.0, time.perf_counter() - start - sum(busy) / len(busy))
        self._sent.popleft()
        self._is_owed[slot] = False
        if number and (self._said[:, slot] == number).any():
            self._take_news(slot, number)
        return slot, self._steps[slot]

    def _wait(self, slot: int, number: int) -> None:
        start = self._crew.clock
        while (pending := self._done[:, slot] != number).any():
            if lost := self._crew.lost():
                self._replace(lost[0])
                continue
            for index in pending.nonzero()[0].tolist():
                member = self._crew.members[index]
                member.heard = max(member.heard, start)
                self._crew.expect(member, self._step_timeout, "while it owed an answer")
            self._crew.listen(LOOK_SECONDS)

    # --- news and losses ----------------------------------------------------------------------------------------

    def _take_news(self, slot: int, number: int) -> None:
        """Said before it was done, so it is in the inbox or on its way."""
        for index in (self._said[:, slot] == number).nonzero()[0].tolist():
            member = self._crew.members[index]
            message = self._find_news(member, slot, number)
            while message is None and member.lost is None:
                self._crew.listen(LOOK_SECONDS)
                self._crew.expect(member, self._step_timeout, "while it owed statistics")
                message = self._find_news(member, slot, number)
            if message is not None:
                for env, values in message["episodes"]:
                    self._played[env] += 1
                    self._episodes.append(Episode(env, values))
                self._take_notices(message)

    @staticmethod
    def _find_news(member: Member, slot: int, number: int) -> dict[str, Any] | None:
        for place, message in enumerate(member.inbox):
            if message.get("slot") == slot and message["number"] == number:
                return member.inbox.pop(place)
        return None

    def _take_notices(self, message: dict[str, Any]) -> None:
        for notice in message["notices"]:
            self._notices += 1
            report(notice, self._notices)

    def _replace(self, member: Member) -> None:
        """A new process; what the old one left half done is asked again, what it had done stays."""
        index = member.index
        owed = [slot for slot in range(self.num_slots) if self._done[index, slot] != self._todo[index, slot]]
        self._said[index, owed] = 0
        member.inbox = [message for message in member.inbox if "slot" in message and message["slot"] not in owed]
        for first, last in self._blocks[index]:
            self._restarts[first:last] += 1
        member.order = {**member.order, "seeds": self._seeds_left(index, member.inbox)}
        # A new worker answers every slot once with a reset row; only after that does it step.
        was_useful = self._number > self._lost_at[index] + 2 * self.num_slots
        self._lost_at[index] = self._number
        self._crew.revive(member, was_useful)
        self._introduce(member)

    def _seeds_left(self, index: int, untold: Sequence[Mapping[str, Any]] = ()) -> dict[str, list[int]] | None:
        """The seeds that a worker's envs have still to play; episodes in its inbox are played already."""
        if self._seeds is None:
            return None
        played = Counter(env for message in untold for env, _ in message["episodes"])
        envs = [env for block in self._blocks[index] for env in range(*block)]
        return {str(env): list(self._seeds[env][self._played[env] + played[env] :]) for env in envs}

    def _introduce(self, member: Member) -> None:
        assert self._memory is not None
        # one message: with the seed in a second one, a pending request could be answered in between
        member.tell({"do": "attach", "layout": self._memory.layout, "seed": self._seed}, [self._memory.fd])
        member.heard = self._crew.clock

    def episodes(self) -> list[Episode]:
        finished, self._episodes = self._episodes, []
        return finished

    def waited(self) -> float:
        """Seconds in recv beyond what the average worker stepped: hand-over, and waiting for the slowest."""
        return self._waited

    def restarts(self) -> int:
        return self._restarts_before + int(self._restarts.sum())

    def inspect_workers(self) -> list[dict[str, Any]]:
        """pid, whether torch is loaded, and the peak of resident memory in bytes, of every worker."""
        for member in self._crew.members:
            member.heard = self._crew.clock
            member.tell({"do": "inspect"})
        found = []
        for member in self._crew.members:
            while (message := member.take("inspected")) is None and member.lost is None:
                self._crew.listen(LOOK_SECONDS)
                self._crew.expect(member, self._step_timeout, "while it was inspected")
            found.append({} if message is None else message["inspected"])
        return found

    def close(self) -> None:
        """End every process and give back the memory; calling it again does nothing."""
        self._crew.close()
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _split(count: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous shares that differ by one at the most."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return list(pairwise(bounds))
