"""C++ envs of the package envpool, which has its own implementations of Gymnasium's envs.

    vector = make(resolve("HalfCheetah-v5"), num_envs=32, threads=2)

"auto" never chooses this backend, because its envs follow the same rules as Gymnasium's but give different results.
The Atari games of envpool are not offered, because they are preprocessed differently. envpool reads seeds only when
it makes the envs, and ignores the seed of a later reset(), so `begin` makes new envs.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from remuda.core import Array
from remuda.envs.spec import EnvSpec

NAME = "envpool"
IS_SAME_GAME = False
INTERNAL_INFO = ("env_id", "players", "elapsed_step")


def offer(spec: EnvSpec) -> str | None:
    """Return why envpool cannot be used for this env, or None if it can."""
    if importlib.util.find_spec("envpool") is None:
        return "as it is not installed (pip install envpool)"
    if spec.make is not None:
        return "as it is not a Gymnasium id"
    if spec.game is not None:
        return "as its Atari games are preprocessed in another way"
    pool = importlib.import_module("envpool")
    if spec.id not in pool.list_all_envs():
        return "as it does not know that id"
    vector = make(spec, 1, 1)
    mode = vector.autoreset_mode
    vector.close()
    return None if mode is AutoresetMode.NEXT_STEP else f"as it resets by {mode}, not on the next step"


def make(spec: EnvSpec, num_envs: int, threads: int) -> EnvPoolVectorEnv:
    return EnvPoolVectorEnv(spec, num_envs, threads)


class EnvPoolVectorEnv:
    """A `NativeVectorEnv` that wraps a pool of envpool."""

    def __init__(self, spec: EnvSpec, num_envs: int, threads: int) -> None:
        self._spec, self._num_envs, self._threads = spec, num_envs, threads
        self._pool = self._build([0] * num_envs)
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self.autoreset_mode = self._pool.metadata.get("autoreset_mode")
        self._ids = np.arange(num_envs, dtype=np.int32)

    def _build(self, seeds: Sequence[int]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium warns that bounds are rounded to float32
            pool = importlib.import_module("envpool").make(
                self._spec.id,
                env_type="gymnasium",
                num_envs=self._num_envs,
                num_threads=self._threads,
                seed=list(seeds),
                **self._spec.kwargs,
            )
            _ = pool.observation_space, pool.action_space  # the first access warns, and caches the spaces
        return pool

    def begin(self, seeds: Sequence[int]) -> Array:
        self._pool = self._build(seeds)
        obs: Array = self._pool.reset()[0]
        self._obs = obs
        return obs

    def restart(self, which: NDArray[np.bool_]) -> Array:
        rows = self._ids[which]
        obs, info = self._pool.reset(rows)
        all_obs: Array = self._obs.copy()
        all_obs[info["env_id"]] = obs
        self._obs = all_obs
        return all_obs

    def send(self, actions: Array) -> None:
        self._pool.send(actions, self._ids)

    def recv(self) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._pool.recv()
        self._obs = obs
        shown = {name: value for name, value in info.items() if name not in INTERNAL_INFO}
        return obs, reward, terminated, truncated, shown

    def close(self) -> None:
        self._pool.close()
