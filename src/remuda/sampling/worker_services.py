"""The services of a sampler worker, one for each way in which rows reach the learner.

| service | samples | into |
|---|---|---|
| ColumnService | when it is asked for a rollout | its columns of the parent's rollout |
| SlotService | when it is given a slot | that slot, one rollout at a time |
| ReplayService | all the time | a replay |
| GroupSlotService | when it is given slots, for groups of envs in other processes | a slot for each group |
| GroupReplayService | all the time, for groups of envs in other processes | a replay |

The message loop that drives a service is in sampler_worker.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from remuda.core import Envs
from remuda.data import Rollout
from remuda.errors import NoState
from remuda.processes.links import Message
from remuda.sampling.buffers import Buffers
from remuda.sampling.inference_server import Filled, InferenceServer
from remuda.sampling.parent_link import ParentLink
from remuda.sampling.sampler import EnvSampler

IDLE_SECONDS = 1.0  # how long an idle worker waits for messages before it checks that its fork server is alive
GROUP_SECONDS = 0.02  # longest wait for groups of envs before the worker reads messages again
STATS_SECONDS = 0.1  # interval at which a worker that samples without being asked sends statistics
THROTTLED_SECONDS = 0.002  # time between two checks of `may_write` while it returns False


class Writer(Protocol):
    """An object that writes rollouts to a replay."""

    def may_write(self) -> bool: ...  # returns False while samplers must wait for the learner
    def write(self, rollout: Rollout, group: int = 0) -> None: ...  # `group`: index among the worker's own groups
    def num_written(self) -> int: ...  # number of rows ever written for all groups of the worker


class SamplingService(ABC):
    """Base class of services. The message loop calls `wait_seconds`, reads messages, and then calls `work`."""

    @abstractmethod
    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Reset every env; return the number of random warm-up steps, of which each env takes at most `warm_up`."""

    @abstractmethod
    def handle(self, message: Message) -> None:
        """Carry out a request of the parent."""

    def wait_seconds(self) -> float:
        """Return how many seconds the message loop may wait for messages before it calls `work`."""
        return IDLE_SECONDS

    def work(self) -> None:  # noqa: B027  (some services only answer requests)
        """Sample for a short time. Services that sample only in `handle` do nothing here."""


class ColumnService(SamplingService):
    """Samples this worker's columns of the parent's rollout whenever the parent asks for a rollout."""

    def __init__(self, parent: ParentLink, envs: Envs, sampler: EnvSampler) -> None:
        self._parent, self._envs, self._sampler = parent, envs, sampler

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return self._sampler.reset(seed, warm_up)

    def handle(self, message: Message) -> None:
        sampler, send = self._sampler, self._parent.send
        match message["do"]:
            case "collect":
                sampler.row = message["row"]
                sampler.collect()
                answer = {"collected": message["row"], "running": sampler.running()}
                self._parent.send_with_stats(answer, self._envs, sampler.take_seconds())
            case "save":
                try:
                    send({"saved": sampler.get_state()})
                except NoState as error:
                    send({"saved": None, "why": str(error)})
            case "load":
                sampler.set_state(message["state"])
                send({"loaded": self._envs.restarts()})


class SlotService(SamplingService):
    """Fills each slot that the parent gives it with a rollout."""

    def __init__(
        self, parent: ParentLink, envs: Envs, sampler: EnvSampler, slots: list[Buffers], first_env: int
    ) -> None:
        self._parent, self._envs, self._sampler = parent, envs, sampler
        self._slots, self._first_env = slots, first_env

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return self._sampler.reset(seed, warm_up)

    def handle(self, message: Message) -> None:
        assert message["do"] == "fill"
        sampler = self._sampler
        sampler.write_to(self._slots[message["slot"]])
        sampler.collect()
        answer = {"filled": message["slot"], "first": self._first_env, "version": sampler.version}
        self._parent.send_with_stats(answer, self._envs, sampler.take_seconds())


class ReplayService(SamplingService):
    """Samples continuously after the message "sample", and writes the rollouts to a replay."""

    def __init__(self, parent: ParentLink, envs: Envs, sampler: EnvSampler | InferenceServer, writer: Writer) -> None:
        self._parent, self._envs, self._writer = parent, envs, writer
        self._sampler: EnvSampler | InferenceServer = sampler
        self._is_sampling, self._has_written, self._last_stats = False, False, 0.0

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return self._sampler.reset(seed, warm_up)

    def handle(self, message: Message) -> None:
        assert message["do"] == "sample"
        self._is_sampling = True

    def wait_seconds(self) -> float:
        if not self._is_sampling:
            return IDLE_SECONDS
        return 0.0 if self._writer.may_write() else THROTTLED_SECONDS

    def work(self) -> None:
        if self._is_sampling:
            if self._writer.may_write():
                self._sample()
            self._send_stats()

    def _sample(self) -> None:
        assert isinstance(self._sampler, EnvSampler)
        self._write(self._sampler.collect())

    def _write(self, rollout: Rollout, group: int = 0) -> None:
        self._writer.write(rollout, group)
        self._has_written = True

    def _send_stats(self) -> None:
        """Send statistics every STATS_SECONDS; before the first rows are written, send only heartbeats."""
        now = time.monotonic()
        if not self._has_written:
            self._parent.beat()
        elif now - self._last_stats > STATS_SECONDS:
            self._last_stats = now
            answer = {"sampled": self._writer.num_written(), "version": self._sampler.version}
            self._parent.send_with_stats(answer, self._envs, self._sampler.take_seconds())


class GroupSlotService(SamplingService):
    """Runs inference for groups of envs in other processes, and fills the slots that the parent gives it."""

    def __init__(self, parent: ParentLink, envs: Envs, server: InferenceServer) -> None:
        self._parent, self._envs, self._server = parent, envs, server

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return self._server.reset(seed, warm_up)

    def handle(self, message: Message) -> None:
        assert message["do"] == "fill"
        self._server.give(message["slot"])

    def wait_seconds(self) -> float:
        return IDLE_SECONDS if self._server.is_idle else 0.0

    def work(self) -> None:
        for filled in serve_groups(self._server, self._parent):
            answer = {"filled": filled.slot, "first": filled.first_env, "version": filled.version}
            self._parent.send_with_stats(answer, self._envs, self._server.take_seconds())


class GroupReplayService(ReplayService):
    """Runs inference for groups of envs in other processes, and writes their rollouts to a replay."""

    def __init__(
        self, parent: ParentLink, envs: Envs, server: InferenceServer, writer: Writer, slots: list[Buffers]
    ) -> None:
        super().__init__(parent, envs, server, writer)
        self._server, self._slots = server, slots
        self._spare = list(range(len(slots)))  # slots that the inference server may not fill at the moment
        self._width = envs.num_envs // envs.num_slots

    def wait_seconds(self) -> float:
        return super().wait_seconds() if self._server.is_idle else 0.0

    def work(self) -> None:
        super().work()
        for filled in serve_groups(self._server, self._parent):
            slot = self._slots[filled.slot]
            rollout = Rollout(slot.steps, slot.next_obs, slot.last_value, slot.state)
            self._write(rollout, filled.first_env // self._width)
            if self._writer.may_write():
                self._server.give(filled.slot)  # now, so that the group takes part in the next batch
            else:
                self._spare.append(filled.slot)

    def _sample(self) -> None:
        while self._spare:
            self._server.give(self._spare.pop())


def serve_groups(server: InferenceServer, parent: ParentLink) -> Iterator[Filled]:
    """Read the answers of groups of envs, yield reports of complete rollouts, and then let the server act."""
    if server.is_idle:
        return
    parent.beat()
    yield from server.receive(GROUP_SECONDS)
    server.act()
