"""The envs of one slot in one process. They are stepped one after another and write to adjacent rows of arrays.

    group = EnvGroup([SingleEnv(spec, index) for index in range(8)])
    group.attach(rows)
    group.reset(seed=1)
    group.step(actions)                # results are in rows.step, rows.episodes and rows.notices
    group.step(actions, hold=True)     # does not reset envs whose episode has ended
    group.renew()                      # starts the next episode of envs whose episode has ended
    group.close()

Both LocalEnvs and the workers of PooledEnvs step their envs in env groups, so their results are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import numpy as np

from remuda.core import Array, ArrayTree, Space, Step
from remuda.data.trees import leaves
from remuda.envs.action_values import writer
from remuda.envs.rows import Rows, scalar_view
from remuda.envs.single import SingleEnv

BLOCK = 1024  # number of steps after which collected rewards are added to the statistics
CHUNK = 8192  # number of floats in one dot product; for more, BLAS would start threads
MAX_REWARD_SUM = 1e38  # if |sum of rewards| exceeds this, each reward is checked; the largest float32 is 3.4e38


def build_all(makers: Sequence[Callable[[], SingleEnv]]) -> list[SingleEnv]:
    """Build all envs; if one cannot be built, close the envs already built and raise the error."""
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
    """Return the shapes and dtypes, by name, of the arrays that hold steps and actions of `num_envs` envs."""
    fields = {"reward": "float32", "terminated": "bool", "truncated": "bool", "mask": "bool"}
    fields |= {"restarts": "int64", "finished": "int64"}
    spaces = [*observation.leaves("obs"), *action.leaves("action")]
    return {
        **{path: ((num_envs, *leaf.shape), leaf.dtype) for path, leaf in spaces},
        **{name: ((num_envs,), dtype) for name, dtype in fields.items()},
        **{f"info.{name}": ((num_envs,), "float64") for name in info},
    }


def slice_rows(
    arrays: Mapping[str, Array], own: slice, observation: Space, action: Space, info: Sequence[str] = ()
) -> tuple[Rows, ArrayTree]:
    """Return the rows and actions of the envs in `own`, as views of the arrays that `rows_layout` describes."""
    obs, actions = (
        space.tree(lambda path, leaf: arrays[path][own], root)
        for space, root in ((observation, "obs"), (action, "action"))
    )
    step = Step(obs, *(arrays[name][own] for name in Step._fields[1:]))
    entries = {name: arrays[f"info.{name}"][own] for name in info}
    rows = Rows(step, arrays["restarts"][own], arrays["finished"][own], arrays["finished"], entries)
    return rows, actions


class EnvGroup:
    """Owns the envs of one slot in one process and steps them together."""

    def __init__(self, envs: list[SingleEnv]) -> None:
        self.envs = envs
        self._write = writer(envs[0].raw_action_space, envs[0].action)
        self._is_held = False
        self._num_steps = 0

    def attach(self, rows: Rows) -> None:
        """Let the envs write their steps to these rows from now on."""
        self.rows = rows
        for row, env in enumerate(self.envs):
            env.attach(rows, row)
        floats = [leaf for _, leaf in leaves(rows.step.obs) if leaf.dtype == np.float32]
        flat = [leaf.reshape(-1) for leaf in floats]  # reshape copies nothing, because the rows are contiguous
        self._floats = [chunk for each in flat for chunk in np.array_split(each, -(-each.size // CHUNK) or 1)]
        self._reward, self._mask = rows.step.reward, scalar_view(rows.step.mask)
        self._terminated, self._truncated = scalar_view(rows.step.terminated), scalar_view(rows.step.truncated)

    def prepare(self, seed: int) -> None:
        """Make the next step reset all envs with this seed; the rows are not written until then."""
        self._num_steps = 0
        self._hold(False)
        for env in self.envs:
            env.prepare(seed)

    def reset(self, seed: int, warm_up: int = 0, on_progress: Callable[[], None] | None = None) -> int:
        """Reset all envs and write their first observations; return the number of random steps taken.

        Each env takes at most `warm_up` random steps. `on_progress` is called after each env.
        """
        self._num_steps = 0
        self._hold(False)
        self.rows.episodes.clear()
        taken = 0
        for env in self.envs:
            taken += env.reset(seed, warm_up)
            if on_progress is not None:
                on_progress()
        self._require_finite_obs([0.0] * len(self.envs))
        return taken

    def step(self, actions: ArrayTree, hold: bool = False) -> None:
        """Step every env with its action; with `hold`, envs whose episode has ended are not reset."""
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
            # If a reward is not finite, neither is the sum. Summing takes a tenth of the time of checking each.
            is_finite = -MAX_REWARD_SUM < sum(rewards) < MAX_REWARD_SUM
            self._reward[:] = rewards
        except (TypeError, ValueError):
            self._check_each(rewards)
            raise
        if not is_finite:
            self._check_each(rewards)
        self._require_finite_obs(rewards)
        self._num_steps += 1
        if self._num_steps % BLOCK == 0:
            for env in self.envs:
                env.count()

    def renew(self) -> None:
        """Start the next episode of envs whose episode has ended; all rows get mask False."""
        self._hold(False)
        for env in self.envs:
            env.renew()
        self._require_finite_obs([0.0] * len(self.envs))

    def get_state(self) -> list[tuple[int, bytes]]:
        """Return (number of steps of the group, state) for every env.

        The number of steps is saved because it determines at which steps collected rewards are added to the
        statistics. If they were added at other steps, the sums would be rounded differently.
        """
        return [(self._num_steps, env.get_state()) for env in self.envs]

    def set_state(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Restore these states, so that the next step continues from them. In the rows, only `obs` is written."""
        self._num_steps = states[0][0]
        for env, (_, state) in zip(self.envs, states, strict=True):
            env.set_state(state)
        self._is_held = self.envs[0].is_held
        self.rows.marked[:] = range(len(self.envs))  # so that the next step clears the flags of all rows

    def _hold(self, hold: bool) -> None:
        self._is_held = hold
        for env in self.envs:
            env.is_held = hold

    def _require_finite_obs(self, rewards: list[float]) -> None:
        for flat in self._floats:
            # A dot product takes a third of the time of np.isfinite. It may overflow even if all values are finite,
            # so np.isfinite has to confirm the result.
            if not isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
                self._check_each(rewards)

    def _check_each(self, rewards: list[float]) -> None:
        """Raise an error for the first env whose reward or observation is not finite, if there is one."""
        for env, reward in zip(self.envs, rewards, strict=True):
            env.require_finite(reward)

    def close(self) -> None:
        for env in self.envs:
            env.close()
