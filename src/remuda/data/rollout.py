"""The data that samplers pass to learners: `Steps`, `Rollout` and `Batch`.

One row is one call of `act` and the response of the env:

    row        t-1      t (ends)   t+1 (reset row)   t+2
    obs        o_t-1    o_t        final obs         first obs of the next episode
    mask       True     True       False             True
    discount   1        0 or 1     1                 1

Envs reset on the *next* step, so the row after the end of an episode, the reset row, holds the true final
observation. The value estimate in the reset row is the bootstrap of a truncated episode. No action is taken in that
row, so its `mask` is False; rows with mask True are called real. In the row before the reset row, `discount` is 0 if
the episode terminated, and 1 if it was truncated.

Recurrent state is reset before row t if mask[t-1] is False; `resets` returns a flag for each row. If you cut off
burn-in rows, call `resets` before the cut, because the first remaining row no longer has a row t-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, SupportsFloat

from remuda.data.arrays import Array, ArrayTuple
from remuda.data.trees import Tree, map_tree


class Steps(ArrayTuple):
    """Rows of experience. The leading axes of all fields are [T, B] (T rows of B envs), or [N] for shuffled rows."""

    obs: Tree
    action: Tree
    reward: Array  # reward for this row's action; 0 on a reset row
    discount: Array  # 0 where the episode terminated with this row, 1 otherwise
    mask: Array  # False where no action was taken: in reset rows, and in padding that repeats the last observation
    policy: Tree  # output of the acting policy: log_prob, value, ...
    version: Array  # version of the weights that chose the action


def resets(mask: Array) -> Array:
    """Return flags [T, B]: True where recurrent state must be reset before a row, as the previous row has mask False.

    Row 0 is all False, because the recurrent state before row 0 is stored with the rollout.
    """
    flags = ~mask
    flags[1:] = flags[:-1].clone() if hasattr(flags, "clone") else flags[:-1].copy()
    flags[0] = False
    return flags


@dataclass(frozen=True, eq=False)
class Rollout:
    """T rows of B environments. The sampler's next call of `collect` may overwrite the arrays."""

    steps: Steps  # [T, B]
    next_obs: Tree  # [B]: the observation after the last row
    last_value: Array = None  # [B]: the agent's value estimate for next_obs; None for agents without values
    state: Tree = None  # [B]: recurrent state before row 0; already reset where row 0 starts an episode
    envs: Array = None  # [B]: index of the env of each column; None if the columns are all envs in order
    begins: Array = None  # [B]: True where row 0 starts a new episode; None if that is unknown

    @property
    def num_real(self) -> int:
        """Number of rows in which an action was taken."""
        return int(self.steps.mask.sum())

    def versions(self) -> tuple[float, int]:
        """Return the mean and the smallest of the versions of the weights that acted in the rows."""
        return float(self.steps.version.float().mean()), int(self.steps.version.min())

    def real_obs(self) -> Tree:
        """Return the observations [N, ...] of all rows with mask True, for the statistics of a normalizer."""
        mask = self.steps.mask
        return map_tree(lambda x: x[mask], self.steps.obs)

    def window(self, t0: int, t1: int, b: Any = slice(None)) -> Rollout:
        """Return rows [t0:t1] of the columns `b` as a rollout that bootstraps from row t1.

        The recurrent state is known for row 0 only, so `state` is None in a window that starts later.
        """
        T = self.steps.reward.shape[0]
        if not 0 <= t0 < t1 <= T:
            raise ValueError(f"window {t0}:{t1} is not inside the rollout's {T} rows")
        if t1 == T:
            next_obs, last_value = map_tree(lambda x: x[b], (self.next_obs, self.last_value))
        else:
            policy = self.steps.policy
            next_obs = map_tree(lambda x: x[t1, b], self.steps.obs)
            last_value = policy.value[t1, b] if policy is not None and "value" in policy else None
        state, begins = map_tree(lambda x: x[b], (self.state, self.begins)) if t0 == 0 else (None, None)
        if t0 > 0:
            begins = ~self.steps.mask[t0 - 1, b]
        envs = None if self.envs is None else self.envs[b]
        return Rollout(self.steps[t0:t1, b], next_obs, last_value, state, envs, begins)


def pick_rows(x: Array, index: Array) -> Array:
    """Return x[index] for tensors `x` and `index` (int64), by copying whole rows.

    For images this is much faster than indexing.
    """
    if x.dim() == 4 and not x.is_contiguous():  # images in channels-last format keep this format
        return x.movedim(1, -1).index_select(0, index).movedim(-1, 1)
    return x.index_select(0, index)


@dataclass(frozen=True, eq=False)
class Batch:
    """Input of the losses: whole sequences [T, B], or shuffled rows [N]."""

    steps: Steps
    # Targets of the losses for each row, computed by `Algorithm.prepare` or by a replay. A SequenceReplay computes
    # targets only for the rows that are learned from, which excludes burn-in rows.
    targets: Tree = None
    state: Tree = None  # [B]: recurrent state before the first row; sequences only
    next_obs: Tree = None  # observations to bootstrap from: [B] after the last row of sequences, [N] for single rows
    weight: Array = None  # importance weight of a prioritized draw: [N] for rows, [B] for sequences
    key: Array = None  # [N, 2] or [B, 2]: identifies each drawn row or sequence, for `Replay.feedback`
    metrics: Mapping[str, SupportsFloat] = field(default_factory=dict)  # metrics that `prepare` computed, for the log
    # Set only in a run's first batch: the smallest and the largest discounted return of all stored rows, and the
    # discounted return if every reward were the mean reward (see `return_range` in replay/ring_replay.py).
    returns: tuple[float, float, float] | None = None

    def flatten(self) -> Self:
        """Return a batch [T, B] as rows [T * B], without `state` and `next_obs`, which belong to whole sequences.

        Raise ValueError if the batch has `weight` or `key`, which belong to whole sequences, too.
        """
        if self.weight is not None or self.key is not None:
            raise ValueError("a prioritized draw of sequences has one weight for each: use columns, not flatten")
        steps, targets = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets, state=None, next_obs=None)

    def rows(self, index: Any) -> Self:
        """Return the rows at `index` of a batch [N], in the order of `index`."""
        parts = (self.steps, self.targets, self.next_obs, self.weight, self.key)
        # The dtype is compared by its name, because this package does not import torch.
        is_tensor = str(getattr(index, "dtype", None)) == "torch.int64"
        pick = (lambda x: pick_rows(x, index)) if is_tensor else (lambda x: x[index])
        steps, targets, next_obs, weight, key = map_tree(pick, parts)
        return type(self)(steps, targets, self.state, next_obs, weight, key, self.metrics)

    def columns(self, b: Any) -> Self:
        """Return the whole sequences in the columns `b` of a batch [T, B], as a minibatch for recurrent agents."""
        steps, targets = map_tree(lambda x: x[:, b], (self.steps, self.targets))
        parts = (self.state, self.next_obs, self.weight, self.key)
        state, next_obs, weight, key = map_tree(lambda x: x[b], parts)
        return replace(self, steps=steps, targets=targets, state=state, next_obs=next_obs, weight=weight, key=key)
