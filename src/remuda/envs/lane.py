"""The envs of one slot in one process, stepped one after another into neighbouring rows.

    lane = Lane([SingleEnv(spec, index) for index in range(8)])
    lane.attach(rows)
    lane.reset(seed=1)
    lane.step(actions)                 # rows.step, rows.episodes and rows.notices say what happened
    lane.close()

Both LocalEnvs and the workers of PooledEnvs are made of lanes, so both answer alike, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.core import Space
from remuda.envs.single import Rows, SingleEnv

BLOCK = 1024  # steps between two foldings of collected rewards
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


def rows_layout(observation: Space, action: Space, num_envs: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays that answer for so many envs, and the one that asks."""
    return {
        "obs": ((num_envs, *observation.shape), observation.dtype),
        "reward": ((num_envs,), "float32"),
        "terminated": ((num_envs,), "bool"),
        "truncated": ((num_envs,), "bool"),
        "mask": ((num_envs,), "bool"),
        "restarts": ((num_envs,), "int64"),
        "action": ((num_envs, *action.shape), action.dtype),
    }


class Lane:
    """Owns its envs."""

    def __init__(self, envs: list[SingleEnv]) -> None:
        self.envs = envs
        self._start = envs[0].action.start
        self._action_dtype = envs[0].action_dtype
        self._is_discrete = envs[0].action.kind == "discrete"
        self._is_float = envs[0].observation.dtype == "float32"
        self._ticks = 0

    def attach(self, rows: Rows) -> None:
        self.rows = rows
        for row, env in enumerate(self.envs):
            env.attach(rows, row)
        self._flat_obs = rows.step.obs.reshape(-1)
        self._reward, self._mask = rows.step.reward, rows.step.mask
        self._terminated, self._truncated = rows.step.terminated, rows.step.truncated

    def prepare(self, seed: int) -> None:
        """Reset at the next step: the rows keep what they hold until then."""
        self._ticks = 0
        for env in self.envs:
            env.prepare(seed)

    def reset(self, seed: int, warm_up: int = 0, tell: Callable[[], None] | None = None) -> int:
        """Write first observations; returns the random steps taken. `tell` hears of every env that is ready."""
        self._ticks = 0
        self.rows.episodes.clear()
        taken = 0
        for env in self.envs:
            taken += env.reset(seed, warm_up)
            if tell is not None:
                tell()
        self._require_finite_obs([0.0] * len(self.envs))
        return taken

    def step(self, actions: NDArray[Any]) -> None:
        rows = self.rows
        if not rows.is_plain:
            self._terminated.fill(False)
            self._truncated.fill(False)
            self._mask.fill(True)
            rows.is_plain = True
        if self._is_discrete:
            taken = actions + self._start if self._start else actions
        else:
            taken = actions.astype(self._action_dtype)  # a copy: an env may keep or change what it is given
        rewards = [env.step(action) for env, action in zip(self.envs, taken, strict=True)]
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

    def _require_finite_obs(self, rewards: list[float]) -> None:
        # count_nonzero, as .all() costs three times as much on small arrays
        if self._is_float and np.count_nonzero(np.isfinite(self._flat_obs)) != self._flat_obs.size:
            self._name_culprit(rewards)

    def _name_culprit(self, rewards: list[float]) -> None:
        for env, reward in zip(self.envs, rewards, strict=True):
            env.complain_of_values(reward)

    def close(self) -> None:
        for env in self.envs:
            env.close()
