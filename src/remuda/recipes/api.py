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
from remuda.recipes.config import ALGORITHMS, GROUPS, KINDS, RunConfig
from remuda.recipes.journal import Callback
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
    for group in {*file_groups, *groups}:
        if group not in GROUPS:
            raise ConfigError(f"{group} is not a group of options: {nearest(group, GROUPS)}")
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
        env=spec.label if env is None else callable_name(env, spec),
        steps=coerce(steps, "int", "steps"),
        seed=coerce(values["seed"], "int", "seed"),
        scheme=str(values["scheme"]),
        **filled,
    )
    return config, spec, info


def callable_name(env: Callable[..., Any], spec: EnvSpec) -> str:
    """How config.yaml names a callable: by its import path, or in <> if it has none and must be given again."""
    try:
        found = describe(env)
    except EnvSpecError:
        return f"<{spec.label}>"
    return f"{found['module']}:{found['name']}" if "module" in found else f"<{spec.label}>"


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
    for name, value in settings.items():
        if name != "steps" and str(value) != str(stored[name]):
            raise CheckpointError(
                f"run {path} was made with {name}={stored[name]}, not {value}: "
                "leave the option out to resume it, or start a new run with --out."
            )
    for group, values in groups.items():
        for name, value in values.items():
            if group not in MAY_CHANGE and str(value) != str(stored["options"][group].get(name)):
                raise CheckpointError(
                    f"run {path} was made with {group}.{name}={stored['options'][group].get(name)}, not {value}: "
                    f"a resumed run may change only --steps and {', '.join(MAY_CHANGE)} options."
                )
    merged = {group: {**values, **groups.get(group, {})} for group, values in stored.pop("options").items()}
    if env is None and str(stored["env"]).startswith("<"):
        raise CheckpointError(f"run {path} was made with {stored['env']}, which has no name: pass env=... again.")
    return settle_config({**stored, **settings}, merged, env=env)


class Policy:
    """A trained agent, ready to act."""

    def __init__(self, agent: PolicyAgent, seed: int = 0) -> None:
        self.agent = agent.eval()
        self._to_env = ToEnv(agent.action)
        self._draw = np.random.default_rng(seed)

    def act(self, obs: Any, state: Any = None, deterministic: bool = True) -> tuple[Any, Any]:
        """The env's action for one observation, or for a batch of them; and the state for the next call."""
        space = self.agent.observation
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
        algorithm.load_state_dict(load_newest(self.path / "checkpoints").learner["algorithm"])
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
