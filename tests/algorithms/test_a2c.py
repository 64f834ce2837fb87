"""Tests of A2C: its loss in worked numbers, and its gradient against the first one of PPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent, make_rollout

from remuda.algorithms import A2C, PPO, Targets
from remuda.config.algo_options import A2COptions
from remuda.core import Clock, Space
from remuda.data import Batch, Steps
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.replay import RolloutBuffer


def make_a2c(agent: Any, **options: Any) -> A2C:
    return A2C(agent, 4, gamma=0.99, gae_lambda=0.95, **options)


def known_batch(agent: Any) -> Batch:
    """Return four rows of one observation, with probabilities 1/2, 1/4, 1/8, 1/8 and the value 2."""
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.zero_()
        agent.policy_head.linear.bias.copy_(torch.tensor([0.5, 0.25, 0.125, 0.125]).log())
        agent.value_head.bias.fill_(2)
    obs, action = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 0])
    steps = Steps(obs, action, None, None, torch.ones(4, dtype=torch.bool), None, None)
    return Batch(steps, Targets(torch.tensor([1.0, 2.0, -1.0, 3.0]), torch.tensor([2.0, 3.0, 4.0, 2.0])))


def test_loss_by_worked_numbers() -> None:
    agent = make_agent(discrete(1), discrete(4))
    batch = known_batch(agent)
    losses = make_a2c(agent, ent_coef=0.1, vf_coef=0.25).losses(batch, Clock())
    log2 = math.log(2)
    policy_loss = (1 * 1 + 2 * 2 - 1 * 3 + 3 * 1) * log2 / 4  # the logarithms are -1, -2, -3 and -1 times log 2
    entropy = (0.5 * 1 + 0.25 * 2 + 0.125 * 3 + 0.125 * 3) * log2
    assert losses.metrics["policy_loss"] == pytest.approx(policy_loss)
    assert losses.metrics["value_loss"] == pytest.approx(5 / 4)
    assert losses.metrics["entropy_loss"] == pytest.approx(-entropy)
    assert losses.groups["policy"].item() == pytest.approx(policy_loss + 0.25 * 5 / 4 - 0.1 * entropy)
    assert not losses.stop


def test_advantages_can_be_normalized_over_the_rollout() -> None:
    agent = make_agent(discrete(1), discrete(4))
    batch = known_batch(agent)
    advantage = batch.targets.advantage
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    expected = (normal * torch.tensor([1.0, 2.0, 3.0, 1.0])).mean() * math.log(2)
    found = make_a2c(agent, normalize_advantage=True).losses(batch, Clock())
    assert found.metrics["policy_loss"] == pytest.approx(expected.item())


@pytest.mark.parametrize("action", [discrete(4), box((2,))], ids=["discrete", "box"])
@pytest.mark.parametrize("shared", [False, True], ids=["two nets", "shared"])
def test_gradient_equals_the_first_of_ppo_without_clipping(action: Space, shared: bool) -> None:
    agent = make_agent(action=action, shared=shared)
    options = {"ent_coef": 0.01, "vf_coef": 0.5, "normalize_advantage": False}
    a2c = make_a2c(agent, **options)
    ppo = PPO(agent, 4, gamma=0.99, gae_lambda=0.95, clip_range=lambda progress: 1e9, **options)
    rollout = make_rollout(agent, seed=1)
    found = []
    for algorithm in (a2c, ppo):
        replay = RolloutBuffer(1, None, seed=0)
        replay.add(algorithm.prepare(rollout))
        (batch,) = replay.batches()
        learner = Learner(algorithm, OptimizerOptions(), lambda progress: 0.0, None)
        found.append(learner.gradients(batch).groups["policy"])
    assert found[0].any()
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_training_on_a_fixed_batch_reaches_the_known_optimum() -> None:
    """There are two observations with one good action each, which the optimal policy always takes."""
    agent = make_agent(discrete(2), discrete(3))
    obs, action = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    good = torch.tensor([2, 0])
    advantage, value = torch.where(action == good[obs], 1.0, 0.0), torch.where(obs == 0, -1.0, 4.0)
    steps = Steps(obs, action, None, None, torch.ones(6, dtype=torch.bool), None, None)
    learner = Learner(make_a2c(agent), OptimizerOptions(), lambda progress: 1e-2, None)
    for _ in range(250):
        metrics = learner.step(Batch(steps, Targets(advantage, value))).metrics
    distribution, values = agent.unroll(torch.tensor([0, 1]), None, None)[0]
    assert distribution.log_prob(good).exp().min() > 0.98
    assert metrics["value_loss"] < 1e-3
    torch.testing.assert_close(values, torch.tensor([-1.0, 4.0]), atol=0.1, rtol=0)


def test_defaults() -> None:
    options = A2COptions()
    assert (options.optimizer, options.optimizer_eps, options.rms_alpha) == ("rmsprop", 1e-5, 0.99)
    assert (options.gae_lambda, options.normalize_advantage, options.max_grad_norm) == (1.0, False, 0.5)
