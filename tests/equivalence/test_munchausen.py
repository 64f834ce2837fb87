"""Tests of examples/munchausen.py, a subclass of DQN in under 40 lines with the losses of its paper."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import remuda
from remuda.agents import QAgent
from remuda.core import Clock, Space
from remuda.data import Batch, Steps
from remuda.nets import MLP
from remuda.replay.transitions import Returns

ROOT = Path(__file__).parents[2]
VARIANT = "examples.munchausen:MunchausenDQN"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_example_is_short_and_shown_in_the_docs() -> None:
    code = (ROOT / "examples" / "munchausen.py").read_text()
    assert len(code.splitlines()) < 40
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms" / "dqn.md").read_text(), re.S)
    assert code.split('"""', 2)[2].strip() in [block.strip() for block in shown]


def test_losses_against_a_slow_reference() -> None:
    from examples.munchausen import MunchausenDQN

    box = Space("box", (3,), "float32", np.full(3, -1, np.float32), np.full(3, 1, np.float32))
    torch.manual_seed(0)
    agent = QAgent(box, Space("discrete", (), "int64", n=4), lambda shape: MLP(shape, (8,), "relu"))
    algorithm = MunchausenDQN(agent, 1, delta=None)
    with torch.no_grad():
        for parameter in algorithm.target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    obs, later = torch.randn(6, 3), torch.randn(6, 3)
    action, reward, discount = torch.randint(4, (6,)), torch.randn(6), torch.tensor([0.9, 0.0, 0.9, 0.81, 0.9, 0.0])
    steps = Steps(obs, action, reward, discount, torch.ones(6, dtype=torch.bool), None, None)
    found = algorithm.losses(Batch(steps, Returns(reward, discount), next_obs=later), Clock())

    q, before, after = (
        net.unroll(x, None, None)[0].detach().double().numpy()
        for net, x in ((agent, obs), (algorithm.target, obs), (algorithm.target, later))
    )
    errors = []
    for i in range(6):
        policy, next_policy = (np.exp((v - v.max()) / 0.03) for v in (before[i], after[i]))
        policy, next_policy = policy / policy.sum(), next_policy / next_policy.sum()
        bonus = 0.9 * max(-1.0, min(0.0, 0.03 * np.log(policy[action[i]])))
        soft = sum(p * (v - 0.03 * np.log(p)) for p, v in zip(next_policy, after[i], strict=True) if p > 0)
        errors.append(float(reward[i]) + bonus + float(discount[i]) * soft - q[i, action[i]])
    assert float(found.groups["q"].detach()) == pytest.approx(np.mean(np.square(errors)) / 2, rel=1e-4)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx(np.abs(errors).tolist(), rel=1e-4)


def test_example_trains_resumes_and_loads(tmp_path: Path) -> None:
    settings = {"learning_starts": 100, "train_freq": 4}
    run = remuda.train(VARIANT, "CartPole-v1", steps=600, out=tmp_path / "run", quiet=True, algo=settings)
    assert run.result["updates"] > 20
    assert "train/bonus" in (run.path / "metrics.jsonl").read_text()
    remuda.resume(run.path, steps=700, quiet=True)
    assert remuda.load(run.path).act(np.zeros(4, np.float32))[0] in (0, 1)
