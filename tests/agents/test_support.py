"""Tests of supports of return distributions: derivation, publication with the weights, and the warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from rollouts import box, discrete

from remuda.agents import QAgent
from remuda.agents.support import (
    DEFAULT_SUPPORT,
    WATCHED_UPDATES,
    ClippedTargets,
    ReturnRange,
    clipped_share,
    derive_support,
)
from remuda.learning.weights import SharedWeights
from remuda.nets import MLP


def make_agent(**options: Any) -> QAgent:
    torch.manual_seed(0)
    return QAgent(box((3,)), discrete(4), lambda shape: MLP(shape, (5,)), **{"atoms": 5, **options})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            ReturnRange(-86.6, 0.0, -100.0),
            (-125.0, 25.0),
        ),  # MountainCar: reward -1 in each of 200 steps, then truncated
        (ReturnRange(-3.9, 0.0, -100.0), (-125.0, 25.0)),  # the same, but only a few steps were seen
        (ReturnRange(0.0, 45.0, 100.0), (-25.0, 135.0)),  # CartPole with random actions
        (ReturnRange(0.0, 1.0, 0.2), (-0.25, 3.0)),  # a single reward at the end
        (ReturnRange(-4.0, 2.0, 0.0), (-5.5, 6.0)),
    ],
)
def test_supports_by_worked_numbers(seen: ReturnRange, expected: tuple[float, float]) -> None:
    assert derive_support(seen) == pytest.approx(expected)


def test_default_support_without_rewards_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert derive_support(ReturnRange(0.0, 0.0, 0.0)) == DEFAULT_SUPPORT
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no reward other than 0 was seen" in caplog.text


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (("auto", "auto"), (-7.0, 3.0)),
        ((-1.0, "auto"), (-1.0, 3.0)),
        (("auto", 1.0), (-7.0, 1.0)),
        (("auto", -20.0), (-30.0, -20.0)),  # below the derived range
        ((5.0, "auto"), (5.0, 15.0)),
    ],
)
def test_given_bounds_are_kept(bounds: Any, expected: tuple[float, float]) -> None:
    agent = make_agent(v_min=bounds[0], v_max=bounds[1])
    assert not agent.has_support
    agent.set_support(-7.0, 3.0)
    assert agent.has_support
    torch.testing.assert_close(agent.support, torch.linspace(*expected, 5))


def test_only_an_automatic_support_is_in_the_state_dict() -> None:
    assert "support" not in make_agent(v_min=-3.0, v_max=3.0).state_dict()
    assert "support" not in make_agent(v_min="auto", v_max="auto", atoms=1).state_dict()
    agent, other = (make_agent(v_min="auto", v_max="auto") for _ in range(2))
    agent.set_support(-7.0, 3.1)
    other.load_state_dict(agent.state_dict())
    assert torch.equal(other.support, agent.support)
    assert other.has_support


def test_support_is_published_with_the_weights() -> None:
    ours, theirs = (make_agent(v_min="auto", v_max="auto") for _ in range(2))
    weights = SharedWeights(ours)
    joined = SharedWeights(theirs, fd=weights.fd)
    try:
        ours.set_support(-7.0, 3.1)
        weights.publish(1)
        assert joined.pull(-1) == 1
        assert torch.equal(theirs.support, ours.support)
    finally:
        joined.close()
        weights.close()


def test_clipped_share_by_worked_numbers() -> None:
    support = torch.tensor([-2.0, 0.0, 2.0])
    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]])
    # Atoms move to -3, -1, 1 in the first row, where -3 is outside, and all to 3 in the second, which is terminal.
    share, low, high = clipped_share(p, torch.tensor([-1.0, 3.0]), torch.tensor([1.0, 0.0]), support)
    assert (share.item(), low.item(), high.item()) == (0.75, -3.0, 3.0)
    share, low, high = clipped_share(p, torch.zeros(2), torch.ones(2), support)
    assert (share.item(), low.item(), high.item()) == (0.0, -2.0, 2.0)


def test_large_clipped_share_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    support, numbers = torch.tensor([-10.0, 0.0, 10.0]), torch.tensor([-12.5, 9.0])
    watch = ClippedTargets()
    for share in (0.01, 0.3, 0.3):
        for _ in range(WATCHED_UPDATES):
            watch.add(torch.tensor(share), *numbers, support)
        if share == 0.01:
            assert not caplog.records
    assert [record.getMessage() for record in caplog.records] == [
        "30 % of target distributions are clipped to the support -10..10, as they reach from -12.5 to 9: set "
        "algo.v_min and algo.v_max to the smallest and largest discounted return."
    ]
