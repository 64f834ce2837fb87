"""Test the registries: names, import paths and entry points of algorithms, schemes and env backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_algorithms
import pytest
from registering import forget_registered

import remuda
from remuda import registry
from remuda.build.algorithm import keyword_parameters, make_agent, make_algorithm, wrap_agent
from remuda.build.nets import find_net
from remuda.cli import main
from remuda.config.algo_options import A2COptions, DQNOptions, OffPolicyOptions
from remuda.config.resolve import resolve_config
from remuda.envs import make_envs, resolve
from remuda.envs.backends import gymnasium_vector
from remuda.errors import ConfigError
from remuda.recipe import Scheme
from remuda.registry import AlgorithmEntry, SchemeEntry, find_algorithm, find_env_backend, find_scheme
from remuda.schemes.synchronous import Synchronous

OWN = ["a2c", "appo", "ddpg", "dqn", "impala", "ppo", "r2d1", "rainbow", "sac", "td3"]
QUIET: dict[str, Any] = {"quiet": True, "log": {"tensorboard": False}, "eval": {"episodes": 0}}


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove at the end of a test what it registered."""
    forget_registered(monkeypatch)


def test_remudas_own_entries_are_registered() -> None:
    assert registry.algorithm_names() == OWN
    assert registry.scheme_names() == ["serial", "parallel", "async", "replicas"]
    assert registry.env_backend_names() == ["ale", "gymnasium", "envpool"]
    data = {entry.name: entry.data for entry in registry.all_algorithms()}
    assert {name for name, kind in data.items() if kind == "rollouts"} == {"a2c", "ppo"}
    assert {name for name, kind in data.items() if kind == "sequences"} == {"appo", "impala"}
    assert {entry.name for entry in registry.all_algorithms() if not entry.may_run_async} == {"a2c", "ppo"}
    for entry in registry.all_algorithms():
        assert issubclass(entry.load_class(), object)
        assert entry.path == f"{entry.load_class().__module__}:{entry.load_class().__qualname__}"
        assert entry.presets
        assert entry.description
        assert (entry.data == "replay") is issubclass(entry.options, OffPolicyOptions)


def test_names_are_checked(scratch: None) -> None:
    with pytest.raises(ConfigError, match=r"^'poo' is not an algorithm: did you mean ppo"):
        find_algorithm("poo")
    with pytest.raises(ConfigError, match=r"^scheme='serail' is not known: did you mean serial"):
        find_scheme("serail")
    with pytest.raises(ConfigError, match=r"^envs\.backend='pyton' is not known: did you mean python"):
        find_env_backend("pyton")
    with pytest.raises(ConfigError, match=r"^'ppo' is an algorithm of Remuda's own: choose another name\.$"):
        remuda.register_algorithm("ppo", own_algorithms.Plain)
    for name in ("", "a:b"):
        with pytest.raises(ConfigError, match="use a word without a colon"):
            remuda.register_algorithm(name, own_algorithms.Plain)
    with pytest.raises(ConfigError, match=r"^'a:b' cannot name a scheme: use a word without a colon\.$"):
        remuda.register_scheme("a:b", make_two, "two workers")
    with pytest.raises(ConfigError, match=r"^the options of mine are not derived from remuda\.config\.algo_base"):
        remuda.register_algorithm("mine", "own_algorithms:Plain", options=dict)
    remuda.register_algorithm("mine", own_algorithms.Plain)
    remuda.register_algorithm("mine", own_algorithms.Bonus)  # a notebook cell may register a name again
    assert find_algorithm("mine").options is own_algorithms.BonusOptions


class TestImportPaths:
    def test_an_import_path_has_its_own_options_presets_and_description(self) -> None:
        entry = find_algorithm("own_algorithms:Bonus")
        assert entry.options is own_algorithms.BonusOptions
        assert entry.presets is own_algorithms.Bonus.presets
        assert entry.description == "A2C whose rewards are larger by a bonus. A second sentence"
        assert entry.data == "rollouts"

    def test_missing_options_and_presets_are_inherited(self) -> None:
        plain, inherited = find_algorithm("own_algorithms:Plain"), find_algorithm("own_algorithms:Quieter")
        assert plain.options is A2COptions
        assert plain.presets is find_algorithm("a2c").presets
        assert inherited.options is own_algorithms.BonusOptions
        assert inherited.presets is own_algorithms.Bonus.presets
        assert find_algorithm("own_algorithms:Unchanged").options is DQNOptions, (
            "of two entries with the same base, the first is used"
        )

    @pytest.mark.parametrize(
        ("path", "sentence"),
        [
            ("own_algorithms:Bonsu", r"own_algorithms has no Bonsu: did you mean Bonus"),
            ("no_such_module:Bonus", r"module no_such_module was not found: install it"),
            ("own_algorithms:option", r"is not the class of an algorithm: derive one from a class of remuda"),
            ("own_algorithms:BonusOptions", r"is not the class of an algorithm"),
            ("own_algorithms:Homeless", r"has no options: derive it from an algorithm that has"),
            ("own_algorithms:WithUndecorated", r"not a dataclass: put @dataclass\(frozen=True\) above Undecorated"),
            ("own_algorithms:WithBareOption", r"bare has no help text: declare it as option\(default, text\)"),
            ("own_algorithms:Rigid", r"Rigid cannot be constructed \(.*'width'\): name keyword-only parameters"),
        ],
    )
    def test_mistakes_are_refused_in_one_sentence(self, path: str, sentence: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=sentence) as caught:
            remuda.train(path, "CartPole-v1", steps=10, out=tmp_path / "run", **QUIET)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    def test_options_reach_the_constructor(self) -> None:
        path = "own_algorithms:Bonus"
        config, _, info = resolve_config({"algo": path, "env": "CartPole-v1"}, {"algo": {"is_loud": "yes"}})
        assert (config.steps, config.rollout_options.n_steps) == (4321, 4)
        made: Any = make_algorithm(config, info, find_net(config.agent))
        assert type(made) is own_algorithms.Bonus
        assert made.bonus == 0.25
        assert made.schedule(0.25) == 0.75
        assert config.algo_options.is_loud is True  # type: ignore[attr-defined]

    def test_the_first_preset_is_used_if_none_fits_the_env(self) -> None:
        config, *_ = resolve_config({"algo": "own_algorithms:Bonus", "env": "Pendulum-v1"}, {})
        assert config.steps == 4321, "the table has no generic preset, so its first one is used"

    def test_the_command_line_shows_and_reads_own_options(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with pytest.raises(SystemExit):
            main(["train", "own_algorithms:Bonus", "--help", "algo"])
        assert "--algo.bonus" in capsys.readouterr().out
        command = ["train", "own_algorithms:Bonus", "--env", "CartPole-v1", "--steps", "64", "--quiet"]
        options = ["--algo.bonus", "2", "--algo.is_loud", "--eval.episodes", "0", "--out", str(tmp_path / "run")]
        assert main([*command, *options]) == 0
        assert "bonus: 2.0" in (tmp_path / "run" / "config.yaml").read_text()
        assert main(["train", "own_algorithms:Bonsu", "--env", "CartPole-v1"]) == 2
        assert "did you mean Bonus" in capsys.readouterr().err


def test_keyword_parameters_include_those_passed_on_to_bases() -> None:
    assert {"bonus", "schedule", "gae_lambda"} <= keyword_parameters(own_algorithms.Quieter)
    assert keyword_parameters(own_algorithms.Rigid) == {"gamma", "width"}


class TestOldVariants:
    """Tests of the option `algo.variant`, which every config.yaml of version 0.1 contains."""

    def test_a_variant_in_a_file_becomes_the_algorithm(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "config.yaml"
        file.write_text("algo: a2c\nenv: CartPole-v1\noptions: {algo: {variant: 'own_algorithms:Plain'}}\n")
        config, *_ = resolve_config({}, {}, file)
        assert config.algo == "own_algorithms:Plain"
        assert "algo.variant=own_algorithms:Plain is now the algorithm itself" in caplog.text

    def test_a_variant_on_the_command_line_becomes_the_algorithm(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        command = ["train", "a2c", "--env", "CartPole-v1", "--steps", "64", "--quiet", "--eval.episodes", "0"]
        out = ["--out", str(tmp_path / "run")]
        assert main([*command, *out, "--algo.variant", "own_algorithms:Plain"]) == 0
        assert "is now the algorithm itself: remuda train own_algorithms:Plain" in caplog.text
        assert "algo: own_algorithms:Plain" in (tmp_path / "run" / "config.yaml").read_text()

    def test_a_variant_of_none_is_dropped_silently(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = remuda.train("a2c", "CartPole-v1", steps=64, out=tmp_path / "run", **QUIET)
        file = run.path / "config.yaml"
        file.write_text(file.read_text().replace("  algo:\n", "  algo:\n    variant: null\n"))
        assert "variant: null" in file.read_text()
        again = remuda.resume(run.path, steps=128, quiet=True)
        assert again.result["steps"] >= 128
        remuda.load(run.path)
        assert "variant" not in caplog.text


@pytest.mark.parametrize("algo", OWN)
def test_an_agent_built_without_its_algorithm_has_the_same_weights(algo: str) -> None:
    env = "Pendulum-v1" if find_algorithm(algo).actions == "Box" else "CartPole-v1"
    config, _, info = resolve_config({"algo": algo, "env": env, "seed": 7}, {})
    alone, whole = (make(config, info, find_net(config.agent)) for make in (make_agent, make_algorithm))
    theirs = whole.agent.state_dict()
    assert all(bool((value == theirs[name]).all()) for name, value in alone.state_dict().items())
    assert alone.state_dict().keys() == theirs.keys()


def test_replay_writers_have_critics_only_if_needed() -> None:
    for path, has_critics in (("sac", False), ("own_algorithms:Prepared", True)):
        config, _, info = resolve_config({"algo": path, "env": "Pendulum-v1"}, {"algo": {"reward_scale": 3}})
        agent = make_agent(config, info, find_net(config.agent))
        wrapped = wrap_agent(config, agent, info, find_net(config.agent), needs_loss=False)
        assert wrapped.agent is agent
        assert wrapped.reward_scale == 3.0
        assert hasattr(wrapped, "critics") is has_critics


# --- schemes and env backends ---------------------------------------------------------------------------------------


def make_two(config: Any) -> Scheme:
    return Synchronous(workers=2)


ENTRY = SchemeEntry("entry", make_two, "two workers")


def test_a_registered_scheme_trains_and_is_listed(
    scratch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remuda.register_scheme("two", make_two, "always two workers")
    run = remuda.train("a2c", "CartPole-v1", steps=64, scheme="two", out=tmp_path / "run", **QUIET)
    assert run.result["status"] == "complete"
    main(["schemes"])
    assert "always two workers" in capsys.readouterr().out
    main(["algos"])
    assert "two" in capsys.readouterr().out
    assert find_scheme(f"{__name__}:ENTRY") is ENTRY
    with pytest.raises(ConfigError, match=r"is not a scheme: make it a remuda\.registry\.SchemeEntry"):
        find_scheme(f"{__name__}:make_two")


def test_a_registered_env_backend_makes_envs(scratch: None) -> None:
    own = SimpleNamespace(NAME="mine", IS_SAME_GAME=False, offer=lambda spec: None, make=gymnasium_vector.make)
    remuda.register_env_backend("mine", own)
    with make_envs(resolve("CartPole-v1"), 2, backend="mine") as envs:
        assert type(envs).__name__ == "NativeEnvs"
    assert find_env_backend("remuda.envs.backends:gymnasium_vector").load() is gymnasium_vector


# --- entry points ---------------------------------------------------------------------------------------------------

MODULE = """
from remuda.algorithms import A2C
from remuda.registry import SchemeEntry

class Mine(A2C):
    "From an entry point."

broken = 3
SCHEME = SchemeEntry("theirs", "remuda.build.schemes:make_serial", "a scheme of a package", has_workers=False)
"""
POINTS = """
[remuda.algorithms]
theirs = their_package:Mine
broken = their_package:broken
missing = their_missing_package:Mine
[remuda.schemes]
theirs = their_package:SCHEME
[remuda.env_backends]
theirs = remuda.envs.backends.gymnasium_vector
"""
PROGRAM = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import remuda
from remuda import registry
from remuda.errors import ConfigError
assert "theirs" in registry.algorithm_names() and "torch" not in sys.modules
names = [entry.name for entry in registry.all_algorithms()]
assert "theirs" in names and "broken" not in names and "ppo" in names, names
assert registry.find_algorithm("theirs").description == "From an entry point"
assert registry.find_scheme("theirs").description == "a scheme of a package"
assert registry.find_env_backend("theirs").load().NAME == "gymnasium"
run = remuda.train("theirs", "CartPole-v1", steps=64, scheme="theirs", out="run", quiet=True, eval={"episodes": 0})
print(run.result["status"])
for name in ("broken", "missing"):
    try:
        registry.find_algorithm(name)
    except ConfigError as error:
        print(error)
"""


def test_entry_points_are_loaded_or_reported(tmp_path: Path) -> None:
    (tmp_path / "their_package.py").write_text(MODULE)
    information = tmp_path / "their_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(POINTS)
    path = [str(tmp_path), str(Path(remuda.__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {path}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "complete" in done.stdout
    assert "broken is not the class of an algorithm" in done.stdout
    assert (
        "'missing' of the entry point their_missing_package:Mine failed to load (ModuleNotFoundError" in done.stdout
    )


def test_an_algorithm_entry_can_be_constructed_explicitly(scratch: None) -> None:
    entry = AlgorithmEntry("hand", "own_algorithms:Plain", A2COptions, {}, A2COptions.builder, "made by hand")
    assert registry._algorithms.add(entry) is find_algorithm("hand")
    assert find_algorithm("hand").load_class() is own_algorithms.Plain
    config, *_ = resolve_config({"algo": "hand", "env": "CartPole-v1"}, {})
    assert config.steps == 1_000_000, "this is the default without any preset"
