"""Tests of examples/dqn.py, a custom loop on EnvPool and ReplayBuffer in about 60 lines that learns CartPole."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn.py"


@pytest.fixture
def example() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("example_dqn", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield module
    torch.set_num_threads(threads)


def test_example_is_short_and_reproducible(example: Any) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 62
    found = [example.train(steps=400, warm_up=100, batch_size=16) for _ in range(2)]
    assert len(found[0][1]) > 5, "some episodes ended"
    assert found[0][1] == found[1][1]
    first, second = ({name: tensor.tolist() for name, tensor in net.state_dict().items()} for net, _ in found)
    assert first == second
    untrained, _ = example.train(steps=80, warm_up=100)
    assert first != {name: tensor.tolist() for name, tensor in untrained.state_dict().items()}, (
        "training changes the parameters"
    )


@pytest.mark.long
def test_example_learns_cartpole(example: Any) -> None:
    _, returns = example.train(seed=1)
    assert np.mean(returns[-30:]) > 400
