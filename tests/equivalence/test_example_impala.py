"""Tests that examples/impala.py, an asynchronous loop, gives the parameters of the package with max_lag=0."""

from pathlib import Path

import pytest
import torch

import remuda
from remuda.learning.checkpoint import load_newest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "impala.py"


def run_example(monkeypatch, **settings):
    monkeypatch.syspath_prepend(str(ROOT))  # workers find the module by the same path
    from examples.impala import train

    with torch.random.fork_rng(devices=[]):
        return train(**settings)


def test_example_gives_the_same_parameters(tmp_path, monkeypatch, capsys):
    example = run_example(monkeypatch, steps=20_000, seed=1, max_lag=0)
    settings = {"steps": 20_000, "seed": 1, "eval": {"episodes": 0}, "quiet": True, "out": tmp_path / "run"}
    scheme = {"name": "async", "max_lag": 0}
    run = remuda.train("impala", "CartPole-v1", scheme=scheme, sampler={"workers": 2}, **settings)
    package = load_newest(run.path / "checkpoints").learner["algorithm"]
    assert package.keys() == example.state_dict().keys()
    for name, tensor in example.state_dict().items():
        assert torch.equal(tensor, package[name]), name
    assert "lag 0" in capsys.readouterr().out


@pytest.mark.long
def test_example_learns_from_older_rollouts_too(monkeypatch, capsys):
    impala = run_example(monkeypatch, steps=20_000, seed=2)
    assert all(parameter.isfinite().all() for parameter in impala.parameters())
    assert "mean return" in capsys.readouterr().out


def test_example_is_short_and_independent_of_the_machinery():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 100
    for package in ("config", "build", "runs", "schemes"):
        assert f"remuda.{package}" not in text, "the example must not use the machinery that it explains"
