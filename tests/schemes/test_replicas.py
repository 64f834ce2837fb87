"""Runs of several ranks must give, bit by bit, the parameters of one process that computes all parts in turn."""

import contextlib
import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from launching import launch
from test_bit_equal import weights

import remuda
from remuda.build import ranks as build_ranks
from remuda.cli import main
from remuda.config.resolve import resolve_config
from remuda.errors import CheckpointError, ConfigError, RanksDiverged
from remuda.learning.checkpoint import load_newest
from remuda.machine import usable_cores
from remuda.runs import evaluation
from remuda.torchrun import NAMES

REPLAY = {"learning_starts": 64, "batch_size": 24}
ALGORITHMS = {
    "ppo": ("CartPole-v1", {"algo": {"n_steps": 12, "batch_size": 48, "n_epochs": 2, "normalize_reward": True}}),
    "a2c": ("CartPole-v1", {"algo": {"n_steps": 12}}),
    "ppo with memory": (
        "CartPole-v1",
        {"algo": {"n_steps": 8, "batch_size": 48, "n_epochs": 2}, "agent": {"core": "lstm", "core_size": 16}},
    ),
    "impala": ("CartPole-v1", {"algo": {"n_steps": 12, "batch_size": 12, "reduction": "sum"}}),
    "appo": ("Pendulum-v1", {"algo": {"n_steps": 12, "batch_size": 12}}),
    "dqn": ("CartPole-v1", {"algo": REPLAY, "replay": {"prioritized": True}}),
    "rainbow": ("CartPole-v1", {"algo": {**REPLAY, "v_min": "auto", "v_max": "auto"}}),
    "r2d1": ("CartPole-v1", {"algo": {"learning_starts": 240, "batch_size": 12}, "replay": {"ratio": 2.0}}),
    "sac": ("Pendulum-v1", {"algo": REPLAY, "replay": {"ratio": 12.0}}),
    "td3": ("Pendulum-v1", {"algo": REPLAY, "replay": {"ratio": 12.0}}),
    "ddpg": ("Pendulum-v1", {"algo": {**REPLAY, "batch_size": 12}, "replay": {"ratio": 6.0}}),
}
ENVS = 12  # divides by 2, 3 and 4
ROUNDS = 20


@pytest.fixture(autouse=True)
def _shared_server_of_ranks(shared_servers, monkeypatch):
    """Fork ranks from a server that already runs, because a server that imports torch takes seconds to start."""
    monkeypatch.setattr(build_ranks, "ForkServer", shared_servers)


def arguments_of(path: Path, case: str, scheme: str, parts: int, **scheme_options) -> dict:
    """Return the keyword arguments of `remuda.train`."""
    env, groups = ALGORITHMS[case]
    rows = groups["algo"].get("n_steps", 10 if case == "r2d1" else 1)
    normalize = {} if case in ("rainbow",) else {"normalize_obs": True}
    merged = {**groups, "agent": {"hidden": (16, 16), **normalize, **groups.get("agent", {})}}
    count = {"parts" if scheme == "serial" else "ranks": parts}
    return {
        "env": env,
        "seed": 5,
        "steps": rows * ENVS * ROUNDS,
        "scheme": {"name": scheme, **count, **scheme_options},
        "sampler": {"envs": ENVS},
        "eval": {"episodes": 0},
        "log": {"every": 1},
        "out": str(path),
        "quiet": True,
        **merged,
    }


def train(path: Path, case: str, scheme: str, parts: int, callbacks=(), **scheme_options) -> remuda.Run:
    arguments = arguments_of(path, case, scheme, parts, **scheme_options)
    return remuda.train(case.split()[0], **arguments, callbacks=callbacks)


def lines(run: remuda.Run) -> list[dict]:
    """Return the metrics of a run without those that depend on the time."""
    found = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "limits/"))} for line in found
    ]


@pytest.mark.parametrize("case", ALGORITHMS)
def test_two_ranks_equal_two_parts_after_20_rounds(tmp_path, case):
    parts, ranks = train(tmp_path / "parts", case, "serial", 2), train(tmp_path / "ranks", case, "replicas", 2)
    assert parts.result["updates"] == ranks.result["updates"] > 5
    assert weights(parts) == weights(ranks)
    assert lines(parts) == lines(ranks)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("case", ["ppo", "a2c", "sac", "dqn", "r2d1"])
def test_more_ranks_equal_as_many_parts(tmp_path, case, count):
    parts = train(tmp_path / "parts", case, "serial", count)
    ranks = train(tmp_path / "ranks", case, "replicas", count)
    assert weights(parts) == weights(ranks)
    assert lines(parts) == lines(ranks)


@pytest.mark.parametrize("case", ["ppo", "sac"])
def test_three_ranks_that_exchange_by_gloo_equal_three_parts(tmp_path, case):
    parts = train(tmp_path / "parts", case, "serial", 3)
    ranks = train(tmp_path / "ranks", case, "replicas", 3, exchange="gloo")
    assert weights(parts) == weights(ranks)
    assert lines(parts) == lines(ranks)


def test_two_parts_shuffle_and_standardize_differently_from_one(tmp_path):
    """Otherwise the comparisons above would pass although nothing is divided."""
    whole, parts = train(tmp_path / "whole", "ppo", "serial", 1), train(tmp_path / "parts", "ppo", "serial", 2)
    assert whole.result["updates"] == parts.result["updates"]
    assert weights(whole) != weights(parts)


def test_env_workers_of_ranks_give_the_same_parameters(tmp_path):
    parts = train(tmp_path / "parts", "ppo", "serial", 2)
    ranks = remuda.train(
        "ppo",
        "CartPole-v1",
        seed=5,
        steps=12 * ENVS * ROUNDS,
        scheme={"name": "replicas", "ranks": 2},
        sampler={"envs": ENVS, "workers": 2},
        agent={"normalize_obs": True, "hidden": (16, 16)},
        eval={"episodes": 0},
        out=tmp_path / "ranks",
        quiet=True,
        algo=ALGORITHMS["ppo"][1]["algo"],
    )
    assert weights(parts) == weights(ranks)


@pytest.mark.parametrize("case", ["ppo", "sac", "r2d1"])
def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path, case):
    whole = train(tmp_path / "whole", case, "replicas", 2)
    stop = [lambda round: round.progress.rounds == ROUNDS // 2]
    stopped = train(tmp_path / "stopped", case, "replicas", 2, callbacks=stop)
    assert stopped.result["updates"] < whole.result["updates"]
    resumed = remuda.resume(stopped.path, quiet=True)
    assert resumed.result["updates"] == whole.result["updates"]
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("ppo", "algo.learning_rate", 1e-2),
        ("ppo", "algo.max_grad_norm", 0.01),
        ("sac", "algo.actor_learning_rate", 0.1),
    ],
)
def test_an_option_that_is_set_between_rounds_changes_in_all_ranks(tmp_path, case, name, value):
    def train_with_change(path: Path, scheme: str, wanted: float | None) -> remuda.Run:
        arguments = arguments_of(path, case, scheme, 2)
        arguments["algo"] = {**arguments["algo"], **({"actor_learning_rate": "1e-3"} if case == "sac" else {})}
        with remuda.start(case, **arguments) as run:
            for _ in range(8):
                run.step()
            if wanted is not None:
                run.set(name, wanted)
            train_to_the_end(run)
        return remuda.Run(path)

    parts = train_with_change(tmp_path / "parts", "serial", value)
    ranks = train_with_change(tmp_path / "ranks", "replicas", value)
    assert weights(parts) == weights(ranks)
    assert weights(parts) != weights(train_with_change(tmp_path / "unchanged", "serial", None))


def train_to_the_end(run: remuda.Training) -> None:
    while not run.done():
        run.step()


def test_ranks_that_diverge_end_the_run_at_the_next_checkpoint(tmp_path):
    """The learner of rank 0 is changed behind the back of the others; nothing that it learned then is saved."""
    arguments = arguments_of(tmp_path / "run", "ppo", "replicas", 2)
    run = remuda.start("ppo", **arguments, checkpoint={"every": 3 * 12 * ENVS})
    for _ in range(3):
        run.step()
    before = run.save()
    run.learner.learning_rate = lambda progress: 0.5
    with pytest.raises(RanksDiverged, match=r"optimizer of rank 1 \(pid \d+ on .*\) differ from those of rank 0"):
        train_to_the_end(run)
    assert run.done()
    assert load_newest(run.path / "checkpoints").path == before
    assert remuda.resume(run.path, quiet=True).result["status"] == "complete"


def test_a_run_of_ranks_is_evaluated_and_loaded_like_any_other(tmp_path):
    run = train(tmp_path / "run", "ppo", "replicas", 2)
    assert run.evaluate(episodes=2)["episodes"] == 2
    assert remuda.load(run.path).act([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)


def test_resume_with_another_number_of_ranks_is_refused(tmp_path):
    run = train(tmp_path / "run", "ppo", "replicas", 2)
    with pytest.raises(CheckpointError, match=r"scheme\.ranks=2, not 3"):
        remuda.resume(run.path, steps=10_000, scheme={"ranks": 3})


# --- torchrun -------------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PPO = ["train", "ppo", "--env", "CartPole-v1", "--steps", "2880", "--seed", "5", "--scheme", "replicas", "--quiet"]
PPO += ["--sampler.envs", "12", "--algo.n_steps", "12", "--algo.batch_size", "48", "--algo.n_epochs", "2"]
PPO += ["--algo.normalize_reward", "true", "--agent.normalize_obs", "true", "--eval.episodes", "0"]
PPO += ["--agent.hidden", "16,16"]
PPO += ["--log.every", "1"]


def run_torchrun(ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, str(ranks), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_ranks_of_torchrun_equal_parts(tmp_path):
    parts = train(tmp_path / "parts", "ppo", "serial", 2)
    done = run_torchrun(2, "-m", "remuda", *PPO, "--out", str(tmp_path / "ranks"))
    assert done.returncode == 0, done.stderr
    ranks = remuda.Run(tmp_path / "ranks")
    assert weights(parts) == weights(ranks)
    assert lines(parts) == lines(ranks)
    assert done.stdout.count("complete:") == 1, "only rank 0 reports"


@pytest.mark.long
@pytest.mark.parametrize(("case", "count"), [("ppo", 3), ("a2c", 2), ("sac", 3), ("dqn", 4), ("r2d1", 2)])
def test_a_script_under_torchrun_equals_parts(tmp_path, case, count):
    parts = train(tmp_path / "parts", case, "serial", count)
    arguments = arguments_of(tmp_path / "ranks", case, "replicas", count)
    script = tmp_path / "script.py"
    script.write_text(f"import remuda\n\nremuda.train({case!r}, **{arguments!r})\n")
    done = run_torchrun(count, str(script))
    assert done.returncode == 0, done.stderr
    ranks = remuda.Run(tmp_path / "ranks")
    assert weights(parts) == weights(ranks)
    assert lines(parts) == lines(ranks)


def test_ranks_with_different_options_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from remuda.cli import main\n"
        f"arguments = [*{PPO}, '--out', {str(tmp_path / 'run')!r}]\n"
        "sys.exit(main([*arguments, '--algo.gamma', '0.9' + os.environ['RANK']]))\n"
    )
    codes, printed = launch(2, [sys.executable, str(script)], tmp_path / "log.txt")
    assert all(codes)
    assert "rank 1 differs from rank 0 in config.options.algo.gamma (0.91 there, 0.9 here)" in printed
    assert not (tmp_path / "run").exists()


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--scheme.ranks", "16", "--sampler.envs", "8"],
            "scheme.ranks=16 is more than sampler.envs=8: use at most 8, or raise sampler.envs.",
        ),
        (
            ["--scheme.ranks", "3", "--sampler.envs", "8"],
            "scheme.ranks=3 does not divide sampler.envs=8: set sampler.envs to 6 or 9.",
        ),
        (["--scheme.ranks", "4", "--sampler.slots", "4"], "scheme.ranks=4 leaves 2 envs to each"),
        (["--scheme.ranks", "2", "--sampler.inference", "workers"], "use sampler.inference=central."),
        (["--scheme.parts", "2"], "it is for --scheme serial: leave it out."),
        (["--scheme.ranks", "4", "--algo.batch_size", "2"], "scheme.ranks=4 is more than algo.batch_size=2"),
        (
            ["--scheme.ranks", "4", "--algo.batch_size", "4"],
            "scheme.ranks=4 leaves too little to each, because in a share algo.batch_size=1 leaves nothing",
        ),
        (
            ["--scheme.ranks", "2", "--agent.core", "lstm", "--algo.n_steps", "8", "--algo.batch_size", "8"],
            "scheme.ranks=2 leaves too little to each, because in a share algo.batch_size=4 is not a whole number of",
        ),
        (
            ["--scheme.ranks", "4", "--sampler.workers", "4"],
            "sampler.workers=4 for each rank is more than the 2 envs of a slot there: use at most 2",
        ),
        (["--scheme.ranks", "1", "--sampler.inference", "workers"], "has no workers under --scheme replicas"),
    ],
)
def test_impossible_numbers_of_ranks_give_one_sentence(tmp_path, capsys, options, sentence):
    command = ["train", "ppo", "--env", "CartPole-v1", "--scheme", "replicas", "--out", str(tmp_path / "run")]
    assert main([*command, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scheme", [{"name": "serial", "parts": 4}, {"name": "replicas", "ranks": 4}])
@pytest.mark.parametrize("capacity", [8, 9, 11, 12])
def test_a_replay_is_divided_or_refused_before_the_run_starts(tmp_path, scheme, capacity):
    """The share of a part keeps as many rows of each env as the whole replay would."""
    replay = {"n_step": 2, "capacity": capacity, "ratio": 1}
    options = {"sampler": {"envs": 4}, "replay": replay, "agent": {"hidden": [4]}}
    algo = {"learning_starts": 8, "batch_size": 4}
    call = partial(
        remuda.train, "sac", "Pendulum-v1", steps=24, scheme=scheme, algo=algo, quiet=True, out=tmp_path / "run"
    )
    if capacity < 12:
        with pytest.raises(
            ConfigError, match=r"replay\.capacity=\d+ keeps 2 rows of each of 4 envs.*use at least 12"
        ):
            call(**options)
        assert not (tmp_path / "run").exists()
    else:
        assert call(**options, eval={"episodes": 0}).result["status"] == "complete"


def test_the_store_of_an_earlier_run_writes_to_no_other_file(tmp_path):
    """When gloo's process group is destroyed, its store opens its file once more, by the number of the descriptor."""
    train(tmp_path / "run", "ppo", "replicas", 2, exchange="gloo")
    files = [tmp_path / f"file-{number}" for number in range(60)]
    with contextlib.ExitStack() as stack:
        for file in files:
            file.write_bytes(b"")
            stack.enter_context(file.open("r+b"))  # takes the lowest free numbers
        gc.collect()
        assert [file.name for file in files if file.read_bytes()] == []


def test_ranks_step_the_envs_of_evaluations_themselves(tmp_path, monkeypatch):
    """Env workers for a few episodes, one per core, would take the cores from the other ranks."""
    asked, make = [], evaluation.make_some_envs

    def make_some_envs(config, spec, num_envs, slots, workers, *arguments):
        asked.append(workers)
        return make(config, spec, num_envs, slots, workers, *arguments)

    monkeypatch.setattr(evaluation, "make_some_envs", make_some_envs)
    run = train(tmp_path / "run", "ppo", "replicas", 2)
    run.evaluate(episodes=3)
    assert asked == [0]


def test_every_rank_gets_an_env_unless_their_number_is_given() -> None:
    def numbers(name: str, **groups) -> tuple[int, int]:
        config, _, _ = resolve_config({"algo": name, "env": "Pendulum-v1", "scheme": "replicas"}, groups)
        return config.scheme_options.ranks, config.sampler.envs

    assert numbers("sac", scheme={"ranks": 4}) == (4, 4), "the default is one env"
    assert numbers("sac")[0] == numbers("sac")[1] == usable_cores()
    assert numbers("sac", sampler={"envs": 1}) == (1, 1)
    assert numbers("ppo", scheme={"ranks": 3}, algo={"batch_size": 48}) == (3, 9), "the default is 8 envs"


def test_incomplete_variables_of_torchrun_give_one_sentence(tmp_path, capsys, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    command = ["train", "ppo", "--env", "CartPole-v1", "--scheme", "replicas", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in line
    assert not (tmp_path / "run").exists()
