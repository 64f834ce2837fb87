"""Tests that the library trains without the package `remuda.fast`, bit-equal to agent.fast_path=false."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import remuda
from remuda.learning.checkpoint import load_newest

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {"steps": 600, "algo": {"n_steps": 32, "n_epochs": 2}}),
    "sac": ("Pendulum-v1", {"steps": 200, "algo": {"learning_starts": 64}, "agent": {"hidden": (32, 32)}}),
}
SCRIPT = """
import sys

sys.modules["remuda.fast"] = None  # an import of it fails from now on

from test_without_fast import train

for algo in sys.argv[2:]:
    train(algo, f"{sys.argv[1]}/{algo}")
loaded = [name for name, module in sys.modules.items() if name.startswith("remuda.fast") and module is not None]
assert not loaded, loaded
"""


def train(algo: str, out: Any, **agent: Any) -> None:
    env, options = RUNS[algo]
    groups = {**options, "agent": {**options.get("agent", {}), **agent}}
    remuda.train(algo, env, seed=1, out=out, eval={"episodes": 0}, quiet=True, **groups)


def learned(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_newest(run / "checkpoints").learner["algorithm"]
    return found


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with every algorithm in one new interpreter without the package; return the directory of the runs."""
    path = tmp_path_factory.mktemp("without")
    command = [sys.executable, "-c", SCRIPT, str(path), *RUNS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.parametrize("algo", RUNS)
def test_training_without_the_package_equals_training_with_the_option_off(
    algo: str, without: Path, tmp_path: Path
) -> None:
    train(algo, tmp_path / "with")
    train(algo, tmp_path / "off", fast_path=False)
    fast, slow, off = (learned(path) for path in (tmp_path / "with", without / algo, tmp_path / "off"))
    assert slow.keys() == off.keys()
    for name, tensor in off.items():
        assert torch.equal(torch.as_tensor(slow[name]), torch.as_tensor(tensor)), name
    assert any(not torch.equal(torch.as_tensor(fast[name]), torch.as_tensor(off[name])) for name in off)
