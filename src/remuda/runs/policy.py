"""A trained agent for use outside of training, with observations and actions in the format of the env.

policy = remuda.load("runs/latest")
obs, _ = env.reset()
state, is_over = None, False                     # the state is None for the first observation of an episode
while not is_over:
    action, state = policy.act(obs, state)
    obs, reward, terminated, truncated, _ = env.step(action)
    is_over = terminated or truncated
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from remuda.agents import PolicyAgent
from remuda.core import Space
from remuda.data import NumpyArray, Tree, leaves, map_tree, namedarraytuple
from remuda.envs.previous import action_width, encode_action
from remuda.errors import ConfigError
from remuda.sampling.sampler import ToEnv


class PolicyState(NamedTuple):
    """State to pass to `Policy.act` with the next observation of the same episode."""

    memory: Tree  # the recurrent state
    action: NDArray[np.float32]  # the last action, encoded as the entry `prev_action` of the next observation


class Policy:
    """A trained agent that acts for one env, or for a batch of them."""

    def __init__(self, agent: PolicyAgent, observation: Space | None = None, seed: int = 0) -> None:
        """Wrap an agent.

        observation: the env's observation space; needed only if the agent also observes its last action or reward.
        seed: the seed for actions that are drawn with `deterministic=False`.
        """
        self.agent = agent.eval()
        self.observation = observation or agent.observation
        self._previous = [name for name in agent.observation.entries if name not in self._own_entries()]
        self._to_env = ToEnv(agent.action)
        self._generator = np.random.default_rng(seed)

    def _own_entries(self) -> tuple[str, ...]:
        return ("obs",) if self.observation.is_leaf else tuple(self.observation.entries)

    def act(
        self, obs: Any, state: PolicyState | None = None, deterministic: bool = True, reward: ArrayLike = 0.0
    ) -> tuple[Any, PolicyState | None]:
        """Return the action for one observation, or the actions for a batch, and the `state` for the next call.

        obs: one observation as the env returns it, or a batch of observations along an additional first axis.
        state: the state that the previous call returned, or None for the first observation of an episode.
        deterministic: whether to act greedily; False explores as in training.
        reward: the reward of the last step, one number for each env; used only by agents that observe it
            (agent.prev_reward).
        """
        rows, is_single = self._rows(obs)
        count = len(next(leaves(rows))[1])
        rows = self._with_previous(rows, count, state, reward)
        draws: dict[str, Any] = {
            "uniform": self._generator.random,
            "normal": self._generator.standard_normal,
        }
        parts = [draws[kind]((count, width), dtype=np.float32) for kind, width in self.agent.noise]
        noise = torch.as_tensor(np.concatenate(parts, axis=1))
        memory = state.memory if state is not None else self.agent.initial_state(count)
        with torch.inference_mode():
            explore = torch.full((count,), 0.0 if deterministic else self.agent.exploration)
            action, _, memory = self.agent.act(rows, memory, explore, noise)
        stored = self._to_env(map_tree(lambda x: x.numpy(), action))
        out = to_user(self.agent.action, stored)
        following = None
        if memory is not None or self._previous:
            following = PolicyState(memory, encode_action(self.agent.action, stored))
        return (first_of(out) if is_single else out), following

    def _rows(self, obs: Any) -> tuple[Any, bool]:
        """Return observations as tensors with a batch axis, and whether `obs` was a single observation."""
        arrays = from_user(self.observation, obs)
        (_, leaf), (_, first) = next(self.observation.leaves()), next(leaves(arrays))
        is_single = first.ndim == len(leaf.shape)
        spaces = self.observation.tree(lambda _, leaf: leaf)

        def as_rows(array: NumpyArray, space: Space) -> Tensor:
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

    def _with_previous(self, rows: Any, count: int, state: PolicyState | None, reward: ArrayLike) -> Any:
        if not self._previous:
            return rows
        own = (rows,) if self.observation.is_leaf else tuple(rows)
        taken = np.zeros((count, action_width(self.agent.action)), np.float32) if state is None else state.action
        got = np.zeros(count, np.float32) if state is None else np.broadcast_to(reward, count).astype(np.float32)
        previous = {"prev_action": torch.as_tensor(taken), "prev_reward": torch.as_tensor(got.reshape(count, 1))}
        fields = tuple(self.agent.observation.entries)
        return namedarraytuple("Entries", fields)(*own, *(previous[name] for name in self._previous))


def from_user(space: Space, obs: Any) -> Any:
    """Convert an observation from the env's dicts and tuples to named array tuples."""
    if space.is_leaf:
        return np.asarray(obs)
    fits = isinstance(obs, Mapping) if space.kind == "dict" else isinstance(obs, (tuple, list))
    found = dict(obs) if isinstance(obs, Mapping) else dict(enumerate(obs)) if fits else {}
    wanted: list[object] = list(space.keys if space.kind == "dict" else range(len(space.entries)))
    if found.keys() != set(wanted):
        entries = ", ".join(space.entries)
        raise ConfigError(f"an observation without exactly the entries {entries} does not fit: give all of them.")
    values = [from_user(entry, found[key]) for key, entry in zip(wanted, space.entries.values(), strict=True)]
    return namedarraytuple("Entries", tuple(space.entries))(*values)


def to_user(space: Space, action: Any) -> Any:
    """Convert an action from named array tuples to the env's dicts, tuples and discrete values."""
    if space.kind in ("discrete", "multidiscrete"):
        shifted = action + (space.start if space.kind == "discrete" else space.starts)
        return shifted.astype(space.env_dtype or shifted.dtype)
    if space.is_leaf:
        return action
    values = [to_user(entry, value) for entry, value in zip(space.entries.values(), action, strict=True)]
    return tuple(values) if space.kind == "tuple" else dict(zip(space.keys, values, strict=True))


def first_of(action: Any) -> Any:
    """Return the first action of a batch."""
    return map_tree(lambda array: array[0], action)
