"""Test that wrong options of algorithms with a replay are refused in one sentence, without creating a run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import remuda
from remuda.build import replay as replays
from remuda.build.recipe import make_recipe
from remuda.build.replay import make_ring, num_frames
from remuda.config import sizes
from remuda.config.resolve import resolve_config
from remuda.config.run_options import ReplayOptions
from remuda.errors import ConfigError

MEMORY = {"agent": {"core": "lstm"}, "replay": {"sequence": 20}}
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("dqn", "Pendulum-v1", {}, r"dqn chooses among a few actions, and those of Pendulum-v1 are a Box: use sac"),
    ("rainbow", "HalfCheetah-v5", {}, r"rainbow chooses among a few actions"),
    (
        "td3",
        "CartPole-v1",
        {},
        r"td3 needs a Box of bounded actions, and those of CartPole-v1 are Discrete: use dqn\.",
    ),
    ("sac", "own_things:unbounded", {}, r"sac needs a Box of bounded actions.*a Box without bounds: use ppo\."),
    ("ddpg", "own_things:two_choices", {}, r"are MultiDiscrete: use ppo\."),
    ("r2d1", "CartPole-v1", {"agent": {"core": None}}, r"r2d1 without agent.core has no memory"),
    ("r2d1", "CartPole-v1", {"algo": {"atoms": 51}}, r"algo\.atoms=51 for r2d1"),
    (
        "dqn",
        "CartPole-v1",
        {"agent": {"core": "gru"}},
        r"agent\.core=gru cannot learn from single rows: set replay\.seq",
    ),
    ("dqn", "CartPole-v1", {"replay": {"sequence": 20}}, r"replay\.sequence=20 without memory: set agent\.core=lstm"),
    ("dqn", "CartPole-v1", {"replay": {"burn_in": 4}}, r"replay\.burn_in=4 without replay\.sequence"),
    (
        "r2d1",
        "CartPole-v1",
        {"replay": {"sequence": 4, "n_step": 5}},
        r"replay\.n_step=5 is longer than replay\.sequence=4: use at most 4\.",
    ),
    (
        "r2d1",
        "CartPole-v1",
        {"replay": {"capacity": 160, "sequence": 20, "n_step": 3}, "sampler": {"envs": 16}},
        r"keeps 10 rows of each of 16 envs, and one draw is over 23: use at least 384\.",
    ),
    ("dqn", "CartPole-v1", {"replay": {"capacity": 2}}, r"one draw is over 3: use at least 32\."),
    (
        "dqn",
        "CartPole-v1",
        {"algo": {"atoms": 51, "v_min": 5, "v_max": 5}},
        r"algo\.v_min=5 is not below algo\.v_max=5",
    ),
    (
        "rainbow",
        "CartPole-v1",
        {"algo": {"v_min": "aut"}},
        r"algo\.v_min='aut' is not a number or auto: give for example 100, or auto\.",
    ),
    (
        "sac",
        "Pendulum-v1",
        {"algo": {"ent_coef": "some"}},
        r"algo\.ent_coef='some' is not a weight: give auto, auto_0",
    ),
    ("sac", "Pendulum-v1", {"algo": {"ent_coef": "-1"}}, r"algo\.ent_coef='-1' is not a weight"),
    ("sac", "Pendulum-v1", {"algo": {"ent_coef": "auto_0"}}, r"algo\.ent_coef='auto_0' is not a weight"),
    ("dqn", "CartPole-v1", {"replay": {"frames": 3}}, r"replay\.frames=3 does not divide .* of shape \(4,\)"),
    (
        "dqn",
        "CartPole-v1",
        {"replay": {"alpha": 0.5}},
        r"replay\.alpha=0\.5 without replay\.prioritized means nothing: set both or neither\.",
    ),
    ("dqn", "CartPole-v1", {"algo": {"epsilon": "linear(1.5, 0)"}}, r"algo\.epsilon=linear\(1\.5, 0\) is too large"),
    ("ppo", "CartPole-v1", {"replay": {"n_step": 3}}, r"ppo does not use a replay: leave them out\."),
    (
        "own_things:endless",
        "CartPole-v1",
        {},
        r"own_things:endless is not the class of an algorithm: derive one from",
    ),
]


@pytest.mark.parametrize(("algo", "env", "groups", "sentence"), CASES)
def test_mistakes_are_refused_in_one_sentence_without_a_run(
    algo: str, env: str, groups: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence) as found:
        remuda.train(algo, env, steps=100, out=tmp_path / "run", quiet=True, **groups)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_a_replay_larger_than_memory_is_refused_with_the_largest_capacity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = 3_000_000_000
    monkeypatch.setattr(replays, "free_memory", lambda: free)
    groups: dict[str, Any] = {"replay": {"capacity": 1_000_000}}
    sentence = r"replay\.capacity=1000000 takes 7\.\d GB, more than 90 % of the 3\.0 GB of free memory: use at most"
    with pytest.raises(ConfigError, match=sentence) as found:
        remuda.train("dqn", "ALE/Pong-v5", steps=100, out=tmp_path / "run", quiet=True, **groups)
    assert not (tmp_path / "run").exists()
    most = int(re.findall(r"at most (\d+)", str(found.value))[0])
    assert 350_000 < most < 400_000  # nine tenths of the free memory hold this many rows of 7 kB
    config, _, info = resolve_config({"algo": "dqn", "env": "ALE/Pong-v5"}, {"replay": {"capacity": most}})
    ring = SimpleNamespace(counters=SimpleNamespace(pause_timeout=30.0))
    monkeypatch.setattr(replays, "FrameRing", lambda *arguments: ring)
    assert make_ring(config, info, None) is ring
    assert ring.counters.pause_timeout > config.envs.step_timeout, "a pause waits until a hanging writer is replaced"


def test_a_rollout_that_needs_nearly_all_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[str, Any] = {"sampler": {"envs": 10}, "algo": {"n_steps": 10_000, "batch_size": 10_000}}
    settings = {"algo": "ppo", "env": "CartPole-v1"}
    row_bytes = 16 + 8 + 16  # observation, action, and the other values of a row
    monkeypatch.setattr(sizes, "free_memory", lambda: int(100_000 * row_bytes / 0.95))
    sentence = r"a rollout of 100000 rows .* takes 0\.0 GB, more than 90 % of the 0\.0 GB of free memory: use smaller"
    with pytest.raises(ConfigError, match=sentence):
        resolve_config(settings, groups)
    monkeypatch.setattr(sizes, "free_memory", lambda: int(100_000 * row_bytes / 0.85))
    resolve_config(settings, groups)


@pytest.mark.parametrize(
    ("env", "asked", "found"),
    [("ALE/Pong-v5", 0, 4), ("ALE/Pong-v5", 1, 1), ("ALE/Pong-v5", 2, 2), ("MinAtar/Breakout-v1", 0, 1)],
)
def test_the_number_of_frames_is_derived_from_the_env(env: str, asked: int, found: int) -> None:
    config, _, info = resolve_config({"algo": "dqn", "env": env}, {"replay": {"frames": asked}})
    assert num_frames(config, info.observation) == found


@pytest.mark.parametrize("algo", ["ddpg", "td3", "sac"])
def test_actor_learning_rate_and_reward_scale_reach_the_learner(algo: str) -> None:
    groups = {"algo": {"actor_learning_rate": "linear(1e-5, 0)", "reward_scale": "5"}}
    config, spec, info = resolve_config({"algo": algo, "env": "Pendulum-v1"}, groups)
    learner = make_recipe(config, spec, info).make_learner()
    assert {name: rate(0.5) for name, rate in learner.own_rates.items()} == {"actor": pytest.approx(5e-6)}
    assert learner.algorithm.reward_scale == 5.0


def test_replay_options_of_ppo_are_the_defaults() -> None:
    config, *_ = resolve_config({"algo": "ppo", "env": "CartPole-v1"}, {})
    assert config.replay == ReplayOptions()
