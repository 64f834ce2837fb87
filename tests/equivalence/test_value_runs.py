"""Tests that runs with a replay are reproducible: repeated, in worker processes, and resumed (R22, R23)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import remuda
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError
from remuda.learning.checkpoint import list_checkpoints, load_newest, parameters_hash

SMALL: dict[str, Any] = {
    "quiet": True,
    "sampler": {"envs": 4},
    "agent": {"hidden": (16,)},
    "algo": {"train_freq": 8, "batch_size": 16, "learning_starts": 64},
    "replay": {"capacity": 400, "ratio": 4.0},  # the ring wraps around
    "eval": {"episodes": 1, "every": 400},
    "log": {"every": 100, "window": 7, "tensorboard": False},
    "checkpoint": {"every": 200},
}
SEQUENCES = {"sequence": 8, "burn_in": 4, "n_step": 2}
MEMORY = {"agent": {"core": "lstm", "core_size": 8}, "replay": SEQUENCES, "algo": {"batch_size": 4}}
CUT = {"checkpoint": {"cut_episodes": True}}
PRIORITIES = {"replay": {"prioritized": True, "n_step": 3}}
CASES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "dqn": ("dqn", "CartPole-v1", []),
    "rainbow": ("rainbow", "CartPole-v1", []),
    "rainbow, automatic support": ("rainbow", "Acrobot-v1", []),
    "r2d1": ("r2d1", "CartPole-v1", [MEMORY]),
    "ddpg with drifting noise": ("ddpg", "Pendulum-v1", [{"algo": {"noise": "ou"}}]),
    "td3, prioritised": ("td3", "Pendulum-v1", [PRIORITIES]),
    "sac, normalised": ("sac", "Pendulum-v1", [{"agent": {"normalize_obs": True}}]),
    "sac with memory": ("sac", "Pendulum-v1", [MEMORY]),
    "dqn, no state, so by the grid": ("dqn", "MiniGrid-Empty-5x5-v0", [PRIORITIES, CUT]),
}
PARALLEL = {"scheme": "parallel", "sampler": {"workers": 2}}


def settings(*changes: dict[str, Any]) -> dict[str, Any]:
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for change in changes:
        for name, value in change.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def outcome(path: Path) -> tuple[Any, ...]:
    """Return the hash of the learner's state, counters, the replay's state, and all metrics except timings."""
    found = load_newest(path / "checkpoints")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    about_time = ("time/fps", "time/time_elapsed", "limits/")
    kept = [{name: v for name, v in line.items() if not name.startswith(about_time)} for line in lines]
    counts = {name: found.progress[name] for name in ("steps", "rounds", "episodes", "restarts")}
    replay = unpack(found.blobs["replay"])
    assert found.learner["version"] > 20
    return parameters_hash(found.learner), counts, pack(replay["replay"]), pack(replay["rows"]["tail"]), kept


# Each case is in one of the two tests below in `make test`, and in both in `make test-long`.
SLOW = (
    "rainbow",
    "rainbow, automatic support",
    "td3, prioritised",
    "sac with memory",
    "dqn, no state, so by the grid",
)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long if c in SLOW else ()) for c in CASES])
def test_same_seed_twice_and_in_worker_processes(case: str, tmp_path: Path) -> None:
    algo, env, changes = CASES[case]
    found = []
    for name, more in {"first": {}, "second": {}, "parallel": PARALLEL}.items():
        remuda.train(algo, env, steps=700, seed=3, out=tmp_path / name, **settings(*changes, more))
        found.append(outcome(tmp_path / name))
    assert found[0] == found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SLOW else pytest.mark.long) for c in CASES])
def test_stopped_twice(case: str, tmp_path: Path) -> None:
    algo, env, changes = CASES[case]
    options = settings(*changes)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    remuda.train(algo, env, steps=700, seed=3, out=whole, **options)
    remuda.train(algo, env, steps=700, seed=3, out=pieces, callbacks=[lambda r: r.progress.rounds >= 9], **options)
    remuda.resume(pieces, callbacks=[lambda r: r.progress.rounds >= 15], quiet=True)
    remuda.resume(pieces, quiet=True)
    assert outcome(pieces) == outcome(whole)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["serial", "parallel"])
def test_stopped_pong_run_with_frames_resumes_exactly(scheme: str, tmp_path: Path) -> None:
    """Deduplicated frames are restored too, and native envs, which cannot be saved, are cut at checkpoints."""
    options = settings(CUT, {"replay": {"capacity": 600}, "scheme": scheme, "eval": {"episodes": 0}})
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    remuda.train("dqn", "ALE/Pong-v5", steps=1500, seed=3, out=whole, **options)
    remuda.train("dqn", "ALE/Pong-v5", steps=1500, seed=3, out=pieces, callbacks=[at_20], **options)
    remuda.resume(pieces, quiet=True)
    assert outcome(pieces) == outcome(whole)


def at_20(round: Any) -> bool:
    return bool(round.progress.rounds >= 20)


def replay_files(path: Path) -> list[set[str]]:
    """Return the names of the replay files of each checkpoint, oldest first."""
    found = [json.loads((each / "manifest.json").read_text())["replay"] for each in list_checkpoints(path)]
    return [set(names) for names in found]


@pytest.mark.parametrize("how", ["flipped", "cut short", "missing"])
def test_damaged_replay_falls_back_to_the_previous_checkpoint(tmp_path: Path, how: str) -> None:
    settings = {**SMALL, "replay": {"capacity": 4000, "ratio": 1.0}, "checkpoint": {"every": 200, "keep": "all"}}
    run = remuda.train("dqn", "CartPole-v1", steps=800, out=tmp_path / "run", **settings)
    checkpoints = run.path / "checkpoints"
    *_, before, newest = list_checkpoints(checkpoints)
    *_, known, names = replay_files(checkpoints)
    (name,) = names - known
    file = checkpoints / "replay" / name
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(data[:-1])
    else:
        data[100] ^= 1
        file.write_bytes(data)
    again = remuda.resume(run.path, steps=1000, quiet=True)
    assert again.result["status"] == "complete"
    log = (run.path / "log.txt").read_text()
    assert f"resumed from {before.name}" in log
    assert name in log, "the log names the damaged file"
    assert newest.exists()


def test_entirely_damaged_replay_raises_an_error_that_names_a_file(tmp_path: Path) -> None:
    run = remuda.train("dqn", "CartPole-v1", steps=600, out=tmp_path / "run", **SMALL)
    for file in (run.path / "checkpoints" / "replay").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be used; the newest: replay file .*damaged"):
        remuda.resume(run.path, steps=900, quiet=True)
    assert json.loads((run.path / "result.json").read_text())["status"] == "failed"
