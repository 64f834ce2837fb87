"""One slot of native vector envs: converts the library's arrays to `core.Step` and collects episode statistics.

slot = NativeSlot(backend.make(spec, num_envs=8, threads=2), label, first=0, count=8, gamma=0.99, stats_class=...)
slot.reset(seed=1, warm_up=0, on_progress=lambda: None)
step = slot.recv()                       # first observations, mask False
slot.send(actions)
step = slot.recv()
slot.finished                            # list of the episodes that ended, the earliest first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.core import Actions, Array, Episode, Step, derive_seed
from remuda.envs.action_values import action_leaves
from remuda.envs.backends import NativeVectorEnv
from remuda.envs.env_group import MAX_REWARD_SUM
from remuda.envs.episodes import CONTINUES, EpisodeStats
from remuda.envs.failures import FAILURES, raised
from remuda.envs.single import WARM_UP_KEY
from remuda.envs.spaces import action_space, observation_space
from remuda.errors import EnvError, EnvFailed, EnvSpecError

BLOCK = 1024  # number of steps whose rewards are collected before they are added to the statistics
T = TypeVar("T")


class NativeSlot:
    """Owns the vector env of one slot and the statistics of its running episodes."""

    def __init__(
        self,
        vector: NativeVectorEnv,
        label: str,
        first: int,
        count: int,
        gamma: float,
        stats_class: type[EpisodeStats],
    ) -> None:
        """`first` is the index of the first of the slot's `count` envs among all envs of the run."""
        self._vector, self._label, self._first, self._count = vector, label, first, count
        self._gamma, self._stats_class = gamma, stats_class
        self.observation = observation_space(vector.observation_space, label)
        self.action = action_space(vector.action_space, label)
        if not (self.observation.is_leaf and self.action.is_leaf):
            raise EnvSpecError(
                f"{label} has spaces with entries, native envs have one array: use envs.backend=python."
            )
        # Native envs count discrete values from the `start` of their space, whereas rollouts count from 0.
        self._obs_start = self.observation.starts if self.observation.starts is not None else self.observation.start
        self._action_start = self.action.starts if self.action.starts is not None else self.action.start
        self._has_starts = bool(np.any(self._action_start))
        self._action_dtype = np.dtype(vector.action_space.dtype)
        self._is_float = self.observation.dtype == "float32"
        self.finished: list[Episode] = []
        self._is_working = False
        self._reset_step: Step | None = None  # first observations after a reset, until `recv` returns them
        self._clear()

    def _clear(self) -> None:
        """Forget all steps and statistics."""
        self._row = 0
        self._rewards = np.zeros((BLOCK, self._count))
        self._starts = np.zeros(self._count, np.int64)  # row of `_rewards` at which each env's episode starts
        self._stats = [self._stats_class() for _ in range(self._count)]
        self._episodes = [1] * self._count
        self._has_ended, self._is_plain = np.zeros(self._count, bool), True  # is_plain: no env needs a reset
        self._reset_step = None

    # --- stepping -----------------------------------------------------------------------------------------------

    def send(self, action: Actions) -> None:
        (array,) = action_leaves(self.action, action, self._count)
        array = array.astype(self._action_dtype) if array.dtype != self._action_dtype else array
        taken = array + self._action_start if self._has_starts else array.copy()
        self._guarded(lambda: self._vector.send(taken))
        self._is_working = True

    def recv(self) -> Step:
        if self._reset_step is not None:
            reset_step, self._reset_step = self._reset_step, None
            return reset_step
        obs, reward, terminated, truncated, info = self._guarded(self._vector.recv)
        self._is_working = False
        mask = ~self._has_ended
        ended = terminated | truncated
        row = self._rewards[self._row]
        row[:] = reward
        if not self._is_plain:
            # An episode may already end in its reset row (mask False). The next row then resets the env again.
            for env in (ended & ~mask).nonzero()[0].tolist():
                self._stats[env].count([float(row[env])], self._gamma)
                self._report(env, info)
            terminated, truncated = terminated & mask, truncated & mask
            row[~mask] = 0.0
        if not -MAX_REWARD_SUM < float(row.sum()) < MAX_REWARD_SUM:
            self._refuse_not_finite(row.astype(np.float32), "reward", "fix its step()")
        stored = self._stored(obs)
        self._is_plain = not ended.any()
        if not self._is_plain:
            for env in (ended & mask).nonzero()[0].tolist():
                self._count_until(env)
                if CONTINUES not in info or not info[CONTINUES][env]:
                    self._report(env, info)
            self._starts[ended] = self._row + 2  # the next row is the reset row, and the next episode starts after it
        self._has_ended = ended
        self._advance()
        return Step(stored, row.astype(np.float32), terminated, truncated, mask)

    def _stored(self, obs: Array) -> Array:
        """Return `obs` as rollouts store it; raise EnvError if the shape is wrong or a value is not finite."""
        array = np.asarray(obs)
        if np.any(self._obs_start):
            array = array - self._obs_start
        array = array.astype(self.observation.dtype, copy=False)
        if array.shape != (self._count, *self.observation.shape):
            raise EnvError(
                f"{self._label}: observations have shape {array.shape}, their space says "
                f"{(self._count, *self.observation.shape)}: use envs.backend=python."
            )
        if self._is_float and np.count_nonzero(np.isfinite(array)) != array.size:
            self._refuse_not_finite(array, "observation", "fix what computes it")
        return array

    # --- statistics: rewards are kept in a block of rows until an episode ends or the block is full -------------

    def _count_until(self, env: int) -> None:
        """Add to an env's statistics the rewards of its running episode in this block, up to the current row."""
        start = self._starts[env]
        if start <= self._row:
            self._stats[env].count(self._rewards[start : self._row + 1, env].tolist(), self._gamma)

    def _advance(self) -> None:
        """Go to the next row of `_rewards`; from the last row, add the rewards to the statistics and go to row 0."""
        if self._row + 1 == BLOCK:
            for env in range(self._count):
                self._count_until(env)
            self._starts = np.maximum(self._starts - BLOCK, 0)
            self._row = -1
        self._row += 1

    def _report(self, env: int, info: Mapping[str, Any]) -> None:
        """Add the finished episode of an env to `finished` and start the statistics of its next episode."""
        last = {name: value[env] for name, value in info.items() if _has_value(info, name, env)}
        values = {str(name): float(value) for name, value in self._stats[env].values(last).items()}
        self.finished.append(Episode(self._first + env, values))
        self._stats[env] = self._stats_class()
        self._episodes[env] += 1

    # --- resetting ----------------------------------------------------------------------------------------------

    def reset(self, seed: int, warm_up: int, on_progress: Callable[[], None]) -> int:
        """Start new episodes; return the number of random steps of all envs. Call `on_progress` before each step.

        A vector env steps all envs together, so every env takes `warm_up` random steps. Each env starts its episode
        at a random one of these steps, because episodes that start together would also end together. If the backend
        cannot reset single envs, all episodes start together.
        """
        on_progress()
        if self._is_working:
            self._discard()
        self._clear()
        self._seeds = [derive_seed(seed, self._first + env, 0) for env in range(self._count)]
        obs = self._guarded(lambda: self._vector.begin(self._seeds))
        draws = [derive_seed(seed, self._first + env, WARM_UP_KEY) for env in range(self._count)]
        first, taken = self._stored(obs), 0
        if warm_up:
            actions = gymnasium.vector.utils.batch_space(self._vector.action_space, self._count)
            actions.seed(draws[0])
            left = np.asarray([draw % (warm_up + 1) for draw in draws])
            for step in range(warm_up):
                on_progress()
                if step and (left == warm_up - step).any():
                    self._restart(left == warm_up - step)
                self._guarded(lambda: self._vector.send(actions.sample()))
                random_step = self.recv()
                taken += int(random_step.mask.sum())
                first = random_step.obs
            restarted = self._restart(left == 0) if (left == 0).any() else None
            first = first if restarted is None else self._stored(restarted)
            self.finished.clear()
        nothing = np.zeros(self._count, bool)
        self._reset_step = Step(first, np.zeros(self._count, np.float32), nothing, nothing.copy(), nothing.copy())
        return taken

    def _restart(self, which: NDArray[np.bool_]) -> Array | None:
        """Start new episodes where `which` is True; return all observations, or None if this is not supported."""
        obs = self._guarded(lambda: self._vector.restart(which))
        if obs is not None:
            for env in which.nonzero()[0].tolist():
                self._stats[env] = self._stats_class()
            self._starts[which], self._has_ended[which] = self._row, False
        return obs

    def _discard(self) -> None:
        """Receive and drop the step that is still in flight."""
        self._guarded(self._vector.recv)
        self._is_working = False

    # --- failing ------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], T]) -> T:
        """Call the library; turn any exception into EnvFailed."""
        try:
            return call()
        except FAILURES as error:
            raise EnvFailed(
                f"{self._label} raised {raised(error)}, and native envs are not rebuilt: "
                "fix it, or use envs.backend=python."
            ) from error

    def _refuse_not_finite(self, array: Array, what: str, remedy: str) -> NoReturn:
        """Raise an error that names the first env with a value in `array` [B, ...] that is not finite."""
        flat = np.isfinite(array.reshape(self._count, -1)).all(axis=1)
        env = int(np.argmin(flat))
        steps = self._stats[env].ep_len + max(0, int(self._row - self._starts[env]))
        place = f"seed {self._seeds[env]}, step {steps} of its episode {self._episodes[env]}"
        value = array[env].reshape(-1)[np.argmin(np.isfinite(array[env].reshape(-1)))]
        raise EnvError(f"env {self._first + env} of {self._label} ({place}): {what} is {value}: {remedy}.")

    def close(self) -> None:
        self._vector.close()


def _has_value(info: Mapping[str, Any], name: str, env: int) -> bool:
    """Return whether info[name] is an array with a value for this env; info["_" + name], if present, is its mask."""
    value, is_set = info[name], info.get(f"_{name}")
    return (
        isinstance(value, np.ndarray)
        and value.ndim == 1
        and not name.startswith("_")
        and (is_set is None or is_set[env])
    )
