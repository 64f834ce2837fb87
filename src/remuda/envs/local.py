"""Envs in this process: the plain implementation of `core.Envs`, and the one to debug with.

    envs = LocalEnvs(resolve("CartPole-v1"), num_envs=8)
    envs.reset(seed=1)
    while training:
        slot, step = envs.recv()             # steps here, one env after another
        envs.send(slot, act(step.obs))       # only remembers the actions
    envs.close()

With `seeds` (one list for each env) every reset takes the next of its env's seeds, and an env whose list is used up
keeps its last observation with mask False: an evaluation of exactly these episodes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from remuda.core import Episode, Step
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.lane import Lane, build_all, rows_layout
from remuda.envs.single import Rows, SingleEnv
from remuda.envs.spec import EnvSpec
from remuda.errors import ConfigError, Interrupted

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


def check_action(action: NDArray[Any], expected: tuple[int, ...]) -> None:
    if action.shape != expected:
        raise ValueError(f"actions have shape {action.shape}, this slot takes {expected}: one action for each env.")


def check_seeds(seeds: Sequence[Sequence[int]] | None, num_envs: int) -> None:
    if seeds is not None and len(seeds) != num_envs:
        raise ConfigError(f"seeds has {len(seeds)} lists for envs={num_envs}: give one list for each env.")


def report(notice: str, count: int) -> None:
    """Tell the user of a restart: of the 1st, 2nd, 4th, 8th ..., as a flaky env would drown everything else."""
    if count & (count - 1) == 0:
        logger.warning("%s", notice)


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
    ) -> None:
        per_slot = envs_per_slot(num_envs, slots)
        check_seeds(seeds, num_envs)
        stats_class = resolve_stats(stats)
        self.num_envs, self.num_slots = num_envs, slots
        self.should_stop = should_stop
        makers = [
            partial(SingleEnv, spec, index, gamma, stats_class, None if seeds is None else seeds[index], max_restarts)
            for index in range(num_envs)
        ]
        envs = build_all(makers)
        self.observation, self.action = envs[0].observation, envs[0].action
        layout = rows_layout(self.observation, self.action, num_envs)
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self._lanes = []
        for slot in range(slots):
            own = slice(slot * per_slot, (slot + 1) * per_slot)
            lane = Lane(envs[own])
            lane.attach(Rows(Step(*(arrays[name][own] for name in Step._fields)), arrays["restarts"][own]))
            self._lanes.append(lane)
        self._restarts = arrays["restarts"]
        self._restarts_before = 0
        self._action_shape, self._action_dtype = (per_slot, *self.action.shape), np.dtype(self.action.dtype)
        self._is_owed = [False] * slots  # sent and not received
        self._sent: deque[tuple[int, NDArray[Any] | None]] = deque()
        self._episodes: list[Episode] = []
        self._notices = 0
        self._is_open = True

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Begin anew; every slot will answer with first observations. Returns the random steps taken."""
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._sent.clear()
        self._episodes.clear()
        taken = 0
        for slot, lane in enumerate(self._lanes):
            taken += lane.reset(seed, warm_up, self._obey_stop)
            self._take_news(lane.rows)
            self._sent.append((slot, None))
        self._is_owed = [True] * self.num_slots
        return taken

    def send(self, slot: int, action: NDArray[Any]) -> None:
        if self._is_owed[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")
        check_action(action, self._action_shape)
        self._is_owed[slot] = True
        self._sent.append((slot, action.astype(self._action_dtype)))

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        self._obey_stop()
        slot, action = self._sent.popleft()
        self._is_owed[slot] = False
        rows = self._lanes[slot].rows
        if action is not None:
            self._lanes[slot].step(action)
            if rows.episodes or rows.notices:
                self._take_news(rows)
        return slot, rows.step

    def _obey_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while stepping envs")

    def _take_news(self, rows: Rows) -> None:
        self._episodes.extend(rows.episodes)
        rows.episodes.clear()
        for notice in rows.notices:
            self._notices += 1
            report(notice, self._notices)
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
            for lane in self._lanes:
                lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
