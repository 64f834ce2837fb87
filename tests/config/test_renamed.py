"""Test that options, files and runs with the option names of version 0.1 are still accepted."""

import logging
import shutil

import pytest
import yaml

import remuda
from remuda.cli import main
from remuda.config.renamed import RENAMED, _notify, rename_options
from remuda.config.resolve import resolve_config
from remuda.config.run_config import KINDS
from remuda.errors import ConfigError

QUICK = {"eval": {"episodes": 0}, "log": {"tensorboard": False}, "quiet": True}
OLD = [(group, old, new) for group, names in RENAMED.items() for old, new in names.items()]
VALUES = {"quick": "false", "share": "0.25", "first_priority": "error", "act": "central"}
SETTINGS = {"algo": "dqn", "env": "CartPole-v1", "scheme": "async"}
PRIORITIZED = {"replay": {"prioritized": True}}


@pytest.fixture(autouse=True)
def _forget_notices():
    _notify.cache_clear()


def notices(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is now" in record.getMessage()]


def age(path) -> None:
    """Rename the options in a run's config.yaml to their names of version 0.1."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    for group, old, new in OLD:
        config["options"][group][old] = config["options"][group].pop(new)
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.mark.parametrize(("group", "old", "new"), OLD)
class TestOneOption:
    def test_new_names_exist_and_old_ones_do_not(self, group, old, new):
        known = KINDS[group].__dataclass_fields__
        assert new in known
        assert old not in known

    def test_an_old_name_as_a_keyword_gives_a_notice(self, group, old, new, caplog):
        with caplog.at_level(logging.WARNING, "remuda"):
            config, _, _ = resolve_config(
                SETTINGS, {**PRIORITIZED, group: {**PRIORITIZED.get(group, {}), old: VALUES[old]}}
            )
        assert str(getattr(getattr(config, group), new)).lower() == VALUES[old]
        assert notices(caplog) == [f"{group}.{old} is now {group}.{new}."]

    def test_an_old_name_in_a_file_gives_a_notice(self, group, old, new, tmp_path, caplog):
        options = {**PRIORITIZED, group: {**PRIORITIZED.get(group, {}), old: VALUES[old]}}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**SETTINGS, "options": options}))
        with caplog.at_level(logging.WARNING, "remuda"):
            config, _, _ = resolve_config({}, {}, path)
        assert str(getattr(getattr(config, group), new)).lower() == VALUES[old]
        assert notices(caplog) == [f"{path}: {group}.{old} is now {group}.{new}."]

    def test_both_names_together_are_refused(self, group, old, new):
        with pytest.raises(ConfigError, match=rf"^{group}\.{old} is the old name of {group}\.{new}, and both"):
            resolve_config(SETTINGS, {group: {old: VALUES[old], new: VALUES[old]}})


def test_old_names_on_the_command_line_give_a_notice(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "a2c", "--env", "CartPole-v1", "--steps", "16", "--quiet", "--eval.episodes", "0"]
    assert main([*arguments, "--agent.quick", "false", "--sampler.act", "central", "--out", "run"]) == 0
    notice = "agent.quick is now agent.fast_path, sampler.act is now sampler.inference."
    assert notices(caplog) == [notice]
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["options"]
    assert stored["agent"]["fast_path"] is False
    assert "quick" not in stored["agent"]


def test_options_without_old_names_are_not_changed():
    groups = {"agent": {"hidden": (8,)}, "sampler": "nonsense", "nonsense": {"act": 1}}
    assert rename_options(groups) == groups


@pytest.mark.parametrize(
    "algo", ["ppo", "dqn", *(pytest.param(algo, marks=pytest.mark.long) for algo in ("r2d1", "sac"))]
)
def test_a_run_of_0_1_is_loaded_resumed_and_repeated(algo, tmp_path, caplog):
    env = "Pendulum-v1" if algo == "sac" else "CartPole-v1"
    options = {"sampler": {"envs": 4}, **QUICK}
    if algo == "ppo":
        options["algo"] = {"n_steps": 16, "batch_size": 32}
    else:
        options["algo"] = {"learning_starts": 64}
    run = remuda.train(algo, env, steps=256, out=tmp_path / "run", **options)
    old = tmp_path / "old"
    shutil.copytree(run.path, old, symlinks=True)
    age(old)
    notice = (
        f"{old}/config.yaml: agent.quick is now agent.fast_path, eval.share is now eval.cpu_fraction, "
        "replay.first_priority is now replay.initial_priority, sampler.act is now sampler.inference."
    )
    with caplog.at_level(logging.WARNING, "remuda"):
        remuda.load(old)
        assert notices(caplog) == [notice]
        caplog.clear()
        resumed, same = (remuda.resume(path, steps=512, quiet=True) for path in (old, run.path))
        assert not notices(caplog), "the notice is logged only once"
        resolve_config({}, {}, resumed.path / "config.yaml")
        assert not notices(caplog), "a resumed run stores the new names"
    tensors = [path.path / "checkpoints/latest/tensors.safetensors" for path in (resumed, same)]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()
