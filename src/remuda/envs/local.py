"""Envs in this process: the plain implementation of `core.Envs`, and the one to debug with.

    envs = LocalEnvs(resolve("CartPole-v1"), num_envs=8)
    envs.reset(seed=1)
    while training:
        slot, step = envs.recv()             # steps here, one env after another
        envs.send(slot, act(step.obs))       # only remembers the actions
    envs.close()

With `seeds` (one list for each env) every reset takes the next of its env's seeds, and an env whose list is used up
keeps its last observation with mask False: an evaluation of exactly these episodes. With `levels` every reset draws
its seed from this one set: training on exactly these. `send(slot, action, hold=True)` lets envs that have ended wait,
with mask False, until `renew(slot)` begins their next episodes; it is answered by `recv` like a send.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from remuda.core import Episode, Space, Step
from remuda.data.trees import leaves
from remuda.envs.env_group import EnvGroup, build_all, rows_layout, slice_rows
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.rows import Rows
from remuda.envs.single import SingleEnv
from remuda.envs.space_values import action_leaves
from remuda.envs.spec import EnvSpec
from remuda.errors import Abandoned, ConfigError, Interrupted
from remuda.processes.notices import Notice, Reporter
from remuda.processes.requests import server_of

logger = logging.getLogger("remuda.envs")


def envs_per_slot(num_envs: int, slots: int) -> int:
    """How many envs a slot has, where they divide."""
    if num_envs < 1 or slots < 1:
        raise ConfigError(f"envs={num_envs} in slots={slots}: both are at least 1.")
    if num_envs % slots:
        raise ConfigError(
            f"envs={num_envs} does not divide by slots={slots}: use {num_envs - num_envs % slots or slots}."
        )
    return num_envs // slots


def blocks_of(num_envs: int, slots: int, num_workers: int, alone: bool) -> list[list[tuple[int, int]]]:
    """The envs of each worker, as first and last of its share of every slot, or with `alone` of slots of its own."""
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


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous shares that differ by one at the most."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def envs_of(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the envs in these shares."""
    return [env for block in blocks for env in range(*block)]


def write_actions(space: Space, targets: Sequence[NDArray[Any]], action: Any) -> None:
    """Copy actions of one slot, in the tree of their space or in the env's own keys, to the arrays of its leaves."""
    if type(action) is np.ndarray and action.shape == targets[0].shape and space.is_leaf:
        targets[0][...] = action
        return
    for target, leaf in zip(targets, list(action_leaves(space, action, len(targets[0]))), strict=True):
        target[...] = leaf


def check_seeds(
    seeds: Sequence[Sequence[int]] | None, levels: Sequence[int] | None, info: Sequence[str], num_envs: int
) -> None:
    if seeds is not None and len(seeds) != num_envs:
        raise ConfigError(f"seeds has {len(seeds)} lists for envs={num_envs}: give one list for each env.")
    if levels is not None and seeds is not None:
        raise ConfigError("levels and seeds were both given: levels are drawn from, seeds are played once; give one.")
    if levels is not None and (len(levels) == 0 or min(levels) < 0):
        raise ConfigError(f"levels={list(levels)[:5]} of env seeds: give at least one, and none below 0.")
    if isinstance(info, str) or len(set(info)) != len(info):
        raise ConfigError(f"info={info!r} is not a list of different names: give those of entries of info.")


class LocalEnvs:
    """`core.Envs` without processes."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        slots: int = 1,
        gamma: float = 0.99,
        stats: str | type[EpisodeStats] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        max_restarts: int = 1000,
        should_stop: Callable[[], bool] | None = None,
        levels: Sequence[int] | None = None,
        info: Sequence[str] = (),
        first_env: int = 0,
        tell: Callable[[Notice], None] | None = None,
    ) -> None:
        """`first_env` is the number of the first env here, where these are some of many: seeds depend on it.

        `tell` receives a notice of every env that was rebuilt; without it, some of them are logged.
        """
        per_slot = envs_per_slot(num_envs, slots)
        check_seeds(seeds, levels, info, num_envs)
        stats_class = resolve_stats(stats)
        self.num_envs, self.num_slots, self._label = num_envs, slots, spec.label
        self.should_stop, self._tell = should_stop, tell
        own_seeds = [None] * num_envs if seeds is None else seeds
        makers = [
            partial(SingleEnv, spec, first_env + row, gamma, stats_class, own_seeds[row], levels, max_restarts)
            for row in range(num_envs)
        ]
        envs = build_all(makers)
        self.observation, self.action = envs[0].observation, envs[0].action
        layout = rows_layout(self.observation, self.action, num_envs, info)
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self._env_groups, self._actions = [], []
        for first in range(0, num_envs, per_slot):
            own = slice(first, first + per_slot)
            rows, actions = slice_rows(arrays, own, self.observation, self.action, info)
            env_group = EnvGroup(envs[own])
            env_group.attach(rows)
            self._env_groups.append(env_group)
            self._actions.append(actions)
        env_groups = list(zip(self._env_groups, self._actions, strict=True))
        self._stepping = [partial(env_group.step, actions) for env_group, actions in env_groups]
        self._holding = [partial(env_group.step, actions, hold=True) for env_group, actions in env_groups]
        self._targets = [[leaf for _, leaf in leaves(actions)] for actions in self._actions]
        self._restarts = arrays["restarts"]
        self._restarts_before = 0
        self._is_owed = [False] * slots  # sent and not received
        self._sent: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._episodes: list[Episode] = []
        self._reporter = Reporter(logger)
        self._is_open = True

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Begin anew; every slot will answer with first observations. Returns the random steps taken."""
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._sent.clear()
        self._episodes.clear()
        taken = 0
        for slot, env_group in enumerate(self._env_groups):
            try:
                taken += env_group.reset(seed, warm_up, self._obey_stop)
            except Abandoned as error:
                raise Interrupted(f"{self._label}: {error}") from error
            self._take_news(env_group.rows)
            self._sent.append((slot, None))
        self._is_owed = [True] * self.num_slots
        return taken

    def prepare(self, seed: int, restarts: int) -> None:
        """Begin anew at the next step, which is answered with a reset row: in place of envs lost so often."""
        self._restarts.fill(restarts)  # their seeds differ from those that were used before
        self._restarts_before = -int(self._restarts.sum())
        for env_group in self._env_groups:
            env_group.prepare(seed)

    def get_state(self) -> dict[str, Any]:
        """What the coming steps depend on, once every slot was received; NoState if the envs hold more."""
        states = [state for env_group in self._env_groups for state in env_group.get_state()]
        return {"envs": states, "restarts": self._restarts.copy(), "restarts_before": self._restarts_before}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """As if every slot had just been received: the next call is a send to any of them."""
        states = list(state["envs"])
        for env_group in self._env_groups:
            own, states = states[: len(env_group.envs)], states[len(env_group.envs) :]
            env_group.set_state(own)
        self._restarts[:], self._restarts_before = state["restarts"], state["restarts_before"]
        self._sent.clear()
        self._is_owed = [False] * self.num_slots

    def send(self, slot: int, action: Any, hold: bool = False) -> None:
        """Arrays [B of the slot], in the tree of the action space; with `hold`, envs that have ended do not reset."""
        self._require_received(slot)
        write_actions(self.action, self._targets[slot], action)
        self._is_owed[slot] = True
        self._sent.append((slot, self._holding[slot] if hold else self._stepping[slot]))

    def renew(self, slot: int) -> None:
        """Envs that have ended begin anew, no other is touched."""
        self._require_received(slot)
        self._is_owed[slot] = True
        self._sent.append((slot, self._env_groups[slot].renew))

    def _require_received(self, slot: int) -> None:
        if self._is_owed[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        self._obey_stop()
        slot, work = self._sent.popleft()
        self._is_owed[slot] = False
        rows = self._env_groups[slot].rows
        if work is not None:
            try:
                work()
            except Abandoned as error:
                raise Interrupted(f"{self._label}: {error}") from error
            if rows.episodes or rows.notices:
                self._take_news(rows)
        return slot, rows.step

    def info(self, slot: int) -> dict[str, NDArray[Any]]:
        """The entries of info that were asked for, [B of the slot], of its last answer; nan where there was none."""
        return dict(self._env_groups[slot].rows.info)

    def _obey_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while stepping envs")

    def _take_news(self, rows: Rows) -> None:
        self._episodes.extend(Episode(env, values) for env, values in rows.episodes)
        rows.episodes.clear()
        if self._tell is None:
            self._reporter.report(rows.notices)
        else:
            for notice in rows.notices:
                self._tell(notice)
        rows.notices.clear()

    def episodes(self) -> list[Episode]:
        finished, self._episodes = self._episodes, []
        return finished

    def waited(self) -> float:
        """Nothing here waits for anybody."""
        return 0.0

    def restarts(self) -> int:
        return self._restarts_before + int(self._restarts.sum())

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            for env_group in self._env_groups:
                env_group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
