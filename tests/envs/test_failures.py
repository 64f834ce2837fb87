"""Exceptions inside a user's env: reported with file and line, logged with traceback, and survived up to a limit."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remuda.cli import main
from remuda.envs import LocalEnvs, PooledEnvs, resolve
from remuda.envs.failures import FailureCount, find_place, raised
from remuda.errors import EnvFailed

ENV = '''\
import contextlib
import os

import gymnasium
import numpy as np


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails_at=37, lasts=100):
        self.fails_at, self.lasts = fails_at, lasts

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            self.look_up({})
        return np.zeros(2, np.float32), 1.0, self.steps >= self.lasts, False, {}

    def look_up(self, cards):
        return np.asarray(cards["ace"])


def one_of_two(path=None):
    """Only the second env of a process finishes episodes, or the env in the process that could create a file."""
    one_of_two.made = getattr(one_of_two, "made", 0) + 1
    if path is None:
        return Env(0 if one_of_two.made == 2 else 3, 40)
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(str(os.getpid()))
    return Env(0 if open(path).read() == str(os.getpid()) else 3, 40)
'''
LINE = 1 + ENV.splitlines().index('        return np.asarray(cards["ace"])')
WAYS = {
    "serial": ["ppo", "--scheme", "serial"],
    "parallel": ["ppo", "--scheme", "parallel", "--sampler.workers", "2"],
    "workers": ["ppo", "--scheme", "parallel", "--sampler.workers", "2", "--sampler.inference", "workers"],
    "async": ["appo", "--scheme", "async", "--sampler.workers", "2"],
    "async central": ["appo", "--scheme", "async", "--sampler.workers", "2", "--sampler.inference", "central"],
    "async replay": ["dqn", "--scheme", "async", "--sampler.workers", "2", "--algo.learning_starts", "64"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a module that contains ENV, make it importable, and return its path."""
    path = tmp_path_factory.mktemp("own") / "own_failing.py"
    path.write_text(ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield path


@pytest.mark.parametrize("way", WAYS)
def test_env_that_fails_in_every_episode_is_named_and_ends_the_run(
    way: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ["train", *WAYS[way], "--env", "own_failing:Env", "--sampler.envs", "4", "--steps", "100000"]
    assert main([*run, "--out", str(tmp_path / "run"), "--seed", "1"]) == 2
    out, err = capfd.readouterr()
    place = f"{source}:{LINE}, in look_up"
    sentence = rf"remuda: env \d of own_failing:Env \(.*\) raised KeyError: 'ace' \({re.escape(place)}\), "
    assert re.fullmatch(sentence + r"20 times while no env finished an episode: fix the env\.\n", err)
    warnings = [line for line in out.splitlines() if line.startswith("warning: env ")]
    if not way.startswith("async"):  # where a sampler may fail 20 times before its first message arrives
        assert place in warnings[0]
        assert warnings[0].endswith("it was rebuilt (restart 1). The full traceback is in log.txt.")
    assert not any("log.txt" in line for line in warnings[1:])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(rf'File "{source}", line \d+, in step\n +self.look_up\(', log)
    assert log.count(f'File "{source}", line {LINE}, in look_up') == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"


def test_traceback_is_logged_if_no_failure_is_allowed(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "ppo", "--env", "own_failing:Env", "--envs.max_restarts", "0", "--scheme", "parallel"]
    assert (
        main(
            [*run, "--sampler.workers", "1", "--sampler.envs", "2", "--steps", "500", "--out", str(tmp_path / "run")]
        )
        == 2
    )
    assert f"own_failing.py:{LINE}, in look_up): fix the env." in capfd.readouterr().err
    assert f'.py", line {LINE}, in look_up' in (tmp_path / "run" / "log.txt").read_text()


def steps(envs: Any, count: int) -> None:
    envs.reset(seed=1)
    for _ in range(count):
        slot, _ = envs.recv()
        envs.send(slot, np.zeros(envs.num_envs, np.int64))


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_of_one_env_do_not_end_the_run_while_another_finishes_episodes(
    workers: int, source: Path, tmp_path: Path
) -> None:
    """The other env may be in another process."""
    kwargs = {"path": str(tmp_path / "good")} if workers else {}
    spec = resolve("own_failing:one_of_two", kwargs)
    with PooledEnvs(spec, 2, 2) if workers else LocalEnvs(spec, 2) as envs:
        steps(envs, 200)
        assert envs.restarts() > 40


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_of_each_env_are_counted_while_none_finishes_an_episode(workers: int, source: Path) -> None:
    spec = resolve("own_failing:Env", {"fails_at": 3})
    with PooledEnvs(spec, 2, 2) if workers else LocalEnvs(spec, 2) as envs:
        with pytest.raises(EnvFailed, match=r"20 times while no env finished an episode"):
            steps(envs, 200)
        assert 39 <= envs.restarts() <= 40


def test_traceback_is_formatted_once_for_each_place(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "remuda.envs"), LocalEnvs(resolve("own_failing:Env"), 2) as envs:
        steps(envs, 37 * 8)
    shown = [record.__dict__.get("traceback") for record in caplog.records]
    assert len(shown) == 4  # for the 1st, 2nd, 4th and 8th failure
    assert [bool(text) for text in shown] == [True, False, False, False]


def test_place_is_in_user_code_if_a_library_raised() -> None:
    def ask() -> None:
        np.linalg.inv(np.zeros((2, 2)))

    with pytest.raises(np.linalg.LinAlgError) as caught:
        ask()
    line = next(line for frame, line in traceback.walk_tb(caught.tb) if frame.f_code.co_name == "ask")
    assert find_place(caught.value) == (f"{__file__}:{line}", "ask")
    assert raised(caught.value) == f"LinAlgError: Singular matrix ({__file__}:{line}, in ask)"


def test_finished_episode_resets_the_count() -> None:
    count = FailureCount(max_restarts=1000)
    assert [count.add(1, failures, 0) for failures in range(1, 20)] == [None] * 19
    assert [count.add(1, failures, 1) for failures in range(20, 39)] == [None] * 19
    assert count.add(1, 39, 1) == ", 20 times while no env finished an episode"


def test_failures_without_a_step_have_their_own_limit() -> None:
    count = FailureCount(max_restarts=1000)
    assert [count.add(failures, failures, 0) for failures in range(1, 21)] == [None] * 20
    assert count.add(21, 21, 0) == ", 21 times in a row without completing a step"
