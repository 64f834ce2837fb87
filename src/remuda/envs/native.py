"""Native vector envs as `core.Envs`: one set of games for each slot, stepped in this process by code of their own.

    with NativeEnvs(resolve("ALE/Pong-v5"), backends.ale, num_envs=16, slots=2, threads=2) as envs:
        envs.reset(seed=1)
        while training:
            slot, step = envs.recv()             # in the order of sending
            envs.send(slot, act(step.obs))       # C++ threads begin to work, where the library has them

Rows are those of the pool. What a native env lacks: it cannot be killed or rebuilt, so an exception ends the run and
one that hangs has no time limit; it plays no given seeds, shows no info, and cannot hold back a reset. An env that
may fail belongs in the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.core import Episode, Step, derive_seed
from remuda.envs.backends import Backend, Games
from remuda.envs.env_group import MOST
from remuda.envs.episodes import CONTINUES, EpisodeStats, resolve_stats
from remuda.envs.failures import FAILURES, raised
from remuda.envs.import_paths import sentence
from remuda.envs.local import envs_per_slot
from remuda.envs.single import WARM_UP_KEY
from remuda.envs.space_values import action_leaves
from remuda.envs.spaces import action_space, observation_space
from remuda.envs.spec import EnvSpec
from remuda.errors import EnvError, EnvFailed, EnvSpecError, Interrupted, NoState

BLOCK = 1024  # rows of rewards that are kept before they are counted


class NativeEnvs:
    """`core.Envs` of a native backend; `threads` of its own for each slot, where the backend has threads."""

    def __init__(
        self,
        spec: EnvSpec,
        backend: Backend,
        num_envs: int,
        slots: int = 1,
        threads: int = 1,
        gamma: float = 0.99,
        stats: str | type[EpisodeStats] | None = None,
        should_stop: Callable[[], bool] | None = None,
        first_env: int = 0,
    ) -> None:
        per_slot = envs_per_slot(num_envs, slots)
        self.num_envs, self.num_slots, self.should_stop = num_envs, slots, should_stop
        stats_class = resolve_stats(stats)
        self._slots: list[_Slot] = []
        try:
            for slot in range(slots):
                try:
                    games = backend.make(spec, per_slot, min(threads, per_slot))
                except FAILURES as error:
                    raise EnvSpecError(
                        f"{spec.label} could not be made by the backend {backend.NAME}, {sentence(error)}: "
                        "change envs.kwargs or use envs.backend=python."
                    ) from error
                label = f"{spec.label} in this process (backend {backend.NAME})"
                self._slots.append(_Slot(games, label, first_env + slot * per_slot, per_slot, gamma, stats_class))
        except BaseException:
            self.close()
            raise
        self.observation, self.action = self._slots[0].observation, self._slots[0].action
        self._sent: deque[int] = deque()
        self._is_owed = [False] * slots

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Begin anew; every slot will answer with first observations. Returns the random steps taken."""
        self._sent.clear()
        taken = sum(slot.reset(seed, warm_up, self._obey_stop) for slot in self._slots)
        self._sent.extend(range(self.num_slots))
        self._is_owed = [True] * self.num_slots
        return taken

    def send(self, slot: int, action: Any, hold: bool = False) -> None:
        """Arrays [B of the slot]; native envs reset by themselves, so `hold` is refused."""
        if hold:
            self.renew(slot)
        if self._is_owed[slot]:
            raise RuntimeError(f"slot {slot} has not been received since its last send.")
        self._slots[slot].send(action)
        self._is_owed[slot] = True
        self._sent.append(slot)

    def renew(self, slot: int) -> None:
        raise RuntimeError("native envs reset by themselves and cannot be held: use backend=python.")

    def recv(self) -> tuple[int, Step]:
        if not self._sent:
            raise RuntimeError("recv() without a send() or reset() before it.")
        self._obey_stop()
        slot = self._sent.popleft()
        self._is_owed[slot] = False
        return slot, self._slots[slot].recv()

    def _obey_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Interrupted("asked to stop while stepping envs")

    def episodes(self) -> list[Episode]:
        finished = [episode for slot in self._slots for episode in slot.finished]
        for slot in self._slots:
            slot.finished.clear()
        return finished

    def info(self, slot: int) -> dict[str, NDArray[Any]]:
        """Nothing: who asks for entries of info gets single envs."""
        return {}

    def waited(self) -> float:
        """How busy a library's threads are is not known; time in recv counts as the envs' own."""
        return 0.0

    def restarts(self) -> int:
        return 0

    def get_state(self) -> NoReturn:
        raise NoState("native envs keep their state to themselves")

    def set_state(self, state: Any) -> NoReturn:
        raise NoState("native envs keep their state to themselves")

    def close(self) -> None:
        while self._slots:
            self._slots.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Slot:
    """The games of one slot, and what is counted of their episodes."""

    def __init__(
        self, games: Games, label: str, first: int, count: int, gamma: float, stats_class: type[EpisodeStats]
    ) -> None:
        self._games, self._label, self._first, self._count = games, label, first, count
        self._gamma, self._stats_class = gamma, stats_class
        self.observation = observation_space(games.observation_space, label)
        self.action = action_space(games.action_space, label)
        if not (self.observation.is_leaf and self.action.is_leaf):
            raise EnvSpecError(
                f"{label} has spaces with entries, native envs have one array: use envs.backend=python."
            )
        # a start for each number of a multidiscrete one; native envs count from there, rollouts from 0
        self._obs_start = self.observation.starts if self.observation.starts is not None else self.observation.start
        self._action_start = self.action.starts if self.action.starts is not None else self.action.start
        self._has_starts = bool(np.any(self._action_start))
        self._action_dtype = np.dtype(games.action_space.dtype)
        self._is_float = self.observation.dtype == "float32"
        self.finished: list[Episode] = []
        self._is_working = False
        self._answer: Step | None = None  # what is there without stepping
        self._clear()

    def _clear(self) -> None:
        self._row = 0
        self._rewards = np.zeros((BLOCK, self._count))
        self._starts = np.zeros(self._count, np.int64)  # the row where the running episode begins, in this block
        self._stats = [self._stats_class() for _ in range(self._count)]
        self._episodes = [1] * self._count
        self._has_ended, self._is_plain = np.zeros(self._count, bool), True
        self._answer = None

    # --- stepping -----------------------------------------------------------------------------------------------

    def send(self, action: Any) -> None:
        (array,) = action_leaves(self.action, action, self._count)
        array = array.astype(self._action_dtype) if array.dtype != self._action_dtype else array
        taken = array + self._action_start if self._has_starts else array.copy()
        self._guarded(lambda: self._games.send(taken))
        self._is_working = True

    def recv(self) -> Step:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return answer
        obs, reward, terminated, truncated, info = self._guarded(self._games.recv)
        self._is_working = False
        mask = ~self._has_ended
        ended = terminated | truncated
        row = self._rewards[self._row]
        row[:] = reward
        if not self._is_plain:
            # a game may end in the very row that resets it: its episode is over, and the next row resets again
            for env in (ended & ~mask).nonzero()[0].tolist():
                self._stats[env].count([float(row[env])], self._gamma)
                self._report(env, info)
            terminated, truncated = terminated & mask, truncated & mask
            row[~mask] = 0.0
        if not -MOST < float(row.sum()) < MOST:
            self._name_culprit(row.astype(np.float32), "reward", "repair its step()")
        stored = self._stored(obs)
        self._is_plain = not ended.any()
        if not self._is_plain:
            for env in (ended & mask).nonzero()[0].tolist():
                self._count_until(env)
                if CONTINUES not in info or not info[CONTINUES][env]:
                    self._report(env, info)
            self._starts[ended] = self._row + 2  # the row that resets is no step
        self._has_ended = ended
        self._advance()
        return Step(stored, row.astype(np.float32), terminated, truncated, mask)

    def _stored(self, obs: Any) -> NDArray[Any]:
        array = np.asarray(obs)
        if np.any(self._obs_start):
            array = array - self._obs_start
        array = array.astype(self.observation.dtype, copy=False)
        if array.shape != (self._count, *self.observation.shape):
            raise EnvError(
                f"{self._label}: observations have shape {array.shape}, their space says "
                f"{(self._count, *self.observation.shape)}: use envs.backend=python."
            )
        if self._is_float and np.count_nonzero(np.isfinite(array)) != array.size:
            self._name_culprit(array, "observation", "repair what computes it")
        return array

    # --- statistics: rewards lie in a block of rows, and are counted when an episode ends or the block is full --

    def _count_until(self, env: int) -> None:
        start = self._starts[env]
        if start <= self._row:
            self._stats[env].count(self._rewards[start : self._row + 1, env].tolist(), self._gamma)

    def _advance(self) -> None:
        if self._row + 1 == BLOCK:
            for env in range(self._count):
                self._count_until(env)
            self._starts = np.maximum(self._starts - BLOCK, 0)
            self._row = -1
        self._row += 1

    def _report(self, env: int, info: Mapping[str, Any]) -> None:
        last = {name: value[env] for name, value in info.items() if _has_value(info, name, env)}
        values = {str(name): float(value) for name, value in self._stats[env].values(last).items()}
        self.finished.append(Episode(self._first + env, values))
        self._stats[env] = self._stats_class()
        self._episodes[env] += 1

    # --- resetting ----------------------------------------------------------------------------------------------

    def reset(self, seed: int, warm_up: int, tell: Callable[[], None]) -> int:
        """First observations, after up to `warm_up` random steps of each env; returns how many were taken in all.

        The games step together, so all take that many, and each begins anew within them at a step that is drawn for
        it: envs that start together would end their episodes together. Where the backend cannot do that, they do.
        """
        tell()
        if self._is_working:
            self._discard()
        self._clear()
        self._seeds = [derive_seed(seed, self._first + env, 0) for env in range(self._count)]
        obs = self._guarded(lambda: self._games.begin(self._seeds))
        draws = [derive_seed(seed, self._first + env, WARM_UP_KEY) for env in range(self._count)]
        first, taken = self._stored(obs), 0
        if warm_up:
            actions = gymnasium.vector.utils.batch_space(self._games.action_space, self._count)
            actions.seed(draws[0])
            left = np.asarray([draw % (warm_up + 1) for draw in draws])
            for step in range(warm_up):
                tell()
                if step and (left == warm_up - step).any():
                    self._restart(left == warm_up - step)
                self._guarded(lambda: self._games.send(actions.sample()))
                answer = self.recv()
                taken += int(answer.mask.sum())
                first = answer.obs
            restarted = self._restart(left == 0) if (left == 0).any() else None
            first = first if restarted is None else self._stored(restarted)
            self.finished.clear()
        nothing = np.zeros(self._count, bool)
        self._answer = Step(first, np.zeros(self._count, np.float32), nothing, nothing.copy(), nothing.copy())
        return taken

    def _restart(self, which: NDArray[np.bool_]) -> Any:
        obs = self._guarded(lambda: self._games.restart(which))
        if obs is not None:
            for env in which.nonzero()[0].tolist():
                self._stats[env] = self._stats_class()
            self._starts[which], self._has_ended[which] = self._row, False
        return obs

    def _discard(self) -> None:
        """The library still owes an answer that nobody wants."""
        self._guarded(self._games.recv)
        self._is_working = False

    # --- failing ------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FAILURES as error:
            raise EnvFailed(
                f"{self._label} raised {raised(error)}, and native envs are not rebuilt: "
                "repair it, or use envs.backend=python."
            ) from error

    def _name_culprit(self, array: NDArray[Any], what: str, remedy: str) -> NoReturn:
        flat = np.isfinite(array.reshape(self._count, -1)).all(axis=1)
        env = int(np.argmin(flat))
        steps = self._stats[env].ep_len + max(0, int(self._row - self._starts[env]))
        place = f"seed {self._seeds[env]}, step {steps} of its episode {self._episodes[env]}"
        value = array[env].reshape(-1)[np.argmin(np.isfinite(array[env].reshape(-1)))]
        raise EnvError(f"env {self._first + env} of {self._label} ({place}): {what} is {value}: {remedy}.")

    def close(self) -> None:
        self._games.close()


def _has_value(info: Mapping[str, Any], name: str, env: int) -> bool:
    """Whether this env said something under this name, as a number: Gymnasium marks those that did under _name."""
    value, said = info[name], info.get(f"_{name}")
    return (
        isinstance(value, np.ndarray) and value.ndim == 1 and not name.startswith("_") and (said is None or said[env])
    )
