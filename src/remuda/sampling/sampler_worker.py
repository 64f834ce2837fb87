"""The process of a sampler worker: it builds its envs and its agent, attaches to shared memory, and samples.

The message "attach" selects a service (worker_services.py), which defines how the worker samples and where the rows
go. The module that a fork server loads provides the functions that build envs, agent and writer:

    def main(fds):
        # make_parts(blueprint, beat, report) returns envs, agent and exploration. make_writer(blueprint, descriptors)
        # returns a Writer, and is needed only by workers that write to a replay.
        return serve(fds, make_parts, make_writer)
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remuda.core import Agent, Weights, derive_seed
from remuda.data import SharedArrays
from remuda.learning.weights import join_weights
from remuda.machine import keep_memory
from remuda.processes import worker_main
from remuda.processes.links import Link, Message
from remuda.processes.notices import Notice
from remuda.processes.worker_pool import Blueprint
from remuda.sampling.buffers import Buffers, allocate, attach, attach_slots
from remuda.sampling.device_agent import as_on_cpu
from remuda.sampling.exploration import Exploration
from remuda.sampling.inference_server import InferenceServer
from remuda.sampling.parent_link import ParentLink
from remuda.sampling.sampler import EnvSampler
from remuda.sampling.worker_services import (
    IDLE_SECONDS,
    ColumnService,
    GroupReplayService,
    GroupSlotService,
    ReplayService,
    SamplingService,
    SlotService,
    Writer,
)

# A MakeParts returns envs, agent and exploration. Its arguments are the blueprint, a function that sends a heartbeat
# and must be called at every step, and a function to which notices are passed.
MakeParts = Callable[[Blueprint, Callable[[], bool], Callable[[Notice], None]], tuple[Any, Agent, Exploration]]
MakeWriter = Callable[[Blueprint, Sequence[int]], Writer]


def serve(fds: Sequence[int], make_parts: MakeParts, make_writer: MakeWriter | None = None) -> int:
    """Run a sampler worker until the parent asks it to leave, or until the parent exits; return the exit code."""
    link = Link.from_fd(fds[0])
    return worker_main.serve(link, SamplerWorker(link, make_parts, make_writer))


class SamplerWorker:
    """Handles the parent's messages: builds envs and agent, and lets the selected service sample between messages."""

    def __init__(self, link: Link, make_parts: MakeParts, make_writer: MakeWriter | None) -> None:
        self._parent = ParentLink(link)
        self._make_parts, self._make_writer = make_parts, make_writer
        self._envs: Any = None
        self._service: SamplingService | None = None
        self._is_leaving = False

    def run(self) -> None:
        torch.set_num_threads(1)  # there is usually one worker per core; `make_parts` may set more threads
        keep_memory()
        server, link = os.getppid(), self._parent.link
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while not self._is_leaving and os.getppid() == server:
            seconds = IDLE_SECONDS if self._service is None else self._service.wait_seconds()
            if poll.poll(seconds * 1000):
                messages, fds = link.receive()
                for message in messages:
                    self._handle(message, fds)
                self._is_leaving |= link.has_ended
            if self._service is not None and not self._is_leaving:
                self._service.work()

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()

    def _handle(self, message: Message, fds: list[int]) -> None:
        match message["do"]:
            case "build":
                self._blueprint = message
                self._parent.beat()
                parts = self._make_parts(message, self._parent.beat, self._parent.notices.append)
                self._envs, self._agent, self._explore = parts
                self._parent.send({"built": True})
            case "attach":
                self._attach(message, [fds.pop(0) for _ in range(message["fds"])])
            case "leave":
                self._is_leaving = True
            case "reset":
                assert self._service is not None
                taken = self._service.reset(message["seed"], message["warm_up"])
                self._parent.send_with_notices({"ready": taken})
            case _:
                assert self._service is not None
                self._service.handle(message)

    def _attach(self, message: Message, fds: list[int]) -> None:
        """Attach to the shared weights and to the memory for rows, and create the service that writes the rows."""
        weights = join_weights(self._agent, message, fds)  # type: ignore[arg-type]  # an Agent is an nn.Module
        self._agent = as_on_cpu(self._agent)
        match message["into"]:
            case "columns":
                self._service = self._sample_columns(weights, message, fds)
            case "slots":
                self._service = self._sample_slots(weights, message, fds)
            case "replay":
                self._service = self._sample_to_replay(weights, fds)
        for fd in fds:
            os.close(fd)
        if message["seed"] is not None and message["into"] != "columns":  # this worker replaces a lost worker
            assert self._service is not None
            self._service.reset(derive_seed(message["seed"], self._blueprint["first"], message["restarts"]))

    @property
    def _has_groups(self) -> bool:
        """Whether the worker runs inference for several groups of envs, which run in other processes."""
        return bool(self._envs.num_slots > 1)

    def _sample_columns(self, weights: Weights, message: Message, fds: list[int]) -> ColumnService:
        memory = SharedArrays.attach(fds[0], message["layout"])
        width = memory["steps.mask"].shape[-1]
        buffers = attach(self._allocate(width), memory).columns(self._blueprint["first"], self._blueprint["last"])
        sampler = self._make_sampler(weights, buffers)
        if message["seed"] is not None:  # this worker replaces a lost worker
            self._envs.prepare(message["seed"], message["restarts"])
            sampler.resume()
        return ColumnService(self._parent, self._envs, sampler)

    def _sample_slots(self, weights: Weights, message: Message, fds: list[int]) -> SamplingService:
        memory = SharedArrays.attach(fds[0], message["layout"])
        slots = attach_slots(self._allocate(memory["steps.mask"].shape[-1]), memory)
        if self._has_groups:
            return GroupSlotService(self._parent, self._envs, self._make_server(weights, slots))
        sampler = self._make_sampler(weights)
        return SlotService(self._parent, self._envs, sampler, slots, self._blueprint["first"])

    def _sample_to_replay(self, weights: Weights, fds: list[int]) -> SamplingService:
        assert self._make_writer is not None
        writer = self._make_writer(self._blueprint, fds)
        if not self._has_groups:
            return ReplayService(self._parent, self._envs, self._make_sampler(weights), writer)
        num_groups = self._envs.num_slots
        slots = [self._allocate(self._envs.num_envs // num_groups) for _ in range(num_groups)]
        server = self._make_server(weights, slots)
        return GroupReplayService(self._parent, self._envs, server, writer, slots)

    def _allocate(self, width: int) -> Buffers:
        return allocate(self._agent, self._envs.observation, self._blueprint["num_steps"], width)

    def _make_server(self, weights: Weights, slots: list[Buffers]) -> InferenceServer:
        num_steps, seed, row = (self._blueprint[name] for name in ("num_steps", "seed", "row"))
        return InferenceServer(self._envs, self._agent, weights, num_steps, seed, slots, row, self._explore)

    def _make_sampler(self, weights: Weights, buffers: Buffers | None = None) -> EnvSampler:
        blueprint = self._blueprint
        return EnvSampler(
            self._envs,
            self._agent,
            weights,
            blueprint["num_steps"],
            blueprint["seed"],
            blueprint.get("row", 0),
            wait_reset=blueprint["wait_reset"],
            first_env=blueprint["first"],
            buffers=buffers,
            explore=self._explore,
        )
