"""Tests of asynchronous runs with a replay: samplers write to it asynchronously, the learner draws due batches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from processes import all_gone, wait_for
from safetensors.torch import load_file
from writing import COUNTING, SOON, Setup, check_rows, merged

import remuda
from remuda.build import envs as build_envs
from remuda.data.packing import unpack
from remuda.errors import ConfigError
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.weights import SharedWeights
from remuda.runs import signals
from remuda.runs.run_log import RunLog
from remuda.sampling.replay_writers import ReplayWriterPool
from remuda.schemes.learning_round import LocalUpdates

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dqn": ("dqn", "CartPole-v1", {}),
    "dqn, normalised": ("dqn", "CartPole-v1", {"agent": {"normalize_obs": True}}),
    "rainbow": ("rainbow", "CartPole-v1", {}),
    "r2d1": (
        "r2d1",
        "CartPole-v1",
        {"agent": {"core_size": 8}, "algo": {"batch_size": 4}, "replay": {"sequence": 10, "n_step": 3}},
    ),
    "rainbow, judged": ("rainbow", "CartPole-v1", {"replay": {"initial_priority": "error"}}),
    "r2d1, judged": (
        "r2d1",
        "CartPole-v1",
        {
            "agent": {"core_size": 8},
            "algo": {"batch_size": 4},
            "replay": {"sequence": 10, "n_step": 3, "burn_in": 4, "initial_priority": "error"},
        },
    ),
    "ddpg": ("ddpg", "Pendulum-v1", {}),
    "ddpg, noise that drifts": ("ddpg", "Pendulum-v1", {"algo": {"noise": "ou"}}),
    "td3": ("td3", "Pendulum-v1", {}),
    "sac": ("sac", "Pendulum-v1", {"algo": {"train_freq": 4}}),
    "sac with memory": (
        "sac",
        "Pendulum-v1",
        {
            "agent": {"core": "gru", "core_size": 8},
            "algo": {"batch_size": 4, "train_freq": 8},
            "replay": {"sequence": 8},
        },
    ),
}
CENTRAL = ("dqn", "rainbow, judged", "r2d1", "r2d1, judged", "ddpg, noise that drifts", "sac", "sac with memory")


def acting(act: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with `sampler.inference` set to `act`."""
    return {**settings, "sampler": {**settings.get("sampler", {}), "inference": act}}


def train(out: Path, name: str = "dqn", env: str = "CartPole-v1", scheme: Any = "async", **settings: Any) -> Any:
    return remuda.train(name, env, scheme=scheme, out=out, quiet=True, **merged(settings))


@pytest.mark.long
def test_lags_of_a_resumed_run_are_not_negative(tmp_path: Path) -> None:
    """Samplers report before the first update of the resumed run, and the reported lags must not be negative."""
    settings = {"replay": {"ratio": None}, "log": {"every": 50, "tensorboard": False}}
    train(tmp_path / "run", "sac", "Pendulum-v1", **settings)
    run = remuda.resume(tmp_path / "run", steps=2_000)
    names = ("lag/acting_weights", "lag/collect_to_gradient")
    ages = [line[name] for line in lines_of(run) for name in names if name in line]
    assert min(ages) >= 0


def test_largest_lag_is_not_that_of_the_mean_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every round, one rollout of a much older version is reported beside those of the newest ones."""
    take_lag = ReplayWriterPool.take_lag

    def take_more(writers: ReplayWriterPool) -> Any:
        with writers._changed:
            writers._lags[:] = [0, 0, 0, 40]
        return take_lag(writers)

    monkeypatch.setattr(ReplayWriterPool, "take_lag", take_more)
    run = train(tmp_path / "run", steps=600, algo={"learning_starts": 100}, eval={"episodes": 0})
    found = [line["lag/collect_to_gradient_max"] for line in lines_of(run) if "lag/collect_to_gradient_max" in line]
    assert min(found) >= 40


def lines_of(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


# These cases take seconds each, and each combines what two other cases cover.
SLOW = [("workers", "r2d1, judged"), ("central", "r2d1, judged"), ("central", "rainbow, judged")]
SLOW += [("workers", "ddpg"), ("workers", "sac"), ("central", "dqn"), ("central", "sac with memory")]
ALL = [*(("workers", case) for case in RUNS), *(("central", case) for case in CENTRAL)]


@pytest.mark.parametrize(
    ("act", "case"), [pytest.param(*each, marks=pytest.mark.long if each in SLOW else ()) for each in ALL]
)
def test_every_algorithm_runs_and_respects_its_replay_ratio(tmp_path: Path, act: str, case: str) -> None:
    algo, env, settings = RUNS[case]
    run = train(tmp_path / "run", algo, env, **acting(act, settings))
    found, last = run.result, lines_of(run)[-1]
    assert found["status"] == "complete"
    rollouts = 4 * merged(settings)["algo"].get(
        "train_freq", 8
    )  # two workers, one of which may stop one rollout late
    assert 1500 <= found["steps"] < 1500 + 2 * rollouts
    per_update = merged(settings)["algo"]["batch_size"] * max(1, merged(settings)["replay"].get("sequence", 0))
    due = 4.0 * (found["steps"] - 300) / per_update
    assert due - 6 < found["updates"] <= due, (
        "all due updates are made, except while the replay held no whole sequence"
    )
    assert {"replay/ratio", "replay/redrawn", "lag/acting_weights", "lag/collect_to_gradient"} <= set(last)
    assert found["episodes"] > 2
    assert len(found["eval"]["returns"]) == 2


def test_observation_statistics_reach_samplers_without_an_update(tmp_path: Path) -> None:
    """Before learning starts there is no update, so only the statistics change and have to be published."""
    scheme = {"name": "async", "weights": "file"}
    settings = {"agent": {"normalize_obs": True}, "algo": {"learning_starts": 5000}, "eval": {"episodes": 0}}
    run = train(tmp_path / "run", steps=400, scheme=scheme, **settings)
    assert run.result["updates"] == 0
    published = load_file(run.path / "weights.safetensors")
    (name,) = [name for name in published if name.endswith("moments.count")]
    assert published[name] >= 400


def test_unchanged_weights_are_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, versions = SharedWeights.publish, list[int]()

    def counted(weights: SharedWeights, version: int) -> None:
        versions.append(version)
        publish(weights, version)

    monkeypatch.setattr(SharedWeights, "publish", counted)
    train(tmp_path / "run", steps=400, algo={"learning_starts": 5000}, eval={"episodes": 0})
    assert versions == [0]


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
def test_rows_hold_the_observations_also_when_the_noise_has_a_state(tmp_path: Path, noise: str) -> None:
    """Pendulum observes the cosine and sine of an angle, so the norm of both in every stored row must be 1."""
    seen: list[np.ndarray[Any, Any]] = []

    def look(round: Any) -> bool:
        ring = round.replay.ring
        stored = ring.rows.obs[: int(ring.written.min())]
        seen.append(np.hypot(stored[..., 0], stored[..., 1]))
        return len(stored) > 20  # rows of the slower group

    options = {"steps": 10**6, "algo": {"noise": noise}, "replay": {"capacity": 10**6}}
    run = train(tmp_path / "run", "ddpg", "Pendulum-v1", callbacks=[look], **options)
    assert run.result["status"] == "stopped by callback"
    np.testing.assert_allclose(seen[-1], 1.0, atol=1e-4)


def test_replay_without_warm_up_waits_for_its_first_row() -> None:
    """Writers count rows before the rows are visible to the learner and before they have an initial priority."""
    for seed in range(3):
        settings: dict[str, Any] = {"algo": {"learning_starts": 0, "batch_size": 16}, "seed": seed}
        td_errors = {"ratio": 4.0, "prioritized": True, "initial_priority": "error"}
        with Setup("CartPole-v1", sampler={"envs": 8, "workers": 2}, replay=td_errors, **settings) as setup:
            setup.wait(lambda: len(list(setup.replay.batches())) > 0)


def test_learner_does_not_wait_for_steps_with_ratio_none(tmp_path: Path) -> None:
    """With slow envs the learner makes far more updates than any usual ratio would permit."""
    slow = {"kwargs": {"seconds": 0.01, "wait": "sleep"}}
    drawn = lambda steps, updates: updates * 16 / max(1, steps - 300)  # noqa: E731

    ratios: list[tuple[float, float]] = []  # for each round, the reported ratio and the one computed from the counts

    def look(round: Any) -> bool:
        ratio = drawn(round.progress.steps, round.learner.version)
        ratios.append((round.metrics["replay/ratio"], ratio))
        return round.progress.steps > 400 and ratio > 8

    options = {"envs": slow, "replay": {"ratio": None}, "callbacks": [look]}
    run = train(tmp_path / "run", env="Remuda/Mock-v0", steps=6000, **options)
    assert run.result["status"] == "stopped by callback", "a learner that waited for steps would not get there"
    reported, counted = zip(*ratios, strict=True)
    assert reported == pytest.approx(counted)


def test_unthrottled_samplers_do_not_wait_for_the_learner(tmp_path: Path) -> None:
    scheme = {"name": "async", "throttle": False, "publish_every": 2}
    run = train(tmp_path / "run", scheme=scheme, steps=4000, replay={"ratio": 500.0})
    assert run.result["status"] == "complete"
    assert lines_of(run)[-1]["replay/ratio"] < 250, (
        "the learner could not keep up, and the samplers did not wait for it"
    )


@pytest.mark.parametrize(
    ("act", "case"),
    [
        *(("workers", case) for case in ("dqn", "r2d1", "sac")),
        pytest.param("workers", "rainbow", marks=pytest.mark.long),
        pytest.param("central", "r2d1", marks=pytest.mark.long),
    ],
)
def test_stopped_run_resumes_with_its_updates_steps_and_replay(tmp_path: Path, act: str, case: str) -> None:
    algo, env, settings = RUNS[case]
    settings = acting(act, settings)
    steps = {"first": 0, "rows": 0}

    def stop_in_the_middle(round: Any) -> bool:
        steps["first"], steps["rows"] = round.progress.steps, int(round.replay.ring.written.min())
        return bool(round.progress.steps >= 900 and steps["rows"])

    first = train(tmp_path / "run", algo, env, callbacks=[stop_in_the_middle], **settings)
    assert first.result["status"] == "stopped by callback"
    updates = first.result["updates"]
    seen: list[tuple[int, int, int]] = []

    def look(round: Any) -> None:
        replay = round.replay
        seen.append((round.progress.steps, replay.steps, int(replay.ring.written.min())))

    second = remuda.resume(first.path, callbacks=[look], quiet=True)
    assert second.result["status"] == "complete"
    assert second.result["updates"] > updates > 10
    assert seen[0][0] >= steps["first"]
    assert seen[0][1] >= steps["first"] - 50, "the replay restores its step count"
    assert seen[0][2] >= steps["rows"], "the replay restores its rows"
    lines = [line["time/total_timesteps"] for line in lines_of(second)]
    assert lines == sorted(set(lines))


@pytest.mark.parametrize("act", ["workers", "central"])
def test_run_resumes_on_a_machine_with_more_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """A replay is saved per group, and by default the number of groups depends on the number of cores."""
    monkeypatch.setattr(build_envs, "usable_cores", lambda: 2)
    settings = {"sampler": {"inference": act, "workers": 0}, "callbacks": [lambda round: round.progress.steps >= 900]}
    first = train(tmp_path / "run", **settings)
    assert first.result["status"] == "stopped by callback"
    monkeypatch.setattr(build_envs, "usable_cores", lambda: 4)
    groups: list[int] = []
    second = remuda.resume(first.path, callbacks=[lambda round: groups.append(round.replay.ring.groups)], quiet=True)
    assert second.result["status"] == "complete"
    assert set(groups) == {2}


@pytest.mark.parametrize("act", ["workers", "central"])
@pytest.mark.parametrize("workers", [1, 2])
def test_stored_rows_match_the_envs(act: str, workers: int) -> None:
    with Setup("counting:make", **acting(act, {**COUNTING, "sampler": {"envs": 4, "workers": workers}})) as setup:
        setup.wait(lambda: setup.replay.steps > 3000)
    assert check_rows(setup.replay) == 0


def test_lost_sampler_is_replaced_and_its_episodes_are_cut() -> None:
    with Setup("counting:make", **COUNTING) as setup:
        for number in range(4):
            setup.wait(lambda: (setup.replay.ring.real > 200 * (number + 1)).all())  # noqa: B023  (used at once)
            member = setup.writers._worker_pool.workers[number % 2]
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            before = int(setup.replay.ring.real[number % 2])
            setup.wait(lambda: setup.replay.ring.real[number % 2] > before + 100)  # noqa: B023
        assert setup.writers.restarts() >= 8  # two envs each time
        setup.wait(lambda: setup.replay.steps > 3000)
    assert check_rows(setup.replay) <= 8, "at most two cuts per lost sampler; some envs were between episodes"


def test_learner_does_not_wait_while_a_sampler_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement may take seconds if the fork server was lost too."""
    with Setup("counting:make", **COUNTING) as setup:
        setup.wait(lambda: (setup.replay.ring.real > 100).all())
        has_begun, may_go_on, relaunch = threading.Event(), threading.Event(), setup.writers._worker_pool.relaunch

        def relaunch_slowly(*given: Any) -> None:
            has_begun.set()
            may_go_on.wait(SOON)
            relaunch(*given)

        monkeypatch.setattr(setup.writers._worker_pool, "relaunch", relaunch_slowly)
        os.kill(setup.writers._worker_pool.workers[0].pid, signal.SIGKILL)
        assert has_begun.wait(SOON)
        timer = threading.Timer(10, may_go_on.set)  # otherwise a learner that does wait would block the test
        timer.start()
        setup.writers.poll(0)
        setup.writers.take_lag()
        assert not may_go_on.is_set(), "the learner waited for the replacement"
        timer.cancel()
        may_go_on.set()
        before = int(setup.replay.ring.real[0])
        setup.wait(lambda: setup.replay.ring.real[0] > before + 100)


def test_options_rejected_by_a_sampler_raise_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^replay\.frames=2, and observations are not stacks"):
        train(tmp_path / "run", env="MinAtar/Breakout-v1", replay={"frames": 2})


def test_replaced_sampler_continues_from_the_common_row_of_a_resumed_run() -> None:
    """In a resumed run all groups start at the row of the furthest one, so noise and schedules never go back."""

    class Uneven(Setup):
        def prepare(self, replay: Any) -> None:
            for _ in range(1000):
                replay.ring.cut(np.zeros((2, 3), np.float32), group=0)
            assert replay.ring.written.tolist() == [1000, 0]

    with Uneven("counting:make", **COUNTING) as setup:
        setup.wait(lambda: setup.replay.ring.real[1] > 200)
        member = setup.writers._worker_pool.workers[1]
        assert member.blueprint["row"] == 1000
        os.kill(member.pid, signal.SIGKILL)
        setup.wait(lambda: member.blueprint["row"] > 1000)
        assert 1100 <= member.blueprint["row"] <= 1000 + int(setup.replay.ring.written[1])


def test_replaced_inference_server_continues_from_the_row_of_the_furthest_group() -> None:
    """The server is killed twice, so that the offsets of the first replacement enter the second one."""
    with Setup("counting:make", **acting("central", COUNTING)) as setup:
        ring, (member,) = setup.replay.ring, setup.writers._worker_pool.workers
        for count in (1, 2):
            before = ring.real.copy()
            setup.wait(lambda: (ring.real > before + 200).all())  # noqa: B023  (used at once)
            rows, ahead = member.blueprint["row"], np.array(setup.writers._ahead)
            os.kill(member.pid, signal.SIGKILL)
            setup.wait(lambda: member.blueprint["row"] > rows)  # noqa: B023
            assert setup.writers.restarts() == 4 * count
            assert member.blueprint["row"] >= rows + 100
            assert (member.blueprint["row"] - np.array(setup.writers._ahead) <= ring.written).all()
            assert min(setup.writers._ahead - ahead) == 0, "the furthest group continues with its own next row"
        before = ring.real.copy()
        setup.wait(lambda: (ring.real > before + 100).all())
    assert check_rows(setup.replay) <= 8


def stored_rows(ring: Any, env: int) -> Any:
    """Return all rows of one env that the ring still stores; a sampler may have overwritten some meanwhile."""
    group = env // ring.width
    row = np.arange(ring.counters.oldest(group), int(ring.written[group]))
    row = row[ring.is_stored(row, np.full(len(row), env))]
    return ring.take(row, np.full(len(row), env))


@pytest.mark.parametrize("act", ["workers", "central"])
def test_exploration_is_spread_over_the_envs_of_all_samplers(act: str) -> None:
    """Half of the first env's actions are random, and practically none of the others', in either worker."""
    algo = {**COUNTING["algo"], "epsilon": "0.5", "epsilon_power": 60.0}
    with Setup("counting:make", **acting(act, {**COUNTING, "algo": algo})) as setup:
        setup.wait(lambda: (setup.replay.ring.real > 600).all())
    ring, agent = setup.replay.ring, setup.learner.algorithm.agent
    greedy = []
    for env in range(4):
        rows = stored_rows(ring, env)
        count = len(rows.mask)
        noise = torch.zeros(count, sum(width for _, width in agent.noise))
        best, _, _ = agent.act(torch.from_numpy(rows.obs), None, torch.zeros(count), noise)
        greedy.append(float((best.numpy() == rows.action)[rows.mask].mean()))
    assert greedy[0] == pytest.approx(5 / 8, abs=0.12), "a random action is the greedy one with probability 1/4"
    assert greedy[1:] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("act", ["workers", "central"])
def test_sampler_without_rows_reports_no_lag(act: str) -> None:
    """A replacement may have to wait before it samples; counted then, its lag would be the length of the run."""

    class Waiting(Setup):
        def prepare(self, replay: Any) -> None:
            replay.ring.counters.limit[0] = 0

    with Waiting("counting:make", **acting(act, COUNTING)) as setup:
        setup.writers.poll(50)
        time.sleep(0.5)
        assert setup.writers.take_lag() == (0, 0)
        assert not any(setup.writers._made_progress)
        setup.wait(lambda: all(setup.writers._made_progress))  # also lets the samplers continue


def test_verdict_names_slow_envs(tmp_path: Path) -> None:
    """Samplers report ten times a second, and rounds are far shorter than that."""
    slow = {"kwargs": {"seconds": 0.005, "wait": "sleep"}}
    options: dict[str, Any] = {"envs": slow, "algo": {"train_freq": 1}, "replay": {"ratio": 1.0}}
    run = train(tmp_path / "run", env="Remuda/Mock-v0", steps=1200, log={"every": 400}, **options)
    assert run.result["limit"] == "env"
    assert np.mean([line["limits/env"] for line in lines_of(run)[1:]]) > 0.5


@pytest.mark.parametrize(("act", "ratio"), [("workers", None), ("workers", 4.0), ("central", None)])
def test_samplers_pause_while_the_learner_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, ratio: float | None
) -> None:
    """Steps sampled meanwhile would use up the run's budget without any learning from them."""
    written: list[Any] = []  # rows that every group wrote during each evaluation
    rings: list[Any] = []
    begin = RunLog.begin

    def begin_and_watch(run_log: RunLog) -> None:
        evaluate = run_log.evaluations.evaluate_agent

        def evaluate_and_look(*given: Any) -> Any:
            before = [ring.written.copy() for ring in rings]
            found = evaluate(*given)
            written.extend(after.written - rows for rows, after in zip(before, rings, strict=True))
            return found

        run_log.evaluations.evaluate_agent = evaluate_and_look
        begin(run_log)

    def look(round: Any) -> bool:
        rings[:] = [round.replay.ring]
        return len(written) >= 3

    monkeypatch.setattr(RunLog, "begin", begin_and_watch)
    settings = acting(act, {"replay": {"ratio": ratio}, "eval": {"every": 300, "episodes": 5}})
    run = train(tmp_path / "run", "ddpg", "Pendulum-v1", callbacks=[look], steps=10**6, **settings)
    assert run.result["status"] == "stopped by callback"
    assert np.max(written) <= 8, "samplers only finish the rollout that began before the evaluation"


def test_decorrelation_that_uses_up_all_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.decorrelate.*: use more steps"):
        train(tmp_path / "run", steps=20, sampler={"decorrelate": 100}, algo={"learning_starts": 10})


@pytest.mark.parametrize("act", ["workers", "central"])
def test_reassembled_frame_stacks_match_the_observations(act: str) -> None:
    """Except after resets, the reassembled stack of every row is that of the previous row moved by one frame."""
    settings: dict[str, Any] = {
        "envs": {"screen_size": 42},
        "agent": {"net": "small"},
        "replay": {"capacity": 3000, "ratio": None},
        "algo": {"train_freq": 5, "learning_starts": 0},
    }
    with Setup("ALE/Pong-v5", **acting(act, settings)) as setup:
        setup.wait(lambda: setup.replay.steps > 600)
        os.kill(setup.writers._worker_pool.workers[0].pid, signal.SIGKILL)
        before = int(setup.replay.ring.real[0])
        setup.wait(lambda: setup.replay.ring.real[0] > before + 100)
    ring = setup.replay.ring
    for env_number in range(ring.envs):
        rows = stored_rows(ring, env_number)
        moved = rows.obs[1:, :3] == rows.obs[:-1, 1:]
        assert moved.all((1, 2, 3))[rows.mask[:-1]].all()


@pytest.mark.parametrize("act", ["workers", "central"])
def test_samplers_act_with_published_weights(act: str) -> None:
    with Setup("counting:make", **acting(act, COUNTING)) as setup:
        for version in range(1, 200):
            with torch.no_grad():
                for parameter in setup.learner.algorithm.agent.parameters():
                    parameter.add_(0.01)
            setup.weights.publish(version)
            setup.writers.poll(version)
            time.sleep(0.005)
        setup.writers.take_lag()
        setup.wait(lambda: len(setup.writers._lags) > 4)
        assert setup.writers.take_lag()[1] < 199


@pytest.mark.parametrize("algo", ["dqn", "impala"])
def test_weights_file_holds_the_newest_agent(tmp_path: Path, algo: str) -> None:
    settings: dict[str, Any] = {"algo": {"n_steps": 8, "batch_size": 4}, "replay": {}} if algo == "impala" else {}
    options = merged(settings) | ({"algo": settings["algo"]} if settings else {})
    options = {name: value for name, value in options.items() if name != "replay" or algo == "dqn"}
    scheme = {"name": "async", "weights": "file"}
    run = remuda.train(algo, "CartPole-v1", scheme=scheme, out=tmp_path / "run", quiet=True, **options)
    assert run.result["status"] == "complete"
    by_file, by_checkpoint = (remuda.load(path) for path in (run.path / "weights.safetensors", run.path))
    for mine, theirs in zip(by_file.agent.parameters(), by_checkpoint.agent.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert lines_of(run)[-1]["lag/acting_weights"] < 100, "samplers have read the file"


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function of n that raises SIGTERM n updates from now, without a grace period for the round."""
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.0)
    exchange = LocalUpdates.exchange

    def in_updates(count: int) -> None:
        left = [count]

        def exchange_and_stop(updates: LocalUpdates, learner: Learner, gradients: Any) -> Any:
            applied = exchange(updates, learner, gradients)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return applied

        monkeypatch.setattr(LocalUpdates, "exchange", exchange_and_stop)

    return in_updates


@pytest.mark.parametrize("throttle", [True, False])
def test_interrupted_round_keeps_its_updates_and_repeats_no_step(
    tmp_path: Path, stopped_after: Callable[[int], None], throttle: bool
) -> None:
    """Updates of an interrupted round are saved, and its steps are counted once the resumed run commits them."""
    scheme = {"name": "async", "throttle": throttle, "publish_every": 50, "weights": "file"}
    settings = {"steps": 1000 if throttle else 10**8, "replay": {"ratio": 16.0 if throttle else 64.0}}
    settings |= {"algo": {"learning_starts": 200}, "checkpoint": {"every": 1}, "agent": {"normalize_obs": True}}
    stopped_after(70)
    first = train(tmp_path / "run", scheme=scheme, **settings)
    assert (first.result["status"], first.result["updates"]) == ("stopped by SIGTERM", 70)
    found = checkpoint.load_newest(first.path / "checkpoints")
    assert found.learner["version"] == 70, "updates of the interrupted round are saved"
    counts = unpack(found.blobs["replay"])["replay"]
    assert counts["steps"] == found.progress["steps"] == first.result["steps"], (
        "the run and its replay count the same steps"
    )
    if not throttle:  # a throttled writer may have stopped before the interrupted round synchronized any row
        assert counts["unseen"] > 0, "the interrupted round had synchronized rows that it did not commit"
    by_file, by_checkpoint = (remuda.load(path) for path in (first.path / "weights.safetensors", first.path))
    for mine, theirs in zip(by_file.agent.parameters(), by_checkpoint.agent.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)

    stopped_after(-1)
    seen: list[tuple[int, int]] = []

    def look(round: Any) -> bool:
        seen.append((round.progress.steps, round.replay.steps))
        return not throttle and len(seen) == 5

    second = remuda.resume(first.path, callbacks=[look], quiet=True)
    assert second.result["status"] == ("complete" if throttle else "stopped by callback")
    assert all(of_run == of_replay for of_run, of_replay in seen)
    assert seen[0][0] >= counts["steps"] + counts["unseen"], "synchronized steps are not sampled again"
    if throttle:
        assert second.result["updates"] == (second.result["steps"] - 200) * 16 // 16, "no step is learned from twice"


def family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("act", ["workers", "central"])
def test_no_process_or_shared_memory_is_left_behind(tmp_path: Path, act: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    seen: set[psutil.Process] = set()  # recorded during the run: orphans have another parent afterwards
    train(tmp_path / "run", sampler={"inference": act}, callbacks=[lambda _: seen.update(family())])
    started = (seen | set(family())) - before
    assert len(started) >= {"workers": 2, "central": 4}[act], (
        "two samplers, or an inference server, a fork server and env workers"
    )
    wait_for(lambda: all_gone(started))
    assert [name for name in os.listdir("/dev/shm") if not name.startswith("tmp")] == [], (
        "only shared memory of other tests may remain"
    )
