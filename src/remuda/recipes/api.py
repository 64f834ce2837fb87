"""What users call: `remuda.train`, `remuda.load`, and configurations settled from presets, files and overrides.

run = remuda.train("ppo", env="CartPole-v1", steps=200_000, algo={"learning_rate": 1e-3})
run.evaluate(episodes=20)["mean_reward"]
policy = remuda.load(run.path)
action, state = policy.act(obs)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from remuda.agents import NetFactory, PolicyAgent
from remuda.envs import EnvInfo, EnvSpec, probe, resolve
from remuda.envs.paths import describe
from remuda.errors import CheckpointError, ConfigError, EnvSpecError, nearest
from remuda.learning.checkpoint import load_newest
from remuda.logs.rundir import RunDirectory
from remuda.recipes.config import ALGORITHMS, GROUPS, KINDS, AlgoOptions, RunConfig
from remuda.recipes.journal import Callback, must_fit
from remuda.recipes.presets import find_preset
from remuda.recipes.train import find_net, make_algorithm, play_episodes
from remuda.recipes.train import train as run_training
from remuda.recipes.values import coerce, fill
from remuda.sampling.sampler import ToEnv, torch_dtype

Groups = Mapping[str, Mapping[str, Any]]
Setup = tuple[RunConfig, EnvSpec, EnvInfo]
MAY_CHANGE = ("eval", "checkpoint", "log")  # groups that a resumed run may set anew


def settle_config(
    settings: Mapping[str, Any],
    groups: Groups,
    file: Path | None = None,
    env: Callable[..., Any] | None = None,
) -> Setup:
    """A whole configuration: option defaults, under the env's preset, under a file, under what was set by hand."""
    from_file = read_config_file(file) if file is not None else {}
    file_groups: Groups = from_file.pop("options", {})
    values = {"seed": 0, "scheme": "serial", **from_file, **settings}
    for name in ("algo", "env"):
        if not values.get(name) and not (name == "env" and env is not None):
            remedy = "remuda train ppo --env CartPole-v1"
            raise ConfigError(f"no {name} is given: name one, as in {remedy}.")
    algo = str(values["algo"])
    if algo not in ALGORITHMS:
        raise ConfigError(f"{algo!r} is not an algorithm: {nearest(algo, ALGORITHMS)}")
    check_groups(file_groups)
    check_groups(groups)
    wanted = {group: {**file_groups.get(group, {}), **groups.get(group, {})} for group in GROUPS}
    kwargs = coerce(wanted["envs"].get("kwargs", {}), "dict[str, Any]", "envs.kwargs")
    spec = resolve(env if env is not None else str(values["env"]), kwargs)
    info = probe(spec)
    preset = find_preset(algo, spec.label, info.action)
    defaults = {"algo": ALGORITHMS[algo](), **{g: kind() for g, kind in KINDS.items()}}
    filled = {
        attribute: fill(defaults[group], {**preset.get(group, {}), **wanted[group]}, group)
        for group, attribute in GROUPS.items()
    }
    steps = values.get("steps", preset["run"]["steps"])
    config = RunConfig(
        algo=algo,
        env=spec.label if env is None else callable_name(env, spec.label),
        steps=coerce(steps, "int", "steps"),
        seed=coerce(values["seed"], "int", "seed"),
        scheme=str(values["scheme"]),
        **filled,
    )
    return config, spec, info


def check_groups(groups: Groups) -> None:
    for group, values in groups.items():
        if group not in GROUPS:
            raise ConfigError(f"{group} is not a group of options: {nearest(str(group), GROUPS)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{group}={values!r} is not a mapping: give its options by name.")


def callable_name(thing: Callable[..., Any], label: str) -> str:
    """How config.yaml names an env or net: by its import path, or in <> if it has none and must be given again."""
    try:
        found = describe(thing)
    except EnvSpecError:
        return f"<{label}>"
    return f"{found['module']}:{found['name']}" if "module" in found and "." not in found["name"] else f"<{label}>"


def read_config_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read ({error}): give a YAML file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML ({str(error).splitlines()[0]}): mend that line.") from None
    known = {"algo", "env", "steps", "seed", "scheme", "options"}
    if not isinstance(content, dict) or not isinstance(content.get("options", {}), dict):
        raise ConfigError(f"--config {path} holds no mapping of settings: start from a run's config.yaml.")
    for name in content:
        if name not in known:
            raise ConfigError(f"--config {path}: {name!r} is not a setting: {nearest(str(name), known)}")
    return content


def resume_config(
    path: Path, settings: Mapping[str, Any], groups: Groups, env: Callable[..., Any] | None = None
) -> Setup:
    """The configuration of an existing run; only how far it goes and how it is watched may change."""
    stored = RunDirectory.open(path).read_config()
    made_with = str(stored.get("env"))
    if env is not None:
        given = made_with if made_with.startswith("<") else callable_name(env, resolve(env).label)
        settings = {**settings, "env": given}
    elif made_with.startswith("<"):
        raise CheckpointError(f"run {path} was made with {made_with}, which has no name: pass env=... again.")
    for name, value in settings.items():
        if name != "steps" and str(value) != str(stored.get(name)):
            raise CheckpointError(
                f"run {path} was made with {name}={stored.get(name)}, not {value}: "
                "leave the option out to resume it, or start a new run with --out."
            )
    options: Groups = stored.pop("options", {})
    check_groups(options)
    check_groups(groups)
    kinds: dict[str, type[Any]] = {"algo": ALGORITHMS.get(str(stored.get("algo")), AlgoOptions), **KINDS}
    for group, values in groups.items():
        before = fill(kinds[group](), options.get(group, {}), group)
        after = fill(before, values, group)
        for name in values if group not in MAY_CHANGE else ():
            if getattr(after, name) != getattr(before, name):
                raise CheckpointError(
                    f"run {path} was made with {group}.{name}={getattr(before, name)}, not {getattr(after, name)}: "
                    f"a resumed run may change only --steps and {', '.join(MAY_CHANGE)} options."
                )
    merged = {group: {**options.get(group, {}), **groups.get(group, {})} for group in GROUPS}
    return settle_config({**stored, **settings}, merged, env=env)


class Policy:
    """A trained agent, ready to act."""

    def __init__(self, agent: PolicyAgent, seed: int = 0) -> None:
        self.agent = agent.eval()
        self._to_env = ToEnv(agent.action)
        self._draw = np.random.default_rng(seed)

    def act(self, obs: Any, state: Any = None, deterministic: bool = True) -> tuple[Any, Any]:
        """The env's action for one observation, or for a batch of them; and the state for the next call."""
        space, space_of_action = self.agent.observation, self.agent.action
        array = np.asarray(obs)
        if array.shape[array.ndim - len(space.shape) :] != space.shape or array.ndim > len(space.shape) + 1:
            raise ConfigError(
                f"an observation of shape {array.shape} does not fit {space.shape}: "
                "give one observation, or a batch of them along the first axis."
            )
        single = array.ndim == len(space.shape)
        rows = torch.as_tensor(array[None] if single else array).to(torch_dtype(space))
        if space.kind == "discrete":
            rows = rows - space.start
        kind, width = self.agent.noise
        draw = self._draw.random if kind == "uniform" else self._draw.standard_normal
        noise = torch.as_tensor(draw((len(rows), width)), dtype=torch.float32)
        with torch.inference_mode():
            explore = torch.full((len(rows),), 0.0 if deterministic else 1.0)
            action, _, state = self.agent.act(rows, state, explore, noise)
        out = self._to_env(action.numpy())
        if space_of_action.kind == "discrete":
            out = out + space_of_action.start
        return (out[0] if single else out), state


class Run:
    """A run on disk."""

    def __init__(
        self, path: str | Path, env: Callable[..., Any] | None = None, net: NetFactory | None = None
    ) -> None:
        self.path = Path(path)
        self._directory = RunDirectory.open(self.path)
        self._env, self._net = env, net

    @property
    def result(self) -> dict[str, Any]:
        """What result.json says."""
        try:
            found: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        except OSError:
            raise CheckpointError(f"run {self.path} has no result yet: it has not ended.") from None
        return found

    def setup(self) -> Setup:
        return resume_config(self.path, {}, {}, self._env)

    def agent(self) -> PolicyAgent:
        """The agent with the newest whole checkpoint's weights."""
        config, _, info = self.setup()
        algorithm = make_algorithm(config, info, self._net or find_net(config.agent))
        found = load_newest(self.path / "checkpoints")
        with must_fit(found.path):
            algorithm.load_state_dict(found.learner["algorithm"])
        agent: PolicyAgent = algorithm.agent
        return agent

    def evaluate(self, episodes: int = 20, seed: int | None = None, deterministic: bool = True) -> dict[str, Any]:
        """Play whole episodes; the same seed gives the same episodes."""
        if episodes < 1:
            raise ConfigError(f"episodes={episodes} is too small: play at least 1.")
        config, spec, info = self.setup()
        if seed is not None:
            config = replace(config, eval=replace(config.eval, seed=seed))
        found = play_episodes(config, spec, info, episodes, self.agent(), explore=not deterministic)
        return found.summary()


def load(path: str | Path, env: Callable[..., Any] | None = None, net: NetFactory | None = None) -> Policy:
    """The policy of a run. A run made with a callable env or net that has no import path needs it again."""
    return Policy(Run(path, env, net).agent())


def train(
    algorithm: str,
    /,
    env: str | Callable[..., Any],
    *,
    steps: int | None = None,
    seed: int = 0,
    scheme: str | Mapping[str, Any] = "serial",
    out: str | Path | None = None,
    net: NetFactory | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, Any],
) -> Run:
    """Train and return the run.

    Groups are those of the command line: algo={"learning_rate": 1e-3}, sampler={...}, agent={...}, eval={...};
    scheme is a name, or {"name": ..., and its options}. `env` may be a callable, `net` a module class. A callback
    is called with every `Round` and stops the run by returning True.
    """
    if not isinstance(scheme, str):
        groups["scheme"] = {name: value for name, value in scheme.items() if name != "name"}
        scheme = str(scheme.get("name", "serial"))
    make = None if isinstance(env, str) else env
    settings: dict[str, Any] = {"algo": algorithm, "seed": seed, "scheme": scheme}
    settings |= {"env": env} if make is None else {}
    settings |= {"steps": steps} if steps is not None else {}
    if net is not None:
        label = getattr(net, "__qualname__", type(net).__qualname__)
        groups["agent"] = {**groups.get("agent", {}), "net": callable_name(net, label)}
    setup = settle_config(settings, groups, env=make)
    result = run_training(*setup, out=out, net=net, callbacks=callbacks, quiet=quiet)
    return Run(result["path"], make, net)


def resume(
    path: str | Path,
    *,
    steps: int | None = None,
    env: Callable[..., Any] | None = None,
    net: NetFactory | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, Any],
) -> Run:
    """Go on with a run from its newest whole checkpoint."""
    setup = resume_config(Path(path), {} if steps is None else {"steps": steps}, groups, env)
    run_training(*setup, out=path, resume=True, net=net, callbacks=callbacks, quiet=quiet)
    return Run(path, env, net)
