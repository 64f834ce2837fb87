"""Test that runs refuse unused options that the user sets, and read exactly the options that are declared as used."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from option_reads import record_reads

import remuda
from remuda.cli import main
from remuda.config.resolve import resolve_config, resume_config
from remuda.config.run_config import KINDS
from remuda.config.used_options import refuse_unused
from remuda.envs import AtariOptions
from remuda.errors import ConfigError
from remuda.registry import all_algorithms

ALGORITHMS = {entry.name: entry.options for entry in all_algorithms()}
PRESETS = {entry.name: entry.presets for entry in all_algorithms()}

TESTS = Path(__file__).parents[1]
BOX = ("ddpg", "sac", "td3")
# Options of Atari games and envs.kwargs are checked against the env instead.
OF_ENVS = {"envs.kwargs", *(f"envs.{item.name}" for item in fields(AtariOptions))}
# These options are used, but read only if another option is set, or only when a configuration is checked.
READ_IF_SET = {"replay.alpha", "algo.correction", "agent.fast_path", "scheme.parts", "sampler.device"}
# These options are read also by runs that do not use them. Such runs refuse the values given here.
READ_ANYWAY = {
    "scheme.weights": "file",
    "eval.cpu_fraction": 0.5,
    "eval.video": True,
    "algo.atoms": 51,
}
NO_EFFECT_WITHOUT_ATOMS = {"algo.v_min", "algo.v_max"}  # options of r2d1


def env_of(algo: str) -> str:
    return "Pendulum-v1" if algo in BOX else "CartPole-v1"


def is_used(algo: str, scheme: str, group: str, name: str) -> bool:
    try:
        refuse_unused({group: {name: 1}}, {"algo": ALGORITHMS[algo], **KINDS}, algo, scheme)
    except ConfigError:
        return False
    return True


def arguments_of(algo: str, scheme: str, path: Path) -> list[str]:
    arguments = ["train", algo, "--env", env_of(algo), "--scheme", scheme, "--steps", "400", "--quiet"]
    arguments += ["--out", str(path), "--eval.episodes", "1", "--sampler.envs", "8"]
    if algo in ("a2c", "appo", "impala", "ppo"):
        return [*arguments, "--algo.n_steps", "16", *(["--algo.batch_size", "32"] if algo == "ppo" else [])]
    return [*arguments, "--algo.learning_starts", "300"]


def check_reads(algo: str, scheme: str, read: set[str]) -> None:
    for group, kind in {"algo": ALGORITHMS[algo], **KINDS}.items():
        for item in fields(kind):
            name = f"{group}.{item.name}"
            if name in OF_ENVS | READ_IF_SET:
                continue
            if is_used(algo, scheme, group, item.name):
                assert name in read, f"{algo} {scheme} does not read {name}, which is declared to be used"
            elif name in read and name not in NO_EFFECT_WITHOUT_ATOMS:
                value = READ_ANYWAY[name]  # a KeyError means that an option declared to be unused is read
                extra = {"episodes": 1, "cpu_fraction": 0.5} if group == "eval" else {}
                settings = {"algo": algo, "env": env_of(algo), "scheme": scheme}
                with pytest.raises(ConfigError, match=rf"{item.name}|cpu_fraction"):
                    resolve_config(settings, {group: {**extra, item.name: value}})


@pytest.mark.parametrize(
    "algo",
    [
        pytest.param(algo, marks=() if algo in ("ppo", "impala", "dqn", "sac") else pytest.mark.long)
        for algo in ALGORITHMS
    ],
)
def test_serial_runs_read_exactly_the_used_options(algo, tmp_path, capsys):
    read: set[str] = set()
    stop = record_reads(read.add)
    try:
        assert main(arguments_of(algo, "serial", tmp_path / "run")) == 0
    finally:
        stop()
    check_reads(algo, "serial", read)


@pytest.mark.parametrize(
    ("algo", "scheme"),
    [
        pytest.param(algo, scheme, marks=pytest.mark.long)
        for algo in ALGORITHMS
        for scheme in ("parallel", "async")
        if scheme == "parallel" or algo not in ("a2c", "ppo")
    ],
)
def test_runs_with_workers_read_exactly_the_used_options(algo, scheme, tmp_path):
    """The reads of worker processes are recorded as well."""
    record = tmp_path / "read.txt"
    path = os.pathsep.join(filter(None, [str(TESTS / "recording"), str(TESTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "remuda", *arguments_of(algo, scheme, tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": path, "RECORDED_OPTIONS": str(record)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    check_reads(algo, scheme, set(record.read_text().split()))


REFUSED = [
    ("dqn", "serial", "agent.shared", "true", "dqn: leave it out"),
    ("dqn", "serial", "agent.shared", "false", "has no effect on dqn: leave it out"),
    ("dqn", "serial", "agent.log_std_init", "0", "has no effect on dqn: leave it out"),
    ("sac", "serial", "agent.head_hidden", "none", "has no effect on sac: leave it out"),
    ("ppo", "serial", "agent.head_hidden", "0", "leave it out"),
    ("ppo", "serial", "replay.ratio", "8", "it is for algorithms with a replay: leave it out"),
    ("r2d1", "serial", "algo.v_min", "0", "has no effect on r2d1: leave it out"),
    ("ppo", "serial", "sampler.workers", "2", "it is for --scheme parallel, async and replicas: leave it out"),
    ("ppo", "parallel", "scheme.throttle", "true", "it is for --scheme async and algorithms with a replay"),
    ("impala", "async", "scheme.publish_every", "10", "it is for algorithms with a replay: leave it out"),
    ("dqn", "async", "scheme.max_lag", "none", "it is for algorithms without a replay: leave it out"),
    ("impala", "serial", "scheme.max_lag", "none", "it is for --scheme async: leave it out"),
    ("dqn", "parallel", "eval.cpu_fraction", "0", "it is for --scheme async: leave it out"),
]


@pytest.mark.parametrize(("algo", "scheme", "option", "value", "rule"), REFUSED)
class TestGivenByTheUser:
    def test_unused_options_on_the_command_line_are_refused(
        self, algo, scheme, option, value, rule, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        assert main(["train", algo, "--env", env_of(algo), "--scheme", scheme, f"--{option}", value]) == 2
        error = capsys.readouterr().err
        assert error.lower().startswith(f"remuda: {option}={value}")
        assert rule in error
        assert len(error.splitlines()) == 1
        assert not list(tmp_path.iterdir())

    def test_unused_options_as_keywords_are_refused(self, algo, scheme, option, value, rule):
        group, _, name = option.partition(".")
        groups = {group: {name: value}}
        schemes = {"name": scheme, **groups.pop("scheme", {})}
        with pytest.raises(remuda.UsageError, match="leave it out"):
            remuda.train(algo, env_of(algo), scheme=schemes, steps=10, quiet=True, **groups)

    def test_unused_options_in_a_file_are_refused(self, algo, scheme, option, value, rule, tmp_path):
        group, _, name = option.partition(".")
        content = {"algo": algo, "env": env_of(algo), "scheme": scheme, "options": {group: {name: value}}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match="leave it out"):
            resolve_config({}, {}, tmp_path / "config.yaml")


def test_a_stored_configuration_lists_unused_options(tmp_path):
    run = remuda.train("a2c", "CartPole-v1", steps=16, out=tmp_path / "run", quiet=True, eval={"episodes": 0})
    stored = yaml.safe_load((run.path / "config.yaml").read_text())
    assert "ratio" in stored["options"]["replay"]
    resolve_config({}, {}, run.path / "config.yaml")
    resume_config(run.path, {}, {})
    with pytest.raises(ConfigError, match=r"^replay\.ratio=8\.0 has no effect on a2c"):
        resume_config(run.path, {}, {"replay": {"ratio": 8.0}})


def test_presets_may_set_unused_options():
    """DQN with and without distributional returns uses the same preset, under all schemes."""
    assert "v_min" in PRESETS["dqn"]["CartPole-*"]["algo"]
    resolve_config({"algo": "dqn", "env": "CartPole-v1"}, {})
