"""`remuda.start`: a run whose rounds are called one by one from the user's own loop.

run = remuda.start("ppo", env="CartPole-v1", steps=200_000)
while not run.done():
    round = run.step()                              # samples and learns once; logs, evaluates, saves if due
    if round.progress.episodes > 500:
        run.set("algo.learning_rate", 1e-4)
print(run.result["eval"])
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar, Self

from remuda.config.algo_base import AlgoOptions
from remuda.config.fields import fill
from remuda.config.run_config import to_dict
from remuda.envs import EnvSpec
from remuda.errors import CheckpointError, ConfigError, Interrupted, nearest
from remuda.learning.learner import Learner
from remuda.recipe import Round
from remuda.runs.evaluation import Result, play_episodes
from remuda.runs.train import Rounds


class Training:
    """A run that trains round by round. Use it as a context manager, or call `close` to end it early.

    Only one `Training` can be open in a process, because it handles the signals of the process and sets the number of
    torch threads. Only the thread that started a `Training` may call its methods.
    """

    path: Path  # the run directory
    _open: ClassVar[weakref.ref[Training] | None] = None

    def __init__(self, rounds: Rounds, spec: EnvSpec) -> None:
        """Start the run, and wait until training can begin. `rounds` is the result of `remuda.runs.train.train`."""
        other = Training._open() if Training._open is not None else None
        if other is not None and not other.done():
            raise ConfigError(f"the run {other.path} is still open in this process: call its close() first.")
        self._rounds, self._spec = rounds, spec
        self._thread = threading.get_ident()
        self._result: Result | None = None
        self._has_failed = False
        try:
            self._log = next(rounds)
        except StopIteration as end:  # a signal ended the scheme before training began
            stopped = Interrupted(f"{end.value['status']} before training began.")
            stopped.signal = end.value["signal"] or stopped.signal
            raise stopped from None
        self.path = self._log.directory.path
        Training._open = weakref.ref(self)
        if self._log.progress.steps >= self._log.config.steps:  # the run was complete before it was resumed
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        elif not self._has_ended():
            try:
                if self._log.last_round is not None:
                    self._log.save(self._log.last_round)
            finally:
                self._has_failed = True
                self._rounds.close()

    def __repr__(self) -> str:
        done = f"{self._log.progress.steps:,} of {self._log.config.steps:,} steps"
        return f"Training({str(self.path)!r}, {done}{', ended' if self._has_ended() else ''})"

    @property
    def learner(self) -> Learner:
        """The learner, with the algorithm, its optimizers and the number of updates."""
        learner = self._log.learner
        assert learner is not None
        return learner

    @property
    def result(self) -> Result:
        """The content of result.json; available once the run has ended without an error."""
        if self._result is None:
            why = "it failed" if self._has_failed else "call step() until done(), or close()"
            raise ConfigError(f"the run has no result: {why}.")
        return self._result

    def done(self) -> bool:
        """Return whether the run has ended: after its last step, by a callback, a signal or `close`, or by an error.

        If a signal has arrived since the last round, this call saves that round and ends the run.
        """
        if not self._has_ended() and self._log.should_stop():
            self._finish()
        return self._has_ended()

    def step(self) -> Round:
        """Sample, make the updates that are due, log the round, evaluate and save if due; return the round.

        Raise Interrupted if a signal ended the run after the previous round, and ConfigError if the run had ended.
        """
        self._must_be_open()
        before = self._log.last_round
        self._advance()
        round = self._log.last_round
        if round is None or round is before:  # no new round: a signal arrived after the caller had called `done`
            raise Interrupted(f"{self.result['status']}: there are no more rounds.")
        if round.is_last:
            self._finish()
        return round

    def save(self) -> Path:
        """Write a checkpoint of the last round, and return the directory of the checkpoint.

        With checkpoint.cut_episodes, a resumed run still continues from the last cut, not from this checkpoint.
        """
        self._must_be_open()
        round = self._log.last_round
        if round is None:
            raise CheckpointError("there is no round to save yet: call step() first.")
        self._log.save(round)
        self._log.checkpoints.wait()
        path = self._log.directory.checkpoints / f"step-{round.progress.steps}"
        if not path.is_dir():
            raise CheckpointError(f"{path} could not be written; log.txt says why.")
        return path

    def evaluate(self, episodes: int = 20, deterministic: bool = True) -> Result:
        """Play whole episodes; return a dict of mean_reward, std_reward, mean_length, episodes and returns.

        The current agent plays. The result is not logged, and training is not affected. A signal ends the evaluation
        with `Interrupted`.
        """
        if episodes < 1:
            raise ConfigError(f"episodes={episodes} is too small: play at least 1.")
        agent, stop = self.learner.agent_on_cpu(), self._log.should_stop
        found = play_episodes(self._log.config, self._spec, episodes, agent, stop, explore=not deterministic)
        return found.summary()

    def set(self, name: str, value: float | str) -> None:
        """Change an option for the rest of the run, and write the new value to config.yaml.

            run.set("algo.learning_rate", "linear(1e-4, 0)")

        The options that may change are `algo.max_grad_norm` and the schedules in `algo` that only the learner reads;
        ConfigError is raised for any other option. A schedule is a function of the progress of the whole run, not of
        the part that remains.
        """
        self._must_be_open()
        config = self._log.config
        options, field = config.algo_options, name.removeprefix("algo.")
        names = changeable(options, self.learner)
        if not name.startswith("algo.") or field not in names:
            hint = nearest(name, [f"algo.{each}" for each in names])
            raise ConfigError(f"{name} cannot change while {config.algo} trains: {hint}")
        changed = replace(
            config, algo_options=fill(options, {field: value if field == "max_grad_norm" else str(value)}, "algo")
        )
        if changed == config:
            return
        self.learner.set_option(field, getattr(changed.algo_options, field))
        self._log.config = changed
        self._log.directory.write_config(to_dict(changed))
        self._log.log(f"{name} is {value} from {self._log.progress.steps:,} steps on")

    def close(self) -> None:
        """End the run: save the last round and write result.json. Do nothing if the run has already ended."""
        if not self._has_ended():
            self._log.stop.is_closed = True
            self._finish()

    def _has_ended(self) -> bool:
        return self._has_failed or self._result is not None

    def _must_be_open(self) -> None:
        if self._has_ended():
            raise ConfigError("the run has ended: it has no more rounds; continue it with remuda.Run(path).start().")
        if threading.get_ident() != self._thread:
            raise ConfigError("the run was started in another thread: call it there.")

    def _finish(self) -> None:
        while not self._has_ended():
            self._advance()

    def _advance(self) -> None:
        """Continue to the next round, or to the end of the run."""
        try:
            next(self._rounds)
        except StopIteration as end:
            self._result = end.value
        except BaseException:
            self._has_failed = True
            raise


def changeable(options: AlgoOptions, learner: Learner) -> list[str]:
    """Return the names of the options that `Training.set` may change.

    These are `max_grad_norm` and the schedules that only the learner's process reads, once for every update.
    """
    rates = ["learning_rate", *(f"{group}_learning_rate" for group in options.group_learning_rates)]
    schedules = [item.name for item in fields(options) if item.metadata.get("schedule")]
    inside = [name for name in schedules if name not in rates and hasattr(learner.algorithm, name)]
    return [*rates, "max_grad_norm", *inside]
