"""The Python interface: the functions `train`, `start`, `resume` and `load`, and the class `Run`.

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
from remuda.build.envs import agent_view
from remuda.build.nets import find_net
from remuda.config.resolve import Setup, callable_name, resolve_config, resume_config, stored_config
from remuda.core import Space
from remuda.errors import CheckpointError, ConfigError
from remuda.learning.restoring import must_fit
from remuda.learning.weights import FileWeights
from remuda.runs.checkpoints import named_checkpoint
from remuda.runs.directory import WEIGHTS, RunDirectory
from remuda.runs.evaluation import Result, play_episodes
from remuda.runs.policy import Policy
from remuda.runs.stopping import Callback
from remuda.runs.train import exhaust
from remuda.runs.train import train as run_training
from remuda.runs.training import Training
from remuda.runs.video import record

EnvFactory = Callable[..., object]  # returns a Gymnasium env


class Run:
    """A run, opened by its directory: finished, stopped or still training.

    `remuda.train` and `remuda.resume` return a `Run`. To open an existing run, give its path:

        run = remuda.Run("runs/latest", checkpoint="best")
        run.result["status"]                    # "complete"
        run.evaluate(episodes=100)["mean_reward"]
        run.record(episodes=3)                  # an mp4 in RUN/videos
        policy = run.policy()
    """

    def __init__(
        self,
        path: str | Path,
        env: EnvFactory | None = None,
        net: NetFactory | None = None,
        checkpoint: int | str | None = None,
    ) -> None:
        """Open the run at `path`.

        path: the run directory, or the file `weights.safetensors` in it, which holds the newest weights of an
            asynchronous run with `scheme.weights=file`.
        env, net: the callables that the run was trained with. They are needed only if they have no import path, for
            example because a script or notebook defines them; otherwise config.yaml contains their import paths.
        checkpoint: the step of the checkpoint to use, or "best" (needs checkpoint.keep=best); by default the newest.
        """
        given = Path(path)
        is_file = given.name == WEIGHTS and given.is_file()
        # If the directory is not that of a run, `open` raises CheckpointError.
        self.path = RunDirectory.open(given.parent if is_file else given).path
        self._weights = self.path / WEIGHTS if is_file else None
        self._env, self._net, self.checkpoint = env, net, checkpoint

    def __repr__(self) -> str:
        has_ended = (self.path / "result.json").exists()
        return f"Run({str(self.path)!r}, {self.result['status'] if has_ended else 'not ended'})"

    @property
    def result(self) -> Result:
        """The content of result.json: status, steps, updates, seconds, steps_per_second, eval and more."""
        try:
            found: Result = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except OSError:
            raise CheckpointError(f"run {self.path} has no result yet: it has not ended.") from None
        return found

    def setup(self, call: str = "remuda.Run({})") -> Setup:
        """Return the configuration of the run, its env spec, and properties of the env such as its spaces.

        If the env or net must be passed again, the error message recommends the Python call `call`, in which {} is
        replaced by the arguments.
        """
        return resume_config(self.path, {}, {}, self._env, self._net, call)

    def agent(self) -> Any:
        """Return the agent, a torch module, with the weights of the chosen checkpoint or weights file."""
        return self._agent("remuda.Run({})")[0]

    def _agent(self, call: str) -> tuple[Any, Space]:
        """Return the agent and the env's observation space.

        The env is built only if it was passed to `Run`, or if the run has no spaces.json.
        """
        stored = stored_config(self.path, self._net, call) if self._env is None else None
        if stored is not None:
            config, info = stored
        else:
            config, _, info = self.setup(call)
        algorithm = make_algorithm(config, agent_view(config, info), find_net(config.agent, given=self._net))
        if self._weights is not None:
            with must_fit(self._weights):
                FileWeights(algorithm.agent, self._weights).pull(have=-1)
            return algorithm.agent, info.observation
        found = named_checkpoint(self.path, self.checkpoint)
        with must_fit(found.path):
            algorithm.load_state_dict(found.learner["algorithm"])
        return algorithm.agent, info.observation

    def policy(self) -> Policy:
        """Return the agent as a `Policy`, which takes observations and returns actions in the format of the env."""
        return Policy(*self._agent("remuda.load({})"))

    def evaluate(self, episodes: int = 20, seed: int | None = None, deterministic: bool = True) -> Result:
        """Play whole episodes and return a dict of mean_reward, std_reward, mean_length, episodes and returns.

        episodes: the number of episodes.
        seed: the seed of envs and exploration; the same seed gives the same episodes. By default the run's eval.seed.
        deterministic: whether to take greedy actions; False explores as in training.
        """
        if episodes < 1:
            raise ConfigError(f"episodes={episodes} is too small: play at least 1.")
        config, spec, _ = self.setup("remuda.Run({}).evaluate()")
        if seed is not None:
            config = replace(config, eval=replace(config.eval, seed=seed, seeds=None))
        found = play_episodes(config, spec, episodes, self.agent(), explore=not deterministic)
        return found.summary()

    def start(
        self,
        *,
        steps: int | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        quiet: bool = False,
        **groups: Mapping[str, object],
    ) -> Training:
        """Continue this run round by round, from its newest checkpoint; `remuda.resume` explains the arguments."""
        changed = {} if steps is None else {"steps": steps}
        setup = resume_config(self.path, changed, groups, self._env, self._net)
        called = as_list(callbacks)
        training = run_training(*setup, out=self.path, resume=True, net=self._net, callbacks=called, quiet=quiet)
        return Training(training, setup[1])

    def record(
        self, episodes: int = 1, seed: int | None = None, out: str | Path | None = None
    ) -> tuple[Path, list[float]]:
        """Record greedy episodes as one mp4 file; return the path of the file and the episodes' returns.

        The path is `out`, by default RUN/videos/step-N.mp4 for a checkpoint of step N. The env needs the render mode
        rgb_array.
        """
        return record(self, episodes, seed, None if out is None else Path(out))


def as_list(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    return [callbacks] if callable(callbacks) else list(callbacks)


def load(
    path: str | Path,
    env: EnvFactory | None = None,
    net: NetFactory | None = None,
    checkpoint: int | str | None = None,
) -> Policy:
    """Return the trained policy of a run, without building the run's env.

        policy = remuda.load("runs/latest")
        action, state = policy.act(obs)

    path: the run directory, or the file weights.safetensors in it.
    env: needed only if the env has no import path and the run was made by an early version of Remuda, which saved no
        spaces.json.
    net: needed if the run's net has no import path, such as a class defined in a script or notebook.
    checkpoint: a step, or "best" (needs checkpoint.keep=best); by default the newest checkpoint.
    """
    return Run(path, env, net, checkpoint).policy()


def train(
    algorithm: str,
    /,
    env: str | EnvFactory,
    *,
    steps: int | None = None,
    seed: int = 0,
    scheme: str | Mapping[str, object] = "serial",
    device: str = "cpu",
    out: str | Path | None = None,
    net: NetFactory | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, object],
) -> Run:
    """Train an agent and return the run.

        run = remuda.train("ppo", "CartPole-v1", steps=200_000, algo={"learning_rate": 1e-3}, sampler={"envs": 16})

    algorithm: the name of the algorithm, such as "ppo" or "sac".
    env: an id that Gymnasium knows, an import path "package.module:make_env", or a callable that returns an env.
    steps: the number of env steps, summed over all envs; by default that of the preset.
    seed: seeds envs, initial weights and every random draw of the run.
    scheme: "serial", "parallel", "async" or "replicas", or a dict with "name" and the scheme's options.
    device: "cpu", "cuda", "cuda:1", "mps" or "auto", for the learner and for inference in this process.
    out: the run directory; by default runs/ALGORITHM-ENV-SEED-TIME.
    net: a callable that returns the network for an observation shape, instead of a built-in network (agent.net).
    callbacks: one or more functions that are called with the `Round` after every round. A callback may add numbers
        to `round.metrics`, and it stops the run by returning True.
    quiet: whether to print no progress and no log lines.
    groups: options by group, as on the command line: algo={...}, agent={...}, sampler={...}, envs={...},
        replay={...}, eval={...}, log={...}, checkpoint={...}.
    """
    setup, make = new_setup(algorithm, env, steps, seed, scheme, device, net, groups)
    result = exhaust(run_training(*setup, out=out, net=net, callbacks=as_list(callbacks), quiet=quiet))
    return Run(result["path"], make, net)


def new_setup(
    algorithm: str,
    env: str | EnvFactory,
    steps: int | None,
    seed: int,
    scheme: str | Mapping[str, object],
    device: str,
    net: NetFactory | None,
    groups: dict[str, Mapping[str, object]],
) -> tuple[Setup, EnvFactory | None]:
    """Return the `Setup` of a new run, and `env` if it is a callable that returns an env, otherwise None."""
    if not isinstance(scheme, str):
        groups["scheme"] = {name: value for name, value in scheme.items() if name != "name"}
        scheme = str(scheme.get("name", "serial"))
    make = None if isinstance(env, str) else env
    settings: dict[str, object] = {"algo": algorithm, "seed": seed, "scheme": scheme}
    # The default device is left out, because it would override `scheme={"device": ...}`, an option of version 0.1.
    settings |= {"device": device} if device != "cpu" else {}
    settings |= {"env": env} if make is None else {}
    settings |= {"steps": steps} if steps is not None else {}
    if net is not None:
        label = getattr(net, "__qualname__", type(net).__qualname__)
        groups["agent"] = {**groups.get("agent", {}), "net": callable_name(net, label)}
    return resolve_config(settings, groups, env=make), make


def start(
    algorithm: str,
    /,
    env: str | EnvFactory,
    *,
    steps: int | None = None,
    seed: int = 0,
    scheme: str | Mapping[str, object] = "serial",
    device: str = "cpu",
    out: str | Path | None = None,
    net: NetFactory | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, object],
) -> Training:
    """Start a run whose rounds your own loop calls one by one; `remuda.train` explains the arguments.

    with remuda.start("ppo", "CartPole-v1", steps=200_000) as run:
        while not run.done():
            round = run.step()
    """
    setup, _ = new_setup(algorithm, env, steps, seed, scheme, device, net, groups)
    return Training(run_training(*setup, out=out, net=net, callbacks=as_list(callbacks), quiet=quiet), setup[1])


def resume(
    path: str | Path,
    *,
    steps: int | None = None,
    device: str | None = None,
    env: EnvFactory | None = None,
    net: NetFactory | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    quiet: bool = False,
    **groups: Mapping[str, object],
) -> Run:
    """Continue a run from its newest intact checkpoint, and return the run.

        remuda.resume("runs/latest", steps=400_000)

    path: the run directory.
    steps: a new total number of steps; by default the number that the run was started with.
    device: a new device; by default that of the run. On another device, numbers are rounded differently.
    env, net: the env and net of the run; needed if they have no import path, such as classes defined in a script.
    callbacks: functions that are called with the `Round` after every round; returning True stops the run.
    quiet: whether to print no progress and no log lines.
    groups: new values of options; only those in eval={...}, checkpoint={...} and log={...} may be changed.
    """
    path = RunDirectory.open(path).path  # a link such as runs/latest may move while the run continues
    given = {name: value for name, value in (("steps", steps), ("device", device)) if value is not None}
    setup = resume_config(path, given, groups, env, net)
    exhaust(run_training(*setup, out=path, resume=True, net=net, callbacks=as_list(callbacks), quiet=quiet))
    return Run(path, env, net)
