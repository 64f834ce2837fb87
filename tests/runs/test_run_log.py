"""Test what a run logs: compare every metric, interval and count with values computed by hand."""

import csv
import io
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

import remuda
from remuda.config.resolve import resolve_config
from remuda.config.run_config import to_dict
from remuda.core import Episode
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError, ConfigError, Interrupted
from remuda.learning.checkpoint import list_checkpoints, load_newest, save
from remuda.logs.terminal import Terminal
from remuda.recipe import Progress, Round
from remuda.runs.checkpoints import LOG_STATE, named_checkpoint
from remuda.runs.directory import RunDirectory
from remuda.runs.run_log import RunLog
from remuda.runs.signals import StopSignals
from remuda.sampling.evaluation import Evaluation

# Episodes of 3, 5 and 2 steps with a reset row after each have 13 rows, 10 of them real. Every round is the same.
LENGTHS, ROWS, REAL, ENVS = [3, 5, 2], 13, 10, 4
STEPS = REAL * ENVS  # steps of a round
EPOCHS, MINIBATCHES = 2, 4
EVAL = "eval/mean_reward"


def train(out, rounds=10, algo="ppo", env="counting:make", kwargs=None, **settings):
    options = {
        "algo": {"n_steps": ROWS} | ({"n_epochs": EPOCHS, "batch_size": 13} if algo == "ppo" else {}),
        "sampler": {"envs": ENVS},
        "envs": {"kwargs": {"lengths": LENGTHS, **(kwargs or {})}},
        "eval": {"episodes": 0},
        "log": {"every": 1, "tensorboard": False},
        "quiet": True,
    }
    for group, values in settings.items():
        options[group] = {**options.get(group, {}), **values} if isinstance(values, dict) else values
    return remuda.train(algo, env, steps=rounds * STEPS, out=out, **options)


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_shorter_intervals_apply_immediately_to_a_resumed_run(tmp_path):
    train(tmp_path / "run", rounds=2)
    changes = {"steps": 6 * STEPS, "checkpoint": {"every": STEPS, "keep": "all"}}
    remuda.resume(tmp_path / "run", eval={"every": STEPS, "episodes": 1}, **changes)
    names = [found.name for found in list_checkpoints(tmp_path / "run/checkpoints")]
    assert sorted(names) == sorted(f"step-{rounds * STEPS}" for rounds in range(2, 7))
    found = [line["time/total_timesteps"] for line in lines(SimpleNamespace(path=tmp_path / "run")) if EVAL in line]
    assert found[-4:] == [rounds * STEPS for rounds in range(3, 7)]


@pytest.mark.parametrize(("algo", "scheme"), [("a2c", "serial"), ("impala", "async"), ("dqn", "async")])
def test_a_signal_just_after_a_round_was_logged_saves_that_round(tmp_path, monkeypatch, algo, scheme):
    """The round was logged without a checkpoint, so it is saved before the run ends; no further round is sampled."""
    written_down, rounds = RunLog.round, []

    def round_and_signal(run_log, round):
        must_end = written_down(run_log, round)
        rounds.append(round.progress.steps)
        if len(rounds) == 3:
            run_log.stop.signals.received = signal.SIGINT
        return must_end

    monkeypatch.setattr(RunLog, "round", round_and_signal)
    settings = {"sampler": {"envs": 2}, "eval": {"episodes": 0}, "log": {"tensorboard": False}}
    run = remuda.train(
        algo, "CartPole-v1", scheme=scheme, steps=100_000, out=tmp_path / "run", quiet=True, **settings
    )
    assert run.result["status"] == "stopped by SIGINT"
    assert len(rounds) == 3
    names = [found.name for found in list_checkpoints(tmp_path / "run/checkpoints")]
    assert names == [f"step-{run.result['steps']}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that uses every interval."""
    return train(
        tmp_path_factory.mktemp("run_log") / "run",
        log={"every": 100, "tensorboard": True, "window": 12},
        eval={"every": 200, "episodes": 3},
        checkpoint={"every": 80, "keep": "all"},
        envs={"kwargs": {"lengths": LENGTHS}, "stats": "counting:Peaks"},
    )


class TestTags:
    def test_required_metrics_exist(self, run):
        statistics = ("mean", "std", "median", "min", "max")
        expected = {f"rollout/{name}_{kind}" for name in ("ep_rew", "ep_len") for kind in statistics}
        expected |= {"time/fps", "time/total_timesteps", "time/iterations", "time/time_elapsed"}
        expected |= {
            f"train/{name}"
            for name in (
                "approx_kl",
                "clip_fraction",
                "clip_range",
                "entropy_loss",
                "explained_variance",
                "learning_rate",
                "loss",
                "n_updates",
                "policy_gradient_loss",
                "value_loss",
            )
        }
        expected |= {"lag/collect_to_gradient", "lag/gradient_to_update", "rollout/episodes", "rollout/restarts"}
        expected |= {f"limits/{name}" for name in ("env", "inference", "update", "wait")}
        for line in lines(run):
            assert expected <= set(line)
            assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values()), line

    def test_metrics_of_a2c(self, tmp_path):
        (line,) = lines(train(tmp_path / "run", rounds=1, algo="a2c"))
        expected = {"entropy_loss", "explained_variance", "learning_rate", "n_updates", "value_loss"}
        assert {f"train/{name}" for name in expected} <= set(line)
        assert not any("clip_" in name for name in line)

    def test_lag_is_the_number_of_updates_since_sampling(self, run, tmp_path):
        assert {line["lag/collect_to_gradient"] for line in lines(run)} == {(EPOCHS * MINIBATCHES - 1) / 2}
        a2c = lines(train(tmp_path / "a2c", rounds=2, algo="a2c"))
        assert {line["lag/collect_to_gradient"] for line in a2c} == {0}
        assert {line["lag/gradient_to_update"] for line in [*lines(run), *a2c]} == {0}

    def test_time_shares_are_valid_fractions(self, run):
        for line in lines(run):
            shares = {name: value for name, value in line.items() if name.startswith("limits/")}
            assert all(value >= 0 for value in shares.values())
            assert 0 < sum(shares.values()) <= 1 + 1e-9
            assert shares["limits/env"] > 0
            assert shares["limits/update"] > 0

    def test_episode_statistics_equal_hand_computed_ones(self, run):
        """The window holds the last 12 episodes, with each length four times."""
        last, mean = lines(run)[-1], 10 / 3
        assert last["rollout/ep_len_mean"] == pytest.approx(mean)
        assert last["rollout/ep_len_std"] == pytest.approx(math.sqrt(sum((n - mean) ** 2 for n in LENGTHS) / 3))
        assert [last[f"rollout/ep_len_{kind}"] for kind in ("median", "min", "max")] == [3, 2, 5]
        assert last["rollout/ep_nonzero_rew_mean"] == pytest.approx(mean)

    def test_info_fields_and_user_defined_statistics_are_logged(self, run):
        last = lines(run)[-1]
        assert last["rollout/info/half_mean"] == pytest.approx(sum(LENGTHS) / 3 / 2)
        assert last["rollout/info/odd_mean"] == pytest.approx(2 / 3)
        assert last["rollout/info/n_min"] == 7
        assert not [name for name in last if "nan" in name or "info/name" in name or "hidden" in name]
        assert last["rollout/last_step_max"] == 5
        assert last["rollout/peak_max"] > 100


class TestIntervals:
    def test_metrics_lines_and_evaluations_are_at_their_intervals(self, run):
        """Rounds have 40 steps. A line is due 100 steps after the last one, and an evaluation adds a line."""
        found = lines(run)
        assert [line["time/total_timesteps"] for line in found] == [120, 200, 320, 400]
        assert [line["time/iterations"] for line in found] == [3, 5, 8, 10]
        assert [line["rollout/episodes"] for line in found] == [36, 60, 96, 120]
        assert [line["train/n_updates"] / EPOCHS / MINIBATCHES for line in found] == [3, 5, 8, 10]
        evaluated = [line["time/total_timesteps"] for line in found if "eval/mean_reward" in line]
        assert evaluated == [200, 400]
        assert found[-1]["eval/mean_reward"] == run.result["eval"]["mean_reward"]
        assert found[-1]["eval/mean_length"] == run.result["eval"]["mean_length"]

    def test_by_default_there_are_about_200_lines(self, make_run_log):
        config, *_ = resolve_config({"algo": "ppo", "env": "CartPole-v1", "steps": 20_000}, {})
        assert make_run_log(config).metrics.lines.every == 100

    def test_checkpoints_are_written_with_their_progress(self, run):
        names = [path.name for path in list_checkpoints(run.path / "checkpoints")]
        assert names == ["step-80", "step-160", "step-240", "step-320", "step-400"]
        progress = load_newest(run.path / "checkpoints").progress
        counts = {"steps": 400, "rounds": 10, "episodes": 120, "restarts": 0, "dropped": 0, "cut": 0}
        assert progress == {**counts, "checkpoints": 5, "best": None, "inexact": None}

    @pytest.mark.parametrize(
        ("keep", "every", "steps"),
        [("last", 80, [320, 400]), ("2", 80, [160, 320, 400]), ("last", 0, [400]), ("all", 300, [320, 400])],
    )
    def test_which_checkpoints_are_kept(self, tmp_path, keep, every, steps):
        run = train(tmp_path / "run", algo="a2c", checkpoint={"every": every, "keep": keep})
        found = list_checkpoints(run.path / "checkpoints")
        assert [int(path.name[5:]) for path in found] == steps
        assert (run.path / "checkpoints/latest").resolve() == found[-1].resolve()

    def test_a_run_without_evaluations_has_no_eval_metrics(self, tmp_path):
        run = train(tmp_path / "run", rounds=2)
        assert run.result["eval"] is None
        assert not any("eval/" in name for line in lines(run) for name in line)


class TestCounts:
    def test_only_real_steps_are_counted(self, run, tmp_path):
        """A round has 13 rows of 4 envs, which is 52; 3 of each 13 rows are reset rows."""
        seen = []
        train(tmp_path / "run", rounds=3, callbacks=[lambda round: seen.append(round.progress.steps)])
        assert seen == [40, 80, 120]
        assert run.result["steps"] == 400

    def test_warm_up_counts_as_steps_but_not_in_rates(self, tmp_path):
        seen = []
        run = train(
            tmp_path / "run",
            rounds=5,
            sampler={"decorrelate": 20},
            callbacks=[lambda round: seen.append((round.progress.steps, len(round.episodes)))],
        )
        result = run.result
        assert seen[-1][0] == result["steps"]
        # The number of warm-up steps is random, but larger than that of a round.
        assert seen[0][0] > ROWS * ENVS
        assert result["episodes"] == sum(count for _, count in seen), "episodes of the warm-up are not counted"
        trained = sum(seconds for name, seconds in result["time"].items() if name != "checkpoint")
        counted = result["steps_per_second"] * trained
        rounds = len(seen)
        assert rounds * (ROWS - 4) * ENVS <= counted * 1.02
        assert counted <= rounds * ROWS * ENVS * 1.02 < result["steps"] * 1.02

    def test_restarts_are_counted(self, tmp_path):
        once = str(tmp_path / "once")
        run = train(tmp_path / "run", rounds=4, kwargs={"fault": "raise", "at": 17, "once": once})
        counts = [line["rollout/restarts"] for line in lines(run)]
        assert counts == sorted(counts)
        assert [counts[0], counts[-1]] == [0, 1]


class TestFiles:
    def test_result_has_all_fields(self, run):
        result = run.result
        assert {"status", "steps", "updates", "seconds", "steps_per_second", "eval"} <= set(result)
        assert result["status"] == "complete"
        assert result["updates"] == 10 * EPOCHS * MINIBATCHES
        assert set(result["eval"]) == {"mean_reward", "std_reward", "mean_length", "episodes", "returns"}
        assert result["seconds"] > 0
        assert result["steps_per_second"] > 0
        assert {"env", "inference", "update", "evaluation", "checkpoint"} <= set(result["time"])

    def test_metrics_csv_has_the_same_values(self, run):
        with (run.path / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["train/loss"]) for row in rows] == [line["train/loss"] for line in lines(run)]

    def test_tensorboard_has_the_same_values(self, run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(run.path / "tb"))
        board.Reload()
        scalars = [(event.step, event.value) for event in board.Scalars("rollout/ep_rew_mean")]
        expected = [(line["time/total_timesteps"], pytest.approx(line["rollout/ep_rew_mean"])) for line in lines(run)]
        assert scalars == expected
        assert [event.step for event in board.Scalars("eval/mean_reward")] == [200, 400]

    def test_the_log_names_checkpoints_evaluations_and_times(self, run):
        text = (run.path / "log.txt").read_text()
        assert "wrote step-400" in text
        assert text.count("evaluation:") == 2
        assert "time: env" in text


# --- RunLog without a run, with a clock that the test sets ---


class Clock:
    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.fixture
def make_run_log(tmp_path):
    made = []

    def make(config, play=None, signals=None):
        directory = RunDirectory.create(tmp_path / "alone", "alone", to_dict(config))
        terminal = Terminal(config.steps, "alone", file=io.StringIO())
        made.append(RunLog(directory, config, play, terminal, signals or StopSignals()))
        return made[-1]

    yield make
    for run_log in made:
        run_log.directory.close()


def make_learner():
    state = {"algorithm": {"w": torch.zeros(1)}}
    nothing = lambda: None  # noqa: E731
    return SimpleNamespace(version=7, agent_on_cpu=nothing, state_dict=lambda: state, check_agreement=nothing)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("remuda.runs.stopping.time", clock)
    monkeypatch.setattr("remuda.logs.stopwatch.time", clock)
    return clock


def resolved(steps=1_000, **groups):
    groups.setdefault("log", {"every": 1, "tensorboard": False})
    return resolve_config({"algo": "ppo", "env": "CartPole-v1", "steps": steps}, groups)[0]


def test_max_steps_ends_the_evaluation_of_endless_episodes(tmp_path):
    settings = {"quiet": True, "out": tmp_path / "run", "eval": {"episodes": 3, "max_steps": 50}}
    run = remuda.train("ppo", "own_things:endless", steps=500, **settings)
    assert run.result["eval"]["mean_length"] == 50
    assert run.result["eval"]["returns"] == [50.0] * 3


class TestAlone:
    def play_round(self, run_log, clock, seconds, progress, learner, steps=100, loss=1.0, episodes=()):
        clock.now += seconds
        progress.steps, progress.rounds = progress.steps + steps, progress.rounds + 1
        spent = {"env": seconds / 4, "inference": seconds / 8, "update": seconds / 2}
        metrics = {"train/loss": loss}
        return run_log.round(Round(progress, learner, list(episodes), metrics, spent, None, lambda: None))

    def test_rates_and_times_equal_hand_computed_ones(self, tmp_path, clock, make_run_log):
        def play(agent, should_stop):
            clock.now += 500
            return Evaluation([1.0, 3.0], [1.0, 3.0])

        groups = {"eval": {"every": 200, "episodes": 2}, "log": {"every": 1, "tensorboard": False}}
        run_log, learner = make_run_log(resolved(steps=1_100, **groups), play), make_learner()
        with run_log.open():
            progress, _ = run_log.resume(learner)
            clock.now += 10  # a warm-up of 800 steps in 10 seconds
            progress.steps += 800
            run_log.begin()
            self.play_round(run_log, clock, 2.0, progress, learner)
            self.play_round(run_log, clock, 4.0, progress, learner)  # followed by an evaluation
            self.play_round(run_log, clock, 1.0, progress, learner)  # the last round, followed by an evaluation
            result = run_log.finish()
        found = [json.loads(line) for line in (tmp_path / "alone/metrics.jsonl").read_text().splitlines()]
        assert [line["time/total_timesteps"] for line in found] == [900, 1000, 1100]
        assert [line["time/fps"] for line in found] == [50, 25, 100], "rates exclude warm-up and evaluation"
        assert [line["time/time_elapsed"] for line in found] == [12, 516, 1017]
        assert [line["limits/env"] for line in found] == [0.25, 0.25, 0.25]
        assert [line["limits/update"] for line in found] == [0.5, 0.5, 0.5]
        assert [line.get("eval/mean_reward") for line in found] == [None, 2.0, 2.0]
        assert result["steps"] == 1100
        assert result["seconds"] == 1017
        assert result["steps_per_second"] == round(300 / 7, 1)
        assert result["time"] == {
            "env": 1.75,
            "inference": 0.875,
            "update": 3.5,
            "other": 0.875,
            "evaluation": 1000.0,
            "checkpoint": 0.0,
        }

    def test_a_line_is_the_mean_over_its_rounds(self, tmp_path, clock, make_run_log):
        run_log, learner = make_run_log(resolved(log={"every": 250, "tensorboard": False})), make_learner()
        with run_log.open():
            progress, _ = run_log.resume(learner)
            run_log.begin()
            for loss in (1.0, 2.0, 6.0, 10.0, 20.0, 30.0):
                self.play_round(run_log, clock, 1.0, progress, learner, loss=loss)
        found = [json.loads(line) for line in (tmp_path / "alone/metrics.jsonl").read_text().splitlines()]
        assert [line["train/loss"] for line in found] == [3.0, 20.0]
        assert [line["train/n_updates"] for line in found] == [7, 7]

    def test_episode_statistics_are_over_the_window(self, tmp_path, clock, make_run_log):
        groups = {"log": {"every": 1, "window": 2, "tensorboard": False}}
        run_log, learner = make_run_log(resolved(**groups)), make_learner()
        episodes = [Episode(0, {"ep_rew": value}) for value in (100.0, 2.0, 4.0)]
        with run_log.open():
            progress, _ = run_log.resume(learner)
            run_log.begin()
            self.play_round(run_log, clock, 1.0, progress, learner)
            self.play_round(run_log, clock, 1.0, progress, learner, episodes=episodes)
        first, second = map(json.loads, (tmp_path / "alone/metrics.jsonl").read_text().splitlines())
        assert "rollout/ep_rew_mean" not in first, "no episode has ended yet"
        assert second["rollout/ep_rew_mean"] == 3.0

    def test_a_signal_during_an_evaluation_stops_it_without_a_result(self, tmp_path, clock, make_run_log):
        """The evaluation has no result, and the checkpoint records that the metrics line is still to be written."""
        signals = StopSignals()

        def play(agent, must_stop):
            signals.received = signal.SIGTERM
            assert not must_stop(), "until the deadline the evaluation may finish"
            signals.deadline = clock.monotonic() - 1
            assert must_stop()
            raise Interrupted("stopped")

        config = resolved(eval={"every": 1, "episodes": 2})
        run_log, learner = make_run_log(config, play, signals), make_learner()
        with run_log.open():
            progress, _ = run_log.resume(learner)
            run_log.begin()
            assert self.play_round(run_log, clock, 1.0, progress, learner), "the run log requests a stop"
            result = run_log.finish()
        assert result["status"] == "stopped by SIGTERM"
        assert result["eval"] is None
        found = load_newest(tmp_path / "alone/checkpoints")
        assert found.step == 100
        assert unpack(found.blobs[LOG_STATE])["is_owed"]
        assert (tmp_path / "alone/metrics.jsonl").read_text() == ""

    def test_a_run_that_never_began_leaves_no_checkpoint(self, tmp_path, clock, make_run_log):
        """There is nothing to save, and a resumed run starts from the beginning."""
        signals = StopSignals()
        signals.received = signal.SIGINT
        run_log, learner = make_run_log(resolved(), None, signals), make_learner()
        with run_log.open():
            run_log.resume(learner)
            result = run_log.finish()
        assert result["steps"] == 0
        assert result["steps_per_second"] == 0
        assert list_checkpoints(tmp_path / "alone/checkpoints") == []

    def test_progress_is_shared_with_the_scheme(self, make_run_log):
        run_log = make_run_log(resolved())
        assert run_log.resume(make_learner())[0] is run_log.progress
        assert run_log.progress == Progress()
        run_log.terminal.close()


def test_metrics_added_by_a_callback_are_logged(tmp_path):
    """The metric is averaged over the rounds of a line, like every other metric, including the current round."""

    def add(round):
        round.metrics["own/rounds"] = float(round.progress.rounds)

    run = train(tmp_path / "run", rounds=4, log={"every": 2 * STEPS}, callbacks=[add])
    assert [line["own/rounds"] for line in lines(run)] == [1.5, 3.5]


@pytest.mark.parametrize("value", ["x", None, [1.0, 2.0]])
def test_a_callback_may_only_add_numbers_to_the_metrics(tmp_path, value):
    def add(round):
        if round.progress.rounds == 2:
            round.metrics["own/x"] = value

    with pytest.raises(ConfigError, match=r"round\.metrics\['own/x'\] is .* a callback may only add numbers"):
        train(tmp_path / "run", rounds=4, callbacks=[add])
    assert load_newest(tmp_path / "run/checkpoints").progress["rounds"] == 2, "the last round is saved"


def test_a_checkpoint_of_an_earlier_version_without_times_is_resumed(tmp_path):
    run = train(tmp_path / "run", rounds=2)
    found = load_newest(run.path / "checkpoints")
    kept = unpack(found.blobs[LOG_STATE])
    for name in ("elapsed", "total", "first_steps"):
        del kept[name]
    save(run.path / "checkpoints", found.step, found.learner, found.progress, blobs={LOG_STATE: pack(kept)})
    assert remuda.resume(run.path, steps=4 * STEPS, quiet=True).result["status"] == "complete"


class TestBestCheckpoint:
    RETURNS = (1.0, 5.0, 3.0, 5.0, 4.0)

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        found = iter(self.RETURNS)
        monkeypatch.setattr("remuda.runs.train.play_episodes", lambda *arguments: Evaluation([next(found)], [1.0]))
        options = {"eval": {"every": STEPS, "episodes": 1}, "checkpoint": {"keep": "best", "every": STEPS}}
        return train(tmp_path / "run", rounds=5, **options)

    def test_the_best_checkpoint_is_kept_and_the_first_of_equal_ones_stays(self, run):
        names = [path.name for path in list_checkpoints(run.path / "checkpoints")]
        assert names == [f"step-{rounds * STEPS}" for rounds in (2, 4, 5)]
        assert (run.path / "checkpoints/best").resolve().name == f"step-{2 * STEPS}"

    def test_a_resumed_run_knows_the_best_evaluation_so_far(self, run, monkeypatch):
        found = iter((4.0, 4.5, 6.0, 2.0))  # the evaluation after the last step is repeated
        monkeypatch.setattr("remuda.runs.train.play_episodes", lambda *arguments: Evaluation([next(found)], [1.0]))
        remuda.resume(run.path, steps=8 * STEPS, quiet=True)
        assert (run.path / "checkpoints/best").resolve().name == f"step-{7 * STEPS}"
        names = [path.name for path in list_checkpoints(run.path / "checkpoints")]
        assert names == [f"step-{rounds * STEPS}" for rounds in (7, 8)]

    def test_an_evaluation_that_is_repeated_after_resuming_counts_too(self, run, monkeypatch):
        """Resuming a complete run repeats the last evaluation, whose result is the best one in this test."""
        found = iter((9.0, 4.5, 6.0, 2.0))
        monkeypatch.setattr("remuda.runs.train.play_episodes", lambda *arguments: Evaluation([next(found)], [1.0]))
        remuda.resume(run.path, steps=8 * STEPS, quiet=True)
        assert (run.path / "checkpoints/best").resolve().name == f"step-{5 * STEPS}"
        names = [path.name for path in list_checkpoints(run.path / "checkpoints")]
        assert names == [f"step-{rounds * STEPS}" for rounds in (5, 7, 8)]

    def test_a_named_checkpoint_can_be_evaluated_loaded_and_recorded(self, run, capsys):
        from remuda.cli import main

        for chosen, step in ((None, 5), ("best", 2), (4 * STEPS, 4), (str(4 * STEPS), 4)):
            found = named_checkpoint(run.path, chosen)
            assert found.step == step * STEPS
            agent = remuda.Run(run.path, checkpoint=chosen).agent()
            expected = found.learner["algorithm"]
            assert all(torch.equal(value, expected[f"agent.{name}"]) for name, value in agent.state_dict().items())
        assert main(["eval", str(run.path), "--episodes", "1", "--checkpoint", "best"]) == 0
        assert main(["eval", str(run.path), "--checkpoint", "17"]) == 2
        said = capsys.readouterr().err
        assert (
            said
            == f"remuda: checkpoint 17 of run {run.path} is not there: use one of 80, 160, 200, best or latest.\n"
        )
        target, _ = remuda.Run(run.path, checkpoint="best").record()
        assert target.name == f"step-{2 * STEPS}.mp4"

    def test_keeping_the_best_checkpoint_needs_evaluations(self, tmp_path):
        with pytest.raises(ConfigError, match=r"set eval\.every"):
            train(tmp_path / "run", checkpoint={"keep": "best"})


def test_the_error_for_a_missing_best_checkpoint_names_the_options_it_needs(tmp_path):
    run = train(tmp_path / "run", rounds=1)
    with pytest.raises(CheckpointError, match=r"train with checkpoint\.keep=best and eval\.every"):
        remuda.load(run.path, checkpoint="best")


def test_times_and_rate_include_the_processes_before_a_resume(tmp_path):
    """Resuming a complete run trains nothing and must not reset its times."""
    first = train(tmp_path / "run", rounds=40).result
    again = remuda.resume(tmp_path / "run", quiet=True).result
    assert again["steps_per_second"] == pytest.approx(first["steps_per_second"], rel=1e-3)
    assert again["seconds"] >= 0.9 * first["seconds"]
    assert again["time"]["update"] == pytest.approx(first["time"]["update"])
    longer = remuda.resume(tmp_path / "run", steps=80 * STEPS, quiet=True).result
    assert longer["time"]["update"] > first["time"]["update"]
    assert longer["seconds"] > first["seconds"]


def test_a_long_first_rollout_is_reported_with_its_size(tmp_path, monkeypatch, capsys):
    """The envs are slow, so that the first rollout takes longer than LINE_SECONDS."""
    for name in ("LINE_SECONDS", "LONG_SECONDS"):
        monkeypatch.setattr(f"remuda.logs.terminal.{name}", 0.1)
    slow = {"kwargs": {"seconds": 0.02}}
    remuda.train(
        "ppo", "own_things:slow", steps=20, out=tmp_path / "run", envs=slow, sampler={"envs": 1},
        algo={"n_steps": 20, "batch_size": 20}, eval={"episodes": 0}, log={"tensorboard": False},
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "0 of 20 steps (0 %)  sampling and learning from the first 20 steps: 0:0" in said
