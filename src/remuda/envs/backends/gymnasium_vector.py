"""Vector envs that an id was registered with (`vector_entry_point`): Gymnasium's own CartPole, and those of users.

    games = make(resolve("CartPole-v1"), num_envs=8, threads=1)

They step in `recv`, as Gymnasium's API cannot send without receiving. CartPole's is another implementation than the
single env (float64 sums in another order), so nobody gets these without asking, unless an id has nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from remuda.envs.import_paths import sentence
from remuda.envs.spec import EnvSpec

NAME = "gymnasium"
IS_SAME_GAME = False


def offer(spec: EnvSpec) -> str | None:
    if spec.make is not None:
        return "as it is not a Gymnasium id"
    if gymnasium.spec(spec.id).vector_entry_point is None:
        return "as its id was registered without a vector_entry_point"
    if spec.game is not None:
        return "whose vector env is the backend ale"
    try:
        vector = _build(spec, 1)
    except Exception as error:
        return f"as its vector env could not be made ({sentence(error)})"
    mode = vector.metadata.get("autoreset_mode")
    vector.close()
    return None if mode is AutoresetMode.NEXT_STEP else f"as its vector env resets by {mode}, not on the next step"


def make(spec: EnvSpec, num_envs: int, threads: int) -> SteppedGames:
    return SteppedGames(_build(spec, num_envs))


def _build(spec: EnvSpec, num_envs: int) -> Any:
    known = gymnasium.spec(spec.id)
    entry = known.vector_entry_point
    creator: Any = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    asked = {}
    if "autoreset_mode" in inspect.signature(creator).parameters:
        asked["autoreset_mode"] = AutoresetMode.NEXT_STEP
    return gymnasium.make_vec(
        known, num_envs=num_envs, vectorization_mode="vector_entry_point", **{**asked, **spec.kwargs}
    )


class SteppedGames:
    """`Games` of a Gymnasium VectorEnv."""

    def __init__(self, vector: Any) -> None:
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self._vector = vector
        self._actions: NDArray[Any] | None = None

    def begin(self, seeds: Sequence[int]) -> Any:
        obs, _ = self._vector.reset(seed=seeds[0])  # Gymnasium's draw every env from one generator
        return obs

    def restart(self, which: NDArray[np.bool_]) -> Any:
        """Not possible: resets of some envs are no part of Gymnasium's API where envs reset by themselves."""
        return None

    def send(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def recv(self) -> Any:
        obs, reward, terminated, truncated, info = self._vector.step(self._actions)
        flags = np.asarray(reward), np.asarray(terminated), np.asarray(truncated)
        return obs, *flags, info

    def close(self) -> None:
        self._vector.close()
