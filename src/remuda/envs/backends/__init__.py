"""Native vector envs: libraries that step many envs with one call, one module for each library.

    backend = choose("auto", resolve("ALE/Pong-v5"))      # None stands for single envs, in this process or in a pool
    vector = backend.make(spec, num_envs=8, threads=2)    # native.py turns this into `core.Envs`

A backend is a module, or any object, with the members of `Backend`, registered by `remuda.register_env_backend`. Its
envs are reset by the step after the end of an episode (Gymnasium's AutoresetMode.NEXT_STEP). If the library cannot
reset an env in this way, the backend does not offer this env, which then has to run as single envs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.core import Array
from remuda.envs.spec import EnvSpec
from remuda.errors import ConfigError
from remuda.registry import all_env_backends, find_env_backend

# (obs, reward, terminated, truncated, info); every array has the shape [num_envs, ...]
VectorStep: TypeAlias = tuple[Array, Array, Array, Array, Mapping[str, Any]]


class NativeVectorEnv(Protocol):
    """Envs that one call steps together. The step after an episode's end resets the env and ignores its action.

    obs = vector.begin(seeds)
    while training:
        vector.send(act(obs))
        obs, reward, terminated, truncated, info = vector.recv()
    vector.close()
    """

    observation_space: gymnasium.Space  # the space of one env, not of the batch
    action_space: gymnasium.Space

    def begin(self, seeds: Sequence[int]) -> Array:
        """Start new episodes in all envs, one seed for each; return the first observations."""

    def restart(self, which: NDArray[np.bool_]) -> Array | None:
        """Start new episodes where `which` [num_envs] is True; return the observations of all envs.

        If the library can reset only all envs together, start no episode and return None.
        """

    def send(self, actions: Array) -> None:
        """Start a step with these actions; the method may return before the envs are stepped.

        Discrete actions count from the `start` of the action space.
        """

    def recv(self) -> VectorStep:
        """Wait for the step and return it, in arrays that no later step writes to.

        Entries of info are arrays [num_envs]. If only some envs have the entry NAME, info["_NAME"] is True for these
        envs. info["episode_continues"] is True where the learner's episode ends but the env's own episode continues,
        as after a lost life.
        """

    def close(self) -> None:
        """End the library's threads and free its memory."""


class Backend(Protocol):
    """One library of native vector envs."""

    @property
    def NAME(self) -> str:
        """The value of the option `envs.backend` that selects this backend."""

    @property
    def IS_SAME_GAME(self) -> bool:
        """Whether the envs give the same results as the id's single Gymnasium env; "auto" requires this."""

    def offer(self, spec: EnvSpec) -> str | None:
        """Return None if the backend has this env, else a clause that says why not: "as it only has MyGames/*"."""

    def make(self, spec: EnvSpec, num_envs: int, threads: int) -> NativeVectorEnv:
        """Make a vector env with at most `threads` threads of its own; called only for specs that `offer` accepts."""


def choose(name: str, spec: EnvSpec, needs_single: str = "") -> Backend | None:
    """Return the backend of this name; None for "python", which stands for single Gymnasium envs.

    For "auto", return a backend whose envs give the same results as single envs, or None if there is no such
    backend; if the id has no single env, return the backend "gymnasium". If `needs_single` is not empty, it names a
    request that only single envs can fulfill. Then "auto" never chooses a native backend for an id that has a single
    env, and every other choice of a native backend raises ConfigError. So does a backend that does not offer the env.
    """
    if name == "auto":
        name = "gymnasium" if spec.is_vector_only else "python"
        if name == "python" and not needs_single:
            backends = (entry.load() for entry in all_env_backends())
            same = (backend for backend in backends if backend.IS_SAME_GAME)
            return next((backend for backend in same if backend.offer(spec) is None), None)
    if name == "python":
        return None
    backend = find_env_backend(name).load()
    if needs_single:
        remedy = f"{spec.label} has no single envs." if spec.is_vector_only else "use envs.backend=python."
        raise ConfigError(f"envs.backend={name} with {needs_single}, which only single envs have: {remedy}")
    if reason := backend.offer(spec):
        raise ConfigError(f"envs.backend={name} cannot play {spec.label}, {reason}: use envs.backend=python.")
    return backend
