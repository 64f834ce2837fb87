"""Build Remuda's own schemes from the configuration of a run. registry/builtin.py registers them."""

from __future__ import annotations

from functools import partial

from remuda.build.envs import num_workers
from remuda.build.ranks import open_group
from remuda.config.run_config import RunConfig
from remuda.recipe import Scheme
from remuda.schemes.asynchronous import Asynchronous, AsynchronousReplay
from remuda.schemes.replicas import Replicas
from remuda.schemes.synchronous import Synchronous


def make_serial(config: RunConfig) -> Scheme:
    return Synchronous(workers=0)


def make_parallel(config: RunConfig) -> Scheme:
    return Synchronous(workers=num_workers(config))


def make_replicas(config: RunConfig) -> Scheme:
    return Replicas(partial(open_group, config), config.sampler.workers)


def make_asynchronous(config: RunConfig) -> Scheme:
    if config.has_replay_writers:
        return AsynchronousReplay(num_workers(config))
    return Asynchronous(num_workers(config), config.scheme_options.max_lag)
