"""The envs of one slot in one process, stepped one after another into neighbouring rows.

    lane = Lane([SingleEnv(spec, index) for index in range(8)])
    lane.attach(rows)
    lane.reset(seed=1)
    lane.step(actions)                 # rows.step, rows.episodes and rows.notices say what happened
    lane.step(actions, hold=True)      # the same, but envs that have ended wait for
    lane.renew()                       # which begins their next episodes and leaves the others alone
    lane.close()

Both LocalEnvs and the workers of PooledEnvs are made of lanes, so both answer alike, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.core import Space, Step
from remuda.data.trees import leaves
from remuda.envs.rows import Rows
from remuda.envs.single import SingleEnv
from remuda.envs.space_values import writer

BLOCK = 1024  # steps between two foldings of collected rewards
PIECE = 8192  # floats that are looked at together: products of longer arrays would wake the threads of BLAS
MOST = 1e38  # sum of the rewards of one step; beyond it each reward is looked at, as float32 ends at 3.4e38


def build_all(makers: Sequence[Callable[[], SingleEnv]]) -> list[SingleEnv]:
    """All of them or none: when one cannot be built, those before it are closed."""
    envs: list[SingleEnv] = []
    try:
        for make in makers:
            envs.append(make())
    except BaseException:
        for env in envs:
            env.close()
        raise
    return envs


def rows_layout(
    observation: Space, action: Space, num_envs: int, info: Sequence[str] = ()
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays that answer for so many envs, and those that ask: of every entry one, named by its path."""
    fields = {"reward": "float32", "terminated": "bool", "truncated": "bool", "mask": "bool"}
    fields |= {"restarts": "int64", "finished": "int64"}
    spaces = [*observation.leaves("obs"), *action.leaves("action")]
    return {
        **{path: ((num_envs, *leaf.shape), leaf.dtype) for path, leaf in spaces},
        **{name: ((num_envs,), dtype) for name, dtype in fields.items()},
        **{f"info.{name}": ((num_envs,), "float64") for name in info},
    }


def slice_rows(
    arrays: Mapping[str, NDArray[Any]], own: slice, observation: Space, action: Space, info: Sequence[str] = ()
) -> tuple[Rows, Any]:
    """Rows and actions of some of the envs, as views of the arrays that `rows_layout` describes."""
    obs, actions = (
        space.tree(lambda path, leaf: arrays[path][own], root)
        for space, root in ((observation, "obs"), (action, "action"))
    )
    step = Step(obs, *(arrays[name][own] for name in Step._fields[1:]))
    entries = {name: arrays[f"info.{name}"][own] for name in info}
    rows = Rows(step, arrays["restarts"][own], arrays["finished"][own], arrays["finished"], entries)
    return rows, actions


class EnvGroup:
    """Owns its envs."""

    def __init__(self, envs: list[SingleEnv]) -> None:
        self.envs = envs
        self._write = writer(envs[0].raw_action_space, envs[0].action)
        self._is_held = False
        self._ticks = 0

    def attach(self, rows: Rows) -> None:
        self.rows = rows
        for row, env in enumerate(self.envs):
            env.attach(rows, row)
        floats = [leaf for _, leaf in leaves(rows.step.obs) if leaf.dtype == np.float32]
        flat = [leaf.reshape(-1) for leaf in floats]  # of contiguous rows: views
        self._floats = [piece for each in flat for piece in np.array_split(each, -(-each.size // PIECE) or 1)]
        self._reward, self._mask = rows.step.reward, memoryview(rows.step.mask)
        self._terminated, self._truncated = memoryview(rows.step.terminated), memoryview(rows.step.truncated)

    def prepare(self, seed: int) -> None:
        """Reset at the next step: the rows keep what they hold until then."""
        self._ticks = 0
        self._hold(False)
        for env in self.envs:
            env.prepare(seed)

    def reset(self, seed: int, warm_up: int = 0, tell: Callable[[], None] | None = None) -> int:
        """Write first observations; returns the random steps taken. `tell` hears of every env that is ready."""
        self._ticks = 0
        self._hold(False)
        self.rows.episodes.clear()
        taken = 0
        for env in self.envs:
            taken += env.reset(seed, warm_up)
            if tell is not None:
                tell()
        self._require_finite_obs([0.0] * len(self.envs))
        return taken

    def step(self, actions: Any, hold: bool = False) -> None:
        """Take these actions, in the tree of the action space; `hold` keeps envs that have ended from resetting."""
        rows = self.rows
        if hold is not self._is_held:
            self._hold(hold)
        if rows.marked:
            for row in rows.marked:
                self._terminated[row] = self._truncated[row] = False
                self._mask[row] = True
            rows.marked.clear()
        rewards = [env.step(action) for env, action in zip(self.envs, self._write(actions), strict=True)]
        try:
            # one sum finds what is not finite, at a tenth of the cost of looking at each
            is_finite = -MOST < sum(rewards) < MOST
            self._reward[:] = rewards
        except (TypeError, ValueError):
            self._name_culprit(rewards)
            raise
        if not is_finite:
            self._name_culprit(rewards)
        self._require_finite_obs(rewards)
        self._ticks += 1
        if self._ticks % BLOCK == 0:
            for env in self.envs:
                env.count()

    def renew(self) -> None:
        """Envs that have ended begin their next episode, the others' rows only say that nothing happened."""
        self._hold(False)
        for env in self.envs:
            env.renew()
        self._require_finite_obs([0.0] * len(self.envs))

    def get_state(self) -> list[tuple[int, bytes]]:
        """Of every env, each with the steps that all have counted: rewards are added up in blocks of these."""
        return [(self._ticks, env.get_state()) for env in self.envs]

    def set_state(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Go on from there at the next step; the rows keep what they hold until then."""
        self._ticks = states[0][0]
        for env, (_, state) in zip(self.envs, states, strict=True):
            env.set_state(state)
        self._is_held = self.envs[0].is_held
        self.rows.marked[:] = range(len(self.envs))  # the next step makes them those of an ordinary one

    def _hold(self, hold: bool) -> None:
        self._is_held = hold
        for env in self.envs:
            env.is_held = hold

    def _require_finite_obs(self, rewards: list[float]) -> None:
        for flat in self._floats:
            # one product finds what is not finite, at a third of the cost of looking; it may also have overflown
            if not isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
                self._name_culprit(rewards)

    def _name_culprit(self, rewards: list[float]) -> None:
        for env, reward in zip(self.envs, rewards, strict=True):
            env.complain_of_values(reward)

    def close(self) -> None:
        for env in self.envs:
            env.close()
