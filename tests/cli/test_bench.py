"""Test `remuda bench`: every part runs and reports its measurements, and contenders that cannot run are named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import prestarted
import psutil
import pytest
from processes import all_gone, find, wait_for

from remuda.bench import turns
from remuda.bench.job import complete
from remuda.bench.turns import median_and_interval
from remuda.cli import bench as bench_command
from remuda.cli import main
from remuda.cli.bench import ours_and_peers, summary
from remuda.errors import TrainingError


@pytest.fixture(autouse=True)
def _prestarted_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turns, bench_command):
        monkeypatch.setattr(module, "subprocess", prestarted)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("envs", ["local", "gymnasium sync"]),
        ("sampler", ["workers act"]),
        ("update", ["autograd"]),
    ],
)
def test_every_part_writes_its_measurements(
    what: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "found.json"
    words = ["bench", what, "--envs", "4", "--workers", "2", "--slices", "2", "--seconds", "0.05", "--out", str(out)]
    assert main([*words, "--only", ",".join(names)]) == 0
    written = json.loads(out.read_text())
    assert list(written["contenders"]) == names
    for name in names:
        assert len(written["slices"][name]) == 2
        assert all(turn["count"] > 0 and turn["seconds"] >= 0.05 for turn in written["slices"][name])
    table = capsys.readouterr().out
    assert f"| {names[-1]} |" in table
    assert "95 % interval" in table


def test_whole_runs_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "ppo", "--only", "remuda", "--slices", "1", "--steps", "100", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["contenders"]) == ["remuda"]
    assert all(row["per_second"] > 0 and row["cpu_seconds_per_1000"] > 0 for row in found["contenders"].values())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["speed"], "invalid choice: 'speed'"),
        (["envs", "--only", "pol"], "did you mean pool?"),
        (["envs", "--slices", "0"], "measures nothing"),
        (["envs", "--env", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["ppo", "--envs", "-8"], "--envs -8 is below 0"),
        (["sampler", "--only", "workers act", "--envs", "1", "--workers", "2"], "workers act: "),
    ],
)
def test_wrong_arguments_give_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("remuda: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("what", ["ppo", "envs"])
def test_a_signal_ends_all_processes(what: str) -> None:
    words = ["bench", what, "--slices", "100", "--seconds", "0.5", "--steps", "10_000_000"]
    bench = subprocess.Popen([sys.executable, "-m", "remuda", *words], stderr=subprocess.PIPE, text=True)
    root, deadline = psutil.Process(bench.pid), time.monotonic() + 30
    is_stepping = {"ppo": lambda: root.children(), "envs": lambda: len(root.children(recursive=True)) > 5}[what]
    while not is_stepping() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # so that the signal arrives during a measurement
    started = root.children(recursive=True)
    assert len(started) > (5 if what == "envs" else 0)  # contenders, some with workers
    bench.send_signal(signal.SIGTERM)
    _, said = bench.communicate(timeout=30)
    assert bench.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in said
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


def test_a_run_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "LONGEST_RUN_SECONDS", 3.0)
    words = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"]
    with pytest.raises(TrainingError, match="fewer --steps"):
        bench_command.run_to_the_end(words, tmp_path / "log")
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: all_gone(find([child])), 10)


def test_a_peer_that_fails_is_left_out_unless_selected_by_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('normalize_obs: not here')"]
    turn = {"count": 10, "seconds": 1.0, "cpu_seconds": 1.0}
    real = bench_command.one_run
    run = lambda command, job: dict(turn) if command == ["fine"] else real(command, job)  # noqa: E731
    monkeypatch.setattr(bench_command, "ours_and_peers", lambda *_: {"ours": (["fine"], {}), "peer": (broken, {})})
    monkeypatch.setattr(bench_command, "one_run", run)
    assert main(["bench", "ppo", "--slices", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count("left out: ") == 1
    assert "normalize_obs: not here" in said.err
    assert list(json.loads(said.out)["contenders"]) == ["ours"]
    assert main(["bench", "ppo", "--only", "peer"]) == 1
    monkeypatch.setattr(bench_command, "ours_and_peers", lambda *_: {"peer": (broken, {})})
    assert main(["bench", "ppo"]) == 1
    assert "no contender could run" in capsys.readouterr().err


def test_contenders_include_only_installed_peers(tmp_path: Path) -> None:
    (tmp_path / "bench" / "peers").mkdir(parents=True)
    (tmp_path / "bench" / "peers" / "sb3.py").touch()
    (tmp_path / "bench" / "peers" / "sample_factory_run.py").touch()
    for name in ("sb3", "sample-factory", "tianshou"):
        (tmp_path / f".venv-{name}").mkdir()
        (tmp_path / f".venv-{name}" / ".installed").touch()
    ours = ["remuda", "remuda parallel", "remuda workers act"]
    assert list(ours_and_peers(tmp_path, "CartPole-v1")) == [*ours, "sb3", "sample-factory"]
    assert list(ours_and_peers(tmp_path, "ALE/Pong-v5")) == [*ours, "remuda single envs", "sb3", "sample-factory"]


def test_ratios_are_computed_within_a_turn() -> None:
    """The machine is twice as slow in the second turn, for both contenders, so the ratio is 3 in both turns."""
    ours = [{"count": 300, "seconds": 1.0, "cpu_seconds": 1.0}, {"count": 150, "seconds": 1.0, "cpu_seconds": 1.0}]
    other = [{"count": 100, "seconds": 1.0, "cpu_seconds": 2.0}, {"count": 50, "seconds": 1.0, "cpu_seconds": 2.0}]
    row = summary({"ours": ours, "other": other}, "steps")["contenders"]["other"]
    assert (row["first_is_times"], row["interval"]) == (3.0, [3.0, 3.0])
    assert row["cpu_seconds_per_1000"] == 30.0


def test_the_interval_contains_the_median() -> None:
    middle, low, high = median_and_interval([1.0, 1.1, 1.2, 1.3, 5.0])
    assert 1.0 <= low <= middle == 1.2 <= high <= 5.0


def test_a_job_is_complete_for_any_env() -> None:
    assert complete("Acrobot-v1", {})["hidden"] == [64, 64]
    assert complete("ALE/Breakout-v5", {})["net"] == "nature"
    assert complete("ALE/Pong-v5", {"steps": 7})["steps"] == 7


@pytest.mark.long
def test_a_contender_that_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "sampler", "--envs", "2", "--workers", "2", "--slices", "1", "--seconds", "0.05", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "left out: alternating: sampler.workers=2 is more than the 1 envs of a slot" in said.err
    assert set(json.loads(said.out)["contenders"]) == {"serial", "central", "workers act"}
