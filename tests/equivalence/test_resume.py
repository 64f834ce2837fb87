"""Tests that a stopped and resumed run equals an uninterrupted one in parameters, optimizer and metrics (R22)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import prestarted
import pytest

import remuda
from remuda.learning.checkpoint import list_checkpoints, load, load_newest, parameters_hash

SMALL = {
    "quiet": True,
    "sampler": {"envs": 4},
    "algo": {"n_steps": 32, "batch_size": 64, "n_epochs": 2},
    "eval": {"episodes": 1, "every": 400},
    "log": {"every": 100, "window": 7, "tensorboard": False},
    "checkpoint": {"every": 300},
}
CUT = {"checkpoint": {"cut_episodes": True}}
PARALLEL = {"scheme": "parallel", "sampler": {"workers": 2}}


def settings(*changes: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: dict(v) if isinstance(v, dict) else v for name, v in SMALL.items()}
    for change in changes:
        for name, value in change.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def outcome(path: Path) -> tuple[str, dict[str, Any], list[dict[str, float]]]:
    """Return the hash of the learner's state, the counters, and all metrics except timings."""
    found = load_newest(path / "checkpoints")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    about_time = ("time/fps", "time/time_elapsed", "limits/")
    kept = [{name: v for name, v in line.items() if not name.startswith(about_time)} for line in lines]
    counts = {name: found.progress[name] for name in ("steps", "rounds", "episodes", "restarts")}
    return parameters_hash(found.learner), counts, kept


def check(tmp_path: Path, algo: str, env: str, steps: int, stops: list[int], /, **options: Any) -> None:
    """Compare an uninterrupted run with one that a callback stops after each of the given rounds."""
    for name in {"a2c": ("batch_size", "n_epochs"), "impala": ("n_epochs",), "appo": ("n_epochs",)}.get(algo, ()):
        options["algo"].pop(name)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    remuda.train(algo, env, steps=steps, seed=3, out=whole, **options)
    for number, stop in enumerate(stops):
        callbacks = [lambda round, stop=stop: round.progress.rounds >= stop]
        if number == 0:
            remuda.train(algo, env, steps=steps, seed=3, out=pieces, callbacks=callbacks, **options)
        else:
            remuda.resume(pieces, callbacks=callbacks, quiet=True)
    remuda.resume(pieces, quiet=True)
    assert outcome(pieces) == outcome(whole)


MEMORY = {"agent": {"core": "gru", "prev_action": True, "prev_reward": True}}
QUICK = {
    "serial": ("ppo", "CartPole-v1", settings()),
    "serial, memory": ("ppo", "CartPole-v1", settings(MEMORY)),
    "parallel": ("ppo", "CartPole-v1", settings(PARALLEL)),
    "waiting, two slots": (
        "ppo",
        "CartPole-v1",
        settings(PARALLEL, {"sampler": {"wait_reset": True, "slots": 2}}, {"algo": {"normalize_reward": True}}),
    ),
    "a2c": ("a2c", "Acrobot-v1", settings({"algo": {"n_steps": 16}, "sampler": {"envs": 8, "decorrelate": 20}})),
    "impala": ("impala", "CartPole-v1", settings(PARALLEL, {"algo": {"batch_size": 2, "normalize_reward": True}})),
    "appo, memory": ("appo", "CartPole-v1", settings(MEMORY, {"algo": {"batch_size": 2}})),
    "normalised": (
        "ppo",
        "Pendulum-v1",
        settings({"agent": {"normalize_obs": True}, "algo": {"normalize_reward": True}}),
    ),
    "no state, so by the grid": ("ppo", "MiniGrid-Empty-5x5-v0", settings(CUT)),
}

SLOW = (
    "serial, memory",
    "waiting, two slots",
    "appo, memory",
)  # these take seconds each, and the long cases cover the same features


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long if c in SLOW else ()) for c in QUICK])
def test_stopped_twice(case: str, tmp_path: Path) -> None:
    algo, env, options = QUICK[case]
    check(tmp_path, algo, env, 700, [2, 4], **options)


ATARI = {"agent": {"net": "a3c"}, "eval": {"episodes": 0}}
LONG = {
    "workers act": ("ppo", "CartPole-v1", settings(PARALLEL, MEMORY, {"sampler": {"inference": "workers"}}), 1500),
    "half cheetah": ("ppo", "HalfCheetah-v5", settings(), 2000),
    "half cheetah, parallel, memory": ("ppo", "HalfCheetah-v5", settings(PARALLEL, MEMORY), 2000),
    "half cheetah, a2c": ("a2c", "HalfCheetah-v5", settings(PARALLEL), 2000),
    "acrobot, parallel, memory": ("a2c", "Acrobot-v1", settings(PARALLEL, MEMORY), 3000),
    "minatar": ("ppo", "MinAtar/Breakout-v1", settings(), 3000),
    "minatar, parallel, memory": ("ppo", "MinAtar/Breakout-v1", settings(PARALLEL, MEMORY), 3000),
    "minatar, a2c": ("a2c", "MinAtar/Breakout-v1", settings(), 3000),
    "pong in the pool": ("ppo", "ALE/Pong-v5", settings(PARALLEL, ATARI, {"envs": {"backend": "python"}}), 1500),
    "pong in the pool, a2c": ("a2c", "ALE/Pong-v5", settings(PARALLEL, ATARI, {"envs": {"backend": "python"}}), 1500),
    "pong, native": ("ppo", "ALE/Pong-v5", settings(PARALLEL, ATARI, CUT), 2000),
    "pong, native, memory": ("ppo", "ALE/Pong-v5", settings(PARALLEL, ATARI, MEMORY, CUT), 2000),
}


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_stopped_three_times(case: str, tmp_path: Path) -> None:
    algo, env, options, steps = LONG[case]
    check(tmp_path, algo, env, steps, [2, 5, 7], **options)


def test_run_without_a_checkpoint_restarts_and_is_equal(tmp_path: Path) -> None:
    options = settings({"checkpoint": {"every": 0}})
    whole, other = tmp_path / "whole", tmp_path / "other"
    remuda.train("ppo", "CartPole-v1", steps=600, seed=3, out=whole, **options)

    def fail(round: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remuda.train("ppo", "CartPole-v1", steps=600, seed=3, out=other, callbacks=[fail], **options)
    assert list_checkpoints(other / "checkpoints") == []
    remuda.resume(other, quiet=True)
    assert outcome(other) == outcome(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("evaluation", [1, pytest.param(3, marks=pytest.mark.long)])
def test_stopped_within_an_evaluation(evaluation: int, number: signal.Signals, tmp_path: Path) -> None:
    """The evaluation outlasts the grace period of the signal, so the resumed run repeats it and logs its line."""
    code = """
import json, os, signal, sys, time
import remuda
from remuda.runs import evaluation
from remuda.runs import signals
signals.PATIENCE_SECONDS = 0.2
calls, real = 0, evaluation.evaluate
def evaluate(*arguments, **options):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), int(sys.argv[3]))
        time.sleep(0.5)
    return real(*arguments, **options)
evaluation.evaluate = evaluate
remuda.train("ppo", "CartPole-v1", steps=900, seed=3, out=sys.argv[1], **json.loads(sys.argv[4]))
"""
    whole, pieces, options = tmp_path / "whole", tmp_path / "pieces", settings({"eval": {"every": 200}})
    remuda.train("ppo", "CartPole-v1", steps=900, seed=3, out=whole, **options)
    arguments = [str(pieces), str(evaluation), str(int(number)), json.dumps(options)]
    done = prestarted.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if number == signal.SIGKILL else 0), done.stderr
    assert "complete" not in [json.loads(path.read_text())["status"] for path in pieces.glob("result.json")]
    remuda.resume(pieces, quiet=True)
    assert outcome(pieces) == outcome(whole)


def test_run_stopped_between_cuts_saves_its_weights_and_resumes_from_the_last_cut(tmp_path: Path) -> None:
    """Resuming from the cut keeps the run bit-equal; `eval` uses the weights at the stop."""
    options = settings({"checkpoint": {"every": 512, "cut_episodes": True}})
    stop = [lambda round: round.progress.rounds >= 6]
    remuda.train("ppo", "MiniGrid-Empty-5x5-v0", steps=3000, out=tmp_path / "run", callbacks=stop, **options)
    cut, stopped = (load(path) for path in list_checkpoints(tmp_path / "run/checkpoints"))
    rounds = [found.progress["rounds"] for found in (cut, stopped)]
    assert rounds == [4, 6], "512 steps are 4 rounds of 4 envs and 32 steps"
    assert "will be done again" in (tmp_path / "run/log.txt").read_text()
    remuda.resume(tmp_path / "run", quiet=True)
    assert f"resumed from step-{cut.step}: {cut.step} of 3,000" in (tmp_path / "run/log.txt").read_text()


def test_last_cut_is_kept_however_often_a_run_is_stopped_after_it(tmp_path: Path) -> None:
    options = settings({"checkpoint": {"every": 512, "cut_episodes": True}})
    path = tmp_path / "run"
    for rounds in (5, 6, 7):  # the cut is after 4
        stop = [lambda round, rounds=rounds: round.progress.rounds >= rounds]
        if rounds == 5:
            remuda.train("ppo", "own_things:late", steps=3000, out=path, callbacks=stop, **options)
        else:
            remuda.resume(path, quiet=True, callbacks=stop)
    found = [load(each) for each in list_checkpoints(path / "checkpoints")]
    assert [each.progress["rounds"] for each in found] == [4, 6, 7]
    assert [each.is_between_cuts for each in found] == [False, True, True]
    lost = found[2].step - found[0].step
    assert f"of which the last {lost:,} will be done again" in (path / "log.txt").read_text()


def test_enabling_cuts_on_resume_keeps_all_progress(tmp_path: Path) -> None:
    options = settings({"checkpoint": {"every": 512}})
    stop, seen = [lambda round: round.progress.rounds >= 3], []
    remuda.train("ppo", "own_things:late", steps=3000, out=tmp_path / "run", callbacks=stop, **options)
    remuda.resume(
        tmp_path / "run",
        quiet=True,
        checkpoint={"cut_episodes": True},
        callbacks=[lambda round: seen.append(round.progress.rounds)],
    )
    assert seen[0] == 4


def test_failure_in_a_slow_round_is_resumed_with_new_episodes(tmp_path: Path, monkeypatch: Any) -> None:
    """The sampler's state kept for a stop signal does not match the learner after a failure, so it is not saved."""
    monkeypatch.setattr("remuda.runs.checkpoints.SLOW_ROUND_SECONDS", 0.0)
    options = settings({"envs": {"kwargs": {"lengths": [9], "fault": "nan", "at": 70}}})
    with pytest.raises(remuda.RemudaError, match="nan at"):
        remuda.train("ppo", "counting:make", steps=3000, out=tmp_path / "run", **options)
    found = load_newest(tmp_path / "run/checkpoints")
    assert found.progress["rounds"] == 2
    assert found.progress["inexact"] == "a round failed, so new episodes start"
    assert "sampler" not in found.blobs


def test_updates_skipped_because_of_a_signal_are_logged(tmp_path: Path, monkeypatch: Any) -> None:
    """This includes the last round: the run is complete, but differs from an uninterrupted one."""
    monkeypatch.setattr(remuda.runs.run_log.RunLog, "must_stop", lambda run_log: run_log.learner.version > 0)
    run = remuda.train("ppo", "counting:make", steps=100, out=tmp_path / "run", **settings())
    assert run.result["updates"] == 1, "one of 4 updates was made"
    assert "stopped before all of its updates were made" in (tmp_path / "run/log.txt").read_text()
    assert "before all of its updates were made" in load_newest(tmp_path / "run/checkpoints").progress["inexact"]


def test_checkpoints_do_not_change_episodes_without_cuts(tmp_path: Path) -> None:
    """Checkpoints do not end the episodes of envs whose state cannot be saved."""
    kwargs = {"kwargs": {"length": 60}}
    found = {}
    for every in (0, 100):
        options = settings({"checkpoint": {"every": every, "keep": "all"}, "envs": kwargs, "algo": {"gamma": 0.9}})
        options["log"]["every"] = 128
        run = remuda.train("ppo", "own_things:late", steps=1200, out=tmp_path / str(every), **options)
        found[every] = outcome(run.path)
    assert found[0] == found[100], "checkpoints change neither learning nor episodes"
    assert found[100][1]["episodes"] == 4 * 5, "each of 4 envs takes 320 rows: 5 episodes of 60 steps"
    assert len(list_checkpoints(tmp_path / "100/checkpoints")) > 5


def test_inexact_resume_is_logged_and_continues_weights_and_counts(tmp_path: Path) -> None:
    options = settings({"envs": {"kwargs": {"length": 60}}})
    stop = [lambda round: round.progress.rounds >= 4]
    path = tmp_path / "run"
    remuda.train("ppo", "own_things:late", steps=1200, out=path, callbacks=stop, **options)
    stopped = load_newest(path / "checkpoints")
    assert stopped.progress["rounds"] == 4
    assert "sampler" not in stopped.blobs
    seen = []
    remuda.resume(path, quiet=True, callbacks=[lambda round: seen.append(round.progress.rounds)])
    assert seen[0] == 5
    said = (path / "log.txt").read_text()
    assert (
        said.count("the resumed run is not bit-equal to an uninterrupted one: the state of its envs cannot be saved")
        == 1
    )
    assert said.count("so new episodes start") == 1


def test_cuts_are_counted_and_too_long_episodes_are_logged(tmp_path: Path) -> None:
    """Episodes of 60 steps that are cut every 32 rows never end, and the log reports this."""
    options = settings(CUT, {"checkpoint": {"every": 128}, "envs": {"kwargs": {"length": 60}}})
    run = remuda.train("ppo", "own_things:late", steps=512, out=tmp_path / "run", **options)
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/cut"] == 4 * 3, "4 envs at each of 3 cuts: nothing is cut after the last round"
    assert last["rollout/episodes"] == 0
    said = (run.path / "log.txt").read_text()
    assert said.count("4 of 4 envs finished no episode in the 128 steps between two cuts") == 1
    options["envs"]["kwargs"]["length"] = 32
    run = remuda.train("ppo", "own_things:late", steps=512, out=tmp_path / "fits", **options)
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/cut"] == 0, "every episode ends with the last row before its cut"
    assert "between two cuts" not in (run.path / "log.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["serial", "parallel"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_at_random_moments(scheme: str, number: signal.Signals, tmp_path: Path) -> None:
    """The command is stopped by a signal and resumed repeatedly until the run is complete."""
    common = ["ppo", "--env", "CartPole-v1", "--steps", "20000", "--seed", "5", "--scheme", scheme, "--quiet"]
    common += ["--sampler.envs", "4", "--algo.n_steps", "64", "--algo.batch_size", "64", "--checkpoint.every", "2000"]
    common += ["--eval.episodes", "2", "--log.every", "500", "--log.tensorboard", "false"]
    command = [sys.executable, "-m", "remuda", "train"]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *common, "--out", str(whole)], check=True, env=environment, timeout=300)
    draw = random.Random(int(number))
    for _ in range(40):
        is_new = not (pieces / "config.yaml").exists()
        arguments = [*common, "--out", str(pieces)] if is_new else ["--resume", str(pieces), "--quiet"]
        process = subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(1.5, 5.0))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            process.wait(30)
        if process.returncode == 0:
            break
        time.sleep(0.1)
    assert json.loads((pieces / "result.json").read_text())["status"] == "complete"
    assert outcome(pieces) == outcome(whole)
