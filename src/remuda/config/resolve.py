"""Make the configuration of a new run from defaults, presets, a file and user options, or read it from a run."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from remuda.config.algo_base import AlgoOptions
from remuda.config.fields import check_value, coerce, fill
from remuda.config.legacy import upgraded
from remuda.config.presets import find_preset
from remuda.config.renamed import rename_options
from remuda.config.run_config import GROUPS, KINDS, SETTINGS, RunConfig
from remuda.config.run_options import EnvsOptions
from remuda.config.sizes import refuse_large_sizes
from remuda.config.used_options import refuse_unused
from remuda.envs import EnvInfo, EnvSpec, probe, resolve
from remuda.envs.atari_options import AtariOptions
from remuda.envs.import_paths import describe
from remuda.errors import CheckpointError, ConfigError, EnvSpecError, nearest
from remuda.machine import usable_cores
from remuda.registry import all_algorithms, find_algorithm, find_scheme
from remuda.runs.advice import RESUME, python_call, without_path
from remuda.runs.directory import RunDirectory
from remuda.runs.spaces import read_spaces
from remuda.torchrun import read_torchrun

Groups = Mapping[str, Mapping[str, object]]
Setup = tuple[RunConfig, EnvSpec, EnvInfo]
MAY_CHANGE = ("eval", "checkpoint", "log")  # groups whose options may change when a run is resumed
MAX_STEPS = "REMUDA_MAX_STEPS"  # environment variable that caps the steps of every run


def resolve_config(
    settings: Mapping[str, object],
    groups: Groups,
    file: Path | None = None,
    env: Callable[..., object] | None = None,
) -> Setup:
    """Return the complete configuration of a run, the spec of its env, and what `probe` found out about the env.

    `settings` holds values for names in SETTINGS, and `groups` holds options by group. Both override the YAML file
    `file`, which overrides the preset of the env, which overrides the defaults of the options. `env` is a callable
    that builds the env; if it is None, `settings` or the file names the env. REMUDA_MAX_STEPS caps the number of
    steps. Raise ConfigError if the user sets an option that the run does not use.
    """
    from_file = read_config_file(file) if file is not None else {}
    from_file, file_groups = upgraded(from_file, from_file.pop("options", {}))
    settings, groups = upgraded(settings, rename_options(groups))
    settings = {**from_file, **settings}
    check_groups(file_groups)
    check_groups(groups)
    config, spec, info = _resolve(settings, merge(file_groups, groups), env)
    # A file with every group is the config.yaml of a run. It lists all options, so its unused options are accepted.
    set_by_user = groups if set(GROUPS) <= set(file_groups) else merge(file_groups, groups)
    refuse_unused(set_by_user, options_classes(config.algo), config.algo, config.scheme)
    return _shorten(config, max_steps()), spec, info


def max_steps() -> int | None:
    """Return the number of steps to which REMUDA_MAX_STEPS caps every run, or None if it is not set."""
    text = os.environ.get(MAX_STEPS)
    if not text:
        return None
    limit: int = coerce(text, "int", MAX_STEPS)
    if limit < 1:
        raise ConfigError(f"{MAX_STEPS}={limit} is too small: use at least 1, or unset it to train in full.")
    return limit


def _shorten(config: RunConfig, limit: int | None) -> RunConfig:
    """Cap the steps of a run at `limit`; shorten its rollouts and warm-up, so that the run still makes updates."""
    if limit is None or config.steps <= limit:
        return config
    logging.getLogger("remuda").warning("%s=%d shortens this run of %d steps.", MAX_STEPS, limit, config.steps)
    sampler = config.sampler
    options = config.algo_options.shortened(limit, sampler.envs)
    sampler = replace(sampler, decorrelate=min(sampler.decorrelate, max(2, limit // sampler.envs) // 4))
    return replace(config, steps=limit, algo_options=options, sampler=sampler)


def merge(first: Groups, second: Groups) -> dict[str, dict[str, object]]:
    """Return the options in `first` and `second`, by group. If both contain an option, `second` takes precedence."""
    return {group: {**first.get(group, {}), **second.get(group, {})} for group in GROUPS}


def options_classes(algo: str) -> dict[str, type[object]]:
    """Return the options class of each group in a run of the algorithm `algo`."""
    return {"algo": find_algorithm(algo).options, **KINDS}


def _resolve(settings: Mapping[str, object], wanted: Groups, env: Callable[..., object] | None) -> Setup:
    """Return configuration, env spec and `probe` result. The caller must have checked the group names in `wanted`."""
    values = {"seed": 0, "scheme": "serial", **settings}
    for name in ("algo", "env"):
        if not values.get(name) and not (name == "env" and env is not None):
            remedy = "remuda train ppo --env CartPole-v1"
            raise ConfigError(f"no {name} is given: name one, as in {remedy}.")
    find_algorithm(str(values["algo"]))
    envs: EnvsOptions = fill(EnvsOptions(), wanted["envs"], "envs")
    atari = AtariOptions(**{item.name: getattr(envs, item.name) for item in fields(AtariOptions)})
    spec = resolve(env if env is not None else str(values["env"]), envs.kwargs, atari)
    info = probe(spec)
    name = spec.label if env is None else callable_name(env, spec.label)
    config = fill_config({**values, "env": name}, wanted, spec.label, info)
    refuse_large_sizes(config, info)
    return config, spec, info


def fill_config(values: Mapping[str, object], wanted: Groups, label: str, info: EnvInfo) -> RunConfig:
    """Return the configuration with the settings `values` (see SETTINGS) and the options `wanted`, by group.

    Options that `wanted` leaves out come from the preset for the env, or else from the defaults. `label` is the id of
    the env, and `info` is what `probe` found out about it.
    """
    algo = str(values["algo"])
    preset = find_preset(algo, label, info.action)
    defaults = {"algo": find_algorithm(algo).options(), **{g: kind() for g, kind in KINDS.items()}}
    filled = {
        attribute: fill(defaults[group], {**preset.get(group, {}), **wanted[group]}, group)
        for group, attribute in GROUPS.items()
    }
    if filled["agent"].core and "batch_size" not in wanted["algo"]:
        filled["algo_options"] = filled["algo_options"].with_memory()
    # Replace values that mean "automatic" by the values for this machine. config.yaml stores the values for this
    # machine, so a run that is resumed on another machine uses them as well.
    scheme, sampler = find_scheme(str(values["scheme"])), filled["sampler"]
    if scheme.has_ranks:
        is_free = "envs" not in wanted["sampler"]
        ranks = filled["scheme_options"].ranks or num_ranks(sampler.envs, filled["algo_options"], is_free)
        if is_free:  # round up to equally many envs per rank; the presets of ddpg, td3 and sac have only 1 env
            sampler = replace(sampler, envs=-(-sampler.envs // ranks) * ranks)
        filled["scheme_options"] = replace(filled["scheme_options"], ranks=ranks)
    if filled["scheme_options"].threads == 0:
        threads = max(1, num_threads(info) // max(1, filled["scheme_options"].ranks))
        filled["scheme_options"] = replace(filled["scheme_options"], threads=threads)
    if sampler.inference == "auto":
        sampler = replace(sampler, inference="workers" if scheme.is_asynchronous else "central")
    filled["sampler"] = sampler
    steps = coerce(values.get("steps", preset["run"]["steps"]), "int", "steps")
    check_value("steps", steps, {})
    return RunConfig(
        algo=algo,
        env=str(values["env"]),
        steps=steps,
        seed=coerce(values["seed"], "int", "seed"),
        scheme=str(values["scheme"]),
        device=find_device(str(values.get("device") or "cpu")),
        **filled,
    )


def stored_config(path: Path, net: Callable[..., object] | None, call: str) -> tuple[RunConfig, EnvInfo] | None:
    """Return the configuration of a run and its `EnvInfo`, or None if the run's directory has no spaces.json.

    The env is neither imported nor built. If the net of the run has no import path and is not passed as `net`,
    CheckpointError is raised, with a message that suggests the Python call `call`.
    """
    stored = RunDirectory.open(path).read_config()
    spaces = read_spaces(path)
    if spaces is None:
        return None
    must_be_given_again(path, {**stored, "env": None}, {"net": net}, call)
    stored, options = upgraded(stored, stored_options(path, stored))
    env = str(stored.get("env")).strip("<>")
    find_algorithm(str(stored.get("algo")))
    wanted = {group: options.get(group, {}) for group in GROUPS}
    info = EnvInfo(env, *spaces, None, (), 0.0)
    return fill_config({"seed": 0, "scheme": "serial", **stored}, wanted, env, info), info


def stored_options(path: Path, stored: Mapping[str, object]) -> Groups:
    """Return the options in the config.yaml of a run, by group, with their present names."""
    options = stored.get("options", {})
    if not isinstance(options, Mapping):
        raise CheckpointError(f"{path}/config.yaml is damaged: it holds no options; restore it or start a new run.")
    renamed = rename_options(options, f"{path}/config.yaml")
    check_groups(renamed)
    return renamed


def find_device(name: str) -> str:
    """Return the name of a device; "auto" becomes the accelerator that PyTorch finds on this machine, or the CPU."""
    if name != "auto":
        return name
    import torch  # imported here, because most commands need no device

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def num_ranks(envs: int, options: AlgoOptions, can_add_envs: bool) -> int:
    """Return the number of ranks if `scheme.ranks` is 0: under torchrun, the number of processes that it has started.

    Without torchrun, this is the largest number, at most one rank per core, that divides the size of a minibatch (if
    the algorithm has minibatches). Unless `can_add_envs` is True, the number also divides `envs`.
    """
    if (torchrun := read_torchrun()) is not None:
        return torchrun.size
    divided = math.gcd(0 if can_add_envs else envs, options.minibatch_size or 0)  # gcd ignores 0: gcd(0, n) is n
    return max(count for count in range(1, usable_cores() + 1) if divided % count == 0)


def num_threads(info: EnvInfo) -> int:
    """Return the default number of torch threads: one per core if observations are large images, otherwise one."""
    has_images = any(
        len(leaf.shape) == 3 and min(sorted(leaf.shape)[1:]) >= 36 for _, leaf in info.observation.leaves()
    )
    return usable_cores() if has_images else 1


def check_groups(groups: Groups) -> None:
    for group, values in groups.items():
        if group not in GROUPS:
            kinds: list[tuple[str, type[Any]]] = [
                *(("algo", each.options) for each in all_algorithms()),
                *KINDS.items(),
            ]
            homes = [f"{home}={{{group!r}: ...}}" for home, kind in kinds if group in {f.name for f in fields(kind)}]
            remedy = f"did you mean {homes[0]}?" if homes else nearest(str(group), (*GROUPS, *SETTINGS))
            raise ConfigError(f"{group} is not a group of options: {remedy}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{group}={values!r} is not a mapping: give its options by name.")


def callable_name(thing: Callable[..., object], label: str) -> str:
    """Return the name of an env or net for config.yaml: its import path, or <label> if it has no import path."""
    try:
        found = describe(thing)
    except EnvSpecError:
        return f"<{label}>"
    return f"{found['module']}:{found['name']}" if "module" in found and "." not in found["name"] else f"<{label}>"


def read_config_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read ({error}): give a YAML file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML ({str(error).splitlines()[0]}): fix that line.") from None
    known = {*SETTINGS, "options"}
    if not isinstance(content, dict) or not isinstance(content.get("options", {}), dict):
        raise ConfigError(f"--config {path} holds no mapping of settings: start from a run's config.yaml.")
    for name in content:
        if name not in known:
            raise ConfigError(f"--config {path}: {name!r} is not a setting: {nearest(str(name), known)}")
    if "options" in content:
        content["options"] = rename_options(content["options"], str(path))
    return content


def must_be_given_again(path: Path, stored: Mapping[str, object], given: Mapping[str, object], call: str) -> None:
    """Raise CheckpointError if the run's env or net has no import path and is not among the `given` objects."""
    needed = without_path(stored)
    if any(given[name] is None for name in needed):
        things = " and ".join(f"{name}={label}" for name, label in needed.items())
        has = "which have" if len(needed) > 1 else "which has"
        raise CheckpointError(
            f"run {path} was made with {things}, {has} no import path: "
            f"from Python, use {python_call(call, path, needed)}."
        )


def resume_config(
    path: Path,
    settings: Mapping[str, object],
    groups: Groups,
    env: Callable[..., object] | None = None,
    net: Callable[..., object] | None = None,
    call: str = RESUME,
) -> Setup:
    """Return the configuration of an existing run with the changes in `settings` and `groups`.

    Only `steps`, `device` and options of the groups in MAY_CHANGE may change. CheckpointError is raised for other
    changes. It is also raised if the run's env or net has no import path and is not passed again; the message then
    suggests the Python call `call`.
    """
    run = RunDirectory.open(path)
    path, stored = run.path, run.read_config()
    must_be_given_again(path, stored, {"env": env, "net": net}, call)
    made_with = str(stored.get("env"))
    if env is not None:
        given = made_with if made_with.startswith("<") else callable_name(env, resolve(env).label)
        settings = {**settings, "env": given}
    settings, groups = upgraded(settings, rename_options(groups))
    for name, value in settings.items():
        if name not in ("steps", "device") and str(value) != str(stored.get(name)):
            raise CheckpointError(
                f"run {path} was made with {name}={stored.get(name)}, not {value}: "
                "leave the option out to resume it, or start a new run with --out."
            )
    stored, options = upgraded(stored, stored_options(path, stored))
    check_groups(groups)
    kinds = options_classes(str(stored.get("algo")))
    for group, values in groups.items():
        before = fill(kinds[group](), options.get(group, {}), group)
        after = fill(before, values, group)
        for name in values if group not in MAY_CHANGE else ():
            if getattr(after, name) != getattr(before, name):
                raise CheckpointError(
                    f"run {path} was made with {group}.{name}={getattr(before, name)}, not {getattr(after, name)}: "
                    f"a resumed run may change only --steps and {', '.join(MAY_CHANGE)} options."
                )
    config, spec, info = _resolve({**stored, **settings}, merge(options, groups), env)
    refuse_unused(groups, kinds, config.algo, config.scheme)
    limit = max_steps()
    if limit is not None and limit < config.steps:
        logging.getLogger("remuda").warning("%s=%d shortens this run of %d steps.", MAX_STEPS, limit, config.steps)
        config = replace(config, steps=limit)
    return config, spec, info
