"""Batches whose parts count differently: sequences with a burn-in, parts without real rows, losses that are sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from parted import make_learner, make_parted, parted
from rollouts import box, discrete, make_agent, make_rollout

from remuda.agents import QAgent
from remuda.algorithms import A2C, IMPALA, R2D1
from remuda.data import Batch, Rollout, Steps, map_tree
from remuda.learning.learner import Learner
from remuda.nets import MLP
from remuda.parts import LocalGroup, PartedReplay, PartedUpdates
from remuda.parts.sampler import PartedRollout
from remuda.replay import RolloutBuffer
from remuda.replay.sequences import SequenceReturns
from remuda.schemes.learning_round import learn

BURN_IN, LENGTH, N_STEP = 4, 3, 1


def side_by_side(rollouts: list[Rollout]) -> Rollout:
    steps = map_tree(lambda *each: torch.cat(each, 1), *(rollout.steps for rollout in rollouts))
    ends = (torch.cat([getattr(each, name) for each in rollouts]) for name in ("next_obs", "last_value"))
    return Rollout(steps, *ends)


def learn_both_ways(
    divided: Learner, undivided: Learner, rollouts: list[Rollout], group: LocalGroup, whole: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of one round over two parts, and of one round over both parts side by side."""
    rollouts = [replace(rollout, envs=torch.tensor([part])) for part, rollout in enumerate(rollouts)]
    replay = PartedReplay([RolloutBuffer(1, None, 0, whole=whole) for _ in rollouts], group)
    real = sum(rollout.num_real for rollout in rollouts)
    both = PartedRollout(tuple(rollouts), real)
    found, _ = learn(divided, replay, both, updates=PartedUpdates(group))  # type: ignore[arg-type]
    expected, _ = learn(undivided, RolloutBuffer(1, None, 0, whole=whole), side_by_side(rollouts))
    return found, expected


def test_a_part_without_real_rows_leaves_metrics_finite() -> None:
    """The explained variance of no rows is NaN, which a weight of 0 would not remove."""
    group = LocalGroup(2)
    algorithms = [A2C(make_agent(seed=5), 2, gamma=0.9, gae_lambda=0.9) for _ in range(2)]
    divided, undivided = make_parted(group, algorithms[0]), make_learner(algorithms[1])
    rollouts = [make_rollout(algorithms[0].agent, T=4, B=1, seed=seed) for seed in (1, 2)]
    rollouts[0].steps.mask[:] = True
    rollouts[1].steps.mask[:] = False
    rollouts[1].steps.reward[:] = 0.0
    found, expected = learn_both_ways(divided, undivided, rollouts, group, whole=False)
    assert math.isfinite(expected["train/explained_variance"])
    assert found["train/explained_variance"] == pytest.approx(expected["train/explained_variance"], abs=1e-5)


def test_losses_that_are_sums_over_rows_are_added_over_parts() -> None:
    group = LocalGroup(2)
    algorithms = [IMPALA(make_agent(seed=5), 2, gamma=0.9, reduction="sum") for _ in range(2)]
    divided, undivided = make_parted(group, algorithms[0]), make_learner(algorithms[1])
    rollouts = [make_rollout(algorithms[0].agent, T=4, B=1, seed=seed) for seed in (1, 2)]
    found, expected = learn_both_ways(divided, undivided, rollouts, group, whole=True)
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)


def sequences(seed: int, has_real_burn_in: bool) -> Batch:
    """Return two sequences for R2D1, whose rows of the burn-in are all real, or all reset rows."""
    draw, rows = torch.Generator().manual_seed(seed), BURN_IN + LENGTH + N_STEP
    mask = torch.ones(rows, 2, dtype=torch.bool)
    mask[:BURN_IN] = has_real_burn_in
    obs, reward = torch.randn(rows, 2, 3, generator=draw), torch.randn(rows, 2, generator=draw)
    action = torch.randint(4, (rows, 2), generator=draw)
    steps = Steps(obs, action, reward, torch.ones(rows, 2), mask, None, None)
    later = torch.arange(BURN_IN, BURN_IN + LENGTH)[:, None].expand(LENGTH, 2) + N_STEP
    targets = SequenceReturns(torch.randn(LENGTH, 2, generator=draw), torch.full((LENGTH, 2), 0.9), later)
    return Batch(steps, targets, make_recurrent_agent().initial_state(2))


def make_recurrent_agent() -> QAgent:
    torch.manual_seed(3)
    return QAgent(box((3,)), discrete(4), lambda shape: MLP(shape, (5,)), core="lstm", core_size=4)


def test_sequences_are_weighted_by_their_learned_rows() -> None:
    """Rows of the burn-in are not learned from, so they must not count, whether they are real or not."""
    group = LocalGroup(2)
    algorithms = [R2D1(make_recurrent_agent(), 0, delta=None, burn_in=BURN_IN) for _ in range(2)]
    divided, undivided = make_parted(group, algorithms[0]), make_learner(algorithms[1])
    batches = [sequences(1, True), sequences(2, False)]
    PartedUpdates(group).exchange(divided, divided.gradients(parted(*batches)))
    steps, targets = (
        map_tree(lambda a, b: torch.cat([a, b], 1), *(getattr(batch, name) for batch in batches))
        for name in ("steps", "targets")
    )
    state = map_tree(lambda a, b: torch.cat([a, b]), *(batch.state for batch in batches))
    undivided.step(Batch(steps, targets, state))
    for name, vector in undivided.vectors.items():
        torch.testing.assert_close(divided.vectors[name], vector, atol=2e-6, rtol=2e-6)
