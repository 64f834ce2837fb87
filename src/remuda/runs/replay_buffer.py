"""A replay buffer for your own training loop: add the steps of a batch of envs, and sample transitions.

    buffer = ReplayBuffer(100_000, envs.single_observation_space, envs.single_action_space, envs.num_envs, n_step=3)
    obs, _ = envs.reset(seed=1)
    while training:
        action = act(obs)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        buffer.add(obs, action, reward, terminated, truncated, next_obs)
        obs = next_obs
        batch = buffer.sample(256)
        target = batch.reward + batch.discount * value(batch.next_obs)

`batch.discount` is 0 if the episode terminated within `n_step` steps after `obs`, and otherwise gamma to the power of
the number of steps from `obs` to `next_obs`. If the episode ended within these steps, `next_obs` is its final
observation.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remuda.core import Space
from remuda.data import Array, NumpyArray, Tree, leaves, map_tree
from remuda.envs.action_values import action_leaves
from remuda.envs.spaces import action_space, observation_space
from remuda.errors import ConfigError
from remuda.machine import free_memory
from remuda.replay import Priorities, Ring, Row, TransitionReplay

AUTORESETS = ("next_step", "same_step", "disabled")
MAX_SHARE = 0.9  # largest fraction of the free memory that a buffer may take


class ReplaySample(NamedTuple):
    """A batch of transitions, along the first axis of every field.

    Observations and actions are tensors, or trees of tensors if the env's spaces are nested.
    """

    obs: Tree
    action: Tree
    reward: Tensor  # discounted sum of the next n_step rewards, or of fewer if the episode or the stored rows end
    next_obs: Tree  # observation after the last of these rewards
    discount: Tensor  # factor for the value of next_obs: gamma ** (number of rewards), or 0 after a termination
    weight: Tensor  # importance weight, scaled to a maximum of 1 in the batch; always 1 without priorities
    key: NDArray[np.int64]  # the rows that were drawn, for `update_priorities`


class ReplayBuffer:
    """A buffer of the newest transitions of `num_envs` envs. When it is full, new rows overwrite the oldest rows."""

    def __init__(
        self,
        capacity: int,  # number of rows, over all envs: transitions, and a row for each reset
        observation_space: Any,  # Gymnasium space of a single env, or remuda.Space such as EnvPool.observation
        action_space: Any,
        num_envs: int = 1,
        *,
        prioritized: bool = False,  # draw rows with probabilities proportional to |TD error| ** alpha
        alpha: float = 0.6,
        n_step: int = 1,
        gamma: float = 0.99,
        autoreset: str = "next_step",  # autoreset mode of the vector env, named as in Gymnasium
        seed: int = 0,  # the k-th draw depends only on this seed, k and the buffer's content
    ) -> None:
        for name, value in {"capacity": capacity, "num_envs": num_envs, "n_step": n_step}.items():
            if value < 1:
                raise ConfigError(f"{name}={value} is too small: use at least 1.")
        if capacity < num_envs:
            raise ConfigError(f"capacity={capacity} is less than num_envs={num_envs}: keep at least a step of each.")
        if not 0 <= gamma <= 1 or alpha < 0:
            raise ConfigError(f"gamma={gamma}, alpha={alpha}: gamma is from 0 to 1, and alpha at least 0.")
        if autoreset not in AUTORESETS:
            raise ConfigError(f"autoreset={autoreset!r} is not known: use {' or '.join(AUTORESETS)}.")
        self.observation_space, self.action_space = (
            as_space(observation_space),
            as_space(action_space, is_action=True),
        )
        self.num_envs, self.capacity, self._autoreset = num_envs, capacity, autoreset
        example = Row(
            blank(self.observation_space), blank(self.action_space), *(np.zeros((), "float32"),) * 2, np.False_
        )
        rows = -(-capacity // num_envs) + 1  # one row per env holds the newest observation and cannot be drawn
        refuse_too_large(capacity, rows * num_envs * (sum(x.nbytes for _, x in leaves(example)) + 16 * prioritized))
        ring = Ring(example, rows, num_envs, groups=num_envs)
        self._finalize = weakref.finalize(self, ring.close)
        priorities = Priorities(ring, alpha) if prioritized else None
        self._replay = TransitionReplay(
            ring, batch_size=1, ratio=None, warm_up=0, n_step=n_step, gamma=gamma, seed=seed, priorities=priorities
        )
        self._envs = np.arange(num_envs)
        self._has_ended = np.zeros(num_envs, bool)  # for each env, whether its newest row ended an episode
        self._goes_on = np.zeros(num_envs, bool)  # for each env, whether its newest row is a real step, not a reset
        self._size = 0

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn."""
        return self._size

    def add(
        self,
        obs: Tree,
        action: Tree,
        reward: Array,
        terminated: Array,
        truncated: Array,
        next_obs: Tree,
        mask: Array = None,
    ) -> None:
        """Add one step of every env.

        All arguments are copied. They are arrays, or dicts and tuples of arrays, with a first axis of size num_envs.

        For the last step of an episode, `next_obs` is the final observation of the episode.

        `mask` is False where the env was reset and no action was taken, as `EnvPool` reports it. Without `mask`,
        resets are detected: with autoreset "next_step", a step is a reset if the previous step ended an episode and
        `obs` is the final observation of that episode. With "same_step" and "disabled" (you call reset() yourself),
        no step is a reset.

        If an episode has not ended, but `obs` differs from the `next_obs` of the previous step, the episode counts as
        truncated after that step.
        """
        count, ring = self.num_envs, self._replay.ring
        seen, after = (
            self._tree(self.observation_space, each, name) for each, name in ((obs, "obs"), (next_obs, "next_obs"))
        )
        taken = self._tree(self.action_space, action, "action")
        rewards, terminations, truncations = (
            self._column(each, name, dtype)
            for each, name, dtype in (
                (reward, "reward", "float32"),
                (terminated, "terminated", "bool"),
                (truncated, "truncated", "bool"),
            )
        )
        kept = ring.obs(ring.written[self._envs], self._envs)  # the observation after the newest row of each env
        follows = same_rows(seen, kept, count)
        if mask is not None:
            is_real = self._column(mask, "mask", "bool")
        elif self._autoreset == "next_step":
            is_real = ~(self._has_ended & follows)
        else:
            is_real = np.ones(count, bool)
        # Where an episode has ended, insert a reset row with the final observation. The row before it bootstraps from
        # this observation.
        is_cut = self._goes_on & (~is_real | self._has_ended | ~follows)
        self._append(is_cut, Row(kept, blank(self.action_space, count), *reset_values(count)), kept)
        discount = np.where(terminations, np.float32(0), np.float32(1))
        self._append(is_real, Row(seen, taken, rewards, discount, is_real), after)
        self._goes_on, self._has_ended = is_real, is_real & (terminations | truncations)

    def _append(self, chosen: NDArray[np.bool_], rows: Row, next_obs: Tree) -> None:
        env = self._envs[chosen]
        if len(env) == 0:
            return
        ring = self._replay.ring
        chosen_rows, following = map_tree(lambda x: x[chosen], (rows, next_obs))
        self._replay.add_each(chosen_rows, following, env)
        written = ring.written[env]
        is_overwritten = (written >= ring.capacity) & ring.rows.mask[written % ring.capacity, env]
        self._size += int(chosen_rows.mask.sum()) - int(is_overwritten.sum())

    def sample(self, batch_size: int, beta: float = 1.0) -> ReplaySample:
        """Draw `batch_size` transitions; `beta` is the exponent of the importance weights of a prioritized draw."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} is too small: draw at least 1.")
        if self._size == 0:
            raise ConfigError("the replay buffer holds no step yet: add some before you sample.")
        found = self._replay.sample(batch_size)
        weight = torch.ones(batch_size) if found.weight is None else found.weight**beta
        steps, targets = found.steps, found.targets
        return ReplaySample(
            steps.obs, steps.action, targets.reward, found.next_obs, targets.discount, weight, found.key
        )

    def update_priorities(self, key: NDArray[np.int64], td_error: Array) -> None:
        """Set the priorities of drawn rows from their TD errors; rows that were overwritten meanwhile are skipped.

        `key` is the field `key` of a sample, and `td_error` holds one TD error for each transition of this sample.
        """
        if self._replay.priorities is None:
            raise ConfigError("this replay buffer has no priorities: make it with prioritized=True.")
        self._replay.feedback(key, torch.as_tensor(td_error).abs().reshape(-1))

    def close(self) -> None:
        """Free the memory. Without this call, it is freed when the buffer is garbage-collected."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tree(self, space: Space, values: Tree, name: str) -> Tree:
        """Convert `values` to a tree like `space`, of arrays [num_envs, ...] with the dtypes that the ring stores."""
        if self.num_envs == 1 and space.is_leaf and np.shape(values) == space.shape:
            values = np.asarray(values)[None]  # the values of a single env may lack the env axis
        try:
            arrays = iter(list(action_leaves(space, values, self.num_envs)))
        except ValueError as error:
            reason = str(error).replace("actions", name, 1).replace("this slot takes", "the buffer takes")
            raise ConfigError(reason.replace("one action", "give one")) from None
        return space.tree(lambda _, leaf: next(arrays).astype(leaf.dtype))

    def _column(self, values: Array, name: str, dtype: str) -> NumpyArray:
        array = np.array(values, dtype)  # a copy, because an EnvPool overwrites its arrays in the next step
        if array.size != self.num_envs:
            raise ConfigError(
                f"{name} has shape {array.shape} for num_envs={self.num_envs}: give one number for each env."
            )
        return array.reshape(self.num_envs)


def as_space(space: Any, is_action: bool = False) -> Space:
    if isinstance(space, Space):
        return space
    return (action_space if is_action else observation_space)(space, "the replay buffer")


def blank(space: Space, count: int | None = None) -> Tree:
    """Return a tree of zeros with the shapes of `space`; if `count` is given, with a first axis of this size."""
    axes = () if count is None else (count,)
    return space.tree(lambda _, leaf: np.zeros((*axes, *leaf.shape), leaf.dtype))


def reset_values(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """Return the arrays reward, discount and mask of `count` reset rows."""
    return np.zeros(count, np.float32), np.ones(count, np.float32), np.zeros(count, bool)


def same_rows(left: Tree, right: Tree, count: int) -> NDArray[np.bool_]:
    """Return, for each of `count` rows, whether `left` and `right` are equal in this row. NaN equals NaN here."""
    same = np.ones(count, bool)
    for (_, a), (_, b) in zip(leaves(left), leaves(right), strict=True):
        same &= ((a == b) | ((a != a) & (b != b))).reshape(count, math.prod(a.shape[1:])).all(-1)
    return same


def refuse_too_large(capacity: int, needed: int) -> None:
    free = free_memory()
    if needed > MAX_SHARE * free:
        raise ConfigError(
            f"capacity={capacity} takes {needed / 1e9:.1f} GB, more than {100 * MAX_SHARE:.0f} % of the "
            f"{free / 1e9:.1f} GB of free memory: use at most {int(MAX_SHARE * free / needed * capacity)}."
        )
