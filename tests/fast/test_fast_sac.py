"""Tests that the fast path of SAC gives the gradients, metrics and priorities of autograd for all batch sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remuda import fast
from remuda.agents import ActorAgent, Critic
from remuda.algorithms import SAC
from remuda.config.resolve import resolve_config
from remuda.core import Clock, Space
from remuda.data import Batch, Steps
from remuda.fast.relu_net import linear_layers
from remuda.fast.sac import FastSAC, critic_layers, sac_gradients
from remuda.fast.sac_side_by_side import side_by_side_gradients
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.nets import MLP
from remuda.replay.transitions import Returns
from remuda.runs.train import make_recipe

torch.set_num_threads(1)


def box(width: int, low: float, high: float) -> Space:
    return Space("box", (width,), "float32", np.full(width, low, np.float32), np.full(width, high, np.float32))


OBS, ACTION = box(5, -1.0, 1.0), box(3, -2.0, 1.0)


def make(activation: str = "relu", critics: int = 2, **options: Any) -> SAC:
    torch.manual_seed(0)
    agent = ActorAgent(OBS, ACTION, lambda shape: MLP(shape, (16, 24), activation, False), stochastic=True)
    kinds = [Critic(agent.inputs, OBS, ACTION, None, (16, 24), activation) for _ in range(critics)]
    return SAC(agent, kinds, seed=7, **options)


def draw(count: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = (torch.randn(count, 5, generator=rng) for _ in range(2))
    action = -2 + 3 * torch.rand(count, 3, generator=rng)
    reward, weight = torch.randn(count, generator=rng), torch.rand(count, generator=rng)
    discount = 0.99 * (torch.rand(count, generator=rng) > 0.1)
    steps = Steps(obs, action, reward, discount, torch.ones(count, dtype=torch.bool), None, None)
    return Batch(steps, Returns(reward, discount), next_obs=next_obs, weight=weight)


@pytest.mark.parametrize("count", [1, 6, 300, 1500, 2048, 5000])
@pytest.mark.parametrize("options", [{}, {"ent_coef": 0.3}], ids=["learned", "fixed"])
@pytest.mark.parametrize("make_gradients", [sac_gradients, side_by_side_gradients], ids=["together", "side by side"])
def test_gradients_metrics_and_priorities_equal_those_of_autograd(
    count: int, options: dict[str, Any], make_gradients: Any
) -> None:
    sac, batch, clock = make(**options), draw(count), Clock(11, 0.3)
    with torch.no_grad():  # target critics differ from the critics, and deviations are at both bounds
        for parameter in sac.target_critics.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        sac.agent.head.bias[3:] = torch.tensor([-21.0, 2.5, 0.0])
    compute = make_gradients(sac)
    assert compute is not None
    by_hand = compute(batch, clock)
    assert by_hand is not None
    losses = sac.losses(batch, clock)
    assert by_hand.groups.keys() == losses.groups.keys()
    for name, parameters in sac.groups().items():
        found = torch.autograd.grad(losses.groups[name], parameters, retain_graph=True)
        exact = torch.cat([gradient.reshape(-1) for gradient in found])
        assert torch.allclose(by_hand.groups[name], exact, rtol=1e-4, atol=1e-6), name
    assert by_hand.metrics.keys() == losses.metrics.keys()
    for name, value in losses.metrics.items():
        assert float(by_hand.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    assert by_hand.priority is not None
    assert torch.allclose(by_hand.priority, losses.priority, rtol=1e-4, atol=1e-5)


def test_other_networks_and_subclasses_use_autograd() -> None:
    assert fast.find(make()) is not None
    assert fast.find(make("tanh")) is None
    assert fast.find(make(critics=3)) is None

    class Own(SAC):
        """A subclass that may override any of the methods that `losses` calls."""

    plain = make()
    assert fast.find(Own(plain.agent, list(plain._critics), seed=1)) is None


@pytest.mark.parametrize(("options", "is_on"), [({}, True), ({"fast_path": False}, False)])
def test_option_turns_the_fast_path_on_and_off(options: dict[str, Any], is_on: bool) -> None:
    groups = {"agent": {"hidden": (16,), **options}}
    learner = make_recipe(*resolve_config({"algo": "sac", "env": "Pendulum-v1"}, groups)).make_learner()
    assert (learner._fast_path is not None) == is_on


def test_fast_path_that_disagrees_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sac = make()
    actor, critics = linear_layers(sac.agent.trunk, sac.agent.head), critic_layers(sac.critics)
    targets = critic_layers(sac.target_critics)
    assert actor is not None
    assert critics is not None
    assert targets is not None
    by_hand = FastSAC(sac, actor, critics, targets)
    by_hand.critics.reverse()  # each critic gets the other's gradient
    by_hand.critics[0].layers = [(weight * 2, bias) for weight, bias in by_hand.critics[0].layers]
    checked = fast.CheckedGradients("SAC", by_hand.gradients)
    learner = Learner(sac, OptimizerOptions(), lambda progress: 1e-3, None, fast_path=checked)
    learner.step(draw(64))
    assert "SAC: fast-path gradient disagrees with autograd; falling back to autograd." in caplog.text
    assert checked.compute is None
