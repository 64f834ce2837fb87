"""Previous action and reward as entries of the observation, for agents with memory.

    envs = WithPrevious(envs, action=True, reward=True)
    envs.observation                       # a dict of "obs" (or the env's own entries), "prev_action", "prev_reward"

Because previous action and reward are entries of the observation, rollouts, replays and evaluation need no extra code
for them. Both entries are zero in the first observation of an episode. Discrete actions are one-hot, so that "no
previous action" differs from action 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from remuda.core import Actions, Array, AsyncEnvs, Envs, EnvsState, Episode, Space, Step
from remuda.data import leaves
from remuda.data.arrays import namedarraytuple
from remuda.envs.action_values import action_leaves
from remuda.errors import ConfigError


def action_width(action: Space) -> int:
    """Return the number of floats to which `encode_action` encodes one action."""
    return sum(_leaf_width(leaf) for _, leaf in action.leaves())


def _leaf_width(leaf: Space) -> int:
    if leaf.kind == "discrete":
        return leaf.n
    if leaf.kind == "multidiscrete":
        assert leaf.sizes is not None
        return int(leaf.sizes.sum())
    return int(np.prod(leaf.shape))


def encode_action(space: Space, action: Actions) -> NDArray[np.float32]:
    """Return actions [B] as floats [B, width]: one-hot for discrete and multidiscrete leaves, else flattened."""
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
    """Return the `observation` space with the entry `prev_action`, the entry `prev_reward` or both added."""
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
    """Wraps and owns other `core.Envs`, and adds the previous action and reward to their observations."""

    def __init__(self, envs: Envs, action: bool, reward: bool) -> None:
        self._envs, self._has_action, self._has_reward = envs, action, reward
        self.action, self.num_envs, self.num_slots = envs.action, envs.num_envs, envs.num_slots
        self.observation = with_previous(envs.observation, envs.action, action, reward)
        self._type = namedarraytuple("Entries", tuple(self.observation.entries))
        per_slot = envs.num_envs // envs.num_slots
        widths = (action_width(envs.action), 1)
        # For each slot, the actions [B, width] and rewards [B, 1] of the last step; zero where an episode begins.
        self._previous = [[np.zeros((per_slot, n), np.float32) for n in widths] for _ in range(envs.num_slots)]
        self._is_over = [np.zeros((per_slot, 1), bool) for _ in range(envs.num_slots)]
        self._is_renewing = [False] * envs.num_slots

    @property
    def should_stop(self) -> Callable[[], bool] | None:
        return self._envs.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: Callable[[], bool] | None) -> None:
        self._envs.should_stop = should_stop

    def reset(self, seed: int, warm_up: int = 0) -> int:
        self._is_renewing = [False] * self.num_slots
        return self._envs.reset(seed, warm_up)

    def prepare(self, seed: int, restarts: int) -> None:
        self._envs.prepare(seed, restarts)

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        if self._has_action:
            self._previous[slot][0] = encode_action(self._envs.action, action)
        self._envs.send(slot, action, hold)

    def renew(self, slot: int) -> None:
        self._is_renewing[slot] = True
        self._envs.renew(slot)

    def recv(self) -> tuple[int, Step]:
        slot, step = self._envs.recv()
        return slot, self._extend(slot, step)

    def _extend(self, slot: int, step: Step) -> Step:
        """Add the previous action and reward, as requested, to the observation of a step."""
        is_over, mask = self._is_over[slot], step.mask[:, None]
        taken, reward = self._previous[slot]
        if self._is_renewing[slot]:  # renew() starts a new episode only in envs whose last episode has ended
            self._is_renewing[slot] = False
            self._previous[slot] = [taken * ~is_over, reward * ~is_over]
            is_over.fill(False)
        else:  # first observations and padding (mask False) follow no action
            self._previous[slot] = [taken * mask, step.reward[:, None] * mask]
            is_over[:] = np.where(mask, (step.terminated | step.truncated)[:, None], is_over)
        own = tuple(step.obs) if not self._envs.observation.is_leaf else (step.obs,)
        wanted = zip(self._previous[slot], (self._has_action, self._has_reward), strict=True)
        return step.replace(obs=self._type(*own, *(value for value, is_wanted in wanted if is_wanted)))

    def info(self, slot: int) -> dict[str, Array]:
        return self._envs.info(slot)

    def get_state(self) -> EnvsState:
        return {"envs": self._envs.get_state(), "previous": self._previous, "is_over": self._is_over}

    def set_state(self, state: EnvsState) -> None:
        self._envs.set_state(state["envs"])
        self._previous, self._is_over = state["previous"], state["is_over"]
        self._is_renewing = [False] * self.num_slots

    def episodes(self) -> list[Episode]:
        return self._envs.episodes()

    def restarts(self) -> int:
        return self._envs.restarts()

    def waited(self) -> float:
        return self._envs.waited()

    def close(self) -> None:
        self._envs.close()


class AsyncWithPrevious(WithPrevious):
    """WithPrevious for asynchronous envs: adds the same entries, and implements `core.AsyncEnvs`."""

    def __init__(self, envs: AsyncEnvs, action: bool, reward: bool) -> None:
        super().__init__(envs, action, reward)
        self._async_envs = envs

    def ready(self, seconds: float) -> list[int]:
        return self._async_envs.ready(seconds)

    def recv(self, slot: int | None = None) -> tuple[int, Step]:
        slot, step = self._async_envs.recv(slot)
        return slot, self._extend(slot, step)
