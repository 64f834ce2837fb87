"""A trained agent as users call it: observations and actions as the env has them, one or a batch at a time.

policy = remuda.load("runs/latest")
obs, _ = env.reset()
state = None                                     # of an episode's first observation
while not over:
    action, state = policy.act(obs, state)
    obs, reward, terminated, truncated, _ = env.step(action)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from remuda.agents import PolicyAgent
from remuda.core import Space
from remuda.data import leaves, map_tree, namedarraytuple
from remuda.envs.previous import action_width, encode_action
from remuda.errors import ConfigError
from remuda.sampling.sampler import ToEnv


class PolicyState(NamedTuple):
    """What an agent must be handed back with the next observation of the same episode."""

    memory: Any  # recurrent state
    action: NDArray[np.float32]  # the action it took, as it is shown to it


class Policy:
    """A trained agent, ready to act."""

    def __init__(self, agent: PolicyAgent, observation: Space | None = None, seed: int = 0) -> None:
        """`observation` is the env's own space, where the agent is shown more than that."""
        self.agent = agent.eval()
        self.observation = observation or agent.observation
        self._shown = [name for name in agent.observation.entries if name not in self._own_entries()]
        self._to_env = ToEnv(agent.action)
        self._draw = np.random.default_rng(seed)

    def _own_entries(self) -> tuple[str, ...]:
        return ("obs",) if self.observation.is_leaf else tuple(self.observation.entries)

    def act(
        self, obs: Any, state: PolicyState | None = None, deterministic: bool = True, reward: Any = 0.0
    ) -> tuple[Any, PolicyState | None]:
        """The env's action for one observation, or for a batch of them; and the state for the next call.

        `reward` is the last step's, for agents that are shown it (agent.prev_reward).
        """
        rows, is_single = self._rows(obs)
        count = len(next(leaves(rows))[1])
        rows = self._with_previous(rows, count, state, reward)
        draws: dict[str, Any] = {"uniform": self._draw.random, "normal": self._draw.standard_normal}
        parts = [draws[kind]((count, width), dtype=np.float32) for kind, width in self.agent.noise]
        noise = torch.as_tensor(np.concatenate(parts, axis=1))
        memory = state.memory if state is not None else self.agent.initial_state(count)
        with torch.inference_mode():
            explore = torch.full((count,), 0.0 if deterministic else self.agent.exploration)
            action, _, memory = self.agent.act(rows, memory, explore, noise)
        stored = self._to_env(map_tree(lambda x: x.numpy(), action))
        out = to_user(self.agent.action, stored)
        following = None
        if memory is not None or self._shown:
            following = PolicyState(memory, encode_action(self.agent.action, stored))
        return (first_of(out) if is_single else out), following

    def _rows(self, obs: Any) -> tuple[Any, bool]:
        """As the agent takes observations: tensors with an axis of rows; and whether it was only one."""
        arrays = from_user(self.observation, obs)
        (_, leaf), (_, first) = next(self.observation.leaves()), next(leaves(arrays))
        is_single = first.ndim == len(leaf.shape)
        spaces = self.observation.tree(lambda _, leaf: leaf)

        def as_rows(array: Any, space: Space) -> Any:
            shape = array.shape if is_single else array.shape[1:]
            if shape != space.shape:
                raise ConfigError(
                    f"an observation of shape {array.shape} does not fit {space.shape}: "
                    "give one observation, or a batch of them along the first axis."
                )
            rows = torch.as_tensor(array[None] if is_single else array)
            if space.kind == "discrete":
                rows = rows - space.start
            elif space.starts is not None:
                rows = rows - torch.as_tensor(space.starts)
            return rows.to(getattr(torch, space.dtype))

        return map_tree(as_rows, arrays, spaces), is_single

    def _with_previous(self, rows: Any, count: int, state: PolicyState | None, reward: Any) -> Any:
        if not self._shown:
            return rows
        own = (rows,) if self.observation.is_leaf else tuple(rows)
        taken = np.zeros((count, action_width(self.agent.action)), np.float32) if state is None else state.action
        got = np.zeros(count, np.float32) if state is None else np.broadcast_to(reward, count).astype(np.float32)
        previous = {"prev_action": torch.as_tensor(taken), "prev_reward": torch.as_tensor(got.reshape(count, 1))}
        fields = tuple(self.agent.observation.entries)
        return namedarraytuple("Entries", fields)(*own, *(previous[name] for name in self._shown))


def from_user(space: Space, obs: Any) -> Any:
    """Dicts and tuples as the env returns them to the tree of the space."""
    if space.is_leaf:
        return np.asarray(obs)
    fits = isinstance(obs, Mapping) if space.kind == "dict" else isinstance(obs, (tuple, list))
    found = dict(obs) if isinstance(obs, Mapping) else dict(enumerate(obs)) if fits else {}
    wanted: list[Any] = list(space.keys if space.kind == "dict" else range(len(space.entries)))
    if found.keys() != set(wanted):
        entries = ", ".join(space.entries)
        raise ConfigError(f"an observation without exactly the entries {entries} does not fit: give all of them.")
    values = [from_user(entry, found[key]) for key, entry in zip(wanted, space.entries.values(), strict=True)]
    return namedarraytuple("Entries", tuple(space.entries))(*values)


def to_user(space: Space, action: Any) -> Any:
    """The tree of a space to arrays, dicts and tuples as the env takes them; values start where the env's do."""
    if space.kind in ("discrete", "multidiscrete"):
        shifted = action + (space.start if space.kind == "discrete" else space.starts)
        return shifted.astype(space.env_dtype or shifted.dtype)
    if space.is_leaf:
        return action
    values = [to_user(entry, value) for entry, value in zip(space.entries.values(), action, strict=True)]
    return tuple(values) if space.kind == "tuple" else dict(zip(space.keys, values, strict=True))


def first_of(action: Any) -> Any:
    return map_tree(lambda array: array[0], action)
