"""Test runs that were written by another version of Remuda, and runs that fail before they begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remuda
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError, RemudaError
from remuda.learning import checkpoint


def train(path: Path | None, **settings: Any) -> Any:
    options: dict[str, Any] = {
        "algo": {"learning_starts": 20, "batch_size": 4},
        "replay": {"capacity": 500},
        "agent": {"hidden": (8,)},
        "sampler": {"envs": 2},
        "eval": {"episodes": 0},
        "log": {"tensorboard": False},
    }
    given: dict[str, Any] = {"env": "CartPole-v1", "steps": 60, "seed": 1, "quiet": True, **options, **settings}
    return remuda.train("dqn", out=path, **given)


@pytest.mark.parametrize(
    ("blob", "entry"), [("journal", "is_owed"), ("replay", "again"), ("sampler", "is_over"), ("progress", "luck")]
)
def test_a_checkpoint_with_a_missing_or_unknown_entry_is_not_resumed(
    blob: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing or unknown entry gives an error of one sentence, and the policy can still be loaded."""
    snapshot = checkpoint.snapshot

    def of_another_version(step: int, learner: Any, progress: Any, blobs: dict[str, bytes], *rest: Any) -> Any:
        if blob == "progress":
            progress = {**progress, entry: 1}
        else:
            blobs = {**blobs, blob: pack(without(unpack(blobs[blob]), entry))}
        return snapshot(step, learner, progress, blobs, *rest)

    monkeypatch.setattr(checkpoint, "snapshot", of_another_version)
    train(tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"was written by another version of Remuda .*: resume it with"):
        remuda.resume(tmp_path / "run", steps=100, quiet=True)
    assert remuda.load(tmp_path / "run").act(np.zeros(4, np.float32))[0] in (0, 1)


def without(saved: dict[str, Any], entry: str) -> dict[str, Any]:
    """Return a copy without the given entry, at any depth."""
    assert entry in str(saved)
    return {
        name: without(value, entry) if isinstance(value, dict) and entry in str(value) else value
        for name, value in saved.items()
        if name != entry
    }


def test_a_run_that_fails_before_it_begins_is_not_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = train(None)
    assert Path("runs/latest").resolve() == good.path.resolve()
    always = {"kwargs": {"step": 0.0, "reset": 1.0}, "max_worker_restarts": 1}
    with pytest.raises(RemudaError):
        train(None, env="own_things:flaky_cartpole", scheme="parallel", envs=always)
    assert Path("runs/latest").resolve() == good.path.resolve()
    assert Path("runs/latest").exists()
