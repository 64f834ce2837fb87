"""Inference in one process for envs in other processes: all groups of envs that wait for actions form one batch.

    server = InferenceServer(envs, agent, weights, num_steps, seed, slots)  # envs: an AsyncPooledEnvs
    server.reset(seed)
    server.give(3)                                    # allows one group to fill the buffers of slot 3
    while working:
        for filled in server.receive(seconds=0.02):   # reads answers of envs; reports slots with complete rollouts
            ...
        server.act()                                  # sends the next actions, computed in one batch

Every group of envs fills a rollout of its own, row by row, and no group waits for another. Weights are pulled before
each batch, so several versions may act in a rollout. `Steps.version` holds the version that acted in each row.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from remuda.core import Agent, AsyncEnvs, Weights
from remuda.data import map_tree
from remuda.sampling.buffers import Buffers, Tree
from remuda.sampling.exploration import Exploration
from remuda.sampling.row_writer import AgentInputs, RowWriter, make_writers
from remuda.sampling.sampler import ToEnv


class Filled(NamedTuple):
    """A report that the buffers of a slot hold a complete rollout."""

    slot: int
    first_env: int  # the index of the env whose rows are in the rollout's first column
    version: int  # the oldest version of the weights that acted in the rollout


@dataclass(eq=False)
class Group:
    """A group of envs that step together, and the state of the rollout that they fill."""

    number: int
    writer: RowWriter
    row: int  # number of the next rollout's first row
    is_waiting: bool = False  # whether the envs have answered and wait for actions
    slot: int | None = None  # the slot that the group fills; None between two rollouts
    t: int = 0  # number of complete rows in the current rollout


class InferenceServer:
    """Runs inference for groups of envs in other processes, and writes a group's rollouts to slots of memory."""

    def __init__(
        self,
        envs: AsyncEnvs,
        agent: Agent,
        weights: Weights,
        num_steps: int,
        seed: int,
        slots: list[Buffers],
        first_row: int = 0,
        explore: Exploration = Exploration(),  # noqa: B008  (immutable)
    ) -> None:
        self.envs, self.agent, self.weights, self.num_steps, self.version = envs, agent, weights, num_steps, -1
        self._slots, self._free = slots, deque[int]()
        self._to_env, self._explore = ToEnv(envs.action), explore
        self._inputs = AgentInputs(agent, envs.observation, envs.num_envs)
        writers = make_writers(self._inputs, envs, agent, seed, explore)
        self._groups = [Group(number, writer, first_row) for number, writer in enumerate(writers)]
        self._seconds = {"env": 0.0, "inference": 0.0}

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Reset every env; return the number of random warm-up steps, of which each env takes at most `warm_up`."""
        self._inputs.reset()
        return int(self.envs.reset(seed, warm_up))

    def give(self, slot: int) -> None:
        """Allow a group to fill the buffers of this slot."""
        self._free.append(slot)

    @property
    def is_idle(self) -> bool:
        """Whether every group waits for a slot, so that nothing can be sampled before `give` is called."""
        return not self._free and all(group.is_waiting and group.slot is None for group in self._groups)

    def receive(self, seconds: float) -> list[Filled]:
        """Read the answers of groups of envs; return a report for every slot whose rollout is now complete.

        If no group can act, wait up to `seconds` for the first answer.
        """
        start = time.perf_counter()
        can_act = any(group.is_waiting and (group.slot is not None or self._free) for group in self._groups)
        for number in self.envs.ready(0.0 if can_act else seconds):
            self._receive(self._groups[number])
        self._seconds["env"] += time.perf_counter() - start
        with torch.inference_mode():
            return [self._finish(group) for group in self._groups if group.t == self.num_steps]

    def act(self) -> None:
        """Give free slots to waiting groups. Then act, in one batch, for all waiting groups that have a slot."""
        start = time.perf_counter()
        with torch.inference_mode():
            if self._free:
                waiting = [group for group in self._groups if group.is_waiting and group.slot is None]
                # Groups that have sampled the fewest rows get slots first. If groups got slots in the order of their
                # numbers, the first groups might take all of them.
                for group in sorted(waiting, key=lambda group: group.row)[: len(self._free)]:
                    self._begin(group, self._free.popleft())
            acting = [group for group in self._groups if group.is_waiting and group.slot is not None]
            if acting:
                self._act(acting)
        self._seconds["inference"] += time.perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds spent on envs and on inference since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _receive(self, group: Group) -> None:
        _, step = self.envs.recv(group.number)
        if group.slot is None:  # no action was sent since the reset, so `step` holds the first observations
            group.writer.obs_arrays[...] = step.obs
        else:
            group.writer.write_step(group.t, step)
            group.t += 1
        group.is_waiting = True

    def _begin(self, group: Group, slot: int) -> None:
        group.slot, group.t = slot, 0
        group.writer.write_to(self._slots[slot])
        group.writer.begin(group.row, self.num_steps)
        group.row += self.num_steps

    def _exploration(self, groups: list[Group]) -> Tensor | None:
        """Return the amount of exploration [N] of the groups' N envs, each at the current row of its group.

        Return None if the agent's default amount applies.
        """
        rows = [group.row - self.num_steps + group.t for group in groups]
        found = {row: self._explore.at(row) for row in set(rows)}
        amounts = [(found[row], group.writer.columns) for row, group in zip(rows, groups, strict=True)]
        parts = [amount[columns] for amount, columns in amounts if amount is not None]
        return torch.cat(parts) if parts else None

    def _finish(self, group: Group) -> Filled:
        buffers, columns, slot = group.writer.buffers, group.writer.columns, group.slot
        assert buffers is not None
        assert slot is not None
        self._inputs.finish(self.agent, buffers, columns)
        group.slot, group.t = None, 0
        return Filled(slot, columns.start, int(buffers.steps.version[0, 0]))

    def _act(self, groups: list[Group]) -> None:
        """Compute actions for several groups in one batch, write them to the rollouts, and send them to the envs."""
        self.version = self.weights.pull(self.version)
        inputs, writers = self._inputs, [group.writer for group in groups]
        index = torch.cat([torch.arange(writer.columns.start, writer.columns.stop) for writer in writers])
        state = None if inputs.state is None else inputs.state[index]
        noise = torch.cat([group.writer.noise[group.t] for group in groups])
        action, output, state = self.agent.act(inputs.obs[index], state, self._exploration(groups), noise)
        if inputs.state is not None:
            inputs.state[index] = state
        actions = map_tree(lambda x: x.numpy(), action)
        end = 0
        for group, writer in zip(groups, writers, strict=True):
            t, (start, end) = group.t, (end, end + writer.columns.stop - writer.columns.start)
            own = writer.random[t] if t < len(writer.random) else _rows(actions, start, end)
            writer.write_action(t, own, None if output is None else output[start:end])
            writer.steps.version[t] = self.version
            group.is_waiting = False
            self.envs.send(group.number, self._to_env(own))


def _rows(tree: Tree, start: int, end: int) -> Tree:
    return map_tree(lambda x: x[start:end], tree)
