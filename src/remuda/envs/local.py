"""Envs in this process: the simplest implementation of `core.Envs`, and the best one for debugging.

    envs = LocalEnvs(resolve("CartPole-v1"), num_envs=8)
    envs.reset(seed=1)
    while training:
        slot, step = envs.recv()             # steps the envs of the slot, one after another
        envs.send(slot, act(step.obs))       # stores the actions
    envs.close()

With `seeds` (one list for each env), every episode uses the next seed of the env's list. An env whose list is used up
repeats its last observation with mask False, so that an evaluation plays exactly one episode per seed. With `levels`,
every episode draws its seed from `levels`, so that training sees only these seeds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import numpy as np

from remuda.core import Actions, Array, EnvsState, Episode, Step
from remuda.data.trees import leaves
from remuda.envs.env_group import EnvGroup, build_all, rows_layout, slice_rows
from remuda.envs.episodes import EpisodeStats, resolve_stats
from remuda.envs.rows import Rows
from remuda.envs.single import SingleEnv
from remuda.envs.slots import check_seeds, envs_per_slot, write_actions
from remuda.envs.spec import EnvSpec
from remuda.errors import Abandoned, Interrupted
from remuda.processes.notices import Notice, Reporter

logger = logging.getLogger("remuda.envs")


class LocalEnvs:
    """`core.Envs` without worker processes."""

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
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        """`first_env` is the first env's index among all envs of the run; an env's seed is derived from its index.

        `on_notice` is called with every `Notice` of an env, for example that the env was rebuilt. If `on_notice` is
        None, a `Reporter` logs the notices and leaves out most repetitions.
        """
        per_slot = envs_per_slot(num_envs, slots)
        check_seeds(seeds, levels, info, num_envs)
        stats_class = resolve_stats(stats)
        self.num_envs, self.num_slots, self._label = num_envs, slots, spec.label
        self.should_stop, self._on_notice = should_stop, on_notice
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
        self._is_in_flight = [False] * slots  # for each slot, whether `recv` still has to return it
        self._sent: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._episodes: list[Episode] = []
        self._reporter = Reporter(logger)
        self._is_open = True

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start new episodes and take up to `warm_up` random steps in each env; return the total of these steps."""
        self._restarts_before += int(self._restarts.sum())
        self._restarts.fill(0)
        self._sent.clear()
        self._episodes.clear()
        taken = 0
        for slot, env_group in enumerate(self._env_groups):
            try:
                taken += env_group.reset(seed, warm_up, self._check_stop)
            except Abandoned as error:
                raise Interrupted(f"{self._label}: {error}") from error
            self._take_stats(env_group.rows)
            self._sent.append((slot, None))
        self._is_in_flight = [True] * self.num_slots
        return taken

    def prepare(self, seed: int, restarts: int) -> None:
        """Let these new envs replace those of a process that was lost `restarts` times so far.

        The next step resets every env, with a seed that is derived from `seed` and `restarts`.
        """
        self._restarts.fill(restarts)  # seeds are derived from this count, so the lost envs' seeds are not used again
        self._restarts_before = -int(self._restarts.sum())
        for env_group in self._env_groups:
            env_group.prepare(seed)

    def get_state(self) -> EnvsState:
        """Return everything that later steps depend on; raise NoState if an env cannot be saved."""
        states = [state for env_group in self._env_groups for state in env_group.get_state()]
        return {"envs": states, "restarts": self._restarts.copy(), "restarts_before": self._restarts_before}

    def set_state(self, state: EnvsState) -> None:
        """Continue from a state that `get_state` returned, as if every slot had just been received."""
        states = list(state["envs"])
        for env_group in self._env_groups:
            own, states = states[: len(env_group.envs)], states[len(env_group.envs) :]
            env_group.set_state(own)
        self._restarts[:], self._restarts_before = state["restarts"], state["restarts_before"]
        self._sent.clear()
        self._is_in_flight = [False] * self.num_slots

    def send(self, slot: int, action: Actions, hold: bool = False) -> None:
        """Store the actions of a slot until `recv`, which steps the envs.

        With `hold`, envs whose episode has ended are not reset.
        """
        self._require_received(slot)
        write_actions(self.action, self._targets[slot], action)
        self._is_in_flight[slot] = True
        self._sent.append((slot, self._holding[slot] if hold else self._stepping[slot]))

    def renew(self, slot: int) -> None:
        """Start new episodes where the last one has ended; the slot's next step has mask False for all its envs."""
        self._require_received(slot)
        self._is_in_flight[slot] = True
        self._sent.append((slot, self._env_groups[slot].renew))

    def _require_received(self, slot: int) -> None:
        if self._is_in_flight[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        self._check_stop()
        slot, work = self._sent.popleft()
        self._is_in_flight[slot] = False
        rows = self._env_groups[slot].rows
        if work is not None:
            try:
                work()
            except Abandoned as error:
                raise Interrupted(f"{self._label}: {error}") from error
            if rows.episodes or rows.notices:
                self._take_stats(rows)
        return slot, rows.step

    def info(self, slot: int) -> dict[str, Array]:
        """Return the entries of info requested at construction, for a slot's last step; nan where one is missing."""
        return dict(self._env_groups[slot].rows.info)

    def _check_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while stepping envs")

    def _take_stats(self, rows: Rows) -> None:
        """Move the finished episodes from `rows` to `_episodes`; report the notices and remove them from `rows`."""
        self._episodes.extend(Episode(env, values) for env, values in rows.episodes)
        rows.episodes.clear()
        if self._on_notice is None:
            self._reporter.report(rows.notices)
        else:
            for notice in rows.notices:
                self._on_notice(notice)
        rows.notices.clear()

    def episodes(self) -> list[Episode]:
        finished, self._episodes = self._episodes, []
        return finished

    def waited(self) -> float:
        """Return 0 seconds, because there are no workers to wait for."""
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
