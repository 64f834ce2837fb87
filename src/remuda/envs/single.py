"""One env of many: stepped into a row of arrays, reset on the step after its end, rebuilt when it raises.

    env = SingleEnv(spec, index=3, gamma=0.99)
    env.attach(rows, row=0)                      # where its answers go
    env.reset(seed=1)                            # writes the first observation, mask False
    reward = env.step(action)                    # writes obs always, the other fields only when they are not plain
    env.close()

Row by row: on an end `obs` is the true final observation; the call after it ignores the action, resets, and writes
the new episode's first observation with reward 0 and mask False. Observations are copied, as envs may reuse theirs.

An end for the learner need not end the episode: if info has a true value under "episode_continues" on a step that is
terminated or truncated, the row ends and the next call resets as ever, but the episode's statistics go on over it.
The reset is the env's own reset(), without a seed: the env knows that it only goes on (one of three lives was lost).

While `is_held`, an env that has ended waits: it answers with its last observation, reward 0 and mask False until
`renew` begins its next episode. An env that fails or is lost while it is held has ended too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
from numpy import ndarray

from remuda.core import derive_seed
from remuda.data.packing import Unpackable, pack, unpack
from remuda.data.trees import leaves, map_tree
from remuda.envs.episodes import CONTINUES, EpisodeStats, is_number
from remuda.envs.failures import FAILURES, FailureCount, notice_of, raised
from remuda.envs.rows import Rows
from remuda.envs.space_values import BoundsCheck, Forbidden, find_not_finite, reader
from remuda.envs.spaces import action_space, observation_space
from remuda.envs.spec import EnvSpec
from remuda.envs.states import get_state, set_state
from remuda.errors import EnvError, EnvFailed, NoState
from remuda.processes.notices import Notice

# What is saved of an env beside its own state and its statistics.
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
# Compared with their bounds are the first observations of each env and the last ones of its first episodes.
# Comparing four floats takes 2 us, an image 25: checking all ends slowed CartPole's first episodes down by 9 %.
CHECKED_OBSERVATIONS, CHECKED_ENDS = 200, 50
WARM_UP_KEY = 1 << 20  # apart from every restart count, so that drawing actions and resetting never share a seed


class SingleEnv:
    """Owns one gymnasium env."""

    def __init__(
        self,
        spec: EnvSpec,
        index: int,
        gamma: float = 0.99,
        stats: type[EpisodeStats] = EpisodeStats,
        seeds: Sequence[int] | None = None,  # play each once, in this order
        levels: Sequence[int] | None = None,  # every reset draws one of these
        max_restarts: int = 1000,
    ) -> None:
        self.spec, self.index, self.gamma, self.max_restarts = spec, index, gamma, max_restarts
        self.is_held = False
        self._stats_class, self._seeds, self._levels = stats, seeds, levels
        self._has_hook = self._is_watched = stats.step is not EpisodeStats.step
        self._current_seed = 0
        self.prepare(seed=0)
        self._open()
        try:
            self.observation = observation_space(self._env.observation_space, spec.label)
            self.action = action_space(self._env.action_space, spec.label)
            raw = self._env.observation_space
            self._read = reader(raw, self.observation)
            # None matches no array: all but boxes always take the slower, converting path
            self._quick_dtype = np.dtype(raw.dtype) if self.observation.kind == "box" else None
            self._bounds = BoundsCheck(self.observation)
            self._unchecked = CHECKED_OBSERVATIONS if self._bounds.is_needed else 0
            self._dtype = None if self._unchecked else self._quick_dtype
            self._shape = self.observation.shape
            self.raw_action_space = self._env.action_space
        except BaseException:
            self.close()
            raise

    def attach(self, rows: Rows, row: int) -> None:
        self._rows, self._row = rows, row
        # views, of no axes for discrete ones; writing to [...] is the fastest
        self._obs = map_tree(lambda array: array[row, ...], rows.step.obs)
        self._is_watched = self._has_hook or bool(rows.info)
        # memoryviews: writing one number to an array costs twice as much
        self._terminated, self._truncated = memoryview(rows.step.terminated), memoryview(rows.step.truncated)
        self._mask, self._reward = memoryview(rows.step.mask), cast("Any", memoryview(rows.step.reward))

    # --- stepping: the hot path, about 0.5 microseconds beside the env's own step -----------------------------

    def step(self, action: Any) -> float:
        """Take this action, or reset if the last one ended the episode; returns the reward."""
        if self._is_waiting:
            return self._begin()
        try:
            answer = self._step(action)
        except FAILURES as error:
            return self._rebuild(error)
        try:
            obs, reward, terminated, truncated, info = answer
        except (TypeError, ValueError):
            self._rewards.append(0.0)  # so that the step which is complained of is counted
            self.complain("step() did not return (obs, reward, terminated, truncated, info): adapt it to Gymnasium.")
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

    def _end(self, terminated: Any, truncated: Any, info: Any) -> None:
        """Report the episode if this was its end."""
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
        if self._stats_class is not EpisodeStats:  # a user's may return whatever it likes
            values = {str(name): float(value) for name, value in values.items()}
        rows.episodes.append((self.index, values))

    def _write_info(self, info: Any) -> None:
        self._require_dict(info)
        for name, array in self._rows.info.items():
            value = info.get(name)
            array[self._row] = float(value) if is_number(value) else math.nan

    def _require_dict(self, info: Any) -> None:
        if type(info) is not dict and not isinstance(info, Mapping):
            self.complain(f"info is {info!r}, not a dict: return {{}} if there is nothing to say.")

    def count(self) -> None:
        """Fold the rewards collected so far into the statistics, so that endless episodes need no endless list."""
        self._stats.count(self._rewards, self.gamma)
        self._rewards.clear()

    # --- resetting ----------------------------------------------------------------------------------------------

    def prepare(self, seed: int) -> None:
        """From now on belong to this seed: the next step resets, and nothing is written before."""
        self._seed, self._seeds_used, self._episode = seed, 0, 0
        self._failures = 0  # in a row, without a completed step
        self._failure_count = FailureCount(self.max_restarts)
        self._is_waiting, self._is_idle, self._is_fresh, self._continues = True, False, True, False
        self._stats: EpisodeStats = self._stats_class()
        self._rewards: list[float] = []

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Write the first observation, after up to `warm_up` random steps; returns how many were taken.

        How many is drawn for each env: envs that start together would end their episodes together.
        """
        self.prepare(seed)
        self._begin()
        if not warm_up or self._is_idle:
            return 0
        draw = derive_seed(seed, self.index, WARM_UP_KEY)
        self._env.action_space.seed(draw)
        return self.warm_up(draw % (warm_up + 1))

    def warm_up(self, steps: int) -> int:
        """Take random steps; episodes that end among them are not reported, the running one counts them."""
        rows, row = self._rows, self._row
        taken = 0
        for _ in range(steps):
            rows.step.mask[row] = True
            reward = self.step(self._env.action_space.sample())
            taken += int(rows.step.mask[row])
            if not math.isfinite(reward) or not all(np.isfinite(leaf).all() for _, leaf in leaves(self._obs)):
                self.complain_of_values(reward)
            if self._is_waiting:
                rows.episodes.clear()
                self._begin()
        self._write_reset()
        return taken

    def renew(self) -> None:
        """Begin the next episode if this one has ended; else leave the env alone, and write that nothing happened."""
        if self._is_waiting:
            self._begin()
        else:
            self._write_padding()

    def _begin(self) -> float:
        if self.is_held:
            return self._write_padding()
        seed = None if self._continues else self._next_seed()
        if self._is_idle and not self._is_fresh:
            return self._write_padding()
        try:
            answer = self._env.reset() if seed is None else self._env.reset(seed=seed)
        except FAILURES as error:
            return self._rebuild(error)
        self._first(answer)
        return 0.0

    def _next_seed(self) -> int | None:
        """Of the coming reset; turns idle when a list of seeds is used up."""
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

    def _first(self, answer: Any) -> None:
        if not self._continues:
            self._stats, self._rewards = self._stats_class(), []
            self._episode += 1
        self._continues = False
        try:
            obs, info = answer
        except (TypeError, ValueError):
            self.complain("reset() did not return (obs, info): adapt it to Gymnasium.")
        if type(obs) is ndarray and obs.dtype is self._dtype and obs.shape == self._shape:
            self._obs[...] = obs
        else:
            self._store(obs)
        self._is_waiting, self._is_fresh = self._is_idle, False
        self._write_reset()
        if self._rows.info:
            self._write_info(info)

    def _write_padding(self) -> float:
        """The last observation stays."""
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
        """All that the coming steps depend on; NoState if the env or its statistics hold what cannot be saved."""
        counts = {name: getattr(self, name) for name in COUNTS}
        is_new = self._is_waiting and self._is_fresh  # never reset: there is no state yet, and none is needed
        saved = {
            "env": None if is_new else get_state(self._env),
            "obs": {path: np.array(array) for path, array in leaves(self._obs)},  # which a row that waits still shows
            "counts": counts,
            "stats": vars(self._stats),
            "rewards": self._rewards,
        }
        try:
            return pack(saved)
        except Unpackable as error:
            raise NoState(f"{self.spec.label}: {error}") from error

    def set_state(self, state: bytes) -> None:
        """Go on from there at the next step; of the row only its observation is written before."""
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
        """Answer with the first observation of a new env instead, unless the env has failed too often."""
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
                raise EnvFailed(f"{text}{why}: repair the env.") from error
            rows.notices.append(notice_of(error, f"{text}; it was rebuilt (restart {restarts}).", rows.places))
            self.close()
            self._episode, self._is_fresh, self._continues = 0, True, False
            if self._seeds is None:
                self._current_seed = self._draw_seed()
            try:
                self._open()
                if self.is_held:
                    return self._wait_anew()
                answer = self._env.reset(seed=self._current_seed)
            except FAILURES as again:
                error = again
                continue
            self._first(answer)
            return 0.0

    def _wait_anew(self) -> float:
        """A rebuilt env that is held begins when it is renewed; a seed of a list is then played again."""
        self._stats, self._rewards, self._is_waiting = self._stats_class(), [], True
        if self._seeds is not None:
            self._seeds_used -= 1
        return self._write_padding()

    def _open(self) -> None:
        self._env = self.spec.build()
        self._step = self._env.step  # one attribute look-up less per step

    def close(self) -> None:
        with contextlib.suppress(*FAILURES):  # a broken close() must not hide what led to it
            self._env.close()

    def _store(self, obs: Any) -> None:
        """Write an observation to its row; what its space forbids is named and refused."""
        try:
            self._obs[...] = self._read(obs)
        except Forbidden as error:
            self.complain(str(error))
        if self._unchecked:
            self._unchecked -= 1
            if not self._unchecked:
                self._dtype = self._quick_dtype
            self._check_bounds()

    def _check_bounds(self) -> None:
        """Warn once of this kind of env if the observation in its row is outside the bounds of its space."""
        key = f"bounds of {self.spec.label}"
        if self._bounds.is_needed and key not in self._rows.places and (what := self._bounds.find(self._obs)):
            self._rows.places.add(key)
            remedy = "agents see it as it is, so widen the bounds of observation_space, or clip."
            self._rows.notices.append(Notice(f"{self._where()}: {what}: {remedy}", place=key))

    def _flag(self, name: str, value: Any) -> bool:
        if value is True or value is False:
            return bool(value)
        if not isinstance(value, bool | np.bool_) and not (np.shape(value) == () and value in (0, 1)):
            self.complain(f"{name} is {value!r}, not a bool: return True or False.")
        return bool(value)

    def complain_of_values(self, reward: Any) -> None:
        """Refuse this env's row if its reward or observation is not finite; called when that of some row is not."""
        what = find_not_finite(reward, self._obs)
        if what is not None:
            self.complain(what)

    def _steps(self) -> int:
        return self._stats.ep_len + len(self._rewards)

    def _where(self) -> str:
        place = f"seed {self._current_seed}, step {self._steps()} of its episode {self._episode}"
        return f"env {self.index} of {self.spec.label} ({place})"

    def complain(self, what: str) -> NoReturn:
        raise EnvError(f"{self._where()}: {what}")
