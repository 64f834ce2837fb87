"""What the sampler hands to the learner: `Steps`, `Rollout` and `Batch`.

One row is one call of `act` and what the env answered to it:

    row        t-1      t (ends)   t+1 (reset row)   t+2
    obs        o_t-1    o_t        final obs         first obs of the next episode
    mask       True     True       False             True
    discount   1        0 or 1     1                 1

Envs reset on the *next* step, so the row after an end holds the true final observation, and its value estimate
is the bootstrap of a truncated episode. No action is taken there: `mask` is False, and "mask[t-1] is False" is
the reset flag of recurrent state (take it before cutting a burn-in off, or the reset at the cut is lost).
Termination is discount 0; truncation keeps 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from remuda.data.arrays import ArrayTuple
from remuda.data.trees import map_tree


class Steps(ArrayTuple):
    """Rows of experience; every field has the same leading axes, [T, B] as sampled or [N] once shuffled."""

    obs: Any
    action: Any
    reward: Any  # of this row's action; 0 on a reset row
    discount: Any  # 0 where the episode terminated with this row, 1 otherwise
    mask: Any  # False on a reset row
    policy: Any  # what the acting agent said: log_prob, value, ...
    version: Any  # of the weights that acted


def resets(mask: Any) -> Any:
    """Rows [T, B] before which recurrent state is put back: those after a reset row. Row 0 has its own state."""
    flags = ~mask
    flags[1:] = flags[:-1].clone() if hasattr(flags, "clone") else flags[:-1].copy()
    flags[0] = False
    return flags


@dataclass(frozen=True, eq=False)
class Rollout:
    """T steps of B environments. Its arrays may be reused by the sampler's next `collect`."""

    steps: Steps  # [T, B]
    next_obs: Any  # [B]: what row T would see
    last_value: Any = None  # [B]: its value, computed without advancing any state; None for agents without one
    state: Any = None  # [B]: recurrent state that goes into row 0, after any reset
    envs: Any = None  # [B]: which env each column is of; None: all of them, in order
    begins: Any = None  # [B]: True where row 0 starts a new episode; None: not known

    def real_obs(self) -> Any:
        """The observations [N, ...] of all rows on which an action was taken: the ones that statistics count."""
        mask = self.steps.mask
        return map_tree(lambda x: x[mask], self.steps.obs)

    def window(self, t0: int, t1: int, b: Any = slice(None)) -> Rollout:
        """Rows t0 to t1 of envs b as a rollout of its own, its end bootstrapped from row t1.

        Recurrent state is known for row 0 only: a window that starts later has none.
        """
        T = self.steps.reward.shape[0]
        if not 0 <= t0 < t1 <= T:
            raise ValueError(f"window {t0}:{t1} is not inside the rollout's {T} rows")
        if t1 == T:
            next_obs, last_value = map_tree(lambda x: x[b], (self.next_obs, self.last_value))
        else:
            said = self.steps.policy
            next_obs = map_tree(lambda x: x[t1, b], self.steps.obs)
            last_value = said.value[t1, b] if said is not None and "value" in said else None
        state, begins = map_tree(lambda x: x[b], (self.state, self.begins)) if t0 == 0 else (None, None)
        if t0 > 0:
            begins = ~self.steps.mask[t0 - 1, b]
        envs = None if self.envs is None else self.envs[b]
        return Rollout(self.steps[t0:t1, b], next_obs, last_value, state, envs, begins)


def pick_rows(x: Any, index: Any) -> Any:
    """x[index] of int64 tensors, whole rows at a time: of images, much faster than by x[index]."""
    if x.dim() == 4 and not x.is_contiguous():  # images with their channels side by side stay so
        return x.movedim(1, -1).index_select(0, index).movedim(-1, 1)
    return x.index_select(0, index)


@dataclass(frozen=True, eq=False)
class Batch:
    """What losses are computed from: whole sequences [T, B], or shuffled rows [N]."""

    steps: Steps
    targets: Any = None  # what the algorithm's `prepare` added, with the same leading axes
    state: Any = None  # [B]: recurrent state before the first row; sequences only
    next_obs: Any = None  # what comes after the last row, to bootstrap from: [B] of sequences, [N] of rows
    weight: Any = None  # importance weight of a prioritised draw: [N] for rows, [B] for sequences
    key: Any = None  # names each draw for feedback, and never means another; axes as weight
    metrics: Mapping[str, Any] = field(default_factory=dict)  # what `prepare` has to say of the rollout
    returns: tuple[float, float, float] | None = (
        None  # of all stored rows, in a run's first batch (replay/returns.py)
    )

    def flatten(self) -> Self:
        """[T, B] to rows [T * B]; recurrent state and last_obs have no place among rows."""
        if self.weight is not None or self.key is not None:
            raise ValueError("a prioritised draw of sequences has one weight for each: use columns, not flatten")
        steps, targets = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets, state=None, next_obs=None)

    def rows(self, index: Any) -> Self:
        """These rows of a flat batch, in this order."""
        parts = (self.steps, self.targets, self.next_obs, self.weight, self.key)
        is_tensor = str(getattr(index, "dtype", None)) == "torch.int64"  # by name: nothing here imports torch
        pick = (lambda x: pick_rows(x, index)) if is_tensor else (lambda x: x[index])
        steps, targets, next_obs, weight, key = map_tree(pick, parts)
        return type(self)(steps, targets, self.state, next_obs, weight, key, self.metrics)

    def columns(self, b: Any) -> Self:
        """Whole sequences of these envs: minibatches of recurrent agents."""
        steps, targets = map_tree(lambda x: x[:, b], (self.steps, self.targets))
        parts = (self.state, self.next_obs, self.weight, self.key)
        state, next_obs, weight, key = map_tree(lambda x: x[b], parts)
        return replace(self, steps=steps, targets=targets, state=state, next_obs=next_obs, weight=weight, key=key)
