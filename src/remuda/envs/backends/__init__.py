"""Native vector envs: games that are stepped together by code of their own, one file for each such library.

    backend = choose("auto", resolve("ALE/Pong-v5"))     # None: single envs, in this process or in the pool
    games = backend.make(spec, num_envs=8, threads=2)    # native.py makes a `core.Envs` of them

A backend is a module with NAME, IS_SAME_GAME, `offer` and `make`, registered by `remuda.register_env_backend`. Every
one resets an env on the step after its end; what cannot do that is not offered, and its single envs run in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from remuda.envs.spec import EnvSpec
from remuda.errors import ConfigError
from remuda.registry import all_env_backends, find_env_backend

Answer = tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], Mapping[str, Any]]


class Games(Protocol):
    """Envs that one call steps together; after an end the next step resets, its action does not count.

    obs = games.begin(seeds)
    while training:
        games.send(act(obs))                # starts the work, where the library can do that
        obs, reward, terminated, truncated, info = games.recv()
    games.close()
    """

    observation_space: Any  # of one env
    action_space: Any

    def begin(self, seeds: Sequence[int]) -> Any: ...  # new episodes everywhere: the first observations
    def restart(self, which: NDArray[np.bool_]) -> Any: ...  # new episodes in these; None where that is not possible
    def send(self, actions: NDArray[Any]) -> None: ...
    def recv(self) -> Answer: ...  # arrays that nobody else writes to
    def close(self) -> None: ...


class Backend(Protocol):
    """One library."""

    @property
    def NAME(self) -> str: ...
    @property
    def IS_SAME_GAME(self) -> bool: ...  # its envs do exactly what the single env of that id does
    def offer(self, spec: EnvSpec) -> str | None: ...  # None: it has this env; else why not, in a few words
    def make(self, spec: EnvSpec, num_envs: int, threads: int) -> Games: ...


def choose(name: str, spec: EnvSpec, needs_single: str = "") -> Backend | None:
    """The backend of that name; for "auto" one that plays the very same game, or the only one there is.

    `needs_single` says what was asked for that only single envs have: "auto" then takes those, a name is refused.
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
