"""One env that writes its steps to one row of arrays and is rebuilt if it raises.

    env = SingleEnv(spec, index=3, gamma=0.99)
    env.attach(rows, row=0)                      # the env writes its steps to this row
    env.reset(seed=1)                            # writes the first observation, mask False
    reward = env.step(action)                    # writes obs; writes the other fields only at an end or a reset
    env.close()

At the end of an episode `obs` is the true final observation. The next step ignores its action, resets the env, and
writes a reset row: the new episode's first observation with reward 0 and mask False. Rows hold copies, so envs may
reuse their arrays.

An env may end the learner's episode without ending its own, as after a lost life in Atari: it sets
info["episode_continues"] on a step that is terminated or truncated. For the learner this is an end like any other.
The statistics continue. The next step calls reset() without a seed, and the env then continues its game.

While `is_held`, an env whose episode has ended is not reset. It writes its last observation, reward 0 and mask False
until `renew` starts its next episode. If a held env fails or its worker is lost, its episode counts as ended.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy import ndarray

from remuda.core import derive_seed
from remuda.data.packing import Unpackable, pack, unpack
from remuda.data.trees import leaves, map_tree
from remuda.envs.episodes import CONTINUES, EpisodeStats, is_number
from remuda.envs.failures import FAILURES, FailureCount, notice_of, raised
from remuda.envs.observation_values import BoundsCheck, Forbidden, find_not_finite, reader
from remuda.envs.rows import Rows, scalar_view
from remuda.envs.spaces import action_space, observation_space
from remuda.envs.spec import EnvSpec
from remuda.envs.states import get_state, set_state
from remuda.errors import EnvError, EnvFailed, NoState
from remuda.processes.notices import Notice

# Attributes of SingleEnv that are saved in addition to the state of the env and its statistics.
COUNTS = (
    "is_held",
    "_seed",
    "_seeds_used",
    "_episode",
    "_current_seed",
    "_failures",
    "_is_waiting",
    "_is_idle",
    "_is_fresh",
    "_continues",
)
# Bounds are checked in an env's first CHECKED_OBSERVATIONS observations, and in the final observations of its first
# CHECKED_ENDS episodes. A check takes 2 us (4 floats) to 25 us (image). Checking the final observations of all
# episodes would slow CartPole's first, short episodes by 9 %.
CHECKED_OBSERVATIONS, CHECKED_ENDS = 200, 50
WARM_UP_KEY = 1 << 20  # key of `derive_seed` for warm-up; resets use the number of restarts, which is smaller


class SingleEnv:
    """Owns one Gymnasium env, and writes its steps to a row of arrays."""

    def __init__(
        self,
        spec: EnvSpec,
        index: int,
        gamma: float = 0.99,
        stats: type[EpisodeStats] = EpisodeStats,
        seeds: Sequence[int] | None = None,  # the env plays one episode for each seed, in this order, then stays idle
        levels: Sequence[int] | None = None,  # if given, every episode draws its seed from this list
        max_restarts: int = 1000,
    ) -> None:
        self.spec, self.index, self.gamma, self.max_restarts = spec, index, gamma, max_restarts
        self.is_held, self._current_seed = False, 0
        self._stats_class, self._seeds, self._levels = stats, seeds, levels
        self._has_hook = self._is_watched = stats.step is not EpisodeStats.step
        self.prepare(seed=self._current_seed)
        self._open()
        try:
            self.observation = observation_space(self._env.observation_space, spec.label)
            self.action = action_space(self._env.action_space, spec.label)
            raw = self._env.observation_space
            self._read = reader(raw, self.observation)
            # The dtype None matches no array, so spaces other than boxes take the slower path through `_store`.
            self._quick_dtype = np.dtype(raw.dtype) if self.observation.kind == "box" else None
            self._bounds = BoundsCheck(self.observation)
            self._unchecked = CHECKED_OBSERVATIONS if self._bounds.is_needed else 0
            self._shape, self._dtype = self.observation.shape, None if self._unchecked else self._quick_dtype
            self.raw_action_space = self._env.action_space
        except BaseException:
            self.close()
            raise

    def attach(self, rows: Rows, row: int) -> None:
        """Write the env's steps to this row from now on."""
        self._rows, self._row = rows, row
        # Assigning to [...] of a view is the fastest way to write a row. array[row, ...] is a view even of a scalar.
        self._obs = map_tree(lambda array: array[row, ...], rows.step.obs)
        self._is_watched = self._has_hook or bool(rows.info)
        self._terminated, self._truncated = scalar_view(rows.step.terminated), scalar_view(rows.step.truncated)
        self._mask, self._reward = scalar_view(rows.step.mask), scalar_view(rows.step.reward)

    # --- stepping: the hot path, about 0.5 us on top of the env's own step ------------------------------------

    def step(self, action: Any) -> float:
        """Take this action, or reset the env if the previous step ended the episode; return the reward."""
        if self._is_waiting:
            return self._begin()
        try:
            result = self._step(action)
        except FAILURES as error:
            return self._rebuild(error)
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError):
            self._rewards.append(0.0)  # so that the step number in the error includes this step
            self._refuse("step() did not return (obs, reward, terminated, truncated, info): adapt it to Gymnasium.")
        self._rewards.append(reward)
        if type(obs) is ndarray and obs.dtype is self._dtype and obs.shape == self._shape:
            self._obs[...] = obs
        else:
            self._store(obs)
        if terminated is not False or truncated is not False or self._is_watched:
            if self._is_watched:
                self._write_info(info)
            if self._has_hook:
                self._stats.step(obs, action, reward, info)
            self._end(terminated, truncated, info)
        return reward  # type: ignore[no-any-return]

    def _end(self, terminated: object, truncated: object, info: Mapping[str, object]) -> None:
        """If an episode ended, write the end flags, and report statistics unless the env's own episode continues."""
        is_terminated, is_truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if not (is_terminated or is_truncated):
            return
        rows, row = self._rows, self._row
        rows.marked.append(row)
        self._terminated[row], self._truncated[row] = is_terminated, is_truncated
        self._require_dict(info)
        if self._episode <= CHECKED_ENDS:
            self._check_bounds()
        self._is_waiting = True
        self._continues = bool(info.get(CONTINUES, False))
        if self._continues:
            return
        self.count()
        rows.finished[row] += 1
        values = self._stats.values(info)
        if self._stats_class is not EpisodeStats:  # a user's class may return values of other types
            values = {str(name): float(value) for name, value in values.items()}
        rows.episodes.append((self.index, values))

    def _write_info(self, info: Mapping[str, object]) -> None:
        self._require_dict(info)
        for name, array in self._rows.info.items():
            value = info.get(name)
            array[self._row] = float(value) if is_number(value) else math.nan

    def _require_dict(self, info: object) -> None:
        if type(info) is not dict and not isinstance(info, Mapping):
            self._refuse(f"info is {info!r}, not a dict: return {{}} if there is nothing to report.")

    def count(self) -> None:
        """Add the collected rewards to the statistics; called regularly, so that the list of rewards stays short."""
        self._stats.count(self._rewards, self.gamma)
        self._rewards.clear()

    # --- resetting ----------------------------------------------------------------------------------------------

    def prepare(self, seed: int) -> None:
        """Use this seed from now on; the next step resets the env, and nothing is written until then."""
        self._seed, self._seeds_used, self._episode = seed, 0, 0
        self._failures = 0  # failures in a row, without a completed step between them
        self._failure_count = FailureCount(self.max_restarts)
        self._is_waiting, self._is_idle, self._is_fresh, self._continues = True, False, True, False
        self._stats: EpisodeStats = self._stats_class()
        self._rewards: list[float] = []

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Write the first observation, after up to `warm_up` random steps; return how many steps were taken.

        This number is random and differs between envs, because episodes that start together would also end together.
        """
        self.prepare(seed)
        self._begin()
        if not warm_up or self._is_idle:
            return 0
        draw = derive_seed(seed, self.index, WARM_UP_KEY)
        self._env.action_space.seed(draw)
        return self.warm_up(draw % (warm_up + 1))

    def warm_up(self, steps: int) -> int:
        """Take `steps` random steps; return how many were not resets. Episodes that end here are not reported."""
        rows, row = self._rows, self._row
        taken = 0
        for _ in range(steps):
            rows.step.mask[row] = True
            reward = self.step(self._env.action_space.sample())
            taken += int(rows.step.mask[row])
            if not math.isfinite(reward) or not all(np.isfinite(leaf).all() for _, leaf in leaves(self._obs)):
                self.require_finite(reward)
            if self._is_waiting:
                rows.episodes.clear()
                self._begin()
        self._write_reset()
        return taken

    def renew(self) -> None:
        """Start the next episode if the last one has ended; otherwise only write a row with mask False."""
        if self._is_waiting:
            self._begin()
        else:
            self._write_padding()

    def _begin(self) -> float:
        """Reset the env, or write padding if it is held or idle; return the reward, which is 0."""
        if self.is_held:
            return self._write_padding()
        seed = None if self._continues else self._next_seed()
        if self._is_idle and not self._is_fresh:
            return self._write_padding()
        try:
            result = self._env.reset() if seed is None else self._env.reset(seed=seed)
        except FAILURES as error:
            return self._rebuild(error)
        self._write_first(result)
        return 0.0

    def _next_seed(self) -> int | None:
        """Return the seed for the next reset, or None for no seed; mark the env as idle if its seeds are used up."""
        if self._seeds is not None and self._seeds_used < len(self._seeds):
            self._current_seed = self._seeds[self._seeds_used]
            self._seeds_used += 1
            return self._current_seed
        if self._seeds is not None:
            self._is_idle = True
        if not self._is_fresh and self._levels is None:
            return None
        self._current_seed = self._draw_seed()
        return self._current_seed

    def _draw_seed(self) -> int:
        keys = self._seed, self.index, int(self._rows.restarts[self._row])
        if self._levels is None:
            return derive_seed(*keys)
        return self._levels[derive_seed(*keys, self._episode) % len(self._levels)]

    def _write_first(self, result: tuple[object, Mapping[str, object]]) -> None:
        """Write the first observation of an episode, given the result of reset()."""
        if not self._continues:
            self._stats, self._rewards = self._stats_class(), []
            self._episode += 1
        self._continues = False
        try:
            obs, info = result
        except (TypeError, ValueError):
            self._refuse("reset() did not return (obs, info): adapt it to Gymnasium.")
        if type(obs) is ndarray and obs.dtype is self._dtype and obs.shape == self._shape:
            self._obs[...] = obs
        else:
            self._store(obs)
        self._is_waiting, self._is_fresh = self._is_idle, False
        self._write_reset()
        if self._rows.info:
            self._write_info(info)

    def _write_padding(self) -> float:
        """Write a row with mask False that keeps the last observation; return the reward, which is 0."""
        self._write_reset()
        for array in self._rows.info.values():
            array[self._row] = math.nan
        return 0.0

    def _write_reset(self) -> None:
        row = self._row
        self._terminated[row] = self._truncated[row] = self._mask[row] = False
        self._reward[row] = 0.0
        self._rows.marked.append(row)

    # --- saving -------------------------------------------------------------------------------------------------

    def get_state(self) -> bytes:
        """Return everything that later steps depend on; raise NoState if env or statistics cannot be saved."""
        is_new = self._is_waiting and self._is_fresh  # an env that was never reset has no state yet
        saved = {
            "env": None if is_new else get_state(self._env),
            "obs": {path: np.array(array) for path, array in leaves(self._obs)},  # a held env repeats these arrays
            "counts": {name: getattr(self, name) for name in COUNTS},
            "stats": vars(self._stats),
            "rewards": self._rewards,
        }
        try:
            return pack(saved)
        except Unpackable as error:
            raise NoState(f"{self.spec.label}: {error}") from error

    def set_state(self, state: bytes) -> None:
        """Restore this state, so that the next step continues from it. In the row, only `obs` is written."""
        saved = unpack(state)
        for path, array in leaves(self._obs):
            array[...] = saved["obs"][path]
        if saved["env"] is not None:
            set_state(self._env, saved["env"])
        for name, value in saved["counts"].items():
            setattr(self, name, value)
        self._stats, self._rewards = self._stats_class(), saved["rewards"]
        vars(self._stats).update(saved["stats"])

    # --- failing ------------------------------------------------------------------------------------------------

    def _rebuild(self, error: BaseException) -> float:
        """Rebuild the env; write its first observation, or padding if held. Raise EnvFailed if it fails too often."""
        rows, row = self._rows, self._row
        if self._steps() > 0 or self._episode > 1:
            self._failures = 0
        while True:
            self._failures += 1
            rows.restarts[row] += 1
            restarts = int(rows.restarts[row])
            text = f"{self._where()} raised {raised(error)}"
            why = self._failure_count.add(self._failures, restarts, int(rows.all_finished.sum()))
            if why is not None:
                raise EnvFailed(f"{text}{why}: fix the env.") from error
            rows.notices.append(notice_of(error, f"{text}; it was rebuilt (restart {restarts}).", rows.places))
            self.close()
            self._episode, self._is_fresh, self._continues = 0, True, False
            if self._seeds is None:
                self._current_seed = self._draw_seed()
            try:
                self._open()
                if self.is_held:
                    return self._wait_for_renewal()
                result = self._env.reset(seed=self._current_seed)
            except FAILURES as next_error:
                error = next_error
                continue
            self._write_first(result)
            return 0.0

    def _wait_for_renewal(self) -> float:
        """Write padding; `renew` later resets the rebuilt env and, if seeds are given, reuses the current seed."""
        self._stats, self._rewards, self._is_waiting = self._stats_class(), [], True
        if self._seeds is not None:
            self._seeds_used -= 1
        return self._write_padding()

    def _open(self) -> None:
        self._env = self.spec.build()
        self._step = self._env.step  # saves one attribute lookup per step

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):  # an error in close() must not hide the error that led to this call
            self._env.close()

    # --- checking what the env returns --------------------------------------------------------------------------

    def _store(self, obs: object) -> None:
        """Write an observation to its row; raise EnvError if the observation space forbids it."""
        try:
            self._obs[...] = self._read(obs)
        except Forbidden as error:
            self._refuse(str(error))
        if self._unchecked:
            self._unchecked -= 1
            if not self._unchecked:
                self._dtype = self._quick_dtype
            self._check_bounds()

    def _check_bounds(self) -> None:
        """Warn if the observation in the row is out of bounds, but only once for all envs of the group."""
        key = f"bounds of {self.spec.label}"
        if self._bounds.is_needed and key not in self._rows.places and (what := self._bounds.find(self._obs)):
            self._rows.places.add(key)
            what += ": agents see it as it is, so widen the bounds of observation_space, or clip."
            self._rows.notices.append(Notice(f"{self._where()}: {what}", place=key))

    def _flag(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_) and not (np.shape(value) == () and value in (0, 1)):
            self._refuse(f"{name} is {value!r}, not a bool: return True or False.")
        return bool(value)

    def require_finite(self, reward: object) -> None:
        """Raise an error if this reward or the observation in the row is not finite."""
        what = find_not_finite(reward, self._obs)
        if what is not None:
            self._refuse(what)

    def _steps(self) -> int:
        return self._stats.ep_len + len(self._rewards)

    def _where(self) -> str:
        episode = f"seed {self._current_seed}, step {self._steps()} of its episode {self._episode}"
        return f"env {self.index} of {self.spec.label} ({episode})"

    def _refuse(self, what: str) -> NoReturn:
        raise EnvError(f"{self._where()}: {what}")
