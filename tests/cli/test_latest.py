"""Test runs/latest as the name of a run: commands follow the link, and it remains a link to the newest run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import remuda
from remuda.cli import main
from remuda.errors import CheckpointError
from remuda.learning.checkpoint import load_newest

SMALL = ["--algo.n_steps", "8", "--algo.batch_size", "16", "--sampler.envs", "4", "--eval.episodes", "1"]
SMALL += ["--eval.max_steps", "5", "--log.tensorboard", "false", "--quiet"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a small run in a new working directory, and return the directory `runs` with its link `latest`."""
    monkeypatch.chdir(tmp_path)
    train("--seed", "1")
    return tmp_path / "runs"


def train(*arguments: str) -> None:
    assert main(["train", "ppo", "--env", "CartPole-v1", "--steps", "64", *SMALL, *arguments]) == 0


def newest_step(run: Path) -> int:
    return load_newest(run / "checkpoints").step


def test_resume_by_command_line_continues_in_the_directory_of_the_run(runs, capsys):
    target = os.readlink(runs / "latest")
    for steps in (96, 160):  # twice, because the first resume must not change the link
        assert main(["train", "--resume", "runs/latest", "--steps", str(steps), "--quiet"]) == 0
        assert os.readlink(runs / "latest") == target
        assert newest_step(runs / target) >= steps
        said = capsys.readouterr().out.splitlines()
        assert said[-1].endswith(f"-> runs/{target}"), "the output names the directory, not the link"
    assert sorted(path.name for path in runs.iterdir()) == sorted(["latest", target])


def test_resume_from_python_continues_in_the_directory_of_the_run(runs):
    target = os.readlink(runs / "latest")
    run = remuda.resume("runs/latest", steps=96, quiet=True)
    assert run.path == Path("runs") / target
    assert os.readlink(runs / "latest") == target
    assert newest_step(runs / target) >= 96


def test_a_run_resumed_through_the_link_keeps_its_directory_when_the_link_moves(runs):
    target = os.readlink(runs / "latest")
    other = runs / "other"
    other.mkdir()

    def move(round: remuda.Round) -> None:
        (runs / "latest").unlink()
        (runs / "latest").symlink_to("other")

    remuda.resume("runs/latest", steps=96, quiet=True, callbacks=[move])
    assert list(other.iterdir()) == []
    assert newest_step(runs / target) >= 96


def test_eval_record_plot_and_run_follow_the_link(runs, capsys):
    target = runs / os.readlink(runs / "latest")
    assert main(["eval", "runs/latest", "--episodes", "1"]) == 0
    assert main(["record", "runs/latest"]) == 0
    assert main(["plot", "runs/latest", "--metric", "train/loss"]) == 0
    assert [path.suffix for path in (target / "videos").iterdir()] == [".mp4"]
    assert (target / "curve.png").is_file()
    assert remuda.Run("runs/latest").path == Path("runs") / target.name


def test_plot_counts_the_run_and_the_link_to_it_once(runs, capsys):
    paths = [str(path) for path in sorted(runs.iterdir())]
    assert len(paths) == 2
    capsys.readouterr()
    assert main(["plot", *paths, "--metric", "train/loss", "--out", "curve.png"]) == 0
    assert capsys.readouterr().out == "1 run -> curve.png\n"


def link_to_itself(runs: Path) -> None:
    """Make the link point to itself, as earlier versions did in `remuda train --resume runs/latest`."""
    (runs / "latest").unlink()
    (runs / "latest").symlink_to("latest")


@pytest.mark.parametrize("command", [["train", "--resume"], ["eval"], ["record"], ["plot"]])
def test_the_error_for_a_link_to_itself_names_the_newest_run(runs, capsys, command):
    target = os.readlink(runs / "latest")
    link_to_itself(runs)
    capsys.readouterr()
    assert main([*command, "runs/latest"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "remuda: runs/latest is a link that leads back to itself: name the run's own directory instead; "
        f"the newest run there is runs/{target}.\n"
    )


def test_a_link_to_itself_without_any_run_is_refused_from_python(tmp_path):
    (tmp_path / "latest").symlink_to("latest")
    with pytest.raises(CheckpointError, match=r"leads back to itself: name the run's own directory instead\.$"):
        remuda.load(tmp_path / "latest")


@pytest.mark.parametrize("again", [["--seed", "2"], None], ids=["new run", "resumed run"])
def test_the_next_run_repairs_a_link_to_itself(runs, again):
    target = os.readlink(runs / "latest")
    link_to_itself(runs)
    if again is None:
        assert main(["train", "--resume", f"runs/{target}", "--steps", "96", "--quiet"]) == 0
        assert os.readlink(runs / "latest") == target
    else:
        train(*again)
        assert os.readlink(runs / "latest") not in (target, "latest")
        assert (runs / "latest" / "result.json").is_file()


def test_the_error_for_a_link_to_a_deleted_run_names_its_target(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("ppo-1")
    assert main(["eval", "runs/latest"]) == 2
    assert "runs/latest (a link to runs/ppo-1) is not a run: it is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("has_earlier_run", [True, False])
def test_a_run_that_fails_in_its_first_round_does_not_change_the_link(tmp_path, monkeypatch, capsys, has_earlier_run):
    monkeypatch.chdir(tmp_path)
    if has_earlier_run:
        train("--seed", "1")
    runs = Path("runs")
    before = sorted((path.name, os.readlink(path) if path.is_symlink() else None) for path in runs.glob("*"))
    failing = ["--env", "CartPole-v1", "--algo.learning_rate", "1e30", "--algo.max_grad_norm", "0", "--seed", "2"]
    assert main(["train", "ppo", *failing, "--steps", "640", *SMALL, "--algo.n_epochs", "40"]) == 1
    assert "gradients were not finite" in capsys.readouterr().err
    assert sorted((path.name, os.readlink(path) if path.is_symlink() else None) for path in runs.glob("*")) == before
