"""Updates from the gradients of several parts, compared with those of one learner on the concatenated batch.

Sums of float32 numbers that are added in another order differ by rounding, so parameters are compared with a
tolerance of 2e-6, or 2e-5 after several updates, which is a few units in the last place of numbers of order 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parted import (
    STOP,
    UNUSUAL,
    Line,
    hash_of,
    joined,
    make_learner,
    make_parted,
    make_replay,
    parted,
    rows_of,
    rows_with_mask,
    run_updates,
)
from ranks import Ranks
from rollouts import box, make_agent, make_rollout

from remuda.algorithms import A2C, IMPALA, PPO
from remuda.core import Clock
from remuda.data import Batch, Rollout, map_tree
from remuda.errors import Interrupted
from remuda.learning.learner import Learner
from remuda.parts import LocalGroup, PartedLearner, PartedReplay, PartedUpdates
from remuda.parts.metrics import PartMetrics, merge
from remuda.parts.sampler import PartedRollout
from remuda.processes.fork_server import ForkServer
from remuda.replay import RolloutBuffer
from remuda.schemes.learning_round import learn, learn_due

CLOSE = {"atol": 2e-6, "rtol": 2e-6}
CLOSE_AFTER_MANY = {"atol": 2e-5, "rtol": 2e-5}
CLOSE_OF_SUMS = {"atol": 1e-4, "rtol": 1e-4}
ENVS = 3  # envs of each part


def assert_equal_parameters(first: Learner, second: Learner, **tolerance: float) -> None:
    for name, vector in first.vectors.items():
        torch.testing.assert_close(vector, second.vectors[name], **tolerance)


# --- the mean over all rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[4, 4], [1, 30], [3, 17, 8], [5, 1, 1, 40]])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_update_is_that_of_one_learner_on_all_rows(counts: list[int], max_grad_norm: float | None) -> None:
    group = LocalGroup(len(counts))
    learner, whole = make_parted(group, max_grad_norm=max_grad_norm), make_learner(max_grad_norm=max_grad_norm)
    updates = PartedUpdates(group)
    for update in range(5):
        batches = [rows_of(10 * update + part, count) for part, count in enumerate(counts)]
        applied = updates.exchange(learner, learner.gradients(parted(*batches)))
        expected = whole.step(joined(batches)).metrics
        assert (applied.versions, applied.stop, applied.gradient_to_update) == (1, False, 0.0)
        assert float(applied.metrics["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-4)
        assert_equal_parameters(learner, whole, **(CLOSE if update == 0 else CLOSE_AFTER_MANY))
    assert learner.version == whole.version == 5


def test_part_without_a_batch_contributes_nothing() -> None:
    group = LocalGroup(3)
    learner, whole = make_parted(group), make_learner()
    batches = [rows_of(part, 6 + part) for part in range(2)]
    found = learner.gradients(parted(batches[0], None, batches[1]))
    assert found.priority is not None
    assert [None if each is None else len(each) for each in found.priority] == [6, None, 7]
    PartedUpdates(group).exchange(learner, found)
    whole.step(joined(batches))
    assert_equal_parameters(learner, whole, **CLOSE)
    assert learner.finish(PartedRollout(tuple(map(rollout_of, batches * 2))[:3], 0))["train/rows"] == pytest.approx(
        (6 * 6 + 7 * 7) / 13
    )


def rollout_of(batch: Batch) -> Any:
    return Rollout(batch.steps, batch.next_obs)


def test_vectors_of_earlier_updates_do_not_remain() -> None:
    """A part's vector is reused, and a part that has no batch later must not add its old gradient again."""
    group = LocalGroup(2)
    learner, whole, updates = make_parted(group), make_learner(), PartedUpdates(group)
    first, second = rows_of(1, 5), rows_of(2, 9)
    updates.exchange(learner, learner.gradients(parted(first, second)))
    updates.exchange(learner, learner.gradients(parted(first, None)))
    whole.step(joined([first, second]))
    whole.step(first)
    assert_equal_parameters(learner, whole, **CLOSE_AFTER_MANY)


def test_update_without_any_batch_changes_nothing() -> None:
    group = LocalGroup(2)
    learner = make_parted(group)
    before = hash_of(learner)
    applied = PartedUpdates(group).exchange(learner, learner.gradients(parted(None, None)))
    assert (applied.versions, applied.stop, learner.version, learner.skipped) == (0, False, 0, 0)
    assert hash_of(learner) == before


def test_every_part_has_its_own_clock() -> None:
    group = LocalGroup(3)
    learner = make_parted(group)
    learner.set_progress(0.5)
    learner.gradients(parted(rows_of(0, 2), None, rows_of(1, 2)))
    assert learner.algorithm.parts == [0, 2]  # type: ignore[attr-defined]
    assert learner.clock == Clock(0, 0.5)


# --- decisions of one part that hold for all ------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1, 2])
def test_stop_of_one_part_ends_the_round_of_all_without_an_update(part: int) -> None:
    group = LocalGroup(3)
    learner, batches = make_parted(group), [rows_of(each, 4) for each in range(3)]
    batches[part].steps.obs[1, 2] = STOP
    before = hash_of(learner)
    found = learner.gradients(parted(*batches))
    applied = PartedUpdates(group).exchange(learner, found)
    assert found.stop
    assert (applied.versions, applied.stop, learner.version) == (0, True, 0)
    assert hash_of(learner) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradient_of_one_part_that_is_not_finite_skips_the_update(part: int, bad: float) -> None:
    group = LocalGroup(3)
    learner, updates = make_parted(group), PartedUpdates(group)
    batches = [rows_of(each, 4) for each in range(3)]
    broken = [*batches]
    broken[part] = rows_of(part, 4)
    broken[part].steps.reward[3] = bad
    before = hash_of(learner)
    applied = updates.exchange(learner, learner.gradients(parted(*broken)))
    assert (applied.versions, applied.stop, learner.version, learner.skipped) == (0, False, 0, 1)
    assert applied.metrics == {"skipped_updates": 1}
    assert hash_of(learner) == before
    assert updates.exchange(learner, learner.gradients(parted(*batches))).versions == 1
    assert hash_of(learner) != before


def make_round(bad: int | None) -> tuple[PartedReplay, PartedLearner, PartedUpdates]:
    """Return a prioritized replay of three parts with due batches. The reward of all rows of part `bad` is NaN."""
    group = LocalGroup(3)
    replay = PartedReplay([make_replay(part, 3, alpha=0.6, ratio=3.0) for part in range(3)], group)
    batches = [rows_with_mask(torch.ones(4, 2, dtype=torch.bool), 0.1 * part) for part in range(3)]
    if bad is not None:
        batches[bad].steps.reward[:] = math.nan
    replay.add(parted(*batches))
    return replay, make_parted(group), PartedUpdates(group)


def priorities_of(replay: PartedReplay) -> list[float]:
    return [each.priorities.tree.total for each in replay._replays]  # type: ignore[attr-defined]


def test_skipped_update_gives_no_priorities_to_any_part() -> None:
    replay, learner, updates = make_round(bad=1)
    before = priorities_of(replay)
    learn_due(learner, replay, 0.0, 0, lambda: False, updates)
    assert (learner.skipped, learner.version) == (6, 0)
    assert priorities_of(replay) == before
    replay, learner, updates = make_round(bad=None)
    learn_due(learner, replay, 0.0, 0, lambda: False, updates)
    assert (learner.skipped, learner.version) == (0, 6)
    assert all(old != new for old, new in zip(before, priorities_of(replay), strict=True))


def test_stop_request_interrupts_after_the_next_exchange() -> None:
    group = LocalGroup(2)
    learner, updates = make_parted(group), PartedUpdates(group)

    def exchange() -> int:
        return updates.exchange(learner, learner.gradients(parted(rows_of(1, 3), rows_of(2, 4)))).versions

    assert exchange() == 1
    assert not updates.agree(False)
    assert not updates.agree(True)
    assert exchange() == 1, "the exchange that carries the request makes an update, too"
    assert updates.agree(False)
    assert exchange() == 1
    assert not updates.agree(False)


def test_round_is_interrupted_one_update_after_the_request() -> None:
    replay, learner, updates = make_round(bad=None)
    with pytest.raises(Interrupted):
        learn_due(learner, replay, 0.0, 0, lambda: learner.version >= 3, updates)
    assert learner.version == 4


# --- real algorithms ------------------------------------------------------------------------------------------------


def a2c(parts: int, **options: Any) -> A2C:
    agent = make_agent(seed=5, normalize_obs=True)
    return A2C(agent, ENVS * parts, gamma=0.9, gae_lambda=0.9, ent_coef=0.01, normalize_reward=True, **options)


def ppo(parts: int, **options: Any) -> PPO:
    agent = make_agent(action=box((2,)), seed=5, normalize_obs=True)
    settings: dict[str, Any] = {"normalize_advantage": False, "normalize_reward": True, **options}
    return PPO(agent, ENVS * parts, gamma=0.9, gae_lambda=0.9, clip_range=lambda progress: 0.2, **settings)


def impala(parts: int, reduction: Any) -> IMPALA:
    agent = make_agent(seed=5, normalize_obs=True)
    return IMPALA(agent, ENVS * parts, gamma=0.9, reduction=reduction, normalize_reward=True, ent_coef=0.01)


def rollouts_of(agent: Any, parts: int, round: int) -> list[Rollout]:
    """Return one rollout for each part. The numbers of real rows differ, because many rows of part 1 are masked."""
    found = []
    for part in range(parts):
        rollout = make_rollout(agent, T=6, B=ENVS, seed=100 * round + part)
        if part == 1:
            rollout.steps.mask[1:5, 1:] = False
            rollout.steps.reward[~rollout.steps.mask] = 0.0
        envs = torch.arange(part * ENVS, (part + 1) * ENVS)
        found.append(replace(rollout, envs=envs))
    return found


def side_by_side(rollouts: list[Rollout]) -> Rollout:
    """Return the envs of all rollouts as the columns of one rollout."""
    steps = map_tree(lambda *each: torch.cat(each, 1), *(rollout.steps for rollout in rollouts))
    next_obs, last_value = (
        torch.cat([getattr(rollout, name) for rollout in rollouts]) for name in ("next_obs", "last_value")
    )
    return Rollout(steps, next_obs, last_value)


def learn_both_ways(
    make: Callable[[int], Any], parts: int, rounds: int, whole: bool = False
) -> tuple[PartedLearner, Learner, list[dict[str, float]], list[dict[str, float]]]:
    """Learn from equal rollouts with several parts, and with one learner for all envs; return both."""
    group = LocalGroup(parts)
    divided, undivided = make_parted(group, make(parts)), make_learner(make(parts))
    replay = PartedReplay([RolloutBuffer(2, None, 0, whole=whole) for _ in range(parts)], group)
    single, updates = RolloutBuffer(2, None, 0, whole=whole), PartedUpdates(group)
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for round in range(rounds):
        rollouts = rollouts_of(undivided.algorithm.agent, parts, round)
        assert len({rollout.num_real for rollout in rollouts}) > 1
        num_real = sum(rollout.num_real for rollout in rollouts)
        rollout: Any = PartedRollout(tuple(rollouts), num_real)
        found[0].append(learn(divided, replay, rollout, updates=updates)[0])
        found[1].append(learn(undivided, single, side_by_side(rollouts))[0])
    return divided, undivided, *found


@pytest.mark.parametrize("make", [a2c, ppo])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_learn_as_one_learner_does(make: Callable[[int], Any], parts: int) -> None:
    """Parameters and statistics of observations and rewards are equal to rounding, and so are the metrics."""
    divided, undivided, found, expected = learn_both_ways(make, parts, rounds=3)
    assert_equal_parameters(divided, undivided, **CLOSE_AFTER_MANY)
    assert divided.version == undivided.version == 6
    assert divided.statistics_version == undivided.statistics_version == 3
    assert_equal_statistics(divided, undivided)
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def assert_equal_statistics(first: Learner, second: Learner) -> None:
    """Compare the buffers of normalizers and of the reward scale, which are float64."""
    mine, theirs = (dict(learner.algorithm.named_buffers()) for learner in (first, second))  # type: ignore[attr-defined]
    compared = 0
    for name, value in theirs.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(mine[name], value, atol=1e-12, rtol=1e-10)
            compared += 1
    assert compared >= 7  # count, mean and variance of observations and of rewards, and the returns of all envs


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_parts_of_impala_learn_as_one_learner_does(reduction: str) -> None:
    divided, undivided, _, _ = learn_both_ways(lambda parts: impala(parts, reduction), 3, rounds=2, whole=True)
    # The gradient of a sum over all rows is some forty times larger, and so are its rounding errors.
    assert_equal_parameters(divided, undivided, **(CLOSE_AFTER_MANY if reduction == "mean" else CLOSE_OF_SUMS))
    assert_equal_statistics(divided, undivided)


def test_target_kl_of_one_part_stops_all() -> None:
    """Only the policy that acted in part 1 differs from the current one."""
    group = LocalGroup(2)
    learner = make_parted(group, ppo(2, target_kl=0.05))
    replay, updates = PartedReplay([RolloutBuffer(3, None, 0) for _ in range(2)], group), PartedUpdates(group)
    rollouts = rollouts_of(learner.algorithm.agent, 2, 0)
    before = copy.deepcopy(learner.vectors)
    rollouts[1].steps.policy.log_prob[:] += 2.0
    rollout: Any = PartedRollout(tuple(rollouts), 0)
    metrics, is_whole = learn(learner, replay, rollout, updates=updates)
    assert is_whole
    assert learner.version == 0
    assert all(torch.equal(vector, before[name]) for name, vector in learner.vectors.items())
    assert "lag/gradient_to_update" not in metrics
    assert metrics["train/approx_kl"] > 0.05


def test_metrics_are_means_over_updates_of_means_over_rows() -> None:
    """An update of few rows counts as much as any other; metrics are forgotten once they are returned."""
    group = LocalGroup(2)
    learner = make_parted(group)
    learner.gradients(parted(rows_of(0, 2), rows_of(1, 6)))
    learner.gradients(parted(rows_of(2, 4), None))
    learner.gradients(parted(None, None))
    empty: Any = PartedRollout((rollout_of(rows_of(0, 1)), rollout_of(rows_of(1, 1))), 2)
    found = learner.finish(empty)
    assert found["train/rows"] == pytest.approx(((2 * 2 + 6 * 6) / 8 + 4) / 2)
    losses = [
        float(Line().losses(rows_of(seed, count), Clock()).metrics["loss"])
        for seed, count in ((0, 2), (1, 6), (2, 4))
    ]
    assert found["train/loss"] == pytest.approx(((2 * losses[0] + 6 * losses[1]) / 8 + losses[2]) / 2)
    assert learner.finish(empty) == {}


@pytest.mark.parametrize("batch_size", [7, 11])
def test_metrics_of_minibatches_of_different_sizes_equal_those_of_one_learner(batch_size: int) -> None:
    """The last minibatch of a rollout is smaller than the others."""
    metrics = []
    for parts in ([batch_size, 3], [batch_size + 3]):
        learner = make_parted(LocalGroup(len(parts)))
        for update, size in enumerate((1, 2)):
            batches = [rows_of(10 * update + part, count // size) for part, count in enumerate([batch_size, 3])]
            learner.gradients(parted(*(batches if len(parts) == 2 else [joined(batches)])))
        rollout: Any = PartedRollout(tuple(rollout_of(rows_of(0, 1)) for _ in parts), 2)
        metrics.append(learner.finish(rollout))
    assert metrics[0]["train/loss"] == pytest.approx(metrics[1]["train/loss"])


def test_largest_values_of_parts_are_not_averaged() -> None:
    metrics = [PartMetrics(), PartMetrics()]
    for values, weights in (((-3.0, -1.0), (5.0, 1.0)), ((2.0, 9.0), (4.0, 0.0))):
        for part, value, weight in zip(metrics, values, weights, strict=True):
            part.add({"error_max": value, "error": torch.tensor(value)}, weight)
    found = merge([part.take() for part in metrics], {})
    assert found == {"error_max": (-1.0 + 2.0) / 2, "error": (-16.0 / 6 + 2.0) / 2}


# --- the same in several processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(shared_servers: Any) -> ForkServer:
    return shared_servers("ranks")


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_ranks_make_the_same_updates_as_parts_of_one_process(kind: str, server: ForkServer, tmp_path: Path) -> None:
    """Parameters are equal bit for bit after every update; some updates stop, are skipped, or lack a batch."""
    expected = run_updates(LocalGroup(3))
    by_update = {name: expected[update][:3] for update, name in UNUSUAL.items()}
    assert by_update == {
        "no batch": [1, False, False],
        "not finite": [0, False, False],
        "stop": [0, True, False],
        "interrupt": [1, False, True],
        "no batches": [0, False, False],
    }
    with Ranks(server, kind, 3, tmp_path, "exchange_gradients") as ranks:
        assert ranks.results() == [expected] * 3
