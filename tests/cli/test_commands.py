"""Test every command with arguments as a user types them."""

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import prestarted
import pytest

import remuda
from remuda.cli import COMMANDS, main
from remuda.cli.train_help import COMMON
from remuda.config.run_config import KINDS
from remuda.config.used_options import is_used_by
from remuda.registry import algorithm_names, all_algorithms, scheme_names

TESTS = Path(__file__).parents[1]
ALGORITHMS = {entry.name: entry.options for entry in all_algorithms()}
SMALL = ["--algo.n_steps", "16", "--algo.batch_size", "32", "--algo.n_epochs", "2", "--sampler.envs", "4"]
QUICK = [*SMALL, "--steps", "300", "--log.tensorboard", "no", "--eval.episodes", "2"]


def start(*arguments, cwd, popen=prestarted.Popen, **settings) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **settings.pop("env", {})}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-m", "remuda", *arguments]
    return popen(command, cwd=cwd, env=environment, **settings)


def remuda_process(*arguments, cwd, popen=prestarted.Popen) -> subprocess.CompletedProcess:
    process = start(*arguments, cwd=cwd, popen=popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def tensors(run: Path) -> bytes:
    return (run / "checkpoints/latest/tensors.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train in a new interpreter, and return the run and the finished process with its output."""
    where = tmp_path_factory.mktemp("trained")
    arguments = ["train", "ppo", "--env", "CartPole-v1", "--seed", "5", *QUICK]
    done = remuda_process(*arguments, cwd=where, popen=subprocess.Popen)
    assert done.returncode == 0, done.stderr
    return where / "runs/latest", done


@pytest.fixture(scope="module")
def run(trained):
    return trained[0].resolve()


class TestTrain:
    def test_output_without_a_terminal_is_plain_lines(self, trained):
        run, done = trained
        assert done.stderr == ""
        assert "\x1b" not in done.stdout
        assert "\r" not in done.stdout
        lines = done.stdout.splitlines()
        progress = [line for line in lines if re.match(r"[\d,]+ of 300 steps \(\d+ %\)", line)]
        assert len(progress) >= 3
        assert "steps/s" in progress[-1]
        assert "(100 %)" in progress[-1]
        assert any(line.startswith("time: env ") for line in lines)
        assert re.fullmatch(r"evaluation: mean return [\d.]+ ± [\d.]+ over 2 greedy episodes", lines[-2])
        path = re.fullmatch(r"complete: [\d,]+ steps, [\d,]+ updates, [\d,]+ steps/s -> (runs/.*)", lines[-1])[1]
        assert run.parent / Path(path).name == run.resolve()
        assert Path(path).name.startswith("ppo-CartPole-v1-5-")

    def test_the_run_directory_has_all_files(self, run):
        expected = {
            "config.yaml",
            "meta.json",
            "metrics.jsonl",
            "metrics.csv",
            "checkpoints",
            "log.txt",
            "result.json",
        }
        assert expected | {"videos"} <= {path.name for path in run.iterdir()}
        result = json.loads((run / "result.json").read_text())
        assert result["status"] == "complete"
        assert result["steps"] >= 300

    def test_quiet_prints_two_lines(self, tmp_path, capsys):
        assert main(["train", "ppo", "--env", "CartPole-v1", *QUICK, "--quiet", "--out", str(tmp_path / "run")]) == 0
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 2
        assert captured.out.splitlines()[0].startswith("evaluation: ")
        assert captured.out.splitlines()[1].startswith("complete: ")
        assert captured.err == ""

    def test_a_config_repeats_the_run_exactly(self, run, tmp_path, capsys):
        arguments = ["train", "--config", str(run / "config.yaml"), "--quiet"]
        assert main([*arguments, "--out", str(tmp_path / "again")]) == 0
        assert tensors(tmp_path / "again") == tensors(run)
        assert (tmp_path / "again/config.yaml").read_text() == (run / "config.yaml").read_text()
        assert main([*arguments, "--seed", "6", "--out", str(tmp_path / "other")]) == 0
        assert tensors(tmp_path / "other") != tensors(run)
        capsys.readouterr()

    def test_options_of_the_algorithm_named_in_a_config_are_accepted(self, run, tmp_path, capsys):
        """--algo.n_epochs is an option of PPO, an algorithm that only the file names."""
        arguments = ["train", "--config", str(run / "config.yaml"), "--quiet", "--algo.n_epochs", "1"]
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
        before, after = (json.loads((path / "result.json").read_text()) for path in (run, tmp_path / "run"))
        assert after["updates"] < before["updates"]
        assert main(["train", "--env", "CartPole-v1", "ppo", *QUICK, "--quiet", "--out", str(tmp_path / "last")]) == 0
        capsys.readouterr()

    def test_resume_accepts_options_equal_to_those_of_the_run(self, run, tmp_path, capsys):
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(run, copy, symlinks=True)
        arguments = ["train", "ppo", "--resume", str(copy), "--env", "CartPole-v1", "--algo.n_epochs", "2", "--quiet"]
        assert main([*arguments, "--steps", "500", "--agent.hidden", "64,64", "--eval.episodes", "1"]) == 0
        result = json.loads((copy / "result.json").read_text())
        assert result["steps"] >= 500
        assert result["eval"]["episodes"] == 1
        capsys.readouterr()

    def test_profile_writes_a_trace_and_a_table(self, tmp_path, capsys):
        path = tmp_path / "run"
        arguments = [
            "train",
            "a2c",
            "--env",
            "CartPole-v1",
            "--steps",
            "100",
            "--algo.n_steps",
            "3",
            "--sampler.envs",
            "2",
        ]
        assert main([*arguments, "--eval.episodes", "0", "--quiet", "--profile", "--out", str(path)]) == 0
        with gzip.open(path / "profile/trace.json.gz") as file:
            trace = json.load(file)
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert any("addmm" in name or "linear" in name for name in names)
        assert "Self CPU" in (path / "profile/top.txt").read_text()
        capsys.readouterr()

    def test_profile_of_a_run_that_ends_too_early_writes_no_trace(self, tmp_path, capsys):
        path = tmp_path / "run"
        arguments = ["train", "ppo", "--env", "CartPole-v1", *QUICK, "--quiet", "--profile", "--out", str(path)]
        assert main([*arguments, "--steps", "1", "--eval.episodes", "0"]) == 0
        assert not (path / "profile").exists()
        assert "there is no profile, because the run ended before round 3" in (path / "log.txt").read_text()
        capsys.readouterr()


class TestEval:
    def test_eval_prints_json(self, run, capsys):
        assert main(["eval", str(run), "--episodes", "3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found) == ["mean_reward", "std_reward", "mean_length", "episodes", "returns"]
        assert found["episodes"] == len(found["returns"]) == 3
        assert found["mean_reward"] == pytest.approx(sum(found["returns"]) / 3)
        assert found == remuda.Run(run).evaluate(3)

    def test_eval_prints_a_sentence(self, run, capsys):
        assert main(["eval", str(run), "--episodes", "2"]) == 0
        assert re.fullmatch(
            r"mean return [\d.]+ ± [\d.]+, mean length [\d.]+, over 2 episodes\n", capsys.readouterr().out
        )

    def test_seed_and_sample_change_the_episodes(self, run, capsys):
        outputs = []
        for extra in ([], ["--seed", "1"], ["--sample"]):
            assert main(["eval", str(run), "--episodes", "5", "--json", *extra]) == 0
            outputs.append(json.loads(capsys.readouterr().out)["returns"])
        assert len({tuple(returns) for returns in outputs}) == 3

    @pytest.mark.parametrize("command", ["eval", "record"])
    @pytest.mark.parametrize("episodes", ["0", "-1", "x"])
    def test_invalid_numbers_of_episodes_are_refused(self, run, command, episodes, capsys):
        assert main([command, str(run), "--episodes", episodes]) == 2
        assert "episodes" in capsys.readouterr().err


class TestPlot:
    def test_plot_writes_an_image(self, run, tmp_path, capsys):
        out = tmp_path / "curve.png"
        assert main(["plot", str(run), "--out", str(out)]) == 0
        assert str(out) in capsys.readouterr().out
        assert picture_size(out)[0] > 300

    def test_plot_writes_any_metric_to_the_run_directory_by_default(self, run, capsys):
        assert main(["plot", str(run), "--metric", "train/loss"]) == 0
        assert picture_size(run / "curve.png")[1] > 200
        assert main(["plot", str(run), "--metric", "train/los"]) == 2
        assert "did you mean train/loss" in capsys.readouterr().err

    def test_plot_to_a_path_that_cannot_be_written_is_refused(self, run, tmp_path, capsys):
        assert main(["plot", str(run), "--out", str(tmp_path / "no/such/curve.png")]) == 2
        assert "choose another" in capsys.readouterr().err


def picture_size(path: Path) -> tuple[int, int]:
    import imageio.v3

    height, width = imageio.v3.imread(path).shape[:2]
    return width, height


def frames(path: Path) -> tuple[int, int, int, float]:
    """Decode a video and return the number, width, height and rate of its frames."""
    import av

    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        count = sum(1 for _ in video.decode(stream))
        return count, stream.width, stream.height, float(stream.average_rate)


class TestRecord:
    def test_record_writes_a_video_of_cart_pole(self, run, capsys):
        pytest.importorskip("pygame")
        length = remuda.Run(run).evaluate(episodes=1)["mean_length"]
        assert main(["record", str(run)]) == 0
        (path,) = (run / "videos").iterdir()
        steps = json.loads((run / "result.json").read_text())["steps"]
        assert path.name == f"step-{steps}.mp4"
        assert capsys.readouterr().out == f"returns {length:.1f} -> {path}\n"
        assert frames(path) == (length + 1, 600, 400, 50.0)

    def test_odd_frame_sizes_become_even_and_episodes_are_concatenated(self, tmp_path, capsys):
        run, out = tmp_path / "run", tmp_path / "made/on/demand.mp4"
        arguments = ["train", "ppo", "--env", "own_things:odd", *QUICK, "--quiet", "--eval.episodes", "0"]
        assert main([*arguments, "--out", str(run)]) == 0
        assert main(["record", str(run), "--episodes", "2", "--out", str(out)]) == 0
        assert frames(out) == (2 * (20 + 1), 46, 32, 20.0)
        assert "returns 20.0, 20.0 -> " in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["film.xyz", "film", "film.mp4/film.mp4"])
    def test_file_names_that_are_not_videos_are_refused(self, run, tmp_path, capsys, name):
        (tmp_path / "film.mp4").write_text("in the way")
        assert main(["record", str(run), "--out", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert ".mp4" in error
        assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"], "no other file is created"


class TestDoctor:
    def test_doctor_of_this_machine_finds_no_problems(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        for word in ("python", "torch", "gymnasium", "cores", "[atari]", "[minigrid]", "no problems found"):
            assert word in out
        assert "nothing yet" not in out
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["problems"] == []
        assert found["remuda"] == remuda.__version__

    def test_doctor_of_an_env_finds_no_problems(self, capsys):
        assert main(["doctor", "--env", "CartPole-v1"]) == 0
        out = capsys.readouterr().out
        assert "Discrete(2)" in out
        assert re.search(r"steps per second +[\d,]+", out)
        assert out.endswith("no problems found\n")

    def test_doctor_of_an_env_as_json(self, capsys):
        arguments = ["doctor", "--env", "own_things:late", "--envs.kwargs", '{"at": 9}', "--json"]
        assert main(arguments) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["label"] == "own_things:late"
        assert found["mean_episode_length"] == 20.0
        assert found["is_repeatable"] is True
        assert found["problems"] == []

    @pytest.mark.parametrize(
        ("env", "words"),
        [("own_things:text_obs", "Text"), ("own_things:raising", "on strike"), ("own_things:lying_dtype", "float64")],
    )
    def test_doctor_of_a_faulty_env_names_the_problem(self, capsys, env, words):
        assert main(["doctor", "--env", env]) == 1
        captured = capsys.readouterr()
        assert re.search(rf"^problem: .*{words}", captured.out, re.MULTILINE)
        assert "Traceback" not in captured.out + captured.err


class TestTables:
    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("algos", ["name", "ppo", "a2c"]),
            ("schemes", ["name", "serial", "parallel"]),
            ("envs", ["id", "CartPole-v1"]),
        ],
    )
    def test_tables_have_a_header_and_rows(self, command, words, capsys):
        assert main([command]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)

    def test_tables_list_all_algorithms_and_schemes(self, capsys):
        main(["algos"])
        assert first_column(capsys.readouterr().out) == algorithm_names()
        main(["schemes"])
        assert first_column(capsys.readouterr().out) == scheme_names()

    def test_the_table_of_envs_can_be_filtered(self, capsys):
        assert main(["envs", "acrobot"]) == 0
        assert first_column(capsys.readouterr().out) == ["Acrobot-v1"]
        assert main(["envs", "no such env"]) == 0
        assert first_column(capsys.readouterr().out) == []


def first_column(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines()[1:] if line.strip() and not line.startswith(" ")]


def test_help_as_a_command_equals_the_option(capsys):
    assert main(["--help"]) == 0
    wanted = capsys.readouterr().out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == wanted
    assert "remuda COMMAND" in wanted


def test_the_number_of_envs_is_printed_with_singular_or_plural(tmp_path, capsys):
    arguments = ["train", "a2c", "--env", "CartPole-v1", "--steps", "8", "--eval.episodes", "0"]
    for count, said in ((1, ": 1 env, configuration"), (2, ": 2 envs, configuration")):
        assert main([*arguments, "--sampler.envs", str(count), "--out", str(tmp_path / str(count))]) == 0
        assert said in capsys.readouterr().out


def help_of(arguments, capsys, *topic) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help", *topic])
    assert ended.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_of_every_command_shows_its_usage(self, command, capsys):
        assert help_of([command], capsys).startswith(f"usage: remuda {command}")

    @pytest.mark.parametrize("algo", [*algorithm_names(), None])
    def test_help_all_shows_every_option_that_the_algorithm_uses(self, algo, capsys):
        text = " ".join(help_of(["train", *([algo] if algo else [])], capsys, "all").split())
        kinds = [("algo", ALGORITHMS[algo])] if algo else [("algo", kind) for kind in ALGORITHMS.values()]
        for group, kind in [*kinds, *KINDS.items()]:
            for item in fields(kind):
                is_shown = algo is None or is_used_by(ALGORITHMS[algo], kind, group, item.name)
                assert (f"--{group}.{item.name} " in text) == is_shown
                assert " ".join(item.metadata["help"].split()) in text or algo is None or not is_shown
        if algo == "a2c":
            assert "--algo.n_epochs" not in text
            assert "(default: 7e-4)" in text

    @pytest.mark.parametrize("algo", [*ALGORITHMS, None])
    def test_help_of_train_shows_ten_options_and_the_groups(self, algo, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        text = help_of(["train", *([algo] if algo else [])], capsys)
        lines = text.splitlines()
        assert lines[:3] == ["usage: remuda train ALGO --env ENV [OPTIONS]", "", "common options:"]
        assert [line.split()[0] for line in lines if line.startswith("  --")] == list(COMMON)
        assert len(COMMON) == 10
        groups = lines[lines.index("groups of options:") + 1 :]
        groups = [line.split()[0] for line in groups[: groups.index("")] if not line.startswith("   ")]
        has_replay = algo is None or ALGORITHMS[algo].data == "replay"
        assert groups == ["run", "algo", *(group for group in KINDS if group != "replay" or has_replay)]
        assert max(map(len, lines)) <= 80
        assert len(lines) <= 45

    @pytest.mark.parametrize("group", ["run", "algo", *KINDS])
    def test_help_of_a_group_shows_only_its_options(self, group, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        text = help_of(["train", "sac"], capsys, group)
        shown = {line.split()[0].partition(".")[0] for line in text.splitlines() if line.startswith("  --")}
        assert shown == ({"--env", "--steps", "--seed", "--scheme", "--device", "--out", "--resume", "--config",
                          "--profile", "--quiet"} if group == "run" else {f"--{group}"})  # fmt: skip
        assert max(map(len, text.splitlines())) <= 80

    def test_help_of_a_group_that_the_algorithm_does_not_use(self, capsys):
        assert "ppo does not use options of the group replay." in help_of(["train", "ppo"], capsys, "replay")

    def test_help_of_an_unknown_group_suggests_the_nearest(self, capsys):
        assert main(["train", "ppo", "--help", "samplr"]) == 2
        assert "did you mean sampler?" in capsys.readouterr().err

    @pytest.mark.parametrize("command", [command for command in COMMANDS if command != "train"])
    def test_help_is_at_most_80_columns_wide(self, command, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, help_of([command], capsys).splitlines())) <= 80

    def test_help_shows_three_examples(self, capsys):
        assert main(["--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        examples = lines[lines.index("examples:") + 1 :]
        assert len(examples) == 3
        assert all(line.startswith("  remuda ") for line in examples)
        assert max(map(len, lines)) <= 80

    def test_without_a_command_the_list_of_commands_is_printed(self, capsys):
        for arguments in ([], ["--help"], ["-h"]):
            assert main(arguments) == 0
            out = capsys.readouterr().out
            assert all(f"  {command} " in out for command in COMMANDS)

    def test_version_is_printed(self, tmp_path):
        done = remuda_process("--version", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"remuda {remuda.__version__}\n", "")
