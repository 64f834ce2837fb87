"""What users call: `remuda.train`, `remuda.resume`, `remuda.load`, and the `Run` and `Policy` that they return.

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

from remuda.agents import NetFactory
from remuda.build.algorithm import make_algorithm
from remuda.build.envs import agent_view, find_net
from remuda.config.resolve import Setup, callable_name, resolve_config, resume_config, stored_config
from remuda.core import Space
from remuda.errors import CheckpointError, ConfigError
from remuda.learning.restoring import must_fit
from remuda.learning.weights import FileWeights
from remuda.runs.checkpoints import named_checkpoint
from remuda.runs.directory import WEIGHTS, RunDirectory
from remuda.runs.evaluation import play_episodes
from remuda.runs.policy import Policy
from remuda.runs.record import record
from remuda.runs.stopping import Callback
from remuda.runs.train import train as run_training


class Run:
    """A run on disk."""

    def __init__(
        self,
        path: str | Path,
        env: Callable[..., Any] | None = None,
        net: NetFactory | None = None,
        checkpoint: int | str | None = None,
    ) -> None:
        """Open a run by its directory, or by the file of weights in it that an asynchronous run may have.

        `checkpoint` is the step of the checkpoint to use, or "best" (checkpoint.keep=best); by default the newest.
        """
        given = Path(path)
        is_file = given.name == WEIGHTS and given.is_file()
        self.path = RunDirectory.open(given.parent if is_file else given).path  # refuses what is no run
        self._weights = self.path / WEIGHTS if is_file else None
        self._env, self._net, self.checkpoint = env, net, checkpoint

    def __repr__(self) -> str:
        known = (self.path / "result.json").exists()
        return f"Run({str(self.path)!r}, {self.result['status'] if known else 'not ended'})"

    @property
    def result(self) -> dict[str, Any]:
        """What result.json says."""
        try:
            found: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        except OSError:
            raise CheckpointError(f"run {self.path} has no result yet: it has not ended.") from None
        return found

    def setup(self, call: str = "remuda.Run({})") -> Setup:
        """Return configuration, env and spaces; `call` is what an error advises, with the env and net given again."""
        return resume_config(self.path, {}, {}, self._env, self._net, call)

    def agent(self) -> Any:
        """Return the agent with the chosen checkpoint's weights, or those of the file that was named."""
        return self._agent("remuda.Run({})")[0]

    def _agent(self, call: str) -> tuple[Any, Space]:
        """Return the agent and the env's observation space, which are built from the run directory where possible."""
        stored = stored_config(self.path, self._net, call) if self._env is None else None
        if stored is not None:
            config, info = stored
        else:
            config, _, info = self.setup(call)
        algorithm = make_algorithm(config, agent_view(config, info), self._net or find_net(config.agent))
        if self._weights is not None:
            with must_fit(self._weights):
                FileWeights(algorithm.agent, self._weights).pull(have=-1)
            return algorithm.agent, info.observation
        found = named_checkpoint(self.path, self.checkpoint)
        with must_fit(found.path):
            algorithm.load_state_dict(found.learner["algorithm"])
        return algorithm.agent, info.observation

    def policy(self) -> Policy:
        """Return the same agent as a `Policy`."""
        return Policy(*self._agent("remuda.load({})"))

    def evaluate(self, episodes: int = 20, seed: int | None = None, deterministic: bool = True) -> dict[str, Any]:
        """Play whole episodes; the same seed gives the same episodes."""
        if episodes < 1:
            raise ConfigError(f"episodes={episodes} is too small: play at least 1.")
        config, spec, _ = self.setup("remuda.Run({}).evaluate()")
        if seed is not None:
            config = replace(config, eval=replace(config.eval, seed=seed, seeds=None))
        found = play_episodes(config, spec, episodes, self.agent(), explore=not deterministic)
        return found.summary()

    def record(
        self, episodes: int = 1, seed: int | None = None, out: str | Path | None = None
    ) -> tuple[Path, list[float]]:
        """Film greedy episodes into an mp4, by default RUN/videos/step-N.mp4; return the file and their returns."""
        return record(self, episodes, seed, None if out is None else Path(out))


def as_list(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    return [callbacks] if callable(callbacks) else list(callbacks)


def load(
    path: str | Path,
    env: Callable[..., Any] | None = None,
    net: NetFactory | None = None,
    checkpoint: int | str | None = None,
) -> Policy:
    """Return the policy of a run's newest checkpoint, that of a step, or "best", without building the run's env.

    A net without an import path, such as a class of a script or notebook, is needed again. `env` is only needed for
    runs that were made before run directories held the spaces of the env.
    """
    return Run(path, env, net, checkpoint).policy()


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
    callbacks: Callback | Sequence[Callback] = (),
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
    setup = resolve_config(settings, groups, env=make)
    result = run_training(*setup, out=out, net=net, callbacks=as_list(callbacks), quiet=quiet)
    return Run(result["path"], make, net)


def resume(
    path: str | Path,
    *,
    steps: int | None = None,
    env: Callable[..., Any] | None = None,
    net: NetFactory | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, Any],
) -> Run:
    """Continue a run from its newest complete checkpoint.

    `env` and `net` are needed where the run was made with ones that have no import path, such as classes of a script
    or notebook.
    """
    path = RunDirectory.open(path).path  # a link such as runs/latest may move while the run goes on
    setup = resume_config(path, {} if steps is None else {"steps": steps}, groups, env, net)
    run_training(*setup, out=path, resume=True, net=net, callbacks=as_list(callbacks), quiet=quiet)
    return Run(path, env, net)
