"""Test `remuda.start`, which runs the rounds of a training in the user's own loop, under every scheme."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import remuda
from remuda.errors import CheckpointError, ConfigError, Interrupted
from remuda.learning.checkpoint import list_checkpoints, load_newest
from remuda.learning.gradients import Gradients
from remuda.sampling.sampler import EnvSampler
from remuda.schemes.learning_round import LocalUpdates

SMALL: dict[str, Any] = {
    "quiet": True,
    "seed": 3,
    "sampler": {"envs": 4},
    "algo": {"n_steps": 32, "batch_size": 64},
    "eval": {"episodes": 2},
    "log": {"every": 100, "tensorboard": False},
}
STEPS = 1500


def start(out: Path, **changes: Any) -> remuda.Training:
    return remuda.start("ppo", "CartPole-v1", out=out, **{"steps": STEPS, **SMALL, **changes})


def learned(run: Path) -> str:
    return hashlib.sha256((run / "checkpoints/latest/tensors.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the same run, made by `remuda.train`."""
    out = tmp_path_factory.mktemp("trained") / "run"
    remuda.train("ppo", "CartPole-v1", out=out, steps=STEPS, **SMALL)
    return out


def test_own_loop_with_evaluations_and_saves_equals_train(tmp_path: Path, trained: Path) -> None:
    run = start(tmp_path / "run")
    assert run.learner.version == 0
    rounds = 0
    while not run.done():
        round = run.step()
        rounds += 1
        assert round.progress.rounds == rounds
        if rounds == 3:
            assert run.evaluate(episodes=2)["episodes"] == 2
            assert run.save().name == f"step-{round.progress.steps}"
    assert run.result["status"] == "complete"
    assert run.result["updates"] == run.learner.version
    assert learned(run.path) == learned(trained)
    config = (run.path / "config.yaml").read_text()
    for call in (run.step, run.save, lambda: run.set("algo.learning_rate", 0.1)):
        with pytest.raises(ConfigError, match="the run has ended"):
            call()
    assert (run.path / "config.yaml").read_text() == config


def test_a_closed_run_is_saved_and_continues_bit_for_bit(tmp_path: Path, trained: Path) -> None:
    with start(tmp_path / "run") as run:
        for _ in range(4):
            round = run.step()
        with pytest.raises(ConfigError, match="the run has no result: call"):
            _ = run.result
    assert run.done()
    assert run.result["status"] == "stopped by close"
    assert load_newest(run.path / "checkpoints").step == run.result["steps"] == round.progress.steps
    again = remuda.Run(run.path).start(quiet=True)
    while not again.done():
        again.step()
    assert again.result["status"] == "complete"
    assert learned(run.path) == learned(trained)
    complete = remuda.Run(run.path).start(quiet=True)
    assert complete.done(), "no rounds are left"


@pytest.mark.parametrize("scheme", ["parallel", "async"])
def test_own_loop_completes_under_other_schemes(tmp_path: Path, trained: Path, scheme: str) -> None:
    algo = {"batch_size": 2, "n_steps": 32} if scheme == "async" else SMALL["algo"]
    options = {**SMALL, "steps": STEPS, "scheme": scheme, "algo": algo, "sampler": {"envs": 4, "workers": 2}}
    with remuda.start(
        "impala" if scheme == "async" else "ppo", "CartPole-v1", out=tmp_path / "run", **options
    ) as run:
        while not run.done():
            run.step()
    assert run.result["status"] == "complete"
    if scheme == "parallel":
        assert learned(run.path) == learned(trained)


def test_a_run_that_is_closed_before_its_first_round_has_sampled_nothing(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run, pytest.raises(CheckpointError, match="no round to save yet"):
        run.save()
    assert run.done()
    assert (run.result["status"], run.result["updates"]) == ("stopped by close", 0)


def test_an_error_in_the_loop_saves_the_last_round_and_closes_everything(tmp_path: Path, trained: Path) -> None:
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    run = start(tmp_path / "run", scheme="parallel")

    def own_loop() -> None:
        with run:
            run.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        own_loop()
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == (threads, handler)
    assert run.done()
    with pytest.raises(ConfigError, match="it failed"):
        _ = run.result
    remuda.resume(run.path, quiet=True)  # the lock was released
    assert learned(run.path) == learned(trained), "the first round was saved"


def test_a_round_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tmp_path / "run")
    run.step()
    monkeypatch.setattr(LocalUpdates, "exchange", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step()
    assert run.done()
    with pytest.raises(ConfigError, match="the run has ended"):
        run.step()


def test_only_one_can_be_open_and_only_in_its_thread(tmp_path: Path) -> None:
    with start(tmp_path / "first") as run:
        with pytest.raises(ConfigError, match=r"first is still open in this process: call its close\(\) first"):
            start(tmp_path / "second")
        with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="in another thread"):
            pool.submit(run.step).result()
    start(tmp_path / "third").close()


def test_a_training_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    run = start(tmp_path / "run")
    run.step()
    del run
    gc.collect()
    assert signal.getsignal(signal.SIGINT) == handler
    start(tmp_path / "other").close()


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_signal_between_two_steps_saves_the_last_round(
    tmp_path: Path, trained: Path, capfd: Any, rounds: int
) -> None:
    with start(tmp_path / "run") as run:
        steps = [run.step().progress.steps for _ in range(rounds)]
        os.kill(os.getpid(), signal.SIGINT)
        assert run.done(), "nothing more is sampled"
    assert "SIGINT: stopping" in capfd.readouterr().err
    assert run.result["status"] == "stopped by SIGINT"
    if rounds:
        assert [path.name for path in list_checkpoints(run.path / "checkpoints")] == [f"step-{steps[-1]}"]
        remuda.resume(run.path, quiet=True)
        assert learned(run.path) == learned(trained)


def test_a_signal_during_an_evaluation_of_the_loop_loses_no_round(tmp_path: Path, trained: Path) -> None:
    run = start(tmp_path / "run")

    def own_loop() -> None:
        with run:
            run.step()
            run.step()
            os.kill(os.getpid(), signal.SIGINT)
            run.evaluate(episodes=100)

    with pytest.raises(Interrupted):
        own_loop()
    assert len(list_checkpoints(run.path / "checkpoints")) == 1
    remuda.resume(run.path, quiet=True)
    assert learned(run.path) == learned(trained)


def test_a_signal_while_envs_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = EnvSampler.reset

    def reset_and_signal(sampler: EnvSampler, *arguments: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return reset(sampler, *arguments)

    monkeypatch.setattr(EnvSampler, "reset", reset_and_signal)
    with pytest.raises(Interrupted, match="before training began"):
        start(tmp_path / "run")


class TestSet:
    def test_set_applies_from_the_next_update_and_after_a_resume(self, tmp_path: Path) -> None:
        with start(tmp_path / "run") as run:
            run.step()
            run.set("algo.learning_rate", 0.0)
            run.set("algo.max_grad_norm", 0.25)
            before = [parameter.clone() for parameter in run.learner.algorithm.parameters()]
            assert run.step().metrics["train/learning_rate"] == 0.0
            after = list(run.learner.algorithm.parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a rate of 0 changes nothing"
            run.set("algo.clip_range", "linear(0.3, 0.1)")
            run.set("algo.learning_rate", "linear(1e-3, 0)")
            clip = run.step().metrics["train/clip_range"]
            assert 0.1 < clip < 0.3
        options = yaml.safe_load((run.path / "config.yaml").read_text())["options"]["algo"]
        assert options["learning_rate"] == "linear(1e-3, 0)"
        assert (options["clip_range"], options["max_grad_norm"]) == ("linear(0.3, 0.1)", 0.25)
        again = remuda.Run(run.path).start(quiet=True)
        assert again.learner.max_grad_norm == 0.25
        assert 0 < float(again.step().metrics["train/learning_rate"]) < 1e-3
        again.close()

    def test_set_the_own_learning_rate_of_a_parameter_group(self, tmp_path: Path) -> None:
        options = {"algo": {"actor_learning_rate": "1e-4", "learning_starts": 64}, "eval": {"episodes": 0}}
        with remuda.start("td3", "Pendulum-v1", steps=400, quiet=True, out=tmp_path / "run", **options) as run:
            run.step()
            run.set("algo.actor_learning_rate", "5e-4")
            assert run.learner.own_rates["actor"](0.5) == 5e-4
            assert run.learner.learning_rate(0.5) != 5e-4
            run.set("algo.actor_learning_rate", "none")
            assert "actor" not in run.learner.own_rates

    @pytest.mark.parametrize(
        ("name", "value", "sentence"),
        [
            ("algo.gamma", 0.9, r"algo\.gamma cannot change while ppo trains: "),
            ("algo.learning_rat", 0.9, r"did you mean algo\.learning_rate"),
            ("learning_rate", 0.9, r"learning_rate cannot change while ppo trains: did you mean algo\.learning_rate"),
            ("algo.learning_rate", "fast", "algo.learning_rate='fast' is not a schedule"),
            ("algo.learning_rate", -1.0, "algo.learning_rate"),
            ("algo.max_grad_norm", -1.0, r"algo\.max_grad_norm=-1\.0"),
            ("algo.max_grad_norm", "abc", r"algo\.max_grad_norm"),
            ("algo.max_grad_norm", None, r"algo\.max_grad_norm"),
            ("algo.max_grad_norm", True, r"algo\.max_grad_norm"),
            ("algo.learning_rate", float("nan"), r"algo\.learning_rate"),
        ],
    )
    def test_options_that_cannot_be_set_are_refused_without_a_change(
        self, tmp_path: Path, name: str, value: Any, sentence: str
    ) -> None:
        with start(tmp_path / "run") as run:
            before = (run.path / "config.yaml").read_text()
            with pytest.raises(ConfigError, match=sentence):
                run.set(name, value)
            assert (run.path / "config.yaml").read_text() == before
            run.step()


class TestLocalUpdates:
    """Tests of the step between gradients and updates if both are computed in one process."""

    class Learner:
        version = 5

        def __init__(self, skips: bool = False) -> None:
            self.skips = skips

        def apply(self, gradients: Gradients) -> dict[str, float]:
            self.version += not self.skips
            return {"grad_norm": 1.0}

    @staticmethod
    def exchange(learner: Any, version: int, stop: bool = False) -> Any:
        return LocalUpdates().exchange(learner, Gradients({}, version, {}, None, stop))

    @pytest.mark.parametrize("lag", [0, 3])
    def test_the_lag_of_a_gradient_is_measured(self, lag: int) -> None:
        applied = self.exchange(self.Learner(), 5 - lag)
        assert (applied.versions, applied.stop, applied.gradient_to_update) == (1, False, lag)

    def test_a_skipped_update_has_no_version(self) -> None:
        assert self.exchange(self.Learner(skips=True), 5).versions == 0

    def test_a_stop_applies_no_update(self) -> None:
        learner = self.Learner()
        applied = self.exchange(learner, 5, stop=True)
        assert (applied.versions, applied.stop, learner.version) == (0, True, 5)
