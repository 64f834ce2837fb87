"""Test distributional runs on envs without a preset: the support is derived, saved, and used by every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import remuda
from remuda.learning.checkpoint import load_newest

SMALL: dict[str, Any] = {
    "quiet": True,
    "sampler": {"envs": 4},
    "agent": {"hidden": (16,)},
    "algo": {"train_freq": 8, "batch_size": 16, "learning_starts": 128},
    "replay": {"capacity": 2000, "ratio": 8.0},
    "eval": {"episodes": 1, "max_steps": 50},
    "log": {"every": 100, "tensorboard": False},
    "checkpoint": {"every": 200},
}


def last_metrics(path: Path) -> dict[str, float]:
    """Return the last line that has metrics of updates; under async, lines without them may follow."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = next(line for line in reversed(lines) if "train/loss" in line)
    return found


def support(path: Path) -> torch.Tensor:
    state = load_newest(path / "checkpoints").learner["algorithm"]
    assert torch.equal(state["agent.support"], state["target.support"])
    assert state["agent.has_support"]
    found: torch.Tensor = state["agent.support"]
    return found


@pytest.mark.parametrize("scheme", ["serial", "async"])
def test_a_derived_support_contains_the_returns(scheme: str, tmp_path: Path) -> None:
    options = {**SMALL, "sampler": {"envs": 4, "workers": 2} if scheme == "async" else {"envs": 4}}
    remuda.train("rainbow", "MountainCar-v0", steps=800, seed=1, out=tmp_path / "run", scheme=scheme, **options)
    found = support(tmp_path / "run")
    assert found[0] == pytest.approx(-125)
    assert found[-1] == pytest.approx(25)
    last = last_metrics(tmp_path / "run")
    assert last["train/loss"] > 0
    assert -120 < last["train/q_mean"] < 20
    assert last["train/clipped_targets"] < 0.01
    assert (last["train/v_min"], last["train/v_max"]) == (found[0], found[-1])
    assert torch.equal(remuda.load(tmp_path / "run").agent.support, found)


def test_a_resumed_run_keeps_its_support(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stop = [lambda round: round.progress.rounds >= 10]
    remuda.train("rainbow", "Acrobot-v1", steps=800, seed=1, out=path, callbacks=stop, **SMALL)
    before = support(path)
    remuda.resume(path, quiet=True)
    assert torch.equal(support(path), before)


def test_a_support_that_is_too_narrow_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {**SMALL, "algo": {**SMALL["algo"], "v_min": -10, "v_max": 10}}
    remuda.train("rainbow", "MountainCar-v0", steps=800, seed=1, out=tmp_path / "run", **options)
    warned = [
        record.getMessage()
        for record in caplog.records
        if "are clipped to the support -10..10" in record.getMessage()
    ]
    assert len(warned) == 1
    assert last_metrics(tmp_path / "run")["train/clipped_targets"] > 0.02
