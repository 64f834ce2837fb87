"""Previous action and reward as entries of the observation, for agents with memory.

    envs = WithPrevious(envs, action=True, reward=True)
    envs.observation                       # a dict of "obs" (or the env's own entries), "prev_action", "prev_reward"

They are part of what is seen, so rollouts, replays and evaluation need to know nothing of them. Both are zero in an
episode's first observation. Whole-numbered actions are one-hot, so that "none" differs from action 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.core import Envs, Episode, Space, Step
from remuda.data import leaves
from remuda.data.arrays import namedarraytuple
from remuda.envs.space_values import action_leaves
from remuda.errors import ConfigError


def action_width(action: Space) -> int:
    """Numbers that `encode_action` makes of one action."""
    return sum(_leaf_width(leaf) for _, leaf in action.leaves())


def _leaf_width(leaf: Space) -> int:
    if leaf.kind == "discrete":
        return leaf.n
    if leaf.kind == "multidiscrete":
        assert leaf.sizes is not None
        return int(leaf.sizes.sum())
    return int(np.prod(leaf.shape))


def encode_action(space: Space, action: Any) -> NDArray[np.float32]:
    """Actions [B] as floats [B, width]: one-hot where they are whole numbers, as they are where they are not."""
    parts = []
    count = len(next(leaves(action))[1])
    for (_, leaf), value in zip(space.leaves(), action_leaves(space, action, count), strict=True):
        rows = value.reshape(count, -1)
        if leaf.kind == "discrete":
            parts.append(np.eye(leaf.n, dtype=np.float32)[rows[:, 0]])
        elif leaf.kind == "multidiscrete":
            assert leaf.sizes is not None
            sizes = leaf.sizes.reshape(-1).tolist()
            parts += [np.eye(n, dtype=np.float32)[rows[:, column]] for column, n in enumerate(sizes)]
        else:
            parts.append(rows.astype(np.float32))
    return np.concatenate(parts, axis=1)


def with_previous(observation: Space, action: Space, has_action: bool, has_reward: bool) -> Space:
    """The space of observations that carry them."""
    entries = dict(observation.entries) if not observation.is_leaf else {"obs": observation}
    wanted = {
        "prev_action": Space("box", (action_width(action),), "float32") if has_action else None,
        "prev_reward": Space("box", (1,), "float32") if has_reward else None,
    }
    for name, space in wanted.items():
        if space is None:
            continue
        if name in entries:
            raise ConfigError(f"the env's observation has an entry {name} of its own: leave agent.{name} out.")
        entries[name] = space
    return Space("dict", entries=entries, keys=tuple(entries))


class WithPrevious:
    """`core.Envs` over another, whose close closes it."""

    def __init__(self, envs: Envs, action: bool, reward: bool) -> None:
        self._envs, self._has_action, self._has_reward = envs, action, reward
        self.action, self.num_envs, self.num_slots = envs.action, envs.num_envs, envs.num_slots
        self.observation = with_previous(envs.observation, envs.action, action, reward)
        self._type = namedarraytuple("Entries", tuple(self.observation.entries))
        per_slot = envs.num_envs // envs.num_slots
        widths = (action_width(envs.action), 1)
        # What each env did last and got for it, zero where its observation is a first one.
        self._previous = [[np.zeros((per_slot, n), np.float32) for n in widths] for _ in range(envs.num_slots)]
        self._is_over = [np.zeros((per_slot, 1), bool) for _ in range(envs.num_slots)]
        self._is_renewing = [False] * envs.num_slots

    @property
    def should_stop(self) -> Callable[[], bool] | None:
        return self._envs.should_stop

    @should_stop.setter
    def should_stop(self, ask: Callable[[], bool] | None) -> None:
        self._envs.should_stop = ask

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return self._envs.reset(seed, warm_up)

    def prepare(self, seed: int, restarts: int) -> None:
        """As of LocalEnvs."""
        self._envs.prepare(seed, restarts)  # type: ignore[attr-defined]

    def send(self, slot: int, action: Any, hold: bool = False) -> None:
        if self._has_action:
            self._previous[slot][0] = encode_action(self._envs.action, action)
        self._envs.send(slot, action, hold)

    def renew(self, slot: int) -> None:
        self._is_renewing[slot] = True
        self._envs.renew(slot)

    def ready(self, seconds: float) -> list[int]:
        """As of AsyncPooledEnvs."""
        slots: list[int] = self._envs.ready(seconds)  # type: ignore[attr-defined]
        return slots

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        slot, step = self._envs.recv() if slot is None else self._envs.recv(slot)  # type: ignore[call-arg]
        is_over, mask = self._is_over[slot], step.mask[:, None]
        taken, reward = self._previous[slot]
        if self._is_renewing[slot]:  # only those that were over have begun anew
            self._is_renewing[slot] = False
            self._previous[slot] = [taken * ~is_over, reward * ~is_over]
            is_over.fill(False)
        else:  # a first observation, or padding, comes after nothing
            self._previous[slot] = [taken * mask, step.reward[:, None] * mask]
            is_over[:] = np.where(mask, (step.terminated | step.truncated)[:, None], is_over)
        own = tuple(step.obs) if not self._envs.observation.is_leaf else (step.obs,)
        wanted = zip(self._previous[slot], (self._has_action, self._has_reward), strict=True)
        return slot, step.replace(obs=self._type(*own, *(value for value, is_wanted in wanted if is_wanted)))

    def get_state(self) -> dict[str, Any]:
        return {"envs": self._envs.get_state(), "previous": self._previous, "is_over": self._is_over}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._envs.set_state(state["envs"])
        self._previous, self._is_over = state["previous"], state["is_over"]

    def episodes(self) -> list[Episode]:
        return self._envs.episodes()

    def restarts(self) -> int:
        return self._envs.restarts()

    def waited(self) -> float:
        return self._envs.waited()

    def close(self) -> None:
        self._envs.close()
