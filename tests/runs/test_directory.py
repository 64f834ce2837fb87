"""Test run directories: their creation is atomic, one process owns them, and they hold no environment variables."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from remuda.errors import CheckpointError, ConfigError
from remuda.runs.directory import WEIGHTS, RunDirectory

CONFIG: dict[str, Any] = {"algorithm": "ppo", "env": "CartPole-v1", "seed": 3, "algo": {"learning_rate": 3e-4}}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def one_sentence(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_layout_and_contents(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "deep" / "run", "ppo-CartPole-v1-3", CONFIG) as run:
        run.log("training starts")
        run.log("training ends")
        run.write_result({"status": "done", "steps": np.int64(5), "eval": {"mean_reward": math.nan}})
        assert sorted(path.name for path in run.path.iterdir()) == [
            "checkpoints", "config.yaml", "log.txt", "meta.json", "result.json", "tb", "videos"
        ]  # fmt: skip
        assert run.checkpoints.is_dir()
        assert run.videos.is_dir()
        assert run.tb.is_dir()
    again = RunDirectory.open(str(tmp_path / "deep" / "run"))
    assert again.read_config() == CONFIG
    assert json.loads((run.path / "result.json").read_text()) == {
        "status": "done", "steps": 5, "eval": {"mean_reward": None}
    }  # fmt: skip
    lines = (run.path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["training starts", "training ends"]
    assert lines[0][4] == lines[0][7] == "-"
    assert not (tmp_path / "deep" / "latest").is_symlink()


def test_config_is_plain_yaml_that_reads_back_equal(tmp_path: Path) -> None:
    config = {
        "tiny": 1e-5, "huge": 1e16, "text": "1e-5", "yes": "no", "none": None, "flag": np.True_, "width": (64, 64),
        "where": PurePosixPath("a/b"), "array": np.arange(2), "number": np.float32(0.5), "infinite": math.inf,
        "ü": "ß",
    }  # fmt: skip
    run = RunDirectory.create(tmp_path / "run", "x", config)
    run.close()
    assert "!!" not in (run.path / "config.yaml").read_text()
    assert run.read_config() == {**config, "width": [64, 64], "where": "a/b", "array": [0, 1], "flag": True}


def test_a_config_that_yaml_cannot_express_creates_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be saved") as error:
        RunDirectory.create(tmp_path / "run", "x", {"env": len})
    one_sentence(error)
    assert list(tmp_path.iterdir()) == []


def test_default_paths_differ_within_one_second_and_latest_follows(tmp_path: Path) -> None:
    runs = [RunDirectory.create(None, "ppo-ALE/Pong-v5-1", CONFIG) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == Path("runs")
        assert run.path.name.startswith("ppo-ALE-Pong-v5-1-20")
        run.point_latest()
        run.close()
    assert os.readlink("runs/latest") == runs[-1].path.name
    assert RunDirectory.open("runs/latest").read_config() == CONFIG
    assert sorted(os.listdir("runs")) == sorted([*(run.path.name for run in runs), "latest"])


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        ("ppo-<<lambda>>-0", "ppo-lambda-0"),
        ("ppo-<test.<locals>.make>-3", "ppo-test.make-3"),
        ("ppo-own_things:late-0", "ppo-own_things-late-0"),
        ("dqn-ALE/Pong-v5-1", "dqn-ALE-Pong-v5-1"),
    ],
)
def test_default_names_are_readable(name: str, directory: str) -> None:
    with RunDirectory.create(None, name, CONFIG) as run:
        assert run.path.name.startswith(f"{directory}-20")


def test_two_processes_in_the_same_second_get_two_directories(tmp_path: Path) -> None:
    program = "from remuda.runs.directory import RunDirectory as R; print(R.create(None, 'x', {}).path)"
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {child.communicate(timeout=20)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(paths) == 2


def test_a_users_own_directory_named_latest_is_kept() -> None:
    Path("runs/latest").mkdir(parents=True)
    run = RunDirectory.create(None, "x", CONFIG)
    run.point_latest()
    run.close()
    assert not Path("runs/latest").is_symlink()


def test_discard_deletes_a_run_that_never_began(tmp_path: Path) -> None:
    run = RunDirectory.create(None, "x", CONFIG)
    (run.path / "metrics.jsonl").write_text("{}")
    run.discard()
    assert list(tmp_path.iterdir()) == []


def test_discard_keeps_files_that_existed_before(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    run = RunDirectory.create(tmp_path / "mine", "x", CONFIG)
    (run.path / "metrics.jsonl").write_text("{}")
    run.discard()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "name", ["metrics.csv", "profile", "evaluations.jsonl", "spaces.json", "weights.safetensors"]
)
def test_a_directory_with_files_that_a_run_would_overwrite_is_refused(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine" / name
    mine.parent.mkdir()
    if mine.suffix:
        mine.write_text("keep me")
    else:
        mine.mkdir()
    with pytest.raises(
        ConfigError, match=rf"contains {name}, which the run would overwrite: move what you want to keep"
    ):
        RunDirectory.create(tmp_path / "mine", "x", CONFIG)
    assert [path.name for path in mine.parent.iterdir()] == [name]


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", "x", CONFIG).close()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir())
    with pytest.raises(
        ConfigError, match=r"out=.* already holds a run: continue it with remuda train --resume"
    ) as error:
        RunDirectory.create(tmp_path / "run", "x", CONFIG)
    assert "another --out" in one_sentence(error)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()) == before


def test_an_empty_directory_or_one_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("mine", "empty"):
        RunDirectory.create(tmp_path / name, "x", CONFIG).close()
        RunDirectory.open(tmp_path / name)
    assert (tmp_path / "mine" / "notes.md").read_text() == "mine"


def test_a_file_and_a_path_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file: a run needs a directory") as error:
        RunDirectory.create(tmp_path / "file", "x", CONFIG)
    one_sentence(error)
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)") as error:
        RunDirectory.create(tmp_path / "file" / "run", "x", CONFIG)
    one_sentence(error)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that even root cannot write to")
def test_a_path_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/proc/remuda/run cannot be written") as error:
        RunDirectory.create("/proc/remuda/run", "x", CONFIG)
    one_sentence(error)


def test_a_default_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot be written") as error:
        RunDirectory.create(None, "x", CONFIG)
    one_sentence(error)


def test_a_failed_creation_removes_only_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.txt").mkdir()  # so that the last file cannot be created
    with pytest.raises(ConfigError, match=r"cannot be written \(Is a directory\)"):
        RunDirectory.create(tmp_path / "mine", "x", CONFIG)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["log.txt"]


def test_a_failed_creation_removes_new_parent_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("remuda.runs.directory._git", interrupted)
    for path in (tmp_path / "a" / "b" / "run", None):
        with pytest.raises(KeyboardInterrupt):
            RunDirectory.create(path, "x", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_opening_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.yaml") as error:
        RunDirectory.open(tmp_path)
    one_sentence(error)
    with pytest.raises(CheckpointError, match="is not a directory") as error:
        RunDirectory.open(tmp_path / "nothing")
    one_sentence(error)


@pytest.mark.parametrize("text", ["a: [1, 2", "- 1", "!!python/object/apply:os.getcwd []", "a: \x00"])
def test_a_damaged_config_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    run = RunDirectory.create(tmp_path / "run", "x", CONFIG)
    run.close()
    (run.path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml") as error:
        run.read_config()
    one_sentence(error)


def test_meta_describes_the_run_without_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-5f1e")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    Path("code.py").write_text("one")
    subprocess.run([*git, "add", "code.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    RunDirectory.create(tmp_path / "clean", "ppo-CartPole-v1-3", CONFIG).close()
    Path("code.py").write_text("two")
    RunDirectory.create(tmp_path / "dirty", "ppo-CartPole-v1-3", CONFIG).close()

    clean, dirty = RunDirectory.open("clean").read_meta(), RunDirectory.open("dirty").read_meta()
    assert clean["git"] == {"commit": head, "dirty": False}
    assert dirty["git"] == {"commit": head, "dirty": True}
    assert clean["name"] == "ppo-CartPole-v1-3"
    assert clean["seed"] == 3
    assert clean["command"] == sys.argv
    assert clean["versions"]["numpy"] == np.__version__
    assert set(clean["versions"]) == {"python", "remuda", "torch", "numpy", "gymnasium"}
    assert clean["machine"]["cpus"] == os.cpu_count()
    for path in Path("clean").rglob("*"):
        if path.is_file():
            assert "canary-5f1e" not in path.read_text()
            assert "SOME_API_KEY" not in path.read_text()


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with RunDirectory.create("run", "x", CONFIG) as run:
        assert run.read_meta()["git"] is None


def test_resume_continues_with_the_new_config(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "x", CONFIG) as run:
        run.log("one")
    with RunDirectory.create(tmp_path / "run", "x", {**CONFIG, "steps": 9}, resume=True) as run:
        run.log("two")
        assert run.read_config()["steps"] == 9
        meta = run.read_meta()
    assert len(meta["resumed"]) == 1
    assert meta["name"] == "x"
    assert [line[20:] for line in (run.path / "log.txt").read_text().splitlines()] == ["one", "two"]
    with pytest.raises(CheckpointError, match="is not a run"):
        RunDirectory.create(tmp_path / "other", "x", CONFIG, resume=True)
    assert not (tmp_path / "other").exists()


def test_one_process_owns_a_run_until_it_dies(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from remuda.runs.directory import RunDirectory
        run = RunDirectory.create(sys.argv[1], "x", {})
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match="is in use by another process: wait until it ends") as error:
            RunDirectory.create(path, "x", CONFIG, resume=True)
        one_sentence(error)
        assert RunDirectory.open(path).read_config() == {}  # reading needs no lock
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=10)
    RunDirectory.create(path, "x", CONFIG, resume=True).close()


def test_discard_deletes_weights_and_evaluations(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "x", CONFIG)
    run.add_evaluation({"steps": 10, "mean_reward": 1.0})
    (run.path / WEIGHTS).write_text("")
    run.discard()
    assert not (tmp_path / "run").exists()


def test_evaluations_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "x", CONFIG) as run:
        run.cut_evaluations(0)  # the file does not exist yet
        for steps in (10, 20, 30):
            run.add_evaluation({"steps": steps, "mean_reward": 1.0})
        path = run.path / "evaluations.jsonl"
        path.write_text(path.read_text() + '{"steps": 5, "mean_rew')  # killed within a line
        run.cut_evaluations(20)
        run.add_evaluation({"steps": 25, "mean_reward": 2.0})
    assert [json.loads(line)["steps"] for line in path.read_text().splitlines()] == [10, 20, 25]
