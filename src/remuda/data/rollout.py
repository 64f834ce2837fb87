"""The data that samplers pass to learners: `Steps`, `Rollout` and `Batch`.

One row is one call of `act` and the response of the env:

    row        t-1      t (ends)   t+1 (reset row)   t+2
    obs        o_t-1    o_t        final obs         first obs of the next episode
    mask       True     True       False             True
    discount   1        0 or 1     1                 1

Envs reset on the *next* step, so the row after an end holds the true final observation, and its value estimate is the
bootstrap of a truncated episode. No action is taken there: `mask` is False, and "mask[t-1] is False" is the reset
flag of recurrent state (compute it before you cut off a burn-in, or the reset at the cut is lost). A termination has
discount 0, a truncation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from remuda.data.arrays import Array, ArrayTuple
from remuda.data.trees import Tree, map_tree


class Steps(ArrayTuple):
    """Rows of experience; every field has the same leading axes, [T, B] as sampled or [N] once shuffled."""

    obs: Tree
    action: Tree
    reward: Array  # reward for this row's action; 0 on a reset row
    discount: Array  # 0 where the episode terminated with this row, 1 otherwise
    mask: Array  # False on a reset row
    policy: Tree  # output of the acting policy: log_prob, value, ...
    version: Array  # version of the weights that chose the action


def resets(mask: Array) -> Array:
    """Return a mask [T, B] of the rows that start from a fresh recurrent state: each row that follows a reset row.

    Row 0 is never marked, because its state is stored with the rollout."""
    flags = ~mask
    flags[1:] = flags[:-1].clone() if hasattr(flags, "clone") else flags[:-1].copy()
    flags[0] = False
    return flags


@dataclass(frozen=True, eq=False)
class Rollout:
    """T steps of B environments; the sampler's next `collect` may reuse the arrays."""

    steps: Steps  # [T, B]
    next_obs: Tree  # [B]: the observation after the last row
    last_value: Array = None  # [B]: value of next_obs, without advancing any state; None for agents without values
    state: Tree = None  # [B]: recurrent state before row 0, after any reset
    envs: Array = None  # [B]: the env of each column; None: all envs, in order
    begins: Array = None  # [B]: True where row 0 starts a new episode; None: not known

    def real_obs(self) -> Tree:
        """Return the observations [N, ...] of all rows with an action, for observation statistics."""
        mask = self.steps.mask
        return map_tree(lambda x: x[mask], self.steps.obs)

    def window(self, t0: int, t1: int, b: Any = slice(None)) -> Rollout:
        """Return rows t0 to t1 of envs b as a rollout that bootstraps from row t1.

        Recurrent state is known for row 0 only; a window that starts later has none.
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
    """Return x[index] for an int64 tensor `index`. Whole rows are copied, which is much faster for images."""
    if x.dim() == 4 and not x.is_contiguous():  # keeps the memory format of channels-last images
        return x.movedim(1, -1).index_select(0, index).movedim(-1, 1)
    return x.index_select(0, index)


@dataclass(frozen=True, eq=False)
class Batch:
    """Input of the losses: whole sequences [T, B], or shuffled rows [N]."""

    steps: Steps
    targets: Tree = None  # added by the algorithm's `prepare` or by a replay, with the same leading axes
    state: Tree = None  # [B]: recurrent state before the first row; sequences only
    next_obs: Tree = None  # observation to bootstrap from after the last row: [B] for sequences, [N] for rows
    weight: Array = None  # importance weight of a prioritized draw: [N] for rows, [B] for sequences
    key: Array = None  # identifies each drawn row or sequence for feedback, and is never reused; same axes as weight
    metrics: Mapping[str, Any] = field(default_factory=dict)  # metrics of the rollout, from `prepare`
    # Range of the returns of all stored rows, in a run's first batch; see `return_range` in replay/ring_replay.py.
    returns: tuple[float, float, float] | None = None

    def flatten(self) -> Self:
        """Return rows [T * B] without recurrent state and next_obs, which belong to whole sequences."""
        if self.weight is not None or self.key is not None:
            raise ValueError("a prioritized draw of sequences has one weight for each: use columns, not flatten")
        steps, targets = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets, state=None, next_obs=None)

    def rows(self, index: Any) -> Self:
        """Return these rows of a flat batch, in this order."""
        parts = (self.steps, self.targets, self.next_obs, self.weight, self.key)
        is_tensor = (
            str(getattr(index, "dtype", None)) == "torch.int64"
        )  # by name, because this package does not import torch
        pick = (lambda x: pick_rows(x, index)) if is_tensor else (lambda x: x[index])
        steps, targets, next_obs, weight, key = map_tree(pick, parts)
        return type(self)(steps, targets, self.state, next_obs, weight, key, self.metrics)

    def columns(self, b: Any) -> Self:
        """Return the whole sequences of these envs, as a minibatch for recurrent agents."""
        steps, targets = map_tree(lambda x: x[:, b], (self.steps, self.targets))
        parts = (self.state, self.next_obs, self.weight, self.key)
        state, next_obs, weight, key = map_tree(lambda x: x[b], parts)
        return replace(self, steps=steps, targets=targets, state=state, next_obs=next_obs, weight=weight, key=key)
