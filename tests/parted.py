"""Helpers for tests of remuda.parts: a small algorithm, batches with known rows, replays and samplers of parts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from counting_agents import CountingRNN
from torch import Tensor, nn

from remuda.core import Clock, Losses
from remuda.data import Batch, Rollout, Steps
from remuda.envs import make_envs, resolve
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import LocalWeights
from remuda.parts import Group, PartedLearner, PartedUpdates
from remuda.parts.replay import PartedBatch
from remuda.replay import Priorities, Ring, Row, TransitionReplay
from remuda.sampling.sampler import EnvSampler

STOP = 1000.0  # an observation for which `Line` asks to stop the round
LENGTHS = (7, 4, 9)  # lengths of the episodes of the counting env

# With an epsilon of 1e6 and a rate of 1e5, RMSprop is gradient descent with a rate of 0.1, which unlike Adam does not
# turn differences by rounding into differences of the step.
DESCENT: dict[str, Any] = {"optimizer": OptimizerOptions("rmsprop", 1e6), "learning_rate": parse_schedule("1e5")}


class Line(nn.Module):
    """A fake algorithm that fits rewards; its losses are means over rows, and its priorities are the errors."""

    agent = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.bias = nn.Parameter(torch.tensor(0.25))
        self.parts: list[int] = []  # parts for which losses were computed

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"weight": [self.weight], "bias": [self.bias]}

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        self.parts.append(clock.part)
        error = (batch.steps.obs * self.weight).sum(-1) + self.bias - batch.steps.reward
        loss = error.square().mean()
        metrics: dict[str, Tensor | float] = {"loss": loss.detach(), "rows": float(len(error))}
        is_over = bool((batch.steps.obs == STOP).any())
        return Losses({"weight": loss, "bias": 0.5 * loss}, metrics, error.detach().abs(), is_over)

    def prepare(self, rollout: Rollout) -> Batch:
        return Batch(rollout.steps, next_obs=rollout.next_obs)

    def reward_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        return {}

    def obs_statistics(self, rollout: Rollout) -> dict[str, Tensor]:
        return {}

    def absorb(self, statistics: Any) -> None:
        raise AssertionError("there are no statistics")


def rows_of(seed: int, count: int) -> Batch:
    """Return a batch of `count` random rows, all of them real."""
    generator = torch.Generator().manual_seed(seed)
    obs, reward = torch.randn(count, 3, generator=generator), torch.randn(count, generator=generator)
    one = torch.ones(count)
    return Batch(Steps(obs, one.long(), reward, one, one.bool(), None, one.long()), key=np.arange(count))


def joined(batches: list[Batch]) -> Batch:
    """Return the rows of all batches as one batch."""
    steps = [batch.steps for batch in batches]
    return Batch(
        Steps(
            torch.cat([each.obs for each in steps]),
            torch.cat([each.action for each in steps]),
            torch.cat([each.reward for each in steps]),
            torch.cat([each.discount for each in steps]),
            torch.cat([each.mask for each in steps]),
            None,
            torch.cat([each.version for each in steps]),
        )
    )


def make_learner(algorithm: Any = None, max_grad_norm: float | None = None, **options: Any) -> Learner:
    """Return a learner for undivided batches; two calls give equal parameters."""
    return Learner(algorithm or Line(), max_grad_norm=max_grad_norm, **{**DESCENT, **options})


def make_parted(
    group: Group, algorithm: Any = None, max_grad_norm: float | None = None, **options: Any
) -> PartedLearner:
    options = {**DESCENT, **options}
    return PartedLearner(group, algorithm or Line(), max_grad_norm=max_grad_norm, **options)


def parted(*batches: Batch | None) -> Any:
    return PartedBatch(batches)


# --- the same updates in one process and in several -----------------------------------------------------------------

UNUSUAL = {2: "no batch", 4: "not finite", 6: "stop", 8: "interrupt", 10: "no batches"}


def batch_of_part(update: int, part: int) -> Batch | None:
    """Return the batch of a part, which has its own number of rows. In some updates, one part is unusual."""
    batch, unusual = rows_of(100 * update + part, 5 + 7 * part + update), UNUSUAL.get(update)
    if unusual == "no batches" or (unusual == "no batch" and part == 1):
        return None
    if part == 1 and unusual == "not finite":
        batch.steps.reward[2] = math.nan
    if part == 1 and unusual == "stop":
        batch.steps.obs[0, 0] = STOP
    return batch


def run_updates(group: Group) -> list[Any]:
    """Make 12 updates with the parts of this process; return what was decided, and a hash of all parameters."""
    learner, updates, found = make_parted(group, max_grad_norm=0.5), PartedUpdates(group), list[Any]()
    for update in range(12):
        gradients = learner.gradients(parted(*(batch_of_part(update, part) for part in group.local)))
        applied = updates.exchange(learner, gradients)
        wants = UNUSUAL.get(update + 1) == "interrupt" and 1 in group.local  # sent with the next gradients
        is_over = updates.agree(wants)
        norm = float(applied.metrics.get("grad_norm", 0.0))
        found.append([applied.versions, applied.stop, is_over, norm, hash_of(learner)])
    return found


def hash_of(learner: Learner) -> str:
    return hashlib.sha256(b"".join(vector.numpy().tobytes() for vector in learner.vectors.values())).hexdigest()


# --- replays and samplers of parts ----------------------------------------------------------------------------------

EXAMPLE = Row(
    obs=np.zeros(1, np.float32),
    action=np.zeros((), np.int64),
    reward=np.zeros((), np.float32),
    discount=np.zeros((), np.float32),
    mask=np.zeros((), bool),
)


def make_replay(part: int, parts: int, envs: int = 2, alpha: float | None = None, **options: Any) -> TransitionReplay:
    """Return the replay of one part."""
    ring = Ring(EXAMPLE, 50, envs)
    settings: dict[str, Any] = {"batch_size": 4, "ratio": 2.0, "warm_up": 0, "n_step": 1, "gamma": 0.9, "seed": 1}
    priorities = None if alpha is None else Priorities(ring, alpha)
    replay = TransitionReplay(ring, **{**settings, **options}, priorities=priorities)
    replay.set_part(part, parts)
    return replay


def rows_with_mask(mask: Tensor, first: float) -> Batch:
    """Return rows [T, B] with this mask. An observation is the number of its row and env, counted from `first`."""
    T, B = mask.shape
    obs = torch.arange((T + 1) * B, dtype=torch.float32).reshape(T + 1, B, 1) + first
    one = torch.ones(T, B)
    return Batch(Steps(obs[:T], one.long(), one * mask, one, mask, None, one.long()), next_obs=obs[T])


def counting_sampler(
    num_envs: int, first_env: int, should_stop: Callable[[], bool] | None = None, workers: int = 0
) -> EnvSampler:
    """Return a sampler whose envs are numbered from `first_env` among all envs of the run."""
    spec = resolve("counting:make", {"lengths": list(LENGTHS)})
    envs = make_envs(spec, num_envs, workers, gamma=0.9, should_stop=should_stop, first_env=first_env)
    return EnvSampler(envs, CountingRNN(), LocalWeights(7), 6, 11, first_env=first_env)
