"""`remuda.start`: a run whose rounds are called one by one from the user's own loop.

run = remuda.start("ppo", env="CartPole-v1", steps=200_000)
while not run.done():
    round = run.step()                              # samples and learns once; logs, evaluates, saves if due
    if round.progress.episodes > 500:
        run.set("algo.learning_rate", 1e-4)
print(run.result["eval"])
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Self

from remuda.config.algo_base import AlgoOptions
from remuda.config.fields import fill
from remuda.config.run_config import to_dict
from remuda.envs import EnvSpec
from remuda.errors import CheckpointError, ConfigError, nearest
from remuda.learning.learner import Learner
from remuda.learning.schedules import parse_schedule
from remuda.recipe import Round
from remuda.runs.evaluation import Result, play_episodes
from remuda.runs.train import Rounds


class Training:
    """A run that trains round by round. Use it as a context manager, or call `close` to end it early."""

    def __init__(self, rounds: Rounds, spec: EnvSpec) -> None:
        """Start the parts of the run. `rounds` comes from `remuda.runs.train.train`."""
        self._rounds, self._spec = rounds, spec
        self._result: Result | None = None
        self._log = next(rounds)
        self.path = self._log.directory.path
        if self._log.progress.steps >= self._log.config.steps:  # a resumed run that was complete
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._rounds.close()
        else:
            self.close()

    def __repr__(self) -> str:
        done = f"{self._log.progress.steps:,} of {self._log.config.steps:,} steps"
        return f"Training({str(self.path)!r}, {done}{', done' if self.done() else ''})"

    @property
    def learner(self) -> Learner:
        """The learner, with the algorithm, its optimizers and the number of updates."""
        learner = self._log.learner
        assert learner is not None
        return learner

    @property
    def result(self) -> Result:
        """The content of result.json; available when the run is done."""
        if self._result is None:
            raise ConfigError("the run has no result yet: call step() until done(), or close().")
        return self._result

    def done(self) -> bool:
        """Return whether the run has ended: all steps are done, or a signal or a callback has stopped it."""
        return self._result is not None

    def step(self) -> Round:
        """Sample, make the updates that are due, log the round, evaluate and save if due; return the round.

        If a signal arrived since the last call, no more is sampled: the run ends, and the last round is returned.
        """
        if self._result is not None:
            raise ConfigError("the run is done: it has no more rounds.")
        try:
            next(self._rounds)
        except StopIteration as end:
            self._result = end.value
        round = self._log.last_round
        if round is None:  # a signal arrived before the first round
            raise ConfigError("the run was stopped before its first round.")
        if round.is_last and self._result is None:
            self._finish()
        return round

    def save(self) -> Path:
        """Write a checkpoint of the last round, and return its directory."""
        round = self._log.last_round
        if round is None or self._result is not None:
            raise CheckpointError("there is no round to save: call save() between two calls of step().")
        self._log.save(round)
        self._log.checkpoints.wait()
        return self._log.directory.checkpoints / f"step-{round.progress.steps}"

    def evaluate(self, episodes: int = 20, deterministic: bool = True) -> Result:
        """Play whole episodes with the present agent; return mean_reward, std_reward, mean_length and returns.

        The result is not logged, and training is not affected.
        """
        if episodes < 1:
            raise ConfigError(f"episodes={episodes} is too small: play at least 1.")
        agent = self.learner.agent_on_cpu()
        return play_episodes(self._log.config, self._spec, episodes, agent, explore=not deterministic).summary()

    def set(self, name: str, value: float | str) -> None:
        """Change an option from now on, and in config.yaml: `algo.max_grad_norm`, or any option that is a schedule.

            run.set("algo.learning_rate", "linear(1e-4, 0)")

        A schedule is a function of the progress of the whole run, not of the part that remains.
        """
        config = self._log.config
        options = config.algo_options
        field = name.removeprefix("algo.")
        names = changeable(options, self.learner)
        if not name.startswith("algo.") or field not in names:
            hint = nearest(name, [f"algo.{each}" for each in names])
            raise ConfigError(f"{name} cannot change while {config.algo} trains: {hint}")
        changed = fill(options, {field: float(value) if field == "max_grad_norm" else str(value)}, "algo")
        apply(self.learner, changed, field)
        self._log.config = replace(config, algo_options=changed)
        self._log.directory.write_config(to_dict(self._log.config))
        self._log.log(f"{name} is {value} from {self._log.progress.steps:,} steps on")

    def close(self) -> None:
        """End the run: save the last round and write result.json. After the end of the run this does nothing."""
        if self._result is None:
            self._log.stop.is_closed = True
            self._finish()

    def _finish(self) -> None:
        try:
            next(self._rounds)
        except StopIteration as end:
            self._result = end.value


def changeable(options: AlgoOptions, learner: Learner) -> list[str]:
    """Return the options that only the learner's process reads, in every update: `max_grad_norm` and schedules."""
    rates = ["learning_rate", *(f"{group}_learning_rate" for group in options.group_learning_rates)]
    schedules = [item.name for item in fields(options) if item.metadata.get("schedule")]
    inside = [name for name in schedules if name not in rates and hasattr(learner.algorithm, name)]
    return [*rates, "max_grad_norm", *inside]


def apply(learner: Learner, options: AlgoOptions, name: str) -> None:
    """Let the learner use the present value of an option, which must be `changeable`."""
    if name == "max_grad_norm":
        learner.max_grad_norm = options.max_grad_norm or None
        return
    text = getattr(options, name)
    schedule = None if text is None else parse_schedule(text, f"algo.{name}")
    group = name.removesuffix("_learning_rate")
    if name == "learning_rate" and schedule is not None:
        learner.learning_rate = schedule
    elif group in options.group_learning_rates and schedule is not None:
        learner.own_rates = {**learner.own_rates, group: schedule}
    else:
        setattr(learner.algorithm, name, schedule)
