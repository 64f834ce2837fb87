"""Vector envs that are registered as the `vector_entry_point` of an id, such as Gymnasium's vectorized CartPole.

    vector = make(resolve("CartPole-v1"), num_envs=8, threads=1)

`send` only stores the actions and `recv` steps the envs, because Gymnasium's API has one method for both. The
vectorized CartPole adds numbers in another order than the single env and so rounds differently. Therefore "auto"
chooses this backend only for ids that have no single env.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from remuda.core import Array
from remuda.envs.import_paths import sentence
from remuda.envs.spec import EnvSpec

NAME = "gymnasium"
IS_SAME_GAME = False


def offer(spec: EnvSpec) -> str | None:
    """Return why this env has no usable vector env, or None if it has one."""
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


def make(spec: EnvSpec, num_envs: int, threads: int) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(_build(spec, num_envs))


def _build(spec: EnvSpec, num_envs: int) -> gymnasium.vector.VectorEnv:
    known = gymnasium.spec(spec.id)
    entry = known.vector_entry_point
    creator = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    options = {}
    if "autoreset_mode" in inspect.signature(creator).parameters:
        options["autoreset_mode"] = AutoresetMode.NEXT_STEP
    return gymnasium.make_vec(
        known, num_envs=num_envs, vectorization_mode="vector_entry_point", **{**options, **spec.kwargs}
    )


class GymnasiumVectorEnv:
    """A `NativeVectorEnv` that wraps a Gymnasium VectorEnv."""

    def __init__(self, vector: gymnasium.vector.VectorEnv) -> None:
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self._vector = vector
        self._actions: Array | None = None

    def begin(self, seeds: Sequence[int]) -> Array:
        obs, _ = self._vector.reset(seed=seeds[0])  # one seed, as all envs of a vector env share one generator
        return obs  # type: ignore[no-any-return]

    def restart(self, which: NDArray[np.bool_]) -> None:
        """Reset nothing and return None, because only all envs can be reset together.

        Gymnasium's API has no reset of single envs that every vector env supports. The vectorized CartPole, for
        example, always resets all envs.
        """
        return

    def send(self, actions: Array) -> None:
        self._actions = actions

    def recv(self) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._vector.step(self._actions)
        return obs, np.asarray(reward), np.asarray(terminated), np.asarray(truncated), info

    def close(self) -> None:
        self._vector.close()
