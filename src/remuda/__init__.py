"""Remuda: one PyTorch platform for reinforcement learning, from a laptop to a cluster.

    import remuda

    run = remuda.train("ppo", env="CartPole-v1", steps=200_000, scheme="parallel")
    print(run.evaluate(episodes=20))
    policy = remuda.load(run.path)

Names are imported when they are first used, so that `import remuda` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remuda.core import Episode, Space, Step
    from remuda.data import Batch, Rollout, Steps, namedarraytuple
    from remuda.envs import EpisodeStats
    from remuda.envs.pool_futures import EnvPool
    from remuda.errors import RemudaError, UsageError
    from remuda.machine import keep_memory
    from remuda.recipe import Round
    from remuda.registry import register_algorithm, register_env_backend, register_scheme
    from remuda.runs.api import Run, load, resume, start, train
    from remuda.runs.policy import Policy
    from remuda.runs.replay_buffer import ReplayBuffer, ReplaySample
    from remuda.runs.training import Training

__version__ = "0.1.0"

_HOMES = {
    "Batch": "remuda.data",
    "EnvPool": "remuda.envs.pool_futures",
    "Episode": "remuda.core",
    "EpisodeStats": "remuda.envs",
    "Policy": "remuda.runs.policy",
    "RemudaError": "remuda.errors",
    "ReplayBuffer": "remuda.runs.replay_buffer",
    "ReplaySample": "remuda.runs.replay_buffer",
    "Rollout": "remuda.data",
    "Round": "remuda.recipe",
    "Run": "remuda.runs.api",
    "Space": "remuda.core",
    "Step": "remuda.core",
    "Steps": "remuda.data",
    "Training": "remuda.runs.training",
    "UsageError": "remuda.errors",
    "keep_memory": "remuda.machine",
    "load": "remuda.runs.api",
    "namedarraytuple": "remuda.data",
    "register_algorithm": "remuda.registry",
    "register_env_backend": "remuda.registry",
    "register_scheme": "remuda.registry",
    "resume": "remuda.runs.api",
    "start": "remuda.runs.api",
    "train": "remuda.runs.api",
}

__all__ = [
    "Batch",
    "EnvPool",
    "Episode",
    "EpisodeStats",
    "Policy",
    "RemudaError",
    "ReplayBuffer",
    "ReplaySample",
    "Rollout",
    "Round",
    "Run",
    "Space",
    "Step",
    "Steps",
    "Training",
    "UsageError",
    "keep_memory",
    "load",
    "namedarraytuple",
    "register_algorithm",
    "register_env_backend",
    "register_scheme",
    "resume",
    "start",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'remuda' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the names in `__all__` and names such as `__version__`, but not the modules imported here."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
