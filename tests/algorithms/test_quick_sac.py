"""SAC by hand against SAC by autograd: the same gradients, metrics and priorities, for few rows and for many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remuda.agents import ActorAgent, Critic
from remuda.algorithms import SAC
from remuda.core import Clock, Space
from remuda.data import Batch, Steps
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.nets import MLP
from remuda.replay.transitions import Returns

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
def test_gradients_metrics_and_priorities_are_those_of_the_losses(count: int, options: dict[str, Any]) -> None:
    sac, batch, clock = make(**options), draw(count), Clock(11, 0.3)
    with torch.no_grad():  # targets that differ from what they follow, and deviations at both bounds
        for parameter in sac.target_critics.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        sac.agent.head.bias[3:] = torch.tensor([-21.0, 2.5, 0.0])
    quick = sac.fast_gradients(batch, clock)
    assert quick is not None
    losses = sac.losses(batch, clock)
    assert quick.groups.keys() == losses.groups.keys()
    for name, parameters in sac.groups().items():
        found = torch.autograd.grad(losses.groups[name], parameters, retain_graph=True)
        exact = torch.cat([gradient.reshape(-1) for gradient in found])
        assert torch.allclose(quick.groups[name], exact, rtol=1e-4, atol=1e-6), name
    assert quick.metrics.keys() == losses.metrics.keys()
    for name, value in losses.metrics.items():
        assert float(quick.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    assert quick.priority is not None
    assert torch.allclose(quick.priority, losses.priority, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_do_is_left_to_autograd() -> None:
    assert make().quick is not None
    assert make("tanh").quick is None
    assert make(critics=3).quick is None
    assert make(quick=False).quick is None

    class Own(SAC):
        """Whatever it does."""

    plain = make()
    assert Own(plain.agent, list(plain._critics), seed=1).quick is None


def test_a_wrong_one_is_noticed_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sac = make()
    assert sac.quick is not None
    sac.quick.critics.reverse()  # each takes the other's gradient
    learner = Learner(sac, OptimizerOptions(), lambda progress: 1e-3, None)
    sac.quick.critics[0].layers = [(weight * 2, bias) for weight, bias in sac.quick.critics[0].layers]
    learner.step(draw(64))
    assert "SAC: fast-path gradient disagrees with autograd; falling back to autograd." in caplog.text
    assert learner._quick is None
