"""Test that user errors give one sentence with value, rule and remedy, exit code 2, no traceback, and no files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import prestarted
import pytest

from remuda.cli import main
from remuda.data.packing import unpack
from remuda.learning.checkpoint import load_newest

BAD = [
    # arguments, words that the sentence must contain
    (["trian"], ["'trian'", "did you mean train"]),
    (["train", "poo", "--env", "CartPole-v1"], ["'poo'", "did you mean ppo"]),
    (["train"], ["no algo", "remuda train ppo"]),
    (["train", "ppo"], ["no env", "--env CartPole-v1"]),
    (["train", "ppo", "--env", "CartPol-v1"], ["CartPol-v1", "CartPole-v1"]),
    (["train", "ppo", "--env", "CartPole-v7"], ["CartPole", "v7"]),
    (["train", "ppo", "--env", "no_such_module:make"], ["no_such_module"]),
    (["train", "ppo", "--env", "counting:mak"], ["counting has no mak", "did you mean make"]),
    (["train", "ppo", "--env", "counting.py:make"], ["counting.py", "write counting"]),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.stats", "counting:Peak"], ["counting has no Peak", "Peaks"]),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.kwargs", "{nonsense"], ["envs.kwargs", "JSON object"]),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.kwargs", '{"speed": 3}'], ["speed"]),
    (["train", "ppo", "--env", "CartPole-v1", "--steps", "many"], ["steps='many'", "whole number"]),
    (["train", "ppo", "--env", "CartPole-v1", "--steps", "0"], ["steps=0", "at least 1"]),
    (["train", "ppo", "--env", "CartPole-v1", "--steps", "1.5"], ["steps='1.5'", "whole number"]),
    (["train", "ppo", "--env", "CartPole-v1", "--seed", "-1"], ["seed=-1"]),
    (["train", "ppo", "--env", "CartPole-v1", "--scheme", "serail"], ["serail", "did you mean serial"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--algo.learning_rat", "1"],
        ["--algo.learning_rat", "--algo.learning_rate"],
    ),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--algo.learning_rate", "fast"],
        ["algo.learning_rate='fast'", "linear("],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.learning_rate", "piecewise(1:3, 0:2)"], ["rising positions"]),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.gamma", "1.5"], ["algo.gamma=1.5", "at most 1.0"]),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.gamma", "nan"], ["algo.gamma=nan", "finite"]),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.n_epochs", "0"], ["algo.n_epochs=0", "at least 1"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--algo.batch_size", "100"],
        ["batch_size=100", "does not divide", "256"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.optimizer", "sgd"], ["algo.optimizer='sgd'", "rmsprop"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--algo.normalize_advantage", "perhaps"],
        ["'perhaps'", "true or false"],
    ),
    (
        [
            "train",
            "dqn",
            "--env",
            "CartPole-v1",
            "--scheme",
            "async",
            "--eval.cpu_fraction",
            "1",
            "--eval.episodes",
            "0",
        ],
        ["eval.cpu_fraction=1", "nothing to play"],
    ),
    (["train", "dqn", "--env", "CartPole-v1", "--sampler.wait_reset", "true"], ["wait_reset", "leave it out"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--device", "cuda"],
        ["device=cuda is not on this machine", ": use cpu."],
    ),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--sampler.device", "cuda:3"],
        ["sampler.device=cuda:3 is not on this machine", ": use cpu."],
    ),
    (
        ["train", "sac", "--env", "Pendulum-v1", "--algo.actor_device", "cuda"],
        ["algo.actor_device=cuda is not on this machine", ": use cpu."],
    ),
    (
        ["train", "sac", "--env", "Pendulum-v1", "--device", "gpu"],
        ["device=gpu", "not a device of PyTorch: use cuda."],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--device", "gpu:1"], ["device=gpu:1", "use cuda:1."]),
    (
        ["train", "impala", "--env", "CartPole-v1", "--scheme", "async", "--sampler.device", "cuda"],
        ["sampler.device=cuda with sampler.inference=workers", "use sampler.inference=central"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.precision", "fp16"], ["agent.precision='fp16'", "fp32, bf16"]),
    (["train", "ppo", "--env", "CartPole-v1", "--sampler.envs", "-3"], ["sampler.envs=-3", "at least 1"]),
    (["train", "ppo", "--env", "CartPole-v1", "--sampler.slots", "3"], ["slots=3", "does not divide", "envs=8"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--sampler.workers", "9", "--scheme", "parallel"],
        ["workers=9", "8 envs"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.hidden", "64,x"], ["agent.hidden='64,x'", "64,64"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.net", "cnn"], ["agent.net='cnn'", "auto, mlp, nature"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.net", "nature"], ["agent.net=nature", "an image"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.core", "rnn"], ["agent.core='rnn'", "lstm, gru"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--agent.core", "lstm", "--algo.batch_size", "48"],
        ["algo.batch_size=48", "splits along envs", "32 or 64 or 128 or 256"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.seeds", "5-3"], ["envs.seeds='5-3'", "0-199"]),
    (["train", "ppo", "--env", "CartPole-v1", "--eval.seeds", "a"], ["eval.seeds='a'", "0-199"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--sampler.inference", "workers"],
        ["sampler.inference=workers", "--scheme parallel"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.episodic_life"], ["episodic_life", "not an Atari game"]),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.backend", "ale"], ["envs.backend=ale", "CartPole-v1"]),
    (["train", "ppo", "--env", "CartPole-v1", "--envs.backend", "gymnasum"], ["did you mean gymnasium"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.net", "no_such_module:Net"], ["no_such_module", "install it"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.net", "own_things:Nett"], ["Nett", "did you mean Net"]),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--agent.net", "own_things:BadNet"],
        ["own_things:BadNet", "does not fit", "(4,)"],
    ),
    (["train", "ppo", "--env", "CartPole-v1", "--checkpoint.keep", "best"], ["eval.every"]),
    (
        ["train", "impala", "--env", "CartPole-v1", "--scheme", "async", "--checkpoint.cut_episodes", "true"],
        ["checkpoint.cut_episodes under --scheme async", "leave it out"],
    ),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--checkpoint.cut_episodes", "true", "--checkpoint.every", "0"],
        ["never cuts", "checkpoint.every"],
    ),
    (
        ["train", "ppo", "--env", "CartPole-v1", "--checkpoint.keep", "some"],
        ["checkpoint.keep='some'", "last, best, all"],
    ),
    (
        ["train", "a2c", "--env", "CartPole-v1", "--algo.n_epochs", "4"],
        ["--algo.n_epochs", "option of ppo, not of a2c"],
    ),
    (["train", "ppo", "--env", "own_things:text_obs"], ["Text", "MultiBinary, and Dict and Tuple"]),
    (["train", "ppo", "--env", "own_things:integer_action"], ["Box(0, 3", "Box of floats"]),
    (["train", "ppo", "--env", "own_things:lying_shape"], ["shape"]),
    (["train", "ppo", "--env", "own_things:lossy_dtype"], ["float64", "uint8", "cannot hold 0.5"]),
    (["train", "ppo", "--env", "own_things:no_env"], ["gymnasium.Env"]),
    (["train", "ppo", "--env", "own_things:raising"], ["own_things:raising", "on strike"]),
    (["train", "ppo", "--env", "CartPole-v1", "extra"], ["'extra'", "too many"]),
    (["train", "--config", "no_such_file.yaml"], ["no_such_file.yaml"]),
    (["train", "ppo", "--env", "CartPole-v1", "--out", "/proc/nowhere/run"], ["/proc/nowhere/run"]),
    (["train", "ppo", "--env", "CartPole-v1", "--log.wandb", "project"], ["pip install 'remuda[wandb]'"]),
    (["train", "ppo", "--env", "CartPole-v1", "--eval.seed", "1e20"], ["eval.seed", "at most"]),
    (["train", "ppo", "--env", "CartPole-v1", "--algo.n_steps", "1e12"], ["algo.n_steps", "at most"]),
    (["train", "ppo", "--env", "CartPole-v1", "--agent.net", "own_broken:Net"], ["own_broken", "ZeroDivisionError"]),
    (["train", "ppo", "--env", "own_things:always_raises"], ["own_things:always_raises", "RuntimeError: never"]),
    (["train", "ppo", "--env", "own_things:list_reward"], ["reward is", "finite float32 numbers"]),
    (["train", "ppo", "--env", "own_things:no_info"], ["info is None", "dict"]),
    (["eval", "no_such_run"], ["no_such_run"]),
    (["eval"], ["RUN"]),
    (["record", "no_such_run"], ["no_such_run"]),
    (["plot", "no_such_run"], ["no_such_run"]),
    (["plot"], ["RUN"]),
    (["doctor", "--env", "CartPol-v1"], ["CartPol-v1", "CartPole-v1"]),
    (["train", "--resume", "no_such_run"], ["no_such_run"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(value)[:60])
def test_user_errors_give_one_sentence_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    check_sentence(captured.err, words)
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == [], "a refused command must not create files"


def check_sentence(text: str, words: list[str]) -> None:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("remuda: ")
    assert "Traceback" not in text
    assert re.search(r"[.?]$", lines[0]), lines[0]
    for word in words:
        assert word in lines[0], (word, lines[0])


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-m", "remuda", *arguments]
    return prestarted.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        pytest.param("MinAtar/Breakout-v1", "minatar", "minatar", marks=pytest.mark.long),
        pytest.param("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid", marks=pytest.mark.long),
        pytest.param("HalfCheetah-v5", "mujoco", "mujoco", marks=pytest.mark.long),
    ],
)
def test_the_error_for_a_missing_package_names_its_extra(env, package, extra, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from remuda.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", "ppo", "--env", env]
    done = prestarted.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    check_sentence(done.stderr, [env, f"pip install 'remuda[{extra}]'"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["serial", "parallel"])
def test_an_error_in_a_real_process_gives_one_sentence(tmp_path, scheme):
    done = run_command("train", "ppo", "--env", "CartPole-v0x", "--scheme", scheme, cwd=tmp_path)
    assert done.returncode == 2
    check_sentence(done.stderr, ["CartPole-v0x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["serial", "parallel"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan_obs", ["own_things:late", "observation", "seed", "step 7"]),
        ("nan_reward", ["own_things:late", "reward", "seed", "step 7"]),
        ("shape", ["own_things:late", "shape (5,)", "(4,)", "seed", "step 7"]),
        ("dtype", ["own_things:late", "complex128", "seed", "step 7"]),
    ],
)
def test_the_error_for_an_env_that_breaks_its_contract_names_env_and_step(
    tmp_path, monkeypatch, capsys, scheme, fault, words
):
    monkeypatch.chdir(tmp_path)
    kwargs = f'{{"fault": "{fault}", "at": 7}}'
    arguments = ["train", "ppo", "--env", "own_things:late", "--envs.kwargs", kwargs, "--scheme", scheme, "--quiet"]
    assert main([*arguments, "--out", "run"]) == 2
    check_sentence(capsys.readouterr().err, words)
    assert list(tmp_path.iterdir()) == [], "a run that failed before its first round leaves no files"


@pytest.mark.parametrize("scheme", ["serial", "parallel"])
def test_rounds_before_an_env_broke_are_saved(tmp_path, monkeypatch, capsys, scheme):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "ppo", "--env", "own_things:late", "--scheme", scheme, "--quiet", "--out", "run"]
    arguments += ["--envs.kwargs", '{"fault": "nan_obs", "at": 15}', "--algo.n_steps", "8", "--algo.batch_size", "64"]
    assert main(arguments) == 2
    check_sentence(capsys.readouterr().err, ["own_things:late", "step 15"])
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed"
    assert "step 15" in result["error"]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-64"]


# Under async, samplers may take more than 15 steps before the first round, and a run without a round is not saved.
@pytest.mark.parametrize(("scheme", "good_episodes"), [("serial", 0), ("parallel", 0), ("async", 50)])
def test_the_replay_before_an_env_broke_is_saved_too(tmp_path, monkeypatch, capsys, scheme, good_episodes):
    """The replay must be saved before it is closed together with the samplers that failed."""
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "dqn", "--env", "own_things:late", "--scheme", scheme, "--quiet", "--out", "run"]
    arguments += ["--sampler.envs", "2", "--algo.learning_starts", "4", "--algo.train_freq", "2"]
    arguments += ["--steps", "20_000"]  # the env breaks long before this step
    fault = {"fault": "nan_obs", "at": 15, "good_episodes": good_episodes}
    assert main([*arguments, "--envs.kwargs", json.dumps(fault)]) == 2
    check_sentence(capsys.readouterr().err, ["own_things:late", "step 15"])
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed"
    found = load_newest(tmp_path / "run/checkpoints")
    assert "replay" in found.blobs
    assert found.step <= unpack(found.blobs["replay"])["replay"]["steps"] <= 2 * (20 * good_episodes + 15)


def test_a_finished_run_is_saved_before_its_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "ppo", "--env", "own_things:late", "--quiet", "--out", "run", "--steps", "64"]
    arguments += ["--envs.kwargs", '{"fault": "nan_obs", "at": 15}', "--algo.n_steps", "8", "--algo.batch_size", "64"]
    assert main(arguments) == 2
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-64"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["train", "ppo", "--env", "CartPole-v1", "--steps", "600", "--out", str(path), "--quiet"]
    assert main([*arguments, "--eval.episodes", "0", "--checkpoint.every", "256"]) == 0
    return path


class TestResume:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--env", "Acrobot-v1"], ["env=CartPole-v1", "not Acrobot-v1", "new run"]),
            (["--seed", "5"], ["seed=0", "not 5"]),
            (["--scheme", "parallel"], ["scheme=serial", "not parallel"]),
            (["--algo.gamma", "0.5"], ["algo.gamma=0.98", "not 0.5", "--steps"]),
            (["--sampler.envs", "4"], ["sampler.envs=8", "not 4"]),
            (["--out", "elsewhere"], ["--resume", "leave out"]),
        ],
    )
    def test_resume_with_other_settings_is_refused(self, run, arguments, words, capsys):
        before = sorted(path.name for path in run.iterdir())
        assert main(["train", "--resume", str(run), *arguments]) == 2
        check_sentence(capsys.readouterr().err, words)
        assert sorted(path.name for path in run.iterdir()) == before

    def test_resume_is_refused_if_all_checkpoints_are_damaged(self, run, tmp_path, capsys):
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(run, copy, symlinks=True)
        for file in copy.glob("checkpoints/step-*/tensors.safetensors"):
            file.write_bytes(file.read_bytes()[:-1])
        assert main(["train", "--resume", str(copy), "--steps", "1000"]) == 2
        check_sentence(capsys.readouterr().err, ["damaged", "tensors.safetensors"])
        assert main(["eval", str(copy)]) == 2
        check_sentence(capsys.readouterr().err, ["damaged"])

    def test_a_directory_that_holds_a_run_is_not_overwritten(self, run, capsys):
        assert main(["train", "ppo", "--env", "CartPole-v1", "--out", str(run)]) == 2
        check_sentence(capsys.readouterr().err, [str(run), "--resume"])

    def test_recording_an_env_that_renders_no_images_is_refused(self, tmp_path, capsys):
        path = tmp_path / "run"
        arguments = ["train", "a2c", "--env", "own_things:late", "--steps", "100", "--out", str(path), "--quiet"]
        assert main([*arguments, "--eval.episodes", "0"]) == 0
        capsys.readouterr()
        assert main(["record", str(path)]) == 2
        check_sentence(capsys.readouterr().err, ["own_things:late", "rgb_array"])
        assert not list((path / "videos").iterdir())


def test_a_lambda_under_parallel_is_refused(tmp_path, monkeypatch):
    import gymnasium

    import remuda

    monkeypatch.chdir(tmp_path)
    with pytest.raises(remuda.UsageError, match="scheme=serial") as caught:
        remuda.train("ppo", lambda: gymnasium.make("CartPole-v1"), scheme="parallel", steps=100, quiet=True)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.json")), "the run is refused before its directory is created"


ABSURD = [
    # algorithm, options, words that the sentence must contain
    ("dqn", ["--replay.ratio", "1e-300"], ["replay.ratio=1e-300 is too small", "at least 1e-06"]),
    ("dqn", ["--algo.batch_size", "1e11"], ["algo.batch_size=100000000000 is too large", "at most 10000000"]),
    ("ppo", ["--algo.batch_size", "100000000000"], ["algo.batch_size=100000000000"]),
    ("impala", ["--algo.batch_size", "1e30"], ["algo.batch_size=1000000000000000019884624838656", "at most"]),
    ("ppo", ["--steps", "1e30"], ["steps=1000000000000000019884624838656 is too large", "at most 1000000000000000"]),
    ("ppo", ["--algo.n_epochs", "1e30"], ["algo.n_epochs", "is too large"]),
    (
        "ppo",
        ["--algo.n_steps", "1e6", "--sampler.envs", "1e5"],
        ["algo.n_steps=1000000 with sampler.envs=100000", "GB"],
    ),
    ("dqn", ["--algo.train_freq", "1e6", "--sampler.envs", "60000", "--replay.capacity", "1e6"], ["GB"]),
    ("ppo", ["--agent.hidden", "1000000,1000000"], ["agent.hidden=1000000,1000000 takes 16000.0 GB", "smaller"]),
    ("ppo", ["--agent.hidden", "1e30"], ["agent.hidden", "is too large"]),
    ("ppo", ["--agent.core", "lstm", "--agent.core_size", "100000"], ["agent.core_size=100000 takes 480.0 GB"]),
    ("dqn", ["--replay.capacity", "1e18"], ["replay.capacity=1000000000000000000 is too large"]),
    ("ppo", ["--algo.learning_rate", "1e300"], ["algo.learning_rate=1e300 is too large", "at most 1e+30"]),
    ("ppo", ["--algo.vf_coef", "1e300"], ["algo.vf_coef=1e+300 is too large", "at most 1e+30"]),
    ("ppo", ["--algo.optimizer_eps", "1e-300"], ["algo.optimizer_eps=1e-300 is too close to 0", "at least 1e-30"]),
    ("dqn", ["--algo.v_min", "-1e300"], ["algo.v_min=-1e+300 is too small", "at least -1e+30"]),
    ("ppo", ["--algo.ent_coef", "nan"], ["algo.ent_coef='nan'"]),
    ("ppo", ["--scheme.threads", "1e9"], ["scheme.threads=1000000000 is too large"]),
    ("ppo", ["--envs.step_timeout", "1e300"], ["envs.step_timeout=1e+300 is too large"]),
    ("ppo", ["--envs.kwargs", '{"a":' * 3000 + "1" + "}" * 3000], ["envs.kwargs", "is not a JSON object"]),
]


@pytest.mark.parametrize(("algo", "options", "words"), ABSURD, ids=lambda value: " ".join(value)[:60])
def test_absurd_sizes_are_refused(algo, options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("remuda.config.sizes.free_memory", lambda: 64 * 10**9)
    assert main(["train", algo, "--env", "CartPole-v1", *options]) == 2
    check_sentence(capsys.readouterr().err, words)
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_gives_one_sentence(monkeypatch, capsys):
    def fail(command, argv):
        raise MemoryError

    monkeypatch.setattr("remuda.cli.train.run", fail)
    assert main(["train", "ppo"]) == 1
    check_sentence(capsys.readouterr().err, ["out of memory", "fewer envs"])
