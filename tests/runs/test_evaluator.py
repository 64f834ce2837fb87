"""Test the evaluator process, which evaluates the newest weights during training."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import remuda
from remuda.build.recipe import make_recipe
from remuda.config.resolve import resolve_config
from remuda.config.run_config import RunConfig
from remuda.envs import EnvSpec
from remuda.errors import ConfigError, Interrupted
from remuda.learning.weights import SharedWeights
from remuda.runs import evaluation, evaluator
from remuda.runs.evaluation import play_episodes
from remuda.runs.evaluator import EvaluatorProcess

SOON = 60.0


def settled(algo: str = "dqn", env: str = "CartPole-v1", **groups: Any) -> tuple[RunConfig, EnvSpec, Any]:
    options: dict[str, Any] = {"eval": {"cpu_fraction": 1.0, "episodes": 3}, "agent": {"hidden": (8,)}, **groups}
    config, spec, info = resolve_config({"algo": algo, "env": env, "scheme": "async", "seed": 1}, options)
    torch.manual_seed(0)
    return config, spec, make_recipe(config, spec, info).make_learner().algorithm.agent


def look_until(
    evaluator: EvaluatorProcess, is_done: Callable[[list[Any]], bool], version: int, steps: int
) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + SOON
    while not is_done(found):
        found += evaluator.poll(version, steps)
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(("algo", "core"), [("dqn", None), ("r2d1", "lstm"), ("impala", None)])
def test_evaluator_results_equal_an_evaluation_of_the_same_weights(algo: str, core: str | None) -> None:
    config, spec, agent = settled(algo, agent={"core": core} if core else {})
    with closing(SharedWeights(agent, 0)) as weights, closing(EvaluatorProcess(config, spec, weights)) as evaluator:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(version))
            weights.publish(version)
            steps = 100 * version
            found = look_until(evaluator, lambda found: any(e["steps"] == steps for e in found), version, steps)  # noqa: B023
            expected = play_episodes(config, spec, 3, agent, workers=0).summary()
            assert {name: found[-1][name] for name in expected} == expected


def test_unchanged_weights_are_evaluated_once() -> None:
    config, spec, agent = settled()
    with closing(SharedWeights(agent, 0)) as weights, closing(EvaluatorProcess(config, spec, weights)) as evaluator:
        look_until(evaluator, bool, 0, 0)
        time.sleep(1.0)
        assert evaluator.poll(0, 0) == []


def test_a_killed_evaluator_is_replaced_until_its_restarts_are_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, spec, agent = settled(envs={"max_worker_restarts": 2})
    with closing(SharedWeights(agent, 0)) as weights, closing(EvaluatorProcess(config, spec, weights)) as evaluator:
        look_until(evaluator, bool, 0, 0)
        os.kill(evaluator._worker_pool.workers[0].pid, signal.SIGKILL)
        weights.publish(1)
        look_until(evaluator, bool, 1, 10)
        deadline = time.monotonic() + SOON
        while evaluator._is_open:
            with suppress(ProcessLookupError):  # the killed evaluator was not replaced yet
                os.kill(evaluator._worker_pool.workers[0].pid, signal.SIGKILL)
            evaluator.poll(1, 10)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert evaluator.poll(2, 20) == []
    assert "training continues without it" in caplog.text


@pytest.mark.long
def test_an_evaluator_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    config, spec, agent = settled(envs={"step_timeout": 3.0, "build_timeout": 15.0})
    with closing(SharedWeights(agent, 0)) as weights, closing(EvaluatorProcess(config, spec, weights)) as evaluator:
        look_until(evaluator, bool, 0, 0)
        first = evaluator._worker_pool.workers[0].pid
        os.kill(first, signal.SIGSTOP)
        weights.publish(1)
        look_until(evaluator, bool, 1, 10)
        assert evaluator._worker_pool.workers[0].pid != first
    assert "was silent for 15 s while it evaluated" in caplog.text


def test_a_run_has_many_evaluations_and_a_video(tmp_path: Path) -> None:
    path, lines_at = tmp_path / "run", []

    def has_seen_enough(round: Any) -> bool:
        """Stop after three evaluations, a video, and enough further steps for a metrics line with the results."""
        lines_at.extend([round.progress.steps] * len(round.evaluations))
        is_filmed = (path / "videos" / "newest.mp4").exists()
        return len(lines_at) >= 3 and is_filmed and round.progress.steps > lines_at[2] + 300

    run = remuda.train(
        "dqn",
        "CartPole-v1",
        scheme="async",
        steps=10_000_000,
        seed=1,
        out=path,
        quiet=True,
        callbacks=has_seen_enough,
        sampler={"envs": 2, "workers": 1},
        agent={"hidden": (8,)},
        algo={"learning_starts": 100, "epsilon": "0.5"},
        eval={"cpu_fraction": 1.0, "episodes": 2, "video": True},
        log={"tensorboard": False, "every": 100},
    )
    lines = [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]
    assert len(lines) >= 3
    assert [line["steps"] for line in lines] == sorted({line["steps"] for line in lines})
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    *before, last = metrics
    told = [line["eval/steps"] for line in before if line.get("eval/steps") is not None]
    assert told
    assert last.get("eval/steps") in (None, last["time/total_timesteps"]), "the last line evaluates the final weights"
    assert all(("eval/steps" in line) == ("eval/mean_reward" in line) for line in metrics)
    assert set(told) <= {line["steps"] for line in lines}
    assert (path / "videos" / "newest.mp4").stat().st_size > 1000
    assert len(run.result["eval"]["returns"]) == 2, "the result contains the evaluation of the final weights"


def test_video_of_an_env_without_rgb_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be filmed"):
        remuda.train(
            "dqn", "own_things:late", scheme="async", out=tmp_path / "run", eval={"cpu_fraction": 0.5, "video": True}
        )
    assert not (tmp_path / "run").exists()


def test_a_net_that_other_processes_cannot_import_is_refused_with_a_remedy(tmp_path: Path) -> None:
    net = lambda shape: torch.nn.Flatten()  # noqa: E731  (the test needs a net without a name)
    with pytest.raises(ConfigError, match=r"has no import path: define it .*, or use --scheme parallel\.$"):
        remuda.train("dqn", "CartPole-v1", scheme="async", out=tmp_path / "run", net=net, eval={"cpu_fraction": 0.5})
    assert not (tmp_path / "run").exists()


def test_evaluations_continue_if_recording_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, spec, agent = settled()
    video = tmp_path / "file" / "newest.mp4"
    video.parent.write_text("where the folder should be")
    with closing(SharedWeights(agent, 0)) as weights, closing(
        EvaluatorProcess(config, spec, weights, video=video)
    ) as evaluator:  # fmt: skip
        for version in (0, 1, 2):
            weights.publish(version)
            look_until(evaluator, bool, version, version)
        look_until(evaluator, lambda found: "no longer recorded as video" in caplog.text, 2, 2)
        assert evaluator._is_open


def test_should_stop_is_polled_only_during_construction() -> None:
    config, spec, agent = settled()
    with closing(SharedWeights(agent, 0)) as weights:
        with pytest.raises(Interrupted):
            EvaluatorProcess(config, spec, weights, should_stop=lambda: True)
        asked = iter([False] * 1000)
        with closing(EvaluatorProcess(config, spec, weights, should_stop=lambda: next(asked))) as evaluator:
            asked = iter([])
            look_until(evaluator, bool, 0, 0)


def test_the_evaluator_uses_one_thread_whatever_scheme_threads_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config, spec, agent = settled(scheme={"threads": 2})
    seen = []
    evaluate = evaluation.evaluate

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return evaluate(*args, **options)

    monkeypatch.setattr(evaluation, "evaluate", watched)
    service = evaluator._Service.__new__(evaluator._Service)
    service._config, service._spec, service._agent, service._video, service._version = config, spec, agent, None, 0
    service._link = SimpleNamespace(send=lambda *message, **options: None)
    monkeypatch.setattr(service, "_should_stop", lambda: False)
    service._evaluate()
    play_episodes(config, spec, 1, agent, workers=0)
    assert seen == [1, 2]
