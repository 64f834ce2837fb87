"""envpool's C++ envs, where that package is installed: many families, each another implementation than Gymnasium's.

    games = make(resolve("HalfCheetah-v5"), num_envs=32, threads=2)

Only by name, never chosen: same rules, other numbers (and Atari games preprocessed in another way, so those are not
offered). Its envs take seeds when they are made, a later reset(seed=...) changes nothing: `begin` makes them anew.
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

from remuda.envs.spec import EnvSpec

NAME = "envpool"
IS_SAME_GAME = False
OWN_INFO = ("env_id", "players", "elapsed_step")


def offer(spec: EnvSpec) -> str | None:
    if importlib.util.find_spec("envpool") is None:
        return "as it is not installed (pip install envpool)"
    if spec.make is not None:
        return "as it is not a Gymnasium id"
    if spec.game is not None:
        return "as its Atari games are preprocessed in another way"
    pool = importlib.import_module("envpool")
    if spec.id not in pool.list_all_envs():
        return "as it does not know that id"
    games = make(spec, 1, 1)
    mode = games.autoreset_mode
    games.close()
    return None if mode is AutoresetMode.NEXT_STEP else f"as it resets by {mode}, not on the next step"


def make(spec: EnvSpec, num_envs: int, threads: int) -> EnvPoolGames:
    return EnvPoolGames(spec, num_envs, threads)


class EnvPoolGames:
    """`Games` of envpool."""

    def __init__(self, spec: EnvSpec, num_envs: int, threads: int) -> None:
        self._spec, self._num_envs, self._threads = spec, num_envs, threads
        self._pool = self._build([0] * num_envs)
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self.autoreset_mode = self._pool.metadata.get("autoreset_mode")
        self._ids = np.arange(num_envs, dtype=np.int32)

    def _build(self, seeds: Sequence[int]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bounds are rounded to float32, which Gymnasium warns of
            pool = importlib.import_module("envpool").make(
                self._spec.id,
                env_type="gymnasium",
                num_envs=self._num_envs,
                num_threads=self._threads,
                seed=list(seeds),
                **self._spec.kwargs,
            )
            _ = pool.observation_space, pool.action_space  # made when they are first asked for, and kept
        return pool

    def begin(self, seeds: Sequence[int]) -> Any:
        self._pool = self._build(seeds)
        obs, _ = self._pool.reset()
        self._obs = obs
        return obs

    def restart(self, which: NDArray[np.bool_]) -> Any:
        rows = self._ids[which]
        obs, info = self._pool.reset(rows)
        self._obs = self._obs.copy()
        self._obs[info["env_id"]] = obs
        return self._obs

    def send(self, actions: NDArray[Any]) -> None:
        self._pool.send(actions, self._ids)

    def recv(self) -> Any:
        obs, reward, terminated, truncated, info = self._pool.recv()
        self._obs = obs
        shown = {name: value for name, value in info.items() if name not in OWN_INFO}
        return obs, reward, terminated, truncated, shown

    def close(self) -> None:
        self._pool.close()
