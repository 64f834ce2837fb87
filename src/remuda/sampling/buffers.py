"""The memory that samplers write rollouts to: ordinary memory, or memory that several processes share.

buffers = allocate(agent, envs.observation, T, B)          # torch tensors [T, B, ...] and [B, ...]
memory, shared = share(buffers)                            # the same structure, in a SharedArrays
theirs = attach(buffers, memory)                           # in another process, with its own `buffers` and `memory`
theirs.columns(4, 8)                                       # views of the columns of envs 4 to 7

memory, slots = share_slots(buffers, 6)                    # six buffers of this shape, for one rollout each
theirs = attach_slots(buffers, memory)                     # in another process

The other process makes its `buffers` with `allocate`, and its `memory` with `SharedArrays.attach`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from remuda.core import Agent, Space
from remuda.data import SharedArrays, Steps, leaves, map_tree

Tree: TypeAlias = Any  # a tensor, a named array tuple of tensors, or None


class Buffers(NamedTuple):
    """The arrays of a rollout, and the recurrent state that follows its last row."""

    steps: Steps  # [T, B]: T rows of B envs
    next_obs: Tree  # [B], the observation after the last row
    last_value: Tensor | None  # [B], the agent's value of `next_obs`; None for agents without a `value` method
    state: Tree  # [B], the state before row 0; None for agents without memory
    begins: Tensor  # [B], True where row 0 starts a new episode
    next_state: Tree  # [B], the state before row 0 of the next rollout; None for agents without memory

    def columns(self, first: int, last: int) -> Buffers:
        """Return views of the columns `first` to `last - 1`, one column for each env."""
        rest = map_tree(lambda x: x[first:last], tuple(self)[1:])
        return Buffers(self.steps[:, first:last], *rest)


def blank_obs(observation: Space, B: int) -> Tree:
    """Return observations of B envs, filled with zeros."""
    return observation.tree(lambda _, leaf: torch.zeros(B, *leaf.shape, dtype=getattr(torch, leaf.dtype)))


def allocate(agent: Agent, observation: Space, T: int, B: int) -> Buffers:
    """Return buffers for T rows of B envs, with the shapes of actions and outputs that `agent.act` returns."""
    obs = blank_obs(observation, B)
    width = sum(width for _, width in agent.noise)
    with torch.no_grad():
        action, output, _ = agent.act(obs, agent.initial_state(B), None, torch.zeros(B, width))
    over_time = lambda x: x.new_zeros((T, *x.shape))  # noqa: E731  (a function of a leaf)
    steps = Steps(
        obs=map_tree(over_time, obs),
        action=map_tree(over_time, action),
        reward=torch.zeros(T, B),
        discount=torch.zeros(T, B),
        mask=torch.zeros(T, B, dtype=torch.bool),
        policy=map_tree(over_time, output),
        version=torch.zeros(T, B, dtype=torch.int64),
    )
    last_value = torch.zeros(B) if hasattr(agent, "value") else None
    begins = torch.zeros(B, dtype=torch.bool)
    return Buffers(steps, obs, last_value, agent.initial_state(B), begins, agent.initial_state(B))


def share(buffers: Buffers) -> tuple[SharedArrays, Buffers]:
    """Return shared memory and new buffers in it, which are shaped like `buffers`. The caller closes the memory."""
    named = dict(leaves(buffers._asdict()))
    memory = SharedArrays({path: (tuple(x.shape), str(x.numpy().dtype)) for path, x in named.items()})
    return memory, attach(buffers, memory)


def attach(buffers: Buffers, memory: SharedArrays) -> Buffers:
    """Return buffers with the structure of `buffers`; their tensors are views of the arrays in `memory`."""
    return _like(buffers, lambda path: torch.from_numpy(memory[path]))


def share_slots(buffers: Buffers, count: int) -> tuple[SharedArrays, list[Buffers]]:
    """Return shared memory and `count` new buffers in it, shaped like `buffers`. The caller closes the memory."""
    named = dict(leaves(buffers._asdict()))
    memory = SharedArrays({path: ((count, *x.shape), str(x.numpy().dtype)) for path, x in named.items()})
    return memory, attach_slots(buffers, memory)


def attach_slots(buffers: Buffers, memory: SharedArrays) -> list[Buffers]:
    """Return the buffers of all slots in `memory`, which `share_slots` has created; each is shaped like `buffers`."""

    def slot(number: int) -> Buffers:
        return _like(buffers, lambda path: torch.from_numpy(memory[path][number]))

    return [slot(number) for number in range(len(memory["steps.mask"]))]


def _like(buffers: Buffers, leaf: Callable[[str], Tensor]) -> Buffers:
    names = iter([path for path, _ in leaves(buffers._asdict())])
    return Buffers(**map_tree(lambda _: leaf(next(names)), buffers._asdict()))
