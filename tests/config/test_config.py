"""Test every option from text, YAML and Python, the presets, and the precedence of user, file and preset."""

import os
import subprocess
import sys
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import yaml

from remuda.build.envs import frame_skip_warning
from remuda.build.replay import num_frames
from remuda.config.algo_options import DQNOptions, OnPolicyOptions, PPOOptions
from remuda.config.fields import coerce, fill
from remuda.config.presets import find_preset
from remuda.config.resolve import resolve_config, resume_config
from remuda.config.run_config import GROUPS, KINDS, RunConfig, to_dict
from remuda.config.run_options import CheckpointOptions
from remuda.config.used_options import refuse_unused
from remuda.core import Space
from remuda.errors import ConfigError
from remuda.registry import all_algorithms
from remuda.runs.directory import RunDirectory

ALGORITHMS = {entry.name: entry.options for entry in all_algorithms()}
PRESETS = {entry.name: entry.presets for entry in all_algorithms()}
EVERY_KIND = [("algo", kind) for kind in ALGORITHMS.values()] + list(KINDS.items())
EVERY_OPTION = [
    pytest.param(group, kind, item, id=f"{kind.__name__}.{item.name}")
    for group, kind in EVERY_KIND
    for item in fields(kind)
]
DISCRETE = Space("discrete", (), "int64", n=2)
BOX = Space("box", (1,), "float32", np.array([-2.0], np.float32), np.array([2.0], np.float32))

# A value of each option that differs from the default, as text and as the option must store it.
OTHERS = {
    "algo.learning_rate": ("linear(1e-3, 0)", "linear(1e-3, 0)"),
    "algo.n_steps": ("6_4", 64),
    "algo.gamma": ("0.5", 0.5),
    "algo.gae_lambda": ("0", 0.0),
    "algo.ent_coef": ("0.25", "0.25"),
    "algo.vf_coef": ("1", 1.0),
    "algo.max_grad_norm": ("7", 7.0),
    "algo.normalize_advantage": ("No", False),
    "algo.normalize_reward": ("yes", True),
    "algo.clip_reward": ("yes", True),
    "algo.optimizer": ("adamw", "adamw"),
    "algo.optimizer_eps": ("1e-8", 1e-8),
    "algo.weight_decay": ("0.1", 0.1),
    "algo.rms_alpha": ("0.9", 0.9),
    "algo.momentum": ("0.9", 0.9),
    "algo.batch_size": ("1.28e2", 128),
    "algo.n_epochs": ("7", 7),
    "algo.clip_range": ("0.1", "0.1"),
    "algo.clip_range_vf": ("linear(0.2, 0.1)", "linear(0.2, 0.1)"),
    "algo.target_kl": ("0.02", 0.02),
    "algo.correction": ("none", "none"),
    "algo.vtrace_lambda": ("0.5", 0.5),
    "algo.rho_clip": ("2", 2.0),
    "algo.c_clip": ("none", None),
    "algo.pg_rho_clip": ("3", 3.0),
    "algo.reduction": ("sum", "sum"),
    "algo.train_freq": ("16", 16),
    "algo.learning_starts": ("1e4", 10_000),
    "algo.gradient_steps": ("3", 3),
    "algo.tau": ("0.5", 0.5),
    "algo.target_update_interval": ("77", 77),
    "algo.epsilon": ("linear(0.5, 0)", "linear(0.5, 0)"),
    "algo.epsilon_power": ("7", 7.0),
    "algo.double": ("off", False),
    "algo.dueling": ("on", True),
    "algo.noisy": ("on", True),
    "algo.atoms": ("21", 21),
    "algo.v_min": ("-3", -3.0),
    "algo.v_max": ("30", 30.0),
    "algo.huber": ("2", 2.0),
    "algo.rescale": ("false", False),
    "algo.eta": ("0.5", 0.5),
    "algo.critics": ("3", 3),
    "algo.actor_learning_rate": ("linear(1e-4, 0)", "linear(1e-4, 0)"),
    "algo.reward_scale": ("5", 5.0),
    "algo.noise": ("ou", "ou"),
    "algo.noise_std": ("0.3", 0.3),
    "algo.policy_delay": ("4", 4),
    "algo.target_noise": ("0.1", 0.1),
    "algo.target_noise_clip": ("0.25", 0.25),
    "algo.target_entropy": ("-2", -2.0),
    "replay.capacity": ("5e4", 50_000),
    "replay.ratio": ("2", 2.0),
    "replay.prioritized": ("yes", True),
    "replay.alpha": ("0.9", 0.9),
    "replay.beta": ("0.5", "0.5"),
    "replay.initial_priority": ("error", "error"),
    "replay.n_step": ("5", 5),
    "replay.sequence": ("30", 30),
    "replay.burn_in": ("10", 10),
    "replay.frames": ("1", 1),
    "agent.head_hidden": ("64", 64),
    "sampler.envs": ("16", 16),
    "sampler.workers": ("2", 2),
    "sampler.slots": ("2", 2),
    "sampler.inference": ("workers", "workers"),
    "sampler.threads": ("2", 2),
    "sampler.wait_reset": ("on", True),
    "sampler.decorrelate": ("1e2", 100),
    "envs.backend": ("python", "python"),
    "envs.kwargs": ('{"difficulty": 1}', {"difficulty": 1}),
    "envs.seeds": ("0-9,20", "0-9,20"),
    "envs.noop_max": ("0", 0),
    "envs.frame_skip": ("2", 2),
    "envs.sticky": ("0.25", 0.25),
    "envs.screen_size": ("42", 42),
    "envs.interpolation": ("linear", "linear"),
    "envs.frame_stack": ("1", 1),
    "envs.episodic_life": ("yes", True),
    "envs.fire_reset": ("yes", True),
    "envs.full_action_set": ("true", True),
    "eval.seeds": ("1000-1019", "1000-1019"),
    "agent.core": ("gru", "gru"),
    "agent.core_size": ("32", 32),
    "agent.prev_action": ("on", True),
    "agent.prev_reward": ("on", True),
    "envs.stats": ("counting:Peaks", "counting:Peaks"),
    "envs.step_timeout": ("5", 5.0),
    "envs.max_restarts": ("7", 7),
    "envs.max_worker_restarts": ("3", 3),
    "eval.max_steps": ("1e3", 1000),
    "eval.cpu_fraction": ("0.25", 0.25),
    "eval.video": ("off", False),
    "envs.build_timeout": ("7.5", 7.5),
    "agent.net": ("own_nets:Net", "own_nets:Net"),
    "agent.hidden": ("32, 16", (32, 16)),
    "agent.activation": ("relu", "relu"),
    "agent.shared": ("on", True),
    "agent.orthogonal_init": ("false", False),
    "agent.log_std_init": ("-1", -1.0),
    "agent.normalize_obs": ("TRUE", True),
    "agent.center_images": ("true", True),
    "agent.fast_path": ("false", False),
    "agent.compile": ("true", True),
    "sampler.device": ("cuda:1", "cuda:1"),
    "agent.precision": ("bf16", "bf16"),
    "algo.actor_device": ("cuda:1", "cuda:1"),
    "algo.critic_device": ("cuda:0", "cuda:0"),
    "scheme.threads": ("2", 2),
    "scheme.max_lag": ("3", 3),
    "scheme.publish_every": ("25", 25),
    "scheme.throttle": ("off", False),
    "scheme.parts": ("2", 2),
    "scheme.ranks": ("4", 4),
    "scheme.exchange": ("gloo", "gloo"),
    "scheme.weights": ("file", "file"),
    "eval.every": ("10_000", 10_000),
    "eval.episodes": ("3", 3),
    "eval.seed": ("12", 12),
    "checkpoint.every": ("1e6", 1_000_000),
    "checkpoint.keep": ("5", "5"),
    "checkpoint.cut_episodes": ("on", True),
    "log.every": ("2.5e3", 2500),
    "log.window": ("10", 10),
    "log.tensorboard": ("off", False),
    "log.wandb": ("project", "project"),
}


@pytest.mark.parametrize(("group", "kind", "item"), EVERY_OPTION)
class TestEveryOption:
    def test_the_default_is_accepted_also_as_text(self, group, kind, item):
        default = getattr(kind(), item.name)
        assert default is None or item.default is MISSING or type(default) is type(item.default)
        as_text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        for way in (default, as_text):
            assert getattr(fill(kind(), {item.name: way}, group), item.name) == default

    def test_the_option_has_a_help_text(self, group, kind, item):
        assert len(item.metadata["help"]) >= 8
        assert not item.metadata["help"].endswith("."), "the help appends the default in parentheses"

    def test_text_is_converted_to_the_type_of_the_option(self, group, kind, item):
        text, value = OTHERS[f"{group}.{item.name}"]
        found = getattr(fill(kind(), {item.name: text}, group), item.name)
        assert found == value
        assert type(found) is type(value)
        if len(item.metadata.get("choices", "ab")) > 1 and not isinstance(value, bool):
            assert value != getattr(kind(), item.name), "the default value would make this test meaningless"
        assert getattr(fill(kind(), {item.name: value}, group), item.name) == value, "Python values are not changed"

    def test_values_outside_the_limits_are_refused(self, group, kind, item):
        rules, name = item.metadata, f"{group}.{item.name}"
        bad = []
        if "low" in rules:
            bad.append((rules["low"] - 1, f"at least {rules['low']}"))
        if "above" in rules:
            bad.append((rules["above"], f"above {rules['above']}"))
        if "high" in rules:
            bad.append((rules["high"] + 1, f"at most {rules['high']}"))
        if "choices" in rules:
            bad.append(("nonsense", ", ".join(rules["choices"])))
        if "schedule" in rules:
            bad.append(("fast", "linear("))
        if item.type.startswith(("int", "tuple")):
            bad += [("1.5", "whole number"), ("x", "whole number"), (True, "whole number"), ("inf", "whole number")]
        if item.type.startswith("float"):
            bad += [("x", "a number"), ("nan", "finite"), ("inf", "finite"), (False, "a number"), ([1.0], "a number")]
        if item.type == "bool":
            bad += [("perhaps", "true or false"), (2, "true or false"), (None, "true or false")]
        if item.type.startswith("dict"):
            bad += [("{", "a JSON object"), ("[1]", "a JSON object"), (3, "a JSON object")]
        for value, rule in bad:
            value = [value] if item.type.startswith("tuple") and isinstance(value, int) else value
            with pytest.raises(ConfigError) as caught:
                fill(kind(), {item.name: value}, group)
            assert name in str(caught.value)
            assert rule in str(caught.value)
            assert "\n" not in str(caught.value)


def test_other_values_are_defined_for_every_option():
    assert set(OTHERS) == {f"{group}.{item.name}" for group, kind in EVERY_KIND for item in fields(kind)}


@pytest.mark.parametrize("text", ["none", "None", "null", None])
def test_none_is_accepted_only_by_optional_options(text):
    set_before = fill(PPOOptions(), {"target_kl": 0.1, "clip_range_vf": "0.2"}, "algo")
    cleared = fill(set_before, {"target_kl": text, "clip_range_vf": text}, "algo")
    assert cleared.target_kl is None
    assert cleared.clip_range_vf is None
    with pytest.raises(ConfigError, match=r"algo\.n_steps"):
        fill(PPOOptions(), {"n_steps": text}, "algo")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e6", 1_000_000), ("200_000", 200_000), ("+5", 5), ("3.0", 3), (7, 7), (2.0, 2), (np.int64(4), 4)],
)
def test_whole_numbers_in_usual_notations(text, value):
    assert coerce(text, "int", "steps") == value


@pytest.mark.parametrize("text", ["64,64", "64, 64", "[64, 64]", "(64,64,)", [64, 64], (64, 64), ["64", "64"]])
def test_lists_in_usual_notations(text):
    assert coerce(text, "tuple[int, ...]", "agent.hidden") == (64, 64)


def test_the_largest_seed_is_parsed_exactly():
    """Parsing through a float, which has 53 bits, would change the seed."""
    assert coerce(str(2**63 - 1), "int", "seed") == 2**63 - 1


@pytest.mark.parametrize(("group", "kind"), EVERY_KIND, ids=lambda value: getattr(value, "__name__", value))
def test_an_unknown_name_suggests_the_nearest(group, kind):
    name = fields(kind)[0].name
    with pytest.raises(ConfigError, match=rf"{group}\.{name}x is not an option: did you mean.* {name}\b"):
        fill(kind(), {f"{name}x": 1}, group)


def test_mutable_defaults_are_not_shared():
    first, second = KINDS["envs"](), KINDS["envs"]()
    first.kwargs["size"] = 3
    assert second.kwargs == {}


class TestWholeConfig:
    def make(self, **settings):
        return RunConfig(**{"algo": "ppo", "env": "X", "steps": 1, "seed": 0, "scheme": "serial"} | settings)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"steps": 0}, "at least 1 step"),
            ({"seed": -1}, "out of range"),
            ({"seed": 2**63}, "out of range"),
            ({"sampler": KINDS["sampler"](envs=6, slots=4)}, "does not divide sampler.envs=6"),
            ({"algo_options": PPOOptions(n_steps=10, batch_size=64)}, "use for example 80 or 40"),
            ({"algo_options": PPOOptions(batch_size=1)}, "use 2 or more"),
        ],
    )
    def test_values_that_contradict_each_other_are_refused(self, settings, words):
        with pytest.raises(ConfigError, match=words):
            self.make(**{"algo_options": PPOOptions()} | settings)

    def test_a_batch_of_one_is_accepted_if_nothing_is_normalized(self):
        self.make(algo_options=PPOOptions(batch_size=1, normalize_advantage=False))

    @pytest.mark.parametrize("keep", ["last", "all", "1", "20"])
    def test_valid_values_of_checkpoint_keep(self, keep):
        assert CheckpointOptions(keep=keep).keep == keep

    @pytest.mark.parametrize("keep", ["0", "-1", "1.5", "some", ""])
    def test_invalid_values_of_checkpoint_keep_are_refused(self, keep):
        with pytest.raises(ConfigError, match="last, best, all or a number"):
            CheckpointOptions(keep=keep)


def foreign_heads(algo):
    """Return the agent options that apply only to agents of other algorithms."""
    names = () if issubclass(ALGORITHMS[algo], OnPolicyOptions) else ("shared", "log_std_init")
    return names if issubclass(ALGORITHMS[algo], DQNOptions) else (*names, "head_hidden")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_options_of_other_agents_are_refused(algo):
    for name in foreign_heads(algo):
        text = OTHERS[f"agent.{name}"][0]
        with pytest.raises(ConfigError, match=f"agent.{name}=.* has no effect on {algo}: leave it out"):
            resolve_config({"algo": algo, "env": "CartPole-v1"}, {"agent": {name: text}})


def is_used(algo, group, name):
    """Return whether a run of this algorithm under `parallel` uses an option."""
    try:
        refuse_unused({group: {name: "1"}}, {"algo": ALGORITHMS[algo], **KINDS}, algo, "parallel")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    "algo",
    [pytest.param(algo, marks=() if algo in ("ppo", "r2d1", "rainbow") else pytest.mark.long) for algo in ALGORITHMS],
)
def test_a_configuration_is_restored_from_yaml(algo, tmp_path):
    """A config.yaml in which every option differs from its default gives the same configuration."""
    groups = {group: {} for group in GROUPS}
    for name, (text, _) in OTHERS.items():
        group, option = name.split(".")
        if group != "algo" or option in {item.name for item in fields(ALGORITHMS[algo])}:
            groups[group][option] = text
    groups["sampler"]["slots"] = "1"  # inference in the workers needs one slot
    for name in ("threads", "device"):  # and there is no inference process
        groups["sampler"].pop(name)
    if algo in ("a2c", "appo", "impala", "ppo"):
        groups["replay"].clear()
    for name in ALGORITHMS[algo].unused_options:
        groups["algo"].pop(name)
    for name in ("max_lag", "publish_every", "throttle", "weights", "ranks", "exchange"):  # of other schemes
        groups["scheme"].pop(name)
    for name in ("cpu_fraction", "video"):
        groups["eval"].pop(name)
    groups["replay"].pop("initial_priority", None)
    if groups["replay"]:
        groups["sampler"].pop("wait_reset")
    groups = {
        group: {name: text for name, text in values.items() if is_used(algo, group, name)}
        for group, values in groups.items()
    }
    settings = {"algo": algo, "env": "ALE/Pong-v5", "steps": "1e5", "seed": "9", "scheme": "parallel"}
    config, *_ = resolve_config(settings, groups)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(config), sort_keys=False))
    again, spec, _ = resolve_config({}, {}, file)
    assert again == config
    assert again.agent.hidden == (32, 16)
    assert spec.kwargs == {"difficulty": 1}
    assert (spec.atari.frame_skip, spec.atari.screen_size, spec.atari.full_action_set) == (2, 42, True)
    # Given options take precedence over the file, and the file over the preset.
    other, *_ = resolve_config({"seed": "10"}, {"algo": {"gamma": "0.9"}}, file)
    assert other == replace(config, seed=10, algo_options=replace(config.algo_options, gamma=0.9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a list", "no mapping"),
        ("42", "no mapping"),
        ("options: 3", "no mapping"),
        ("algo: ppo\nenv: CartPole-v1\nstps: 3", "did you mean steps"),
        ("algo: [1\nenv: }", "not YAML"),
        ("algo: ppo\nenv: CartPole-v1\noptions: {algo: null}", "algo=None is not a mapping"),
        ("algo: ppo\nenv: CartPole-v1\noptions: {algo: 3}", "algo=3 is not a mapping"),
        ("algo: ppo\nenv: CartPole-v1\noptions: {algos: {gamma: 1}}", "did you mean algo"),
        ("algo: ppo\nenv: CartPole-v1\noptions: {1: {gamma: 1}}", "1 is not a group"),
        ("algo: ppo\nenv: CartPole-v1\noptions: {algo: {1: 1}}", "algo.1 is not an option"),
        ("algo: a2c\nenv: CartPole-v1\noptions: {algo: {n_epochs: 1}}", "algo.n_epochs is not an option"),
        ("algo: ppo\nenv: CartPole-v1\nsteps: null", "steps=None is not a whole number"),
        ("env: CartPole-v1", "no algo is given"),
        ("algo: ppo", "no env is given"),
        ("algo: dqnn\nenv: CartPole-v1", "'dqnn' is not an algorithm"),
    ],
)
def test_config_files_with_mistakes_are_refused_in_one_sentence(tmp_path, text, words):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve_config({}, {}, file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_files_are_read_as_utf8_in_every_locale(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "algo: ppo\nenv: CartPole-v1\noptions: {envs: {kwargs: {name: é}}}", "utf-8"
    )
    program = "from remuda.config.resolve import read_config_file as read; from pathlib import Path; "
    program += "print(ascii(read(Path('config.yaml'))['options']['envs']['kwargs']['name']))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ascii_only, capture_output=True, text=True
    )
    assert done.stdout.strip() == r"'\xe9'", done.stderr


EVERY_PRESET = [(algo, pattern) for algo, table in PRESETS.items() for pattern in table]


class TestPresets:
    def test_every_algorithm_has_fallback_presets(self):
        assert set(PRESETS) == set(ALGORITHMS)
        assert all({"discrete", "box"} <= set(PRESETS[algo]) for algo in ("a2c", "appo", "impala", "ppo"))
        assert all("discrete" in PRESETS[algo] for algo in ("dqn", "rainbow", "r2d1"))
        assert all("box" in PRESETS[algo] for algo in ("ddpg", "sac", "td3"))

    @pytest.mark.parametrize(("algo", "pattern"), EVERY_PRESET)
    def test_every_preset_sets_known_options_to_valid_values(self, algo, pattern):
        preset = PRESETS[algo][pattern]
        assert set(preset) <= {"run", *GROUPS}
        assert set(preset["run"]) == {"steps"}
        kinds = {"algo": ALGORITHMS[algo], **KINDS}
        filled = {GROUPS[g]: fill(kind(), preset.get(g, {}), g) for g, kind in kinds.items()}
        RunConfig(algo=algo, env=pattern, steps=preset["run"]["steps"], seed=0, scheme="serial", **filled)
        for group, values in preset.items():
            for name, value in values.items() if group != "run" else ():
                assert getattr(filled[GROUPS[group]], name) == value, "presets hold typed values, not text"

    @pytest.mark.parametrize(
        ("env", "action", "pattern"),
        [
            ("CartPole-v1", DISCRETE, "CartPole-*"),
            ("gymnasium:CartPole-v1", DISCRETE, "CartPole-*"),
            ("my.package:CartPole-v0", DISCRETE, "CartPole-*"),
            ("MyCartPole-v1", DISCRETE, "discrete"),
            ("cartpole-v1", DISCRETE, "discrete"),
            ("package.module:make", DISCRETE, "discrete"),
            ("package.module:make", BOX, "box"),
        ],
    )
    @pytest.mark.parametrize("algo", ["a2c", "appo", "impala", "ppo", "dqn", "rainbow"])
    def test_which_preset_is_used(self, algo, env, action, pattern):
        if pattern == "box" and algo in ("dqn", "rainbow"):
            assert find_preset(algo, env, action) in PRESETS[algo].values()  # the action space is refused later
            return
        assert find_preset(algo, env, action) is PRESETS[algo][pattern]

    @pytest.mark.parametrize("algo", ["a2c", "appo", "impala", "ppo", "dqn", "rainbow", "r2d1"])
    @pytest.mark.parametrize("env", ["PongNoFrameskip-v4", "Pong-v4", "ale_py:Breakout-v0", "ALE/Pong-v5"])
    def test_every_id_of_an_atari_game_has_the_same_preset(self, algo, env):
        assert find_preset(algo, env, DISCRETE) is PRESETS[algo]["ALE/*"]

    @pytest.mark.parametrize("env", ["PongNoFrameskip-v4", "Pong-v4"])
    def test_frames_of_atari_games_are_stored_once_whatever_their_id(self, env):
        config, _, info = resolve_config({"algo": "dqn", "env": env}, {})
        assert config.algo_options.clip_reward
        assert num_frames(config, info.observation) == 4

    @pytest.mark.parametrize(
        ("env", "groups", "warns"),
        [
            ("PongNoFrameskip-v4", {}, True),
            ("PongNoFrameskip-v4", {"envs": {"frame_skip": 4}}, False),
            ("ALE/Pong-v5", {"envs": {"kwargs": {"frameskip": 1}}}, True),
            ("Pong-v4", {}, False),
            ("CartPole-v1", {}, False),
        ],
    )
    def test_games_without_frame_skip_give_a_warning(self, env, groups, warns):
        _, spec, _ = resolve_config({"algo": "ppo", "env": env}, groups)
        text = frame_skip_warning(spec)
        assert (text is not None) == warns
        assert text is None or (env in text and "--envs.frame_skip 4" in text)

    @pytest.mark.parametrize("env", ["CartPole-v1", "gymnasium:CartPole-v1"])
    def test_the_preset_applies_to_the_run(self, env):
        config, spec, info = resolve_config({"algo": "ppo", "env": env}, {})
        assert config.steps == 200_000
        assert config.algo_options.n_epochs == 20
        assert config.algo_options.learning_rate == "linear(2e-3, 0)"
        assert spec.label == config.env == env
        assert info.action.n == 2

    @pytest.mark.parametrize(("algo", "pattern"), EVERY_PRESET)
    def test_user_values_take_precedence_over_the_preset(self, algo, pattern):
        known = {"MountainCar-*": "MountainCar-v0", "ALE/*": "ALE/Pong-v5", "MinAtar/*": "MinAtar/Breakout-v1"}
        known |= {"box": "counting:make", "discrete": "counting:make"}
        env = known.get(pattern, pattern.replace("*", "v0" if pattern.startswith("Remuda") else "v1"))
        kwargs = {"action": "box" if pattern == "box" else "discrete"} if env == "counting:make" else {}
        preset = PRESETS[algo][pattern]
        mine = {}
        for name in set(preset.get("algo", {})) - set(ALGORITHMS[algo].unused_options):
            mine[name] = OTHERS[f"algo.{name}"][1]
        if algo == "ppo":
            mine |= {"n_steps": 64, "batch_size": 128}
        groups = {"algo": mine, "sampler": {"envs": 4, "decorrelate": 0}, "agent": {"normalize_obs": False}}
        config, *_ = resolve_config({"algo": algo, "env": env, "steps": 77}, {**groups, "envs": {"kwargs": kwargs}})
        assert find_preset(algo, env, BOX if pattern == "box" else DISCRETE) is preset
        assert config.steps == 77
        assert config.sampler.envs == 4
        assert config.sampler.decorrelate == 0
        assert not config.agent.normalize_obs
        assert {name: getattr(config.algo_options, name) for name in mine} == mine

    def test_a_user_value_that_equals_the_default_takes_precedence_too(self):
        """The user's value applies even if it equals the option's default, from which the preset differs."""
        config, *_ = resolve_config({"algo": "ppo", "env": "CartPole-v1"}, {"algo": {"n_epochs": "4"}})
        assert config.algo_options.n_epochs == PPOOptions().n_epochs == 4


class TestMaxSteps:
    """REMUDA_MAX_STEPS shortens a run and everything in it that would be longer than the run."""

    def resolved(self, algo: str, env: str = "CartPole-v1", steps: int | None = None, **groups: dict[str, object]):
        settings = {"algo": algo, "env": env} | ({} if steps is None else {"steps": steps})
        return resolve_config(settings, groups)[0]

    def test_max_steps_caps_steps_rollouts_and_warm_up(self, monkeypatch):
        monkeypatch.setenv("REMUDA_MAX_STEPS", "128")
        ppo = self.resolved("ppo", sampler={"envs": 8, "decorrelate": 100})
        assert (ppo.steps, ppo.algo_options.n_steps, ppo.algo_options.batch_size) == (128, 16, 128)
        assert ppo.sampler.decorrelate * ppo.sampler.envs < 128
        dqn = self.resolved("dqn")
        assert (dqn.steps, dqn.algo_options.learning_starts) == (128, 64)

    def test_a_shorter_run_is_not_changed(self, monkeypatch, caplog):
        whole = self.resolved("ppo", steps=1000)
        monkeypatch.setenv("REMUDA_MAX_STEPS", "1000")
        assert self.resolved("ppo", steps=1000) == whole
        assert not caplog.records
        assert self.resolved("ppo", steps=1001).steps == 1000
        assert "REMUDA_MAX_STEPS=1000 shortens this run of 1001 steps" in caplog.text

    @pytest.mark.parametrize("value", ["many", "0", "-3", "1.5"])
    def test_an_invalid_max_steps_is_refused_in_one_sentence(self, monkeypatch, value):
        monkeypatch.setenv("REMUDA_MAX_STEPS", value)
        with pytest.raises(ConfigError, match=r"^REMUDA_MAX_STEPS=.*\.$"):
            self.resolved("ppo")

    def test_a_resumed_run_is_capped_too(self, monkeypatch, tmp_path):
        with RunDirectory.create(tmp_path / "run", "x", to_dict(self.resolved("ppo", steps=1000))):
            pass
        monkeypatch.setenv("REMUDA_MAX_STEPS", "300")
        resumed = resume_config(tmp_path / "run", {}, {})[0]
        assert resumed.steps == 300
        assert resumed.algo_options.n_steps == 32, "a resumed run keeps the length of its rollouts"


@pytest.mark.parametrize("env", ["CliffWalking-v1", "MountainCarContinuous-v0"])
def test_minibatches_of_a_preset_hold_whole_sequences_of_recurrent_agents(env):
    found, _, _ = resolve_config({"algo": "ppo", "env": env}, {"agent": {"core": "gru"}})
    assert found.algo_options.batch_size == found.algo_options.n_steps == 256
    without, _, _ = resolve_config({"algo": "ppo", "env": env}, {})
    assert without.algo_options.batch_size == 128
    with pytest.raises(ConfigError, match="recurrent PPO splits along envs"):
        resolve_config({"algo": "ppo", "env": env}, {"agent": {"core": "gru"}, "algo": {"batch_size": 128}})
