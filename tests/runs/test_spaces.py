"""Test the spaces stored in a run directory: they are exact and checked, and a policy is loaded with them alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym

import remuda
from remuda.core import Space
from remuda.envs.spaces import action_space, observation_space, space_to_wire
from remuda.errors import CheckpointError, EnvSpecError
from remuda.runs.spaces import read_spaces, write_spaces

DISCRETE = gym.Discrete(4, start=-1)
OBSERVATIONS = [
    gym.Box(-1, 1, (3,)),
    gym.Box(np.array([-np.inf, 0.1, -0.0], np.float32), np.array([np.inf, 1 / 3, 1e-45], np.float32)),
    gym.Box(0, 255, (4, 8, 8), np.uint8),
    gym.Box(np.array([-(2**63)]), np.array([2**63 - 1]), dtype=np.int64),
    gym.Box(0, 1, (2,), np.bool_),
    gym.Box(-1, 1, ()),
    gym.Box(-1, 1, (0,)),
    DISCRETE,
    gym.MultiDiscrete([[2, 3], [4, 5]], start=[[0, -1], [2, 3]]),
    gym.MultiBinary((2, 2)),
    gym.Dict({"left arm": gym.Tuple([gym.Box(0, 1, (2,)), gym.Dict({"x": DISCRETE, "class": gym.Discrete(2)})])}),
]


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
def test_every_space_is_restored_exactly(tmp_path: Path, space: Any) -> None:
    observation = observation_space(space, "env")
    action = action_space(gym.Dict({"move": gym.Box(-1, 1, (2,)), "jump": DISCRETE}), "env")
    write_spaces(tmp_path, observation, action)
    found = read_spaces(tmp_path)
    assert found is not None
    assert [space_to_wire(each) for each in found] == [space_to_wire(each) for each in (observation, action)]


def test_the_file_of_an_image_space_is_small(tmp_path: Path) -> None:
    write_spaces(tmp_path, observation_space(gym.Box(0, 255, (4, 84, 84), np.uint8), "env"), Space("discrete", n=2))
    assert (tmp_path / "spaces.json").stat().st_size < 500


BOX = {"kind": "box", "shape": [1], "dtype": "float32", "low": -1.0, "high": 1.0}
DAMAGED = [
    {"kind": "pickle"},
    {**BOX, "dtype": "O"},
    {**BOX, "dtype": "nonsense"},
    {**BOX, "shape": [10**6, 10**6]},
    {**BOX, "shape": [-1]},
    {**BOX, "shape": "text"},
    {**BOX, "shape": [True]},
    {**BOX, "low": [1.0, 2.0]},
    {**BOX, "low": "nan"},
    {**BOX, "low": None},
    {**BOX, "low": {}},
    {**BOX, "dtype": "uint8", "low": -1},
    {**BOX, "dtype": "uint8", "low": 0.5},
    {"kind": "discrete", "shape": [], "dtype": "int64", "n": 0, "start": 0},
    {"kind": "discrete", "shape": [], "dtype": "int64", "n": 10**30, "start": 0},
    {"kind": "multidiscrete", "shape": [1], "dtype": "int64", "sizes": 0, "starts": 0},
    {"kind": "dict", "entries": {}, "keys": []},
    {"kind": "dict", "entries": {"__class__": BOX}, "keys": ["a"]},
    {"kind": "dict", "entries": {"a": BOX}, "keys": []},
    {"kind": "tuple", "entries": [1]},
    [],
    "text",
    None,
]


@pytest.mark.parametrize("values", DAMAGED, ids=str)
def test_damaged_or_hostile_files_are_refused_in_one_sentence(tmp_path: Path, values: Any) -> None:
    (tmp_path / "spaces.json").write_text(json.dumps({"observation": BOX, "action": values}))
    with pytest.raises(
        CheckpointError, match=r"spaces\.json cannot be used \(.*\): restore it, or delete it"
    ) as caught:
        read_spaces(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_json_or_deeply_nested_are_refused(tmp_path: Path) -> None:
    deep: Any = BOX
    for _ in range(100):
        deep = {"kind": "tuple", "entries": {"item0": deep}}
    for text in ("{", "[]", "[" * 100_000, "\0", json.dumps({"observation": deep, "action": BOX})):
        (tmp_path / "spaces.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"spaces\.json cannot be used"):
            read_spaces(tmp_path)


def train(out: Path, env: Any, **settings: Any) -> remuda.Run:
    small = {"algo": {"n_steps": 4, "batch_size": 8}, "sampler": {"envs": 2}, "log": {"tensorboard": False}}
    return remuda.train("ppo", env, steps=8, out=out, quiet=True, eval={"episodes": 0}, **small, **settings)


def test_a_policy_is_loaded_where_the_env_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vanishing.py").write_text("from puzzles import *\nfrom counting import make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = train(tmp_path / "run", "vanishing:make", agent={"prev_action": True, "prev_reward": True})
    obs = np.zeros(3, np.float32)
    before, _ = remuda.load(run.path).act(obs)
    (tmp_path / "vanishing.py").unlink()
    del sys.modules["vanishing"]
    assert remuda.load(run.path).act(obs)[0] == before
    with pytest.raises(EnvSpecError, match="module vanishing was not found"):
        remuda.Run(run.path).evaluate(episodes=1)
    (run.path / "spaces.json").unlink()  # older versions did not write this file
    with pytest.raises(EnvSpecError, match="module vanishing was not found"):
        remuda.load(run.path)


def test_an_old_run_reads_spaces_from_its_env_until_it_is_resumed(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "CartPole-v1")
    kept = (run.path / "spaces.json").read_text()
    (run.path / "spaces.json").unlink()
    assert remuda.load(run.path).act(np.zeros(4))[0] in (0, 1)
    remuda.resume(run.path, steps=16, quiet=True)
    assert (run.path / "spaces.json").read_text() == kept


def test_loading_builds_no_env(tmp_path: Path) -> None:
    built = []

    def make() -> gymnasium.Env[Any, Any]:
        built.append(1)
        return gymnasium.make("CartPole-v1")

    run = train(tmp_path / "run", make)
    count = len(built)
    assert remuda.load(run.path).act(np.zeros(4))[0] in (0, 1)
    assert len(built) == count
    (run.path / "spaces.json").write_text("{")
    with pytest.raises(CheckpointError, match="delete it and pass env"):
        remuda.load(run.path)
    assert remuda.load(run.path, env=make).act(np.zeros(4))[0] in (0, 1)


def test_a_run_that_fails_before_the_first_round_leaves_no_spaces(tmp_path: Path) -> None:
    with pytest.raises(remuda.RemudaError):
        train(tmp_path / "run", "counting:make", envs={"kwargs": {"fault": "nan", "at": 2}})
    assert not (tmp_path / "run").exists()


def test_an_env_that_does_not_fit_does_not_overwrite_the_spaces(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "CartPole-v1")
    before = (run.path / "spaces.json").read_bytes()
    with pytest.raises(remuda.RemudaError):
        remuda.resume(run.path, env=lambda: __import__("gymnasium").make("Acrobot-v1"), steps=10_000)
    assert (run.path / "spaces.json").read_bytes() == before


def test_spaces_that_need_too_much_memory_are_refused(tmp_path: Path) -> None:
    leaf = {"kind": "box", "shape": [1 << 21], "dtype": "float64", "low": 0.0, "high": 1.0}
    nested = {"kind": "tuple", "entries": {f"e{index}": leaf for index in range(3)}}
    (tmp_path / "spaces.json").write_text(json.dumps({"observation": nested, "action": leaf}))
    with pytest.raises(CheckpointError, match="spaces of 8,388,608 numbers"):
        read_spaces(tmp_path)
