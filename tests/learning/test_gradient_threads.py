"""Tests that gradients computed in parts by several threads equal those of the whole batch."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollouts import box, make_agent, make_rollout, move, somewhere

from remuda.algorithms import IMPALA
from remuda.data import Batch
from remuda.learning.gradient_threads import GradientThreads
from remuda.learning.gradients import Gradients
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions


def learner_of(algorithm: Any, num_parts: int) -> Learner:
    return Learner(algorithm, OptimizerOptions(), lambda progress: 0.0, None, num_parts)


def stale_batch(impala: IMPALA, B: int) -> Batch:
    """Return a batch of a policy that has changed since, whose columns have different numbers of real rows."""
    rollout = make_rollout(impala.agent, 9, B, seed=2)
    move(impala.agent)
    with torch.no_grad():
        batch = impala.prepare(rollout)
    assert (~batch.steps.mask).sum(0).unique().numel() > 1
    return batch


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("remuda-gradients")}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num_parts", [2, 3, 5, 9])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_gradients_in_parts_equal_those_of_the_whole_batch(reduction: Any, num_parts: int, action: str) -> None:
    """Nine parts exceed the number of columns."""
    agent = make_agent(action=box((2,)) if action == "box" else None)
    impala = IMPALA(agent, 5, gamma=0.9, reduction=reduction, ent_coef=0.02, rho_clip=1.1)
    batch = stale_batch(impala, 5)
    whole, parts = learner_of(impala, 1), learner_of(impala, num_parts)
    expected, found = whole.gradients(batch), parts.gradients(batch)
    parts.close()
    assert found.version == expected.version
    assert found.groups.keys() == expected.groups.keys()
    torch.testing.assert_close(found.groups["policy"], expected.groups["policy"], rtol=1e-4, atol=1e-5)
    assert float(expected.groups["policy"].norm()) > 0.01
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert float(found.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    assert 0 < float(expected.metrics["rho_clipped"]) < 1


def test_gradients_in_parts_of_a_recurrent_agent() -> None:
    agent = make_agent(core="gru", core_size=8, shared=True)
    impala = IMPALA(agent, 4, gamma=0.9, reduction="mean")
    rollout = make_rollout(make_agent(), 9, 4, seed=2)
    with torch.no_grad():
        batch = replace(impala.prepare(rollout), state=somewhere(agent, 4))
    whole, parts = learner_of(impala, 1), learner_of(impala, 3)
    expected, found = (learner.gradients(batch).groups["policy"] for learner in (whole, parts))
    parts.close()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_part_without_real_rows_contributes_nothing(reduction: Any) -> None:
    impala = IMPALA(make_agent(), 4, gamma=0.9, reduction=reduction)
    batch = stale_batch(impala, 4)
    mask = batch.steps.mask.clone()
    mask[:, :2] = False
    batch = replace(batch, steps=batch.steps.replace(mask=mask))
    whole, parts = learner_of(impala, 1), learner_of(impala, 2)
    expected, found = whole.gradients(batch), parts.gradients(batch)
    parts.close()
    torch.testing.assert_close(found.groups["policy"], expected.groups["policy"], rtol=1e-4, atol=1e-5)
    assert float(found.metrics["rho"]) == pytest.approx(float(expected.metrics["rho"]))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_batch_without_real_rows_has_zero_gradient(reduction: Any) -> None:
    """Such a batch occurs if every env is reset in a rollout of one row."""
    impala = IMPALA(make_agent(), 4, gamma=0.9, reduction=reduction)
    batch = stale_batch(impala, 4)
    batch = replace(batch, steps=batch.steps.replace(mask=torch.zeros_like(batch.steps.mask)))
    for num_parts in (1, 2):
        learner = learner_of(impala, num_parts)
        found = learner.gradients(batch)
        learner.close()
        assert not found.groups["policy"].any()


def test_sums_and_means_by_worked_numbers() -> None:
    """With two columns of 3 and 1 real rows, a mean weights them by 3/4 and 1/4, and a sum adds them."""
    impala = IMPALA(make_agent(), 2, gamma=0.9)
    rollout = make_rollout(impala.agent, 3, 2)
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    batch = Batch(rollout.steps.replace(mask=mask), next_obs=rollout.next_obs)

    def of(part: Batch) -> Gradients:
        rows = float(part.steps.mask.sum())
        metrics: dict[str, Any] = {"loss": rows, "rho": torch.tensor(rows)}
        return Gradients({"policy": (torch.full((2,), rows),)}, 6, metrics, None, stop=rows == 1)

    by_mean, by_sum = GradientThreads(2, "mean"), GradientThreads(2, "sum")
    mean, total = by_mean.gradients(of, batch), by_sum.gradients(of, batch)
    by_mean.close()
    by_sum.close()
    assert mean.groups["policy"].tolist() == [0.75 * 3 + 0.25 * 1] * 2
    assert total.groups["policy"].tolist() == [4.0] * 2
    assert float(mean.metrics["loss"]) == float(mean.metrics["rho"]) == 2.5
    assert float(total.metrics["loss"]) == 4.0
    assert float(total.metrics["rho"]) == 2.5, "metrics other than losses are means over rows"
    assert mean.stop
    assert mean.version == 6


def test_error_in_a_part_is_raised() -> None:
    impala = IMPALA(make_agent(), 2, gamma=0.9)
    parts, batch = GradientThreads(2, "sum"), impala.prepare(make_rollout(impala.agent, 3, 2))

    def fail(part: Batch) -> Gradients:
        raise ZeroDivisionError("in a part")

    with pytest.raises(ZeroDivisionError, match="in a part"):
        parts.gradients(fail, batch)
    parts.close()


def test_threads_end_with_the_learner() -> None:
    before = threads()
    impala = IMPALA(make_agent(), 4, gamma=0.9)
    learner = learner_of(impala, 3)
    batch = impala.prepare(make_rollout(impala.agent, 3, 4))
    learner.step(batch)
    assert len(threads() - before) > 0
    learner.close()
    assert threads() <= before
    learner.close()
    assert learner.gradients(batch).groups["policy"].isfinite().all(), "the learner stays usable after close"


def test_one_part_starts_no_thread() -> None:
    impala = IMPALA(make_agent(), 4, gamma=0.9)
    before = threads()
    learner_of(impala, 1).step(impala.prepare(make_rollout(impala.agent, 3, 4)))
    assert threads() == before
