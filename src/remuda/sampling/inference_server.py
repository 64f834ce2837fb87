"""One process that acts for all envs: whichever groups of them are ready make a batch, and nobody waits for the rest.

    sampler = InferenceServer(envs, agent, weights, num_steps, seed, buffers)  # envs: an AsyncPooledEnvs
    sampler.reset(seed)
    sampler.give(3)                                  # buffers 3 may be filled by whichever group needs some next
    while working:
        for filled in sampler.receive(seconds=0.02): # answers of envs; rollouts that are complete with them
            ...
        sampler.inference()                                # one batch

Every group fills a rollout of its own, row by row, and weights are looked at before each batch: a rollout may be of
several versions, and says of every row which one acted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remuda.core import Agent, Weights
from remuda.data import map_tree
from remuda.sampling.buffers import Buffers, blank_obs
from remuda.sampling.exploration import Exploration, RandomActions
from remuda.sampling.noise import Noise
from remuda.sampling.sampler import ToEnv


class Filled(NamedTuple):
    """A rollout that is complete."""

    slot: int
    first_env: int
    version: int  # the oldest that acted


@dataclass
class Group:
    """Envs that step together, and the rollout that they fill."""

    number: int
    columns: slice
    noise: Noise
    row: int  # rows done, over all rollouts
    is_seen: bool = False  # its observations are there, and nobody has acted on them
    slot: int | None = None
    t: int = 0  # rows of its rollout that are complete
    buffers: Buffers | None = None
    arrays: Any = None  # the same memory as numpy
    noises: Any = field(default=None, repr=False)
    random: Any = ()  # [up to T, B of the group] actions of the rows that are to be random


class InferenceServer:
    """Envs x Agent -> rollouts of groups, in slots of memory."""

    def __init__(
        self,
        envs: Any,
        agent: Agent,
        weights: Weights,
        num_steps: int,
        seed: int,
        slots: list[Buffers],
        first_row: int = 0,
        explore: Exploration = Exploration(),  # noqa: B008  (it never changes)
    ) -> None:
        self.envs, self.agent, self.weights, self.num_steps, self.version = envs, agent, weights, num_steps, -1
        self._slots, self._free = slots, deque[int]()
        self._to_env = ToEnv(envs.action)
        B, width = envs.num_envs, envs.num_envs // envs.num_slots
        self._obs = blank_obs(envs.observation, B)  # what comes next
        self._obs_arrays = map_tree(lambda tensor: tensor.numpy(), self._obs)
        self._state, self._blank = agent.initial_state(B), agent.initial_state(B)
        self._begins = torch.ones(B, dtype=torch.bool)  # True where the next row starts a new episode
        shares = [slice(first, first + width) for first in range(0, B, width)]
        self._groups = [
            Group(number, own, Noise(seed, range(own.start, own.stop), agent.noise), first_row)
            for number, own in enumerate(shares)
        ]
        self._explore, self._random = explore, list[RandomActions]()
        if explore.random_rows > first_row:
            self._random = [RandomActions(envs.action, seed, range(own.start, own.stop)) for own in shares]
        self._seconds = {"env": 0.0, "inference": 0.0}

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env; returns the random steps that were taken to spread them over their episodes."""
        self._begins.fill_(True)
        return int(self.envs.reset(seed, warm_up))

    def give(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before a slot is given: every group has seen what it must act on."""
        return not self._free and all(group.is_seen and group.slot is None for group in self._groups)

    def receive(self, seconds: float) -> list[Filled]:
        """What groups have answered, waiting so long for the first if there is nothing to act on."""
        start = time.perf_counter()
        can_act = any(group.is_seen and (group.slot is not None or self._free) for group in self._groups)
        for number in self.envs.ready(0.0 if can_act else seconds):
            self._receive(self._groups[number])
        self._seconds["env"] += time.perf_counter() - start
        with torch.inference_mode():
            return [self._finish(group) for group in self._groups if group.t == self.num_steps]

    def act(self) -> None:
        """Once for all groups that wait for it."""
        start = time.perf_counter()
        with torch.inference_mode():
            if self._free:
                waiting = [group for group in self._groups if group.is_seen and group.slot is None]
                # who has done least comes first, or with few slots the first group would have them all
                for group in sorted(waiting, key=lambda group: group.row)[: len(self._free)]:
                    self._begin(group, self._free.popleft())
            acting = [group for group in self._groups if group.is_seen and group.slot is not None]
            if acting:
                self._act(acting)
        self._seconds["inference"] += time.perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _receive(self, group: Group) -> None:
        _, step = self.envs.recv(group.number)
        if group.slot is not None:
            arrays, t = group.arrays, group.t
            arrays.reward[t] = step.reward
            arrays.discount[t] = ~step.terminated
            arrays.mask[t] = step.mask
            self._begins[group.columns] = torch.from_numpy(~step.mask)
            group.t += 1
        self._obs_arrays[group.columns] = step.obs
        if self._state is not None and not step.mask.all():
            envs = torch.from_numpy(group.columns.start + np.flatnonzero(~step.mask))
            self._state[envs] = self._blank[envs]
        group.is_seen = True

    def _begin(self, group: Group, slot: int) -> None:
        group.slot, group.t, group.buffers = slot, 0, self._slots[slot]
        group.arrays = map_tree(lambda tensor: tensor.numpy(), group.buffers.steps)
        group.noises = group.noise.rows(group.row, self.num_steps)
        group.random = self._random_actions(group)
        group.row += self.num_steps
        group.buffers.begins.copy_(self._begins[group.columns])
        if self._state is not None:
            group.buffers.state[...] = self._state[group.columns]

    def _random_actions(self, group: Group) -> Any:
        count = min(self.num_steps, self._explore.random_rows - group.row)
        return self._random[group.number].rows(group.row, count) if count > 0 else ()

    def _exploration(self, groups: list[Group]) -> Tensor | None:
        """Of each of their envs, by the row that its own group has come to."""
        rows = [group.row - self.num_steps + group.t for group in groups]
        found = {row: self._explore.at(row) for row in set(rows)}
        amounts = [(found[row], group.columns) for row, group in zip(rows, groups, strict=True)]
        parts = [amount[columns] for amount, columns in amounts if amount is not None]
        return torch.cat(parts) if parts else None

    def _finish(self, group: Group) -> Filled:
        buffers, columns = group.buffers, group.columns
        assert buffers is not None
        assert group.slot is not None
        buffers.next_obs[...] = self._obs[columns]
        if buffers.last_value is not None:
            state = None if self._state is None else self._state[columns]
            value: Tensor = self.agent.value(self._obs[columns], state)  # type: ignore[attr-defined]  # the buffers say so
            buffers.last_value.copy_(value)
        filled = Filled(group.slot, columns.start, int(buffers.steps.version[0, 0]))
        group.slot, group.t = None, 0
        return filled

    def _act(self, groups: list[Group]) -> None:
        """One batch; what comes of it goes to each group's own row, and to its envs."""
        self.version = self.weights.pull(self.version)
        index = torch.cat([torch.arange(group.columns.start, group.columns.stop) for group in groups])
        obs = self._obs[index]
        state = None if self._state is None else self._state[index]
        noise = torch.cat([group.noises[group.t] for group in groups])
        action, said, state = self.agent.act(obs, state, self._exploration(groups), noise)
        if self._state is not None:
            self._state[index] = state
        actions = map_tree(lambda x: x.numpy(), action)
        end = 0
        for group in groups:
            start, end = end, end + group.columns.stop - group.columns.start
            assert group.buffers is not None
            own = map_tree(lambda x: x[start:end], actions)  # noqa: B023  (used at once)
            own = group.random[group.t] if group.t < len(group.random) else own
            steps = group.buffers.steps
            group.arrays.obs[group.t] = self._obs_arrays[group.columns]
            group.arrays.action[group.t] = own
            if said is not None:
                steps.policy[group.t] = said[start:end]
            steps.version[group.t] = self.version
            group.is_seen = False
            self.envs.send(group.number, self._to_env(own))
