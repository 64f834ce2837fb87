"""The log of a run, to which a scheme reports after every round.

    with RunLog(directory, config, evaluate_agent, terminal, signals).open() as run_log:
        for _ in scheme.rounds(recipe, run_log):
            pass
        result = run_log.finish()

`RunLog` only coordinates. Metrics are in `metrics.py`, checkpoints in `checkpoints.py`, evaluations in
`evaluation.py`, and the conditions for stopping early in `stopping.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Self, cast

from remuda.config.run_config import RunConfig, to_dict
from remuda.core import Replay
from remuda.data.packing import unpack
from remuda.errors import Abandoned, CheckpointError, ConfigError, Interrupted, RanksDiverged, RemudaError
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.restoring import must_fit, of_this_version
from remuda.logs.notices import warnings_go_to
from remuda.logs.stopwatch import Stopwatch
from remuda.logs.terminal import TRAINING, Terminal, where_time_went
from remuda.recipe import Progress, Round
from remuda.runs.advice import resume_advice
from remuda.runs.checkpoints import (
    CUT_SHORT,
    LOG_STATE,
    CutWatch,
    RunCheckpoints,
    SamplerState,
    state_in,
    state_of,
)
from remuda.runs.directory import RunDirectory
from remuda.runs.evaluation import EvaluateAgent, Evaluations, Result, eval_episodes
from remuda.runs.metrics import MetricsState, RunMetrics
from remuda.runs.signals import StopSignals
from remuda.runs.stopping import Callback, StopConditions
from remuda.runs.verdict import remedies_for, verdict


class LogState(MetricsState):
    """State of the run's log in a checkpoint."""

    next: tuple[int, int, int]  # steps at which the next metrics line, checkpoint and evaluation are due
    is_owed: bool  # whether the metrics line of the checkpoint's step is still to be written


class RunLog:
    """The `recipe.Log` of a run, which writes to its run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        evaluate_agent: EvaluateAgent,
        terminal: Terminal,
        signals: StopSignals,
    ) -> None:
        self.directory, self.config, self.terminal = directory, config, terminal
        self.progress = Progress()
        self.learner: Learner | None = None
        self.last_round: Round | None = None
        self.stopwatch = Stopwatch()
        self.metrics = RunMetrics(config, self.stopwatch, self.log)
        self.evaluations = Evaluations(config, evaluate_agent, directory, terminal, self.stopwatch)
        self.checkpoints = RunCheckpoints(directory, config.checkpoint, self.stopwatch, self.log, self._get_state)
        self.stop = StopConditions(signals)
        self._cuts = CutWatch(config.sampler.envs, config.checkpoint.every, self.log)
        self._is_resumed = False
        self._resume_from: checkpoint.Checkpoint | None = None
        self._saved: LogState | None = None  # the log's state in the checkpoint from which the run is resumed
        self._is_whole = True  # whether all due updates of the last round were made
        self._start_counting()

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Functions that are called with every round; the run stops when one of them returns True."""
        return self.stop.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self.stop.callbacks = callbacks

    @contextmanager
    def open(self, is_resumed: bool = False, resume_from: checkpoint.Checkpoint | None = None) -> Iterator[Self]:
        """Keep the metric writers open inside the context.

        If `is_resumed`, first delete the metrics and evaluations that were logged after the checkpoint `resume_from`,
        or all of them if it is None, because the run then starts again from the beginning.
        """
        self._is_resumed, self._resume_from = is_resumed, resume_from
        self._saved = _state_in(resume_from)
        step = resume_from.step if resume_from is not None else 0
        if self._saved is not None:
            with of_this_version():
                step -= self._saved["is_owed"]  # delete the line of this step, too: `begin` writes it again
        with ExitStack() as stack:
            stack.callback(self.terminal.close)
            stack.enter_context(warnings_go_to(self.log))
            stack.enter_context(self.metrics.open(self.directory, step if is_resumed else None))
            if is_resumed:
                self.directory.cut_evaluations(step)
            try:
                yield self
            except (Exception, GeneratorExit):  # GeneratorExit: the user's own loop has abandoned the run
                self.checkpoints.wait()  # nothing may be written once the directory's lock is released
                raise
            self.checkpoints.wait()
            self.log(where_time_went(self.stopwatch.total))
            self.log(verdict(self.stopwatch.total, remedies_for(self.config))[1])

    def log(self, line: str, traceback: str = "") -> None:
        """Show a line on the terminal and append it to log.txt; a traceback is appended to log.txt only."""
        self.terminal.note(f"{line} The full traceback is in log.txt." if traceback else line)
        self.directory.log(line, traceback)

    # --- recipe.Log: what the scheme calls ---

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        """Load the checkpoint, if any, into the learner; return the run's counters and the sampler's state."""
        self.learner = learner
        found = self._resume_from
        if found is not None:
            with must_fit(found.path):
                learner.load_state_dict(found.learner)
            with of_this_version():
                self.progress = self.checkpoints.resume(found, learner.version)
            if self.progress.rounds == 0:
                self.progress.steps = 0  # no round was completed, so warm-up is repeated
            for sentence in found.skipped:
                self.log(f"warning: {sentence}")
            self.log(f"resumed from step-{found.step}: {self.progress.steps:,} of {self.config.steps:,} steps done")
            if (why := found.progress.get("inexact")) is not None and self.progress.steps < self.config.steps:
                self.log(f"the resumed run is not bit-equal to an uninterrupted one: {why}.")
            self._cuts.last_steps = self.progress.steps
        elif self._is_resumed:
            has_any = bool(checkpoint.list_checkpoints(self.directory.checkpoints))
            why = "the run was stopped before its first cut" if has_any else "the run has no checkpoint"
            self.log(f"{why}: it starts again from the beginning, with the same seed")
        envs = self.config.sampler.envs
        self.log(f"{self.directory.path}: {envs} env{'s' if envs > 1 else ''}, configuration in config.yaml")
        self.stopwatch.start(0.0 if self._saved is None else self._saved["elapsed"])
        return self.progress, None if found is None else found.blobs.get("sampler")

    def restore(self, replay: Replay) -> None:
        """Load the content of the replay from the checkpoint, if there is one."""
        self.checkpoints.restore_replay(self._resume_from, replay)

    def begin(self) -> None:
        """Point runs/latest to this run, and start to measure rates and intervals, now that warm-up is over.

        If a resumed run's checkpoint was saved before the metrics line of the same step was written, evaluate if due,
        and write this metrics line now.
        """
        self.directory.point_latest()
        size = self.config.algo_options.rows_per_round * self.config.sampler.envs
        first = "" if self.config.is_asynchronous else f" from the first {size:,} steps"
        self.terminal.begin(TRAINING + first)
        self.directory.log(f"training begins at {self.progress.steps:,} steps")
        self.stop.has_begun = True
        self._start_counting()
        if self._saved is not None and self._saved["is_owed"]:
            assert self.learner is not None
            mean_reward = self._evaluate_and_write(self.learner)
            self._save_if_best(mean_reward, lambda: state_in(self._resume_from))

    def _start_counting(self) -> None:
        steps, saved = self.progress.steps, self._saved
        self.metrics.start(steps, saved)
        self.metrics.lines.start(steps, None if saved is None else saved["next"][0])
        self.checkpoints.interval.start(steps, None if saved is None else saved["next"][1])
        self.evaluations.interval.start(steps, None if saved is None else saved["next"][2])

    def round(self, round: Round) -> bool:
        """Record a round; write metrics, evaluate and save if due; return whether the run must end."""
        self.stop.call_callbacks(round)
        self.metrics.add(round)
        self._cuts.add(round)
        for found in round.evaluations:
            self.evaluations.add_concurrent(found)
        self.checkpoints.poll()
        seconds = self.stopwatch.lap(round.seconds)
        self.learner, self._is_whole = round.learner, round.is_whole
        is_last = round.progress.steps >= self.config.steps
        if is_last:
            self.checkpoints.save(round, line_pending=True)  # save first, because an env may fail in the evaluation
        try:
            mean_reward = self._evaluate_and_write(round.learner)
        except Interrupted:
            self.log("the evaluation was stopped before its end: it is repeated when the run is resumed")
            self.checkpoints.save(round, line_pending=True)
            return True
        self.terminal.update(self.metrics.latest, round.progress.steps)
        self._save_if_best(mean_reward, lambda: state_of(round))
        self.checkpoints.save_if_due(round, is_last)
        must_end = self.stop.should_end()
        if must_end:
            self.checkpoints.save(round)
        elif not is_last:
            self.checkpoints.hold_if_slow(round, seconds)
        return must_end

    def _evaluate_and_write(self, learner: Learner) -> float | None:
        """Evaluate and write a metrics line if due; return the mean return of the evaluation, if there was one."""
        steps, mean_reward = self.progress.steps, None
        if self.evaluations.is_due(steps):
            mean_reward = self.evaluations.run(learner, self.checkpoints.replay, self.must_stop)
            self.evaluations.interval.restart(steps)
        if mean_reward is not None or steps >= self.config.steps or self.metrics.lines.is_due(steps):
            self.metrics.write_line(self.progress, learner.version, self.evaluations.take_metrics(steps))
        return mean_reward

    def _save_if_best(self, mean_reward: float | None, get_sampler_state: Callable[[], SamplerState]) -> None:
        if mean_reward is not None:
            assert self.learner is not None
            self.checkpoints.save_if_best(self.learner, self.progress, mean_reward, get_sampler_state)

    def should_stop(self) -> bool:
        """Return whether to stop at the end of the current round."""
        return self.stop.is_requested()

    def save(self, round: Round) -> None:
        """Write a checkpoint of this round unless there is one already."""
        self.checkpoints.save(round)

    def must_stop(self) -> bool:
        """Return whether to stop within the current round. Also refresh the terminal, as schemes call this often."""
        self.terminal.tick()
        return self.stop.must_end_now()

    def pass_signal(self, number: int) -> None:
        """Stop as if this process had received the signal, which another rank of the run has received."""
        self.stop.signals.receive(number)

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what was learned so far if a RemudaError ended the round. The arguments are those of `__exit__`.

        For Interrupted, which a signal causes, do nothing: `save_if_stopped` saves then.
        If ranks have diverged, do nothing either: what they learned is wrong.
        """
        if isinstance(error, RemudaError) and not isinstance(error, Interrupted | RanksDiverged):
            self.checkpoints.save_failed(self.learner, self.progress)

    def save_if_stopped(self, error: Interrupted) -> None:
        """Save what was learned before a signal interrupted a round; log a warning if an env call was abandoned."""
        if isinstance(error.__cause__, Abandoned):
            self.log(f"warning: {error}; worker processes (--scheme parallel) are replaced when they hang.")
        self.checkpoints.save_interrupted(self.learner, self.progress, self._cuts.is_between)

    def _get_state(self, line_pending: bool) -> LogState:
        """Return the log's state for a checkpoint.

        `line_pending` is True if the metrics line of this step is not written yet.
        """
        return {
            **self.metrics.get_state(),
            "next": (
                self.metrics.lines.next_steps,
                self.checkpoints.interval.next_steps,
                self.evaluations.interval.next_steps,
            ),
            "is_owed": line_pending,
        }

    # --- the end of the run ---

    def finish(self) -> Result:
        """Evaluate the final agent if it has not been evaluated yet; return the content of result.json.

        A run that was stopped by a signal or by `Training.close` is not evaluated. Raise ConfigError if warm-up has
        used all steps, and CheckpointError if a complete run could not be saved.
        """
        learner = self.learner
        assert learner is not None
        self.checkpoints.wait()
        steps, is_complete = self.progress.steps, self.progress.steps >= self.config.steps
        advice = resume_advice(self.directory.path, to_dict(self.config))
        if is_complete and not self.progress.rounds:
            raise ConfigError(
                f"all of --steps {self.config.steps:,} went into the random steps that spread the envs "
                "(sampler.decorrelate): use more steps, or fewer of these."
            )
        if is_complete and self.checkpoints.saved_steps < steps:
            raise CheckpointError(
                f"what was learned could not be saved after {steps:,} steps{self._describe_lost_steps()}: "
                f"make room, then continue with: {advice}"
            )
        status = "complete" if is_complete else f"stopped by {self.stop.reason}"
        if not self._is_whole:
            self.log(f"warning: {CUT_SHORT}")
        if not self.progress.rounds:
            self.log("nothing was learned yet: a resumed run starts from the beginning")
        if not is_complete:
            self.log(f"{status} after {steps:,} steps{self._describe_lost_steps()}; continue with: {advice}")
        if self.evaluations.result is None and not self.should_stop() and self.config.eval.episodes:
            self.terminal.note(f"evaluating {eval_episodes(self.config)} greedy episodes")
            with suppress(Interrupted):
                self.evaluations.run(learner, self.checkpoints.replay, self.must_stop)
        return {
            "status": status,
            "steps": steps,
            "updates": learner.version,
            "episodes": self.progress.episodes,
            "seconds": round(self.stopwatch.elapsed(), 3),
            "steps_per_second": round(self.metrics.steps_per_second(steps), 1),
            "time": {name: round(seconds, 3) for name, seconds in self.stopwatch.total.items()},
            "limit": verdict(self.stopwatch.total, {})[0],
            "eval": self.evaluations.result,
        }

    def _describe_lost_steps(self) -> str:
        """Return a phrase with the number of steps that a resumed run repeats, or "" if it repeats none."""
        saved = self._cuts.last_steps if self._cuts.is_between else self.checkpoints.saved_steps
        lost = self.progress.steps - saved
        return f", of which the last {lost:,} will be done again" if lost else ""


def _state_in(found: checkpoint.Checkpoint | None) -> LogState | None:
    """Return the state of the run's log in checkpoint `found`; None if `found` is None or contains no such state."""
    if found is None or LOG_STATE not in found.blobs:
        return None
    with of_this_version():
        # Checkpoints of earlier versions lack the run's times, so these are the defaults.
        times = {"elapsed": 0.0, "total": {}, "first_steps": found.progress["steps"]}
        return cast("LogState", {**times, **unpack(found.blobs[LOG_STATE])})
