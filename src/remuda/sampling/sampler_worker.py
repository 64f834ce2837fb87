"""What runs in a worker that acts: builds its envs and its agent, then samples whenever it is asked.

Under synchronous schemes it samples its columns of the running rollout; under asynchronous ones it fills slots, or it
samples without being asked and writes what it has to a replay: rollouts of all its envs, or, with groups of envs in
processes of their own, of one group each.

A module names what is built and serves it, so that a fork server can load both:

    def main(fds):
        return serve(fds, make_parts)                # make_parts(order, beat, tell) -> (envs, agent, exploration)
        return serve(fds, make_parts, make_writer)   # make_writer(order, descriptors) -> Writer
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from remuda.core import Agent, derive_seed
from remuda.data import Rollout, SharedArrays
from remuda.errors import NoState
from remuda.learning.weights import join_weights
from remuda.machine import keep_memory
from remuda.processes import worker_main as serving
from remuda.processes.links import Link
from remuda.processes.notices import Notice, collect_warnings
from remuda.sampling.buffers import Buffers, allocate, attach, attach_slots
from remuda.sampling.exploration import Exploration
from remuda.sampling.inference_server import Filled, InferenceServer
from remuda.sampling.sampler import EnvSampler

LOOK_SECONDS = 1.0  # how often an idle worker looks whether its fork server lives, where the kernel does not tell
WORK_SECONDS = 0.02  # how long groups of envs are waited for before orders are looked at
BEAT_SECONDS = 0.25  # how often a busy one says that it lives
NEWS_SECONDS = 0.1  # how often one that is not asked says what it has sampled
REST_SECONDS = 0.002  # how long such a one waits before it looks again whether it may go on

# order, heartbeat (asked at every step), receiver of notices of rebuilt envs -> envs, agent, exploration
MakeParts = Callable[
    [Mapping[str, Any], Callable[[], bool], Callable[[Notice], None]], tuple[Any, Agent, Exploration]
]


class Writer(Protocol):
    """Where a worker that is not asked for rollouts puts them."""

    def may_write(self) -> bool: ...  # False: samplers are to wait for the learner
    def write(self, rollout: Rollout, group: int = 0) -> None: ...  # of its groups of envs
    def num_written(self) -> int: ...  # rows of all its groups, ever


MakeWriter = Callable[[Mapping[str, Any], Sequence[int]], Writer]


def serve(fds: Sequence[int], make_parts: MakeParts, make_writer: MakeWriter | None = None) -> int:
    """Until told to leave or the parent is gone; returns the exit code."""
    link = Link.from_fd(fds[0])
    return serving.serve(link, _Service(link, make_parts, make_writer))


class _Service:
    def __init__(self, link: Link, make_parts: MakeParts, make_writer: MakeWriter | None) -> None:
        self._link, self._make_parts, self._make_writer = link, make_parts, make_writer
        self._envs: Any = None
        self._is_leaving = False
        self._beaten = 0.0
        self._notices = collect_warnings()  # such as of lost env workers: the parent has the run's log
        self._groups: InferenceServer | None = None
        self._writer: Writer | None = None
        self._is_sampling, self._has_sampled, self._told = False, False, 0.0
        self._spare: list[int] = []  # slots of this process whose rollouts are in the replay

    def run(self) -> None:
        torch.set_num_threads(1)  # there is one of these for every core
        keep_memory()
        server = os.getppid()
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while not self._is_leaving and os.getppid() == server:
            if poll.poll(self._patience() * 1000):
                messages, fds = self._link.receive()
                for message in messages:
                    self._obey(message, fds)
                self._is_leaving |= self._link.has_ended
            if self._is_sampling and not self._is_leaving:
                self._sample()
            if self._groups is not None and not self._groups.is_idle:
                self._beat()
                for filled in self._groups.receive(WORK_SECONDS):
                    self._hand_over(filled)
                self._groups.act()

    def _patience(self) -> float:
        """How long orders may be waited for."""
        if self._groups is not None and not self._groups.is_idle:
            return 0.0
        if self._is_sampling:
            assert self._writer is not None
            return 0.0 if self._writer.may_write() else REST_SECONDS
        return LOOK_SECONDS

    def _sample(self) -> None:
        """Straight into the replay; the parent hears of it now and then."""
        assert self._writer is not None
        may_write = self._writer.may_write()
        if may_write and self._groups is not None:
            while self._spare:
                self._groups.give(self._spare.pop())
        elif may_write:
            self._write(self._sampler.collect())
        if not self._has_sampled:  # nothing to tell but that it lives
            self._beat()
            return
        now = time.monotonic()
        if now - self._told > NEWS_SECONDS:
            self._told = self._beaten = now
            self._tell({"sampled": self._writer.num_written(), "version": (self._groups or self._sampler).version})

    def _write(self, rollout: Rollout, group: int = 0) -> None:
        assert self._writer is not None
        self._writer.write(rollout, group)
        self._has_sampled = True

    def _hand_over(self, filled: Filled) -> None:
        """What a group has sampled: to the parent, or to the replay."""
        assert self._groups is not None
        if self._writer is None:
            self._tell({"filled": filled.slot, "first": filled.first_env, "version": filled.version})
            return
        slot = self._slots[filled.slot]
        width = self._envs.num_envs // self._envs.num_slots
        self._write(Rollout(slot.steps, slot.next_obs, slot.last_value, slot.state), filled.first_env // width)
        if self._writer.may_write():
            self._groups.give(filled.slot)  # at once, so that its group is in the next batch
        else:
            self._spare.append(filled.slot)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()

    def _beat(self) -> bool:
        """Asked by the envs at every step whether to stop: never, but a busy worker must be heard of."""
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            self._link.send({"alive": True}, seconds=None)
        return False

    def _obey(self, message: Mapping[str, Any], fds: list[int]) -> None:
        match message["do"]:
            case "build":
                self._order = message
                self._beat()
                self._envs, self._agent, self._explore = self._make_parts(message, self._beat, self._notices.append)
                self._link.send({"built": True})
            case "attach":
                self._attach(message, [fds.pop(0) for _ in range(message.get("fds", 2))])
            case "sample":
                self._is_sampling = True
            case "reset":
                taken = (self._groups or self._sampler).reset(message["seed"], message["warm_up"])
                self._link.send({"ready": taken, "notices": self._notices}, seconds=None)
                self._notices.clear()
            case "collect":
                self._sampler.row = message["row"]
                self._sampler.collect()
                self._tell({"collected": message["row"], "running": self._sampler.running()})
            case "fill" if self._groups is not None:
                self._groups.give(message["slot"])
            case "fill":
                self._sampler.write_to(self._slots[message["slot"]])
                self._sampler.collect()
                first, version = self._order["first"], self._sampler.version
                self._tell({"filled": message["slot"], "first": first, "version": version})
            case "save":
                try:
                    self._link.send({"saved": self._sampler.get_state()}, seconds=None)
                except NoState as error:
                    self._link.send({"saved": None, "why": str(error)})
            case "load":
                self._sampler.set_state(message["state"])
                self._link.send({"loaded": self._envs.restarts()})
            case "leave":
                self._is_leaving = True

    def _tell(self, answer: Mapping[str, Any]) -> None:
        news = {
            "episodes": [(episode.env, episode.values) for episode in self._envs.episodes()],
            "notices": self._notices,
            "restarts": self._envs.restarts(),
            "seconds": (self._groups or self._sampler).take_seconds(),
        }
        self._link.send({**answer, **news}, seconds=None)  # the parent may be busy
        self._notices.clear()

    def _attach(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """To what is written to, of which the message says what it is, and to the weights."""
        order, envs, agent = self._order, self._envs, self._agent
        into = message.get("into")
        weights = join_weights(agent, message, fds)  # type: ignore[arg-type]
        buffers: Buffers | None = None
        first, last = order["first"], order["last"]
        if into == "replay":
            assert self._make_writer is not None
            self._writer = self._make_writer(order, fds)
            width = envs.num_envs // envs.num_slots
            self._spare = list(range(envs.num_slots)) if envs.num_slots > 1 else []
            self._slots = [allocate(agent, envs.observation, order["num_steps"], width) for _ in self._spare]
        else:
            self._memory = SharedArrays.attach(fds[0], message["layout"])
            width = self._memory["steps.mask"].shape[-1]
            own = allocate(agent, envs.observation, order["num_steps"], width)
            if into == "slots":
                self._slots = attach_slots(own, self._memory)
            else:
                buffers = attach(own, self._memory).columns(first, last)
        for fd in fds:
            os.close(fd)
        if envs.num_slots > 1:
            common = (envs, agent, weights, order["num_steps"], order["seed"])
            self._groups = InferenceServer(*common, self._slots, order["row"], self._explore)
            if message["seed"] is not None:
                self._groups.reset(derive_seed(message["seed"], first, message["restarts"]))
            return
        self._sampler = EnvSampler(
            envs,
            agent,
            weights,
            order["num_steps"],
            order["seed"],
            order.get("row", 0),
            wait_reset=order["wait_reset"],
            first_env=first,
            buffers=buffers,
            explore=self._explore,
        )
        if message["seed"] is None:
            return
        # in place of a lost worker
        if into is not None:
            self._sampler.reset(derive_seed(message["seed"], first, message["restarts"]))
        else:
            envs.prepare(message["seed"], message["restarts"])
            self._sampler.resume()
