"""Tests that examples/ppo.py, a training loop on its own, gives the parameters of the package."""

import importlib.util
from pathlib import Path

import torch

import remuda
from remuda.learning.checkpoint import load_newest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo.py"


def load_example():
    spec = importlib.util.spec_from_file_location("example_ppo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_gives_the_same_parameters(tmp_path, capsys):
    with torch.random.fork_rng(devices=[]):
        example = load_example().main(steps=5_000, seed=1)
    settings = {"steps": 5_000, "seed": 1, "eval": {"episodes": 0}, "quiet": True, "out": tmp_path / "run"}
    run = remuda.train("ppo", "CartPole-v1", **settings)
    package = load_newest(run.path / "checkpoints").learner["algorithm"]
    assert package.keys() == example.state_dict().keys()
    for name, tensor in example.state_dict().items():
        assert torch.equal(tensor, package[name]), name
    assert "steps" in capsys.readouterr().out


def test_example_is_short_and_independent_of_the_machinery():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 80
    for package in ("config", "build", "runs", "schemes"):
        assert f"remuda.{package}" not in text, "the example must not use the machinery that it explains"
