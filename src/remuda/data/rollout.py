"""What the sampler hands to the learner: `Steps`, `Rollout` and `Batch`.

One row is one call of `act` and what the env answered to it:

    row        t-1      t (ends)   t+1 (reset row)   t+2
    obs        o_t-1    o_t        final obs         first obs of the next episode
    mask       True     True       False             True
    discount   1        0 or 1     1                 1

Envs reset on the *next* step, so the row after an end holds the true final observation, and its value estimate
is the bootstrap of a truncated episode. No action is taken there: `mask` is False, and "mask[t-1] is False" is
the reset flag of recurrent state. Termination is discount 0; truncation keeps 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Rollout:
    """T steps of B environments. Its arrays may be reused by the sampler's next `collect`."""

    steps: Steps  # [T, B]
    last_obs: Any  # [B]: what row T would see
    last_value: Any  # [B]: its value, computed without advancing any state
    state: Any = None  # [B]: recurrent state that goes into row 0, after any reset

    def window(self, t0: int, t1: int, b: Any = slice(None)) -> Rollout:
        """Rows t0 to t1 of envs b as a rollout of its own, its end bootstrapped from row t1.

        Recurrent state is known for row 0 only: a window that starts later has none.
        """
        T = self.steps.reward.shape[0]
        if not 0 <= t0 < t1 <= T:
            raise ValueError(f"window {t0}:{t1} is not inside the rollout's {T} rows")
        if t1 == T:
            last_obs, last_value = (map_tree(lambda x: x[b], end) for end in (self.last_obs, self.last_value))
        else:
            following = self.steps[t1, b]
            last_obs, last_value = following.obs, following.policy.value
        state = map_tree(lambda x: x[b], self.state) if t0 == 0 else None
        return Rollout(self.steps[t0:t1, b], last_obs, last_value, state)


@dataclass(frozen=True)
class Batch:
    """What losses are computed from: whole sequences [T, B], or shuffled rows [N]."""

    steps: Steps
    targets: Any = None  # what the algorithm's `prepare` added, with the same leading axes
    state: Any = None  # [B]: recurrent state before the first row; sequences only
    weight: Any = None  # importance weight of a prioritised draw
    key: Any = None  # (index, generation) of a prioritised draw, for feedback of priorities

    def flatten(self) -> Self:
        """[T, B] to rows [T * B]; recurrent state has no place among rows."""
        steps, targets = map_tree(lambda x: x.reshape(-1, *x.shape[2:]), (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets, state=None)

    def rows(self, index: Any) -> Self:
        """These rows of a flat batch, in this order."""
        steps, targets = map_tree(lambda x: x[index], (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets)

    def columns(self, b: Any) -> Self:
        """Whole sequences of these envs: minibatches of recurrent agents."""
        steps, targets = map_tree(lambda x: x[:, b], (self.steps, self.targets))
        return replace(self, steps=steps, targets=targets, state=map_tree(lambda x: x[b], self.state))
