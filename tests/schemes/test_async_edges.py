"""Tests of edge cases of asynchronous runs with a replay: late messages, refused options, changed spaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from lasting import shared_server
from processes import children_of
from writing import Setup, merged

import remuda
from remuda.build import recipe
from remuda.errors import ConfigError, EnvSpecError, WorkerError
from remuda.learning.checkpoint import load_newest
from remuda.learning.learner import Learner
from remuda.processes.fork_server import ForkFailed, ForkServer
from remuda.replay import RowCounters
from remuda.runs import signals
from remuda.runs.run_log import RunLog
from remuda.sampling.replay_writers import ReplayWriterPool
from remuda.schemes.learning_round import LocalUpdates


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    with shared_server("remuda.build.workers"):
        yield


def train(out: Path, name: str = "dqn", env: str = "CartPole-v1", **settings: Any) -> Any:
    return remuda.train(
        name, env, scheme="async", out=out, quiet=True, **merged({"eval": {"episodes": 0}, **settings})
    )


def samplers() -> list[psutil.Process]:
    """Return the workers. They are children of fork servers, of which some may belong to other tests."""
    return [worker for server in psutil.Process().children() for worker in children_of(server)]


def test_run_saves_its_learner_after_a_checkpoint_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a writer does not stop while the replay is saved, the run ends with an error but saves all updates."""
    pause_writers, seen = RowCounters.pause_writers, []

    def fails_once(counters: RowCounters) -> Any:
        if seen and seen[0] > 900:
            monkeypatch.setattr(RowCounters, "pause_writers", pause_writers)
            raise WorkerError("writers of groups [1] of the replay did not stop")
        return pause_writers(counters)

    monkeypatch.setattr(RowCounters, "pause_writers", fails_once)

    def look(round: Any) -> None:
        seen[:] = [round.progress.steps, round.learner.version]

    with pytest.raises(WorkerError, match="did not stop"):
        train(tmp_path / "run", callbacks=[look], steps=5_000, checkpoint={"every": 700})
    newest = load_newest(tmp_path / "run" / "checkpoints")
    assert newest.step >= seen[0] > 1_000, "the final checkpoint is later than the previous one, at 700"
    assert newest.learner["version"] >= seen[1]


def stop_in_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise SIGTERM in the next update, without a grace period for the round."""
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.0)
    exchange = LocalUpdates.exchange

    def stop_and_exchange(updates: LocalUpdates, learner: Learner, gradients: Any) -> Any:
        monkeypatch.setattr(LocalUpdates, "exchange", exchange)
        os.kill(os.getpid(), signal.SIGTERM)
        return exchange(updates, learner, gradients)

    monkeypatch.setattr(LocalUpdates, "exchange", stop_and_exchange)


def test_signal_ends_a_run_whose_samplers_hang_during_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hung samplers are ended without a long wait, and all updates are saved."""
    hung: list[psutil.Process] = []

    def look(round: Any) -> None:
        if round.learner.version > 20 and not hung:
            hung.extend(samplers())
            for process in hung:
                process.suspend()
            time.sleep(0.1)
            round.replay.ring.counters.begun[0] += 5
            stop_in_the_next_update(monkeypatch)

    start = time.monotonic()
    run = train(tmp_path / "run", callbacks=[look], steps=10**8, checkpoint={"every": 0}, replay={"ratio": None})
    assert time.monotonic() - start < 50.0
    assert run.result["status"] == "stopped by SIGTERM"
    assert load_newest(run.path / "checkpoints").learner["version"] == run.result["updates"]


def test_episodes_and_restarts_of_an_interrupted_round_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    episodes = ReplayWriterPool.episodes
    monkeypatch.setattr(ReplayWriterPool, "episodes", lambda writers: heard.append(episodes(writers)) or heard[-1])
    monkeypatch.setattr(ReplayWriterPool, "restarts", lambda writers: len(heard))
    stopped: list[bool] = []

    def look(round: Any) -> None:
        if round.learner.version > 20 and not stopped:
            stopped.append(True)
            time.sleep(0.5)  # gives samplers time to report episodes
            stop_in_the_next_update(monkeypatch)

    run = train(tmp_path / "run", callbacks=[look], steps=10**8, replay={"ratio": None})
    assert run.result["status"] == "stopped by SIGTERM"
    progress = load_newest(run.path / "checkpoints").progress
    assert heard[-1], "the interrupted round had episodes"
    assert progress["episodes"] == sum(map(len, heard))
    assert progress["restarts"] == len(heard)


def test_drain_waits_neither_for_rows_of_an_earlier_run_nor_for_lost_samplers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Resumed(Setup):
        def prepare(self, replay: Any) -> None:
            for group in range(self.workers):
                replay.ring.cut(np.zeros((replay.ring.width, 4), np.float32), group)

    monkeypatch.setattr("remuda.sampling.replay_writers.DRAIN_SECONDS", 10_000.0)
    with Resumed("CartPole-v1") as setup:
        setup.writers.drain()
        setup.wait(lambda: setup.replay.ring.written.min() > 20)
        setup.replay.ring.counters.limit[0] = 0
        samplers()[-1].kill()
        setup.wait(lambda: setup.writers.restarts() > 0)
        setup.replay.ring.counters.limit[0] = 0
        setup.writers.drain()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_env_with_other_spaces_in_a_sampler_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Spaces determine the layout of shared memory; a sampler with another layout would misread it and hang."""
    file = tmp_path / "size"
    file.write_text("3")
    words = r"shifting:make: observation is box float32\[2\] in a worker, and box float32\[3\] where the run learns"
    envs = {"kwargs": {"file": str(file)}, "max_worker_restarts": 1}
    if when == "at once":
        make = recipe.make_replay_writers
        monkeypatch.setattr(recipe, "make_replay_writers", lambda *given: file.write_text("2") and make(*given))
        with pytest.raises(EnvSpecError, match=words):
            train(tmp_path / "run", env="shifting:make", envs=envs)
        return

    def look(round: Any) -> None:
        if round.progress.steps > 400 and file.read_text() == "3":
            file.write_text("2")
            samplers()[-1].kill()

    with pytest.raises(WorkerError) as caught:
        train(tmp_path / "run", env="shifting:make", envs=envs, steps=10**6, callbacks=[look])
    assert "observation is box float32[2] in a worker" in f"{caught.value} {caught.value.__notes__}"


def test_samplers_wait_until_the_first_limit_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round may begin long after the samplers, for example on a slow disk or a busy core."""
    begin = RunLog.begin
    monkeypatch.setattr(RunLog, "begin", lambda run_log: (time.sleep(0.5), begin(run_log)))
    run = train(tmp_path / "run", steps=600)
    assert 600 <= run.result["steps"] < 600 + 2 * 4 * 8, "at most one more rollout per worker"


def test_run_survives_forks_that_fail_for_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, refused, killed = ForkServer.fork, [], []

    def maybe(server: ForkServer, fds: Any) -> int:
        if killed and len(refused) < 4:
            refused.append(time.monotonic())
            raise ForkFailed("[Errno 11] Resource temporarily unavailable")
        return fork(server, fds)

    monkeypatch.setattr(ForkServer, "fork", maybe)

    def look(round: Any) -> bool:
        if round.progress.steps > 400 and not killed:
            killed.append(time.monotonic())
            samplers()[-1].kill()
        return round.progress.restarts > 0 and len(refused) == 4 and len(samplers()) == 8

    run = train(tmp_path / "run", steps=10**6, sampler={"envs": 8, "workers": 8}, callbacks=[look])
    assert run.result["status"] == "stopped by callback"
    rests = [after - before for before, after in pairwise(refused)]
    assert len(rests) == 3
    assert min(rests) > 0.15, "retries are spaced although seven other samplers report often"


def test_every_finished_episode_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remuda.sampling.replay_writers.DRAIN_SECONDS", 30.0)
    ended: list[int] = []

    def look(round: Any) -> None:
        ring = round.replay.ring
        columns = [ring.rows.mask[: int(ring.written[group]), ring.columns(group)] for group in range(ring.groups)]
        ended[:] = [sum(int((~mask).sum()) for mask in columns)]

    for act in ("workers", "central"):
        run = train(tmp_path / act, steps=600, callbacks=[look], sampler={"inference": act})
        # An episode that ended with its env's last row has no reset row yet.
        assert ended[0] <= run.result["episodes"] <= ended[0] + 4
        assert run.result["episodes"] > 10


def test_refused_replay_leaks_no_file_descriptor(tmp_path: Path) -> None:
    settings = {
        "algo": {"batch_size": 4, "train_freq": 300},
        "replay": {"sequence": 10, "n_step": 3, "capacity": 400},
    }
    counts = []
    for _ in range(3):
        with pytest.raises(ConfigError, match="never leave a whole sequence"):
            train(tmp_path / "run", "r2d1", agent={"core_size": 8}, **settings)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] <= counts[0], "there may be fewer, because garbage of earlier tests is freed"
