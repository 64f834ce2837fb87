"""Tests of algorithms with a replay on tasks with a known optimum (seconds) and of default presets (minutes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remuda

SMALL: dict[str, Any] = {
    "sampler": {"envs": 4},
    "agent": {"hidden": (32,), "activation": "relu"},
    "replay": {"capacity": 4000, "ratio": 8.0},
    "eval": {"episodes": 20},
    "log": {"tensorboard": False},
    "quiet": True,
}
Q = {
    "gamma": 0.5,
    "batch_size": 32,
    "train_freq": 2,
    "learning_starts": 200,
    "learning_rate": "2e-3",
    "target_update_interval": 50,
    "v_min": -1.0,
    "v_max": 3.0,
}


@pytest.mark.parametrize("ends", ["truncate", "terminate"])
@pytest.mark.parametrize("algo", ["dqn", "rainbow"])
def test_identity_is_learned_with_truncation_and_termination(tmp_path: Path, algo: str, ends: str) -> None:
    options = {**SMALL, "algo": Q, "envs": {"kwargs": {"ends": ends, "n": 3, "start": 2}}}
    run = remuda.train(algo, "puzzles:identity", steps=3000, seed=1, out=tmp_path / "run", **options)
    assert run.result["eval"]["mean_reward"] >= 9.9


@pytest.mark.parametrize("algo", ["ddpg", "td3", "sac"])
def test_continuous_actions_follow_the_observation(tmp_path: Path, algo: str) -> None:
    settings = {"gamma": 0.5, "batch_size": 64, "learning_starts": 200, "learning_rate": "2e-3", "train_freq": 4}
    run = remuda.train(algo, "puzzles:follow", steps=3000, seed=1, out=tmp_path / "run", algo=settings, **SMALL)
    assert run.result["eval"]["mean_reward"] >= -0.5, "random actions score about -10"


CASES = [
    ("dqn", "CartPole-v1", 200_000, 450),
    ("rainbow", "CartPole-v1", 100_000, 400),
    ("r2d1", "Remuda/Recall-v0", 150_000, 0.95),
    ("ddpg", "Pendulum-v1", 12_000, -250),
    ("td3", "Pendulum-v1", 12_000, -250),
    ("sac", "Pendulum-v1", 12_000, -250),
]


@pytest.mark.long
@pytest.mark.parametrize(("algo", "env", "steps", "goal"), CASES)
def test_presets_learn(tmp_path: Path, algo: str, env: str, steps: int, goal: float) -> None:
    run = remuda.train(algo, env, steps=steps, seed=21, out=tmp_path / "run", quiet=True, eval={"episodes": 50})
    assert run.result["eval"]["mean_reward"] >= goal
