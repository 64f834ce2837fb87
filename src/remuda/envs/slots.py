"""Divide envs into slots and between workers, and check arguments of `core.Envs`.

envs_per_slot(num_envs=8, slots=2)                                # 4
worker_blocks(num_envs=8, slots=2, num_workers=2, alone=False)    # [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from remuda.core import Actions, Array, Space
from remuda.envs.action_values import action_leaves
from remuda.errors import ConfigError
from remuda.processes.requests import server_of

Block = tuple[int, int]  # (first, last) stands for the envs in range(first, last), without `last`


def envs_per_slot(num_envs: int, slots: int) -> int:
    """Return the number of envs in each slot; raise ConfigError unless `num_envs` is a multiple of `slots`."""
    if num_envs < 1 or slots < 1:
        raise ConfigError(f"envs={num_envs} in slots={slots}: both are at least 1.")
    if num_envs % slots:
        raise ConfigError(
            f"envs={num_envs} does not divide by slots={slots}: use {num_envs - num_envs % slots or slots}."
        )
    return num_envs // slots


def worker_blocks(num_envs: int, slots: int, num_workers: int, alone: bool) -> list[list[Block]]:
    """Return a list for each worker: one block of envs for each slot that the worker serves.

    A worker steps its share of every slot. With `alone` it steps all envs of its own slots instead.
    """
    per_slot = envs_per_slot(num_envs, slots)
    starts = range(0, num_envs, per_slot)
    if alone:
        if not 1 <= num_workers <= slots:
            raise ConfigError(f"workers={num_workers} for {slots} slots, each of which belongs to one: use fewer.")
        servers = [server_of(slot, slots, num_workers) for slot in range(slots)]
        return [
            [(start, start + per_slot) for start, server in zip(starts, servers, strict=True) if server == worker]
            for worker in range(num_workers)
        ]
    if not 1 <= num_workers <= per_slot:
        raise ConfigError(
            f"workers={num_workers} for {per_slot} envs per slot: every worker serves every slot, "
            f"so use 1 to {per_slot} workers."
        )
    shares = split_evenly(per_slot, num_workers)
    return [[(start + first, start + last) for start in starts] for first, last in shares]


def split_evenly(count: int, parts: int) -> list[Block]:
    """Split range(count) into contiguous blocks whose sizes differ by at most one."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def envs_in(blocks: Sequence[Block]) -> list[int]:
    """Return the indices of all envs in these blocks."""
    return [env for block in blocks for env in range(*block)]


def write_actions(space: Space, targets: Sequence[Array], action: Actions) -> None:
    """Copy the actions of one slot into `targets`, one array for each leaf of the action space."""
    first = targets[0]
    if (
        type(action) is np.ndarray
        and action.shape == first.shape
        and action.dtype.kind == first.dtype.kind
        and space.is_leaf
    ):
        first[...] = action
        return
    for target, leaf in zip(targets, list(action_leaves(space, action, len(targets[0]))), strict=True):
        target[...] = leaf


def check_seeds(
    seeds: Sequence[Sequence[int]] | None, levels: Sequence[int] | None, info: Sequence[str], num_envs: int
) -> None:
    """Raise ConfigError if `seeds`, `levels` or `info` are invalid, or do not fit each other or `num_envs`."""
    if seeds is not None and len(seeds) != num_envs:
        raise ConfigError(f"seeds has {len(seeds)} lists for envs={num_envs}: give one list for each env.")
    if levels is not None and seeds is not None:
        raise ConfigError("levels and seeds were both given: levels are drawn from, seeds are played once; give one.")
    if levels is not None and (len(levels) == 0 or min(levels) < 0):
        raise ConfigError(f"levels={list(levels)[:5]} of env seeds: give at least one, and none below 0.")
    if isinstance(info, str) or len(set(info)) != len(info):
        raise ConfigError(f"info={info!r} is not a list of different names: give those of entries of info.")
