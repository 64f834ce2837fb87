"""Tests of the asynchronous scheme: bit-equal to the synchronous one with max_lag=0, and otherwise reporting lags."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import move
from test_bit_equal import weights
from test_synchronous import REAL, Pieces, run

import remuda
from remuda.build.envs import num_workers
from remuda.build.recipe import make_recipe
from remuda.config.resolve import resolve_config
from remuda.core import derive_seed
from remuda.data import map_tree, resets
from remuda.errors import ConfigError, Interrupted
from remuda.learning.checkpoint import load_newest
from remuda.learning.gradient_threads import GradientThreads
from remuda.recipe import Progress
from remuda.schemes.asynchronous import Asynchronous, shares

N, ENVS, ROUNDS = 16, 8, 8
SIZES: dict[str, dict[str, int]] = {  # a batch is a whole round
    "impala": {"batch_size": ENVS},
    "appo": {"batch_size": ENVS, "n_epochs": 2},
    "ppo": {"batch_size": N * ENVS, "n_epochs": 2},
    "a2c": {},
}
LAGS = {
    "lag/collect_to_gradient",
    "lag/collect_to_gradient_max",
    "async/slots_free",
    "async/slots_full",
    "rollout/dropped",
    "lag/acting_weights",
}


def train(out: Path, name: str = "impala", scheme: Any = "async", env: str = "CartPole-v1", **settings: Any) -> Any:
    options: dict[str, Any] = {
        "steps": N * ENVS * ROUNDS,
        "seed": 3,
        "algo": {"n_steps": N, **SIZES[name]},
        "sampler": {"envs": ENVS, "workers": 2, "inference": "workers"},
        "eval": {"episodes": 0},
        "log": {"tensorboard": False, "every": 1},
    }
    for key, value in settings.items():
        options[key] = {**options[key], **value} if isinstance(options.get(key), dict) else value
    return remuda.train(name, env, scheme=scheme, out=out, quiet=True, **options)


def lines_of(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "impala": ("impala", "CartPole-v1", {}),
    "appo": ("appo", "CartPole-v1", {}),
    "impala, memory": (
        "impala",
        "CartPole-v1",
        {"agent": {"core": "lstm", "core_size": 16, "prev_action": True, "prev_reward": True}},
    ),
    "appo, memory, normalised": (
        "appo",
        "CartPole-v1",
        {"agent": {"core": "lstm", "core_size": 16, "normalize_obs": True}, "algo": {"normalize_reward": True}},
    ),
    "impala, continuous, normalised, warm-up": (
        "impala",
        "Pendulum-v1",
        {"agent": {"normalize_obs": True}, "algo": {"normalize_reward": True}, "sampler": {"decorrelate": 20}},
    ),
    "impala, padded": ("impala", "CartPole-v1", {"sampler": {"wait_reset": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_max_lag_0_equals_the_synchronous_run(tmp_path: Path, case: str) -> None:
    algo, env, settings = CASES[case]
    waiting = train(tmp_path / "parallel", algo, "parallel", env, **settings)
    found = train(tmp_path / "async", algo, {"name": "async", "max_lag": 0}, env, **settings)
    assert found.result["updates"] == waiting.result["updates"] >= ROUNDS
    assert found.result["steps"] == waiting.result["steps"]
    assert weights(found) == weights(waiting)
    assert found.result["episodes"] == waiting.result["episodes"]
    for mine, theirs in zip(lines_of(found), lines_of(waiting), strict=True):
        for name in ("lag/collect_to_gradient", "lag/collect_to_gradient_max", "train/loss"):
            assert mine[name] == theirs[name], name
        assert mine["lag/acting_weights"] == 0.0
        assert mine["rollout/dropped"] == 0


@pytest.mark.parametrize("act", ["workers", "central"])
def test_every_log_line_reports_lags(tmp_path: Path, act: str) -> None:
    """Each update learns from half of the envs, while the other half continues to be sampled."""
    settings: dict[str, Any] = {"sampler": {"inference": act}, "algo": {"batch_size": ENVS // 2}}
    run = train(tmp_path / "run", scheme={"name": "async", "max_lag": 4}, steps=3000, **settings)
    lines = lines_of(run)
    assert len(lines) > 10
    for line in lines:
        assert set(line) >= LAGS
        assert all(math.isfinite(line[name]) for name in LAGS)
        assert 0 <= line["lag/collect_to_gradient"] <= line["lag/collect_to_gradient_max"] <= 4
    dropped = [line["rollout/dropped"] for line in lines]
    assert dropped == sorted(dropped), "dropped rollouts are counted over the whole run"
    assert run.result["status"] == "complete"
    assert 3000 <= run.result["steps"] <= 3000 + N * ENVS
    assert run.result["updates"] == pytest.approx(3000 / (N * ENVS / 2), rel=0.3)
    assert run.result["episodes"] > 20


@pytest.mark.parametrize(("epochs", "max_lag"), [(10, 5), (4, 12)])
def test_rollouts_within_max_lag_are_never_dropped(tmp_path: Path, epochs: int, max_lag: int) -> None:
    """This holds from the first rollout on: the number of updates per round is known before the first round."""
    settings: dict[str, Any] = {"sampler": {"workers": 1}, "algo": {"n_epochs": epochs}}
    run = train(tmp_path / "run", "appo", {"name": "async", "max_lag": max_lag}, **settings)
    assert lines_of(run)[-1]["rollout/dropped"] == 0
    assert max(line["lag/collect_to_gradient_max"] for line in lines_of(run)) <= max_lag + epochs


@pytest.mark.parametrize(("algo", "core"), [("ppo", None), ("a2c", None), ("ppo", "lstm")])
def test_on_policy_algorithms_run_with_correction_none(tmp_path: Path, algo: str, core: str | None) -> None:
    agent = {"core": core, "core_size": 8}
    scheme = {"name": "async", "max_lag": 2} if algo == "a2c" else "async"
    run = train(tmp_path / "run", algo, scheme, agent=agent, algo={"correction": "none"})
    assert run.result["status"] == "complete"
    assert run.result["updates"] >= ROUNDS
    assert all(set(line) >= LAGS for line in lines_of(run))


def settled(name: str, kind: str = "async", env: str = "CartPole-v1", **groups: Any) -> Any:
    config, *_ = resolve_config({"algo": name, "env": env, "scheme": kind, "steps": 1000}, groups)
    num_workers(config)
    return config


REFUSED = [
    ("ppo", "async", {}, "--algo.correction none"),
    ("a2c", "async", {}, "--algo.correction none"),
    ("dqn", "async", {"scheme": {"max_lag": 3}}, "leave it out"),
    ("dqn", "async", {"sampler": {"inference": "central", "slots": 2}}, "use 1"),
    ("dqn", "async", {"sampler": {"inference": "central"}, "envs": {"backend": "gymnasium"}}, "use python"),
    ("sac", "async", {"sampler": {"threads": 2}}, "leave it out"),
    ("dqn", "async", {"algo": {"gradient_steps": 2}}, "set replay.ratio"),
    ("dqn", "async", {"sampler": {"envs": 8, "workers": 3}}, "use 2 or 4"),
    ("dqn", "parallel", {"replay": {"ratio": "none"}}, "give a number"),
    ("dqn", "serial", {"scheme": {"publish_every": 3}}, "leave it out"),
    ("impala", "async", {"scheme": {"throttle": False}}, "leave it out"),
    ("impala", "parallel", {"eval": {"cpu_fraction": 0.1}}, "use --scheme async"),
    ("impala", "async", {"eval": {"video": True}}, "needs eval.cpu_fraction"),
    ("impala", "async", {"sampler": {"envs": 8, "workers": 4}, "algo": {"batch_size": 3}}, "use 8"),
    ("impala", "async", {"sampler": {"envs": 8, "workers": 3}, "algo": {"batch_size": 8}}, "use 2 or 4"),
    ("impala", "async", {"sampler": {"envs": 8, "workers": 2}, "algo": {"batch_size": 2}}, "use 4 or 8"),
    ("impala", "async", {"sampler": {"envs": 8, "workers": 9}, "algo": {"batch_size": 8}}, "at most 8 workers"),
    ("impala", "serial", {"scheme": {"max_lag": 2}}, "leave it out"),
    ("impala", "parallel", {"scheme": {"max_lag": 0}}, "leave it out"),
    ("impala", "async", {"scheme": {"max_lag": -1}}, "max_lag"),
    ("impala", "async", {"sampler": {"threads": 2}}, "leave it out"),
    ("impala", "parallel", {"sampler": {"inference": "central", "threads": 2}}, "leave it out"),
]


@pytest.mark.parametrize(("algo", "scheme", "groups", "remedy"), REFUSED)
def test_conflicting_options_are_refused_in_one_sentence(algo: str, scheme: str, groups: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(algo, scheme, **groups)
    text = str(caught.value)
    assert remedy in text
    assert "\n" not in text
    assert text.endswith(".")


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train(tmp_path / "run", sampler={"workers": 3})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("act", ["workers", "central"])
def test_padding_is_kept_or_refused(act: str) -> None:
    """With wait_reset every column holds at most one episode, with both kinds of inference."""
    try:
        rollout, _ = first_rollout(act, None, {"wait_reset": True}, moves=False)
    except ConfigError as error:
        assert "wait_reset" in str(error)  # noqa: PT017  (either is right)
        return
    for b in range(ENVS):
        real = rollout.steps.mask[:, b].tolist()
        assert real == sorted(real, reverse=True), "columns are padded to the end of the rollout"
    assert not rollout.steps.mask.all()


def first_rollout(act: str, core: str | None, sampler: Any = None, moves: bool = True) -> tuple[Any, Any]:
    """Return a copy of the first rollout for a learner at version 7 and its agent.

    With `moves`, the agent's weights differ from those that its seed gives.
    """
    groups = {
        "sampler": {"envs": ENVS, "workers": 2, "inference": act, **(sampler or {})},
        "algo": {"n_steps": 32, "batch_size": ENVS},
        "agent": {"core": core, "core_size": 8},
    }
    settings = {"algo": "impala", "env": "CartPole-v1", "scheme": "async", "steps": 1000, "seed": 3}
    config, spec, info = resolve_config(settings, groups)
    recipe = make_recipe(config, spec, info)
    learner = recipe.make_learner()
    state = learner.state_dict()
    learner.load_state_dict({**state, "version": 7})
    agent = learner.algorithm.agent
    if moves:
        move(agent)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(contextlib.closing(recipe.make_weights(agent, learner.version)))
        source = stack.enter_context(
            contextlib.closing(recipe.make_source(agent, shared, num_workers(config), 0, None, lambda: False))
        )
        source.start(3)
        rollout = source.take(learner.version, lambda: False)
        kept = map_tree(lambda x: x.clone(), (rollout.steps, rollout.next_obs, rollout.last_value, rollout.state))
    return type(rollout)(*kept, rollout.envs), agent


@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize("act", ["workers", "central"])
def test_first_actions_use_the_learners_weights(act: str, core: str | None) -> None:
    rollout, agent = first_rollout(act, core)
    steps = rollout.steps
    assert steps.version.unique().tolist() == [7]
    with torch.no_grad():
        reset = None if core is None else resets(steps.mask)
        (policy, value), _ = agent.unroll(steps.obs, rollout.state, reset)
    log_prob = policy.rows(steps.mask).log_prob(steps.action[steps.mask])
    torch.testing.assert_close(log_prob, steps.policy.log_prob[steps.mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value[steps.mask], steps.policy.value[steps.mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_lag", [0, None])
def test_resumed_run_continues_from_its_checkpoint(tmp_path: Path, max_lag: int | None) -> None:
    out, rate = tmp_path / "run", 1e-3
    first = train(out, scheme={"name": "async", "max_lag": max_lag}, algo={"learning_rate": rate})
    before, result = load_newest(out / "checkpoints"), first.result
    seen: list[Any] = []

    def look(round: Any) -> None:
        progress = round.progress
        parameters = {name: x.clone() for name, x in round.learner.algorithm.state_dict().items()}
        seen.append((round.learner.version, progress.rounds, progress.steps, parameters))

    again = remuda.resume(out, steps=result["steps"] + 3 * N * ENVS, quiet=True, callbacks=look)
    assert [(version, rounds) for version, rounds, *_ in seen[:2]] == [
        (result["updates"] + 1, before.progress["rounds"] + 1),
        (result["updates"] + 2, before.progress["rounds"] + 2),
    ]
    assert seen[0][2] > result["steps"]
    for name, value in before.learner["algorithm"].items():
        # One update of Adam moves no parameter much farther than its learning rate.
        assert float((seen[0][3][name] - value).abs().max()) < 4 * rate, name
    assert again.result["steps"] >= result["steps"] + 3 * N * ENVS
    assert again.result["episodes"] > result["episodes"]
    steps = [line["time/total_timesteps"] for line in lines_of(again)]
    assert steps == sorted(set(steps))


def test_complete_run_does_nothing_when_resumed(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    before = weights(run)
    again = remuda.resume(run.path, quiet=True)
    assert again.result["updates"] == run.result["updates"]
    assert weights(again) == before


def test_callback_can_stop_the_run(tmp_path: Path) -> None:
    run = train(tmp_path / "run", steps=10**6, callbacks=[lambda round: round.progress.rounds == 5])
    assert run.result["status"] == "stopped by callback"
    assert run.result["updates"] == 5
    assert load_newest(run.path / "checkpoints").progress["rounds"] == 5


def test_gradient_threads_are_used_and_closed_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    original = GradientThreads.close
    monkeypatch.setattr(GradientThreads, "close", lambda self: (closed.append(self.count), original(self)))
    run = train(tmp_path / "run", scheme={"name": "async", "max_lag": 0, "threads": 2})
    assert closed == [2]
    assert run.result["updates"] >= ROUNDS


class SourceOfPieces:
    """A fake rollout source that appends its calls to those of the other parts."""

    def __init__(self, pieces: Any) -> None:
        self.pieces, self.dropped = pieces, 0

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int:
        assert version == self.pieces.version
        self.pieces.did(f"start {seed} {warm_up}")
        return warm_up

    def take(self, version: int, should_stop: Any) -> Any:
        assert should_stop == self.pieces.must_stop
        self.pieces.did(f"take {version}")
        self.dropped += 1
        return self.pieces.collect()

    def release(self, version: int) -> None:
        assert self.pieces.weights.pull(-1) == version, "weights are published before the rollout is released"
        self.pieces.did(f"release {version}")

    def metrics(self) -> dict[str, float]:
        return {"async/slots_free": 3.0}

    def take_seconds(self) -> dict[str, float]:
        return {"env": 3.0, "inference": 1.0}

    def episodes(self) -> list[Any]:
        return self.pieces.episodes()

    def restarts(self) -> int:
        return self.pieces.restarts()

    def close(self) -> None:
        self.pieces.did("close source")


class AsyncPieces(Pieces):
    """The fake recipe of the synchronous tests, with a rollout source in place of a sampler."""

    def make_source(
        self, agent: Any, weights: Any, workers: int, rounds: int, max_lag: int | None, should_stop: Any
    ) -> Any:
        assert (agent, weights, should_stop) == ("the agent", self.weights, self.must_stop)
        self.did(f"source {workers} {rounds} {max_lag}")
        return SourceOfPieces(self)


ROUND = ["prepare", "add", "step", "feedback key 0", "step", "feedback key 1", "finish"]


def test_order_of_calls() -> None:
    pieces = AsyncPieces(steps=REAL * 2)
    run(Asynchronous(workers=2, max_lag=5), pieces)
    assert pieces.calls == [
        *("learner", "resume", "weights", "replay 0", "source 2 0 5", "restore", "start 3 0", "begin at 0"),
        *("take 0", "collect with 0", "progress 0.00", *ROUND, "release 2", "round"),
        *("take 2", "collect with 2", "progress 0.50", *ROUND, "release 4", "round"),
        "close source",
    ]
    assert pieces.weights.closed == 1
    assert pieces.start == Progress(2 * REAL, rounds=2, episodes=2, restarts=4, dropped=2)
    assert pieces.rounds[0][3]["async/slots_free"] == 3.0
    assert pieces.saveable == [(None, True, False, False)] * 2, "there is no env state: envs are reset on resume"


def test_resumed_run_uses_a_new_seed_and_continues_its_counters() -> None:
    before = Progress(steps=100, rounds=7, episodes=9, restarts=5, dropped=6)
    pieces = AsyncPieces(before, warm_up=50, steps=100 + REAL)
    run(Asynchronous(workers=2), pieces)
    assert pieces.calls[3:8] == [
        "replay 7",
        "source 2 7 None",
        "restore",
        f"start {derive_seed(3, 7)} 0",
        "begin at 100",
    ]
    assert pieces.start == Progress(100 + REAL, rounds=8, episodes=10, restarts=9, dropped=7)


def test_signal_during_take_keeps_all_finished_rounds() -> None:
    pieces = AsyncPieces(steps=1000)
    pieces.fail_in, pieces.error = "take 4", Interrupted("now")
    run(Asynchronous(workers=2), pieces)
    assert (pieces.start.steps, pieces.start.rounds) == (2 * REAL, 2)
    assert pieces.calls[-3:] == ["take 4", "save what was learned", "close source"]


@pytest.mark.parametrize("place", ["source", "restore", "start", "take", "prepare", "step", "release", "round"])
def test_failure_anywhere_closes_what_was_created(place: str) -> None:
    pieces, threads = AsyncPieces(), torch.get_num_threads()
    pieces.fail_in, pieces.error = place, ZeroDivisionError("here")
    with pytest.raises(ZeroDivisionError, match="here"):
        run(Asynchronous(workers=2), pieces)
    assert pieces.weights.closed == 1
    assert pieces.closed == 2, "replay and learner are closed"
    assert pieces.calls[-1] == "save what was learned", "the learner is saved after the samplers have ended"
    assert (pieces.calls[-2] == "close source") == (place != "source")
    assert torch.get_num_threads() == threads


def test_shares_split_the_waiting_time() -> None:
    assert shares(4.0, {"env": 3.0, "inference": 1.0, "wait": 0.0}) == {"env": 3.0, "inference": 1.0, "wait": 0.0}
    assert shares(4.0, {"env": 0.0, "inference": 0.0}) == {"env": 0.0, "inference": 0.0}
