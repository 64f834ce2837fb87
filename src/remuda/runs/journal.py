"""The journal of a run: told of every round, it keeps metrics, evaluates, writes checkpoints and says when to stop.

with Journal(...).open() as journal:
    learner = scheme.run(recipe, journal)
    result = journal.finish(learner)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Self

from remuda.build.envs import eval_episodes
from remuda.config.run_config import RunConfig, to_dict
from remuda.core import Replay
from remuda.data.packing import unpack
from remuda.errors import Abandoned, CheckpointError, ConfigError, Interrupted, RemudaError
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.restoring import must_fit, of_this_version
from remuda.logs.meters import Window, as_number, summarize
from remuda.logs.notices import warnings_go_to
from remuda.logs.stopwatch import Stopwatch
from remuda.logs.terminal import TRAINING, Terminal, where_time_went
from remuda.logs.writers import MetricsFile, TensorBoard, WandB, Writer
from remuda.recipe import Progress, Round
from remuda.runs.advice import resume_advice
from remuda.runs.checkpoints import CUT_SHORT, CutWatch, RunCheckpoints, SamplerState, state_in, state_of
from remuda.runs.directory import RunDirectory
from remuda.runs.signals import StopSignals
from remuda.runs.verdict import remedies_for, verdict
from remuda.sampling.evaluation import Evaluation

Callback = Callable[[Round], Any]  # sees every round; returning True stops the run
LINES_PER_RUN = 200
# Seconds a round must have taken for the sampler's state to be kept in memory at its end. A stop signal may interrupt
# the round after it, whose end would take longer than the signal allows.
SLOW_ROUND_SECONDS = 1.0
MID_ROUND = "the run was stopped in the middle of a round, so new episodes start"
FAILED = SamplerState(None, "a round failed, so new episodes start")


class Journal:
    """Implements core.Log on a run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        evaluate: Callable[[Any, Callable[[], bool]], Evaluation],
        terminal: Terminal,
        signals: StopSignals,
    ) -> None:
        self.directory, self.config, self.terminal, self.signals = directory, config, terminal, signals
        self.callbacks: Sequence[Callback] = ()
        self.is_resumed = False
        self.resume_from: checkpoint.Checkpoint | None = None
        self.progress = Progress()
        self.evaluation: dict[str, Any] | None = None
        self._watched: dict[str, Any] | None = None  # the last evaluation of a process of its own
        self.stopped_by: str | None = None
        self._evaluate = evaluate
        self._window = Window(config.log.window)
        self._writers: list[Writer] = []
        self._sums: dict[str, list[float]] = defaultdict(list)
        self._watch = Stopwatch()
        self._log_every = config.log.every or max(1, config.steps // LINES_PER_RUN)
        self._checkpoints = RunCheckpoints(directory, config.checkpoint, self.log)
        self._cuts = CutWatch(config.sampler.envs, config.checkpoint.every, self.log)
        self._mean_reward: float | None = None  # of an evaluation at the end of this round
        self._is_whole = True  # all due updates of the last round were made
        self._held: tuple[int, SamplerState] | None = None  # rounds, and the sampler's state after them
        self._has_begun = False
        self._kept: dict[str, Any] | None = None  # where the journal of a resumed run stood
        self._learner: Learner | None = None
        self._latest: dict[str, float] = {}
        self._started = time.perf_counter()
        self._count_from_here()

    @contextmanager
    def open(self, is_resumed: bool = False, resume_from: checkpoint.Checkpoint | None = None) -> Iterator[Self]:
        """Writers are open inside; what a resumed run logged after its checkpoint, if there is one, is dropped."""
        options, self.is_resumed, self.resume_from = self.config.log, is_resumed, resume_from
        done = resume_from.step if resume_from is not None else 0
        if resume_from is not None and "journal" in resume_from.blobs:
            with of_this_version():
                # Checkpoints of earlier versions do not hold the run's times.
                times = {"elapsed": 0.0, "total": {}, "first_steps": resume_from.progress["steps"]}
                self._kept = {**times, **unpack(resume_from.blobs["journal"])}
                done -= self._kept["is_owed"]  # the line of that step is written again
        with ExitStack() as stack:
            stack.callback(self.terminal.close)
            stack.enter_context(warnings_go_to(self.log))
            files = stack.enter_context(closing(MetricsFile(self.directory.path)))
            self._writers = [files]
            if is_resumed:
                files.resume(done)
                self.directory.cut_evaluations(done)
            if options.tensorboard:
                board = stack.enter_context(closing(TensorBoard(self.directory.tb)))
                self._writers.append(board)
                if is_resumed:
                    board.resume(done)
            if options.wandb:
                online = WandB(options.wandb, self.directory.path, to_dict(self.config))
                self._writers.append(stack.enter_context(closing(online)))
            try:
                yield self
            except Exception:
                self._checkpoints.wait()  # before another process may write to the directory
                raise
            self._checkpoints.wait()
            self.log(where_time_went(self._watch.total))
            self.log(verdict(self._watch.total, remedies_for(self.config))[1])

    # --- what the scheme calls ---

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        """Counters and the sampler's state, and into the learner the weights, that the run starts from."""
        self._learner = learner
        found = self.resume_from
        if found is not None:
            with must_fit(found.path):
                learner.load_state_dict(found.learner)
            with of_this_version():
                self.progress = self._checkpoints.resume(found, learner.version)
            if self.progress.rounds == 0:
                self.progress.steps = 0  # warm-up is taken again
            for sentence in found.skipped:
                self.log(f"warning: {sentence}")
            self.log(f"resumed from step-{found.step}: {self.progress.steps:,} of {self.config.steps:,} steps done")
            if (why := found.progress.get("inexact")) is not None and self.progress.steps < self.config.steps:
                self.log(f"it is not bit-equal to a run that was never stopped: {why}.")
            self._cuts.last_steps = self.progress.steps
        elif self.is_resumed:
            has_any = bool(checkpoint.list_checkpoints(self.directory.checkpoints))
            why = (
                "it was stopped before its first cut" if has_any else "no checkpoint was written before the run ended"
            )
            self.log(f"{why}: it begins anew, with the same seed")
        envs = self.config.sampler.envs
        self.log(f"{self.directory.path}: {envs} env{'s' if envs > 1 else ''}, settings in config.yaml")
        self._started = time.perf_counter() - (0.0 if self._kept is None else self._kept["elapsed"])
        return self.progress, None if found is None else found.blobs.get("sampler")

    def restore(self, replay: Replay) -> None:
        """Load what the run had collected when its checkpoint was written."""
        self._checkpoints.replay = replay
        found = self.resume_from
        if found is not None and "replay" in found.blobs:
            with of_this_version():
                self._checkpoints.restore(found, unpack(found.blobs.pop("replay")))

    def begin(self) -> None:
        """Warm-up is over: rates and intervals count from here."""
        self.directory.point_latest()
        size = self.config.algo_options.rows_per_round * self.config.sampler.envs
        first = "" if self.config.scheme == "async" else f" from the first {size:,} steps"
        self.terminal.begin(TRAINING + first)
        self.directory.log(f"training begins at {self.progress.steps:,} steps")
        self._has_begun = True
        self._count_from_here()
        if self._kept is not None:
            self._watch.total.update(self._kept["total"])
            self._window.set_state(self._kept["window"])
            self._sums.update(self._kept["sums"])
            if self._kept["is_owed"]:
                assert self._learner is not None
                self._evaluate_and_write(self.progress, self._learner)
                self._keep_if_best(lambda: state_in(self.resume_from))

    def _count_from_here(self) -> None:
        steps = self._first_steps = self._line_steps = self.progress.steps
        self._watch.restart()
        points = [steps + every for every in (self._log_every, self.config.checkpoint.every, self.config.eval.every)]
        if self._kept is not None:  # the earlier of both: intervals may have been made shorter
            points = [min(point, kept) for point, kept in zip(points, self._kept["next"], strict=True)]
            self._first_steps = self._kept["first_steps"]
        self._next_line, self._next_checkpoint, self._next_evaluation = points

    def round(self, round: Round) -> bool:
        if True in [callback(round) for callback in self.callbacks]:  # every callback sees it, and may add metrics
            self.stopped_by = "callback"
        for episode in round.episodes:
            self._window.add(episode.values)
        for name, value in round.metrics.items():
            self._sums[name].append(as_number(name, value))
        self._cuts.watch(round)
        for found in round.evaluations:
            self._watched = found
            with suppress(OSError):  # the next metrics line holds the newest one, and reports the full disk
                self.directory.add_evaluation(found)
        self._checkpoints.poll()
        seconds = self._watch.lap(round.seconds)
        self._learner, self._mean_reward, self._is_whole = round.learner, None, round.is_whole
        steps, last = round.progress.steps, round.progress.steps >= self.config.steps
        if last:
            self.save(round, is_owed=True)  # before the evaluation, in which an env may still fail
        try:
            self._evaluate_and_write(round.progress, round.learner)
        except Interrupted:
            self.log("the evaluation was stopped before its end: it is done when the run is resumed")
            self.save(round, is_owed=True)
            return True
        self.terminal.update(self._latest, steps)
        self._save_if_due(round, last)
        must_end = self.stopped_by is not None or self.should_stop()
        if must_end:
            self.save(round)
        elif seconds > SLOW_ROUND_SECONDS and not last:
            with self._watch.timed("checkpoint"):
                self._held = (round.progress.rounds, state_of(round))
        return must_end

    def _save_if_due(self, round: Round, last: bool) -> None:
        steps, every = round.progress.steps, self.config.checkpoint.every
        self._keep_if_best(lambda: state_of(round))
        is_due = round.was_cut or (every and steps >= self._next_checkpoint and not round.cut_follows)
        if is_due and not last:
            self._next_checkpoint = steps + every
            self.save(round)

    def _keep_if_best(self, get_state: Callable[[], SamplerState]) -> None:
        """Keep a checkpoint of the weights that were just evaluated if none did better (checkpoint.keep=best)."""
        steps, mean_reward = self.progress.steps, self._mean_reward
        if mean_reward is not None and self._checkpoints.is_best(steps, mean_reward):
            assert self._learner is not None
            with self._watch.timed("checkpoint"):  # again if there is one: it does not know yet that it is the best
                self._write(self._learner, get_state())
                self._checkpoints.mark_best(steps, mean_reward)

    def should_stop(self) -> bool:
        return self.signals.received is not None

    def must_stop(self) -> bool:
        """Return whether to stop at once; a round may end by itself first. Polled often: it also drives the view."""
        self.terminal.tick()
        return self.should_stop() and (not self._has_begun or time.monotonic() > self.signals.deadline)

    # --- the end ---

    def finish(self, learner: Learner) -> dict[str, Any]:
        """The last evaluation; what result.json says."""
        self._checkpoints.wait()
        signal = self.signals.received
        complete = self.progress.steps >= self.config.steps
        advice = resume_advice(self.directory.path, to_dict(self.config))
        if complete and not self.progress.rounds:
            raise ConfigError(
                f"all of --steps {self.config.steps:,} went into the random steps that spread the envs "
                "(sampler.decorrelate): use more steps, or fewer of these."
            )
        if complete and self._checkpoints.saved_steps < self.progress.steps:
            raise CheckpointError(
                f"what was learned could not be saved after {self.progress.steps:,} steps{self._what_is_lost()}: "
                f"make room, then continue with: {advice}"
            )
        status = "complete" if complete else f"stopped by {signal.name if signal else self.stopped_by}"
        if not self._is_whole:
            self.log(f"warning: {CUT_SHORT}")
        if not self.progress.rounds:
            self.log("nothing was learned yet: a resumed run begins anew")
        if not complete:
            self.log(f"{status} after {self.progress.steps:,} steps{self._what_is_lost()}; continue with: {advice}")
        if self.evaluation is None and signal is None and self.config.eval.episodes:
            self.terminal.note(f"evaluating {eval_episodes(self.config)} greedy episodes")
            with suppress(Interrupted):
                self._run_evaluation(learner)
        trained, steps = self._watch.trained(), self.progress.steps - self._first_steps
        return {
            "status": status,
            "steps": self.progress.steps,
            "updates": learner.version,
            "episodes": self.progress.episodes,
            "seconds": round(time.perf_counter() - self._started, 3),
            "steps_per_second": round(steps / trained, 1) if trained else 0.0,
            "time": {name: round(seconds, 3) for name, seconds in self._watch.total.items()},
            "limit": verdict(self._watch.total, {})[0],
            "eval": self.evaluation,
        }

    def _what_is_lost(self) -> str:
        """Say how many steps a resumed run samples again, if any: those since the last exact cut, or a full disk."""
        lost = self.progress.steps - self._checkpoints.saved_steps
        if self._cuts.is_between:
            lost = self.progress.steps - self._cuts.last_steps
        return f", of which the last {lost:,} will be done again" if lost else ""

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what was learned before something broke, if anything was; new episodes start from there."""
        if isinstance(error, RemudaError) and not isinstance(error, Interrupted):
            self._save_within_round(FAILED)

    def save_if_stopped(self, error: Interrupted) -> None:
        """Save what was learned before a signal interrupted a round; name an env that did not return."""
        if isinstance(error.__cause__, Abandoned):
            self.log(f"warning: {error}; worker processes (--scheme parallel) are replaced when they hang.")
        held, rounds = self._held, self.progress.rounds
        is_held = held is not None and held[0] == rounds
        self._save_within_round(held[1] if held and is_held else SamplerState(None, MID_ROUND, self._cuts.is_between))

    def _save_within_round(self, state: SamplerState) -> None:
        learner = self._learner
        if learner is None or not self.progress.rounds or self._checkpoints.has(self.progress, learner):
            return
        try:
            self._write(learner, state)
        except RemudaError as another:  # the user must learn why the run ends, not of this
            self.log(f"warning: what was learned since the last checkpoint is lost ({another})")

    def save(self, round: Round, is_owed: bool = False) -> None:
        """Write a checkpoint of this round's end unless there is one; `is_owed`: before its metrics line."""
        if not self._checkpoints.has(round.progress, round.learner):
            with self._watch.timed("checkpoint"):
                self._write(round.learner, state_of(round), is_owed)

    def _write(self, learner: Learner, sampler: SamplerState, is_owed: bool = False) -> None:
        kept = {
            "window": self._window.get_state(),
            "sums": dict(self._sums),
            "next": (self._next_line, self._next_checkpoint, self._next_evaluation),
            "is_owed": is_owed,
            "first_steps": self._first_steps,
            "total": dict(self._watch.total),
            "elapsed": time.perf_counter() - self._started,
        }
        self._checkpoints.save(learner, self.progress, sampler, kept)

    def log(self, line: str, traceback: str = "") -> None:
        """Show a line and keep it in log.txt, where a traceback follows it."""
        self.terminal.note(f"{line} The whole traceback is in log.txt." if traceback else line)
        self.directory.log(line, traceback)

    # --- details ---

    def _evaluate_and_write(self, progress: Progress, learner: Learner) -> None:
        """What is due at the end of a round."""
        last = progress.steps >= self.config.steps
        if self._evaluate_if_due(progress, learner, last) or last or progress.steps >= self._next_line:
            self._write_line(progress, learner)

    def _write_line(self, progress: Progress, learner: Learner) -> None:
        steps, seconds = progress.steps, sum(self._watch.interval.values()) or 1.0
        line = self._window.summary()
        line |= {name: summarize(name, of) for name, of in self._sums.items()}
        line |= {
            f"limits/{name}": self._watch.interval[name] / seconds for name in ("env", "inference", "update", "wait")
        }
        line |= {
            "train/n_updates": float(learner.version),  # so far: a count is no mean over rounds
            "rollout/episodes": float(progress.episodes),
            "rollout/restarts": float(progress.restarts),
            "rollout/dropped": float(progress.dropped),
            "rollout/cut": float(progress.cut),
            "time/total_timesteps": float(steps),
            "time/iterations": float(progress.rounds),
            "time/fps": (steps - self._line_steps) / seconds,
            "time/time_elapsed": time.perf_counter() - self._started,
        }
        if self._watched is not None:
            line |= {f"eval/{name}": self._watched[name] for name in ("mean_reward", "std_reward", "mean_length")}
            line["eval/steps"] = float(self._watched["steps"])  # of the weights that were evaluated
            self._watched = None
        if self.evaluation is not None:
            line |= {f"eval/{name}": self.evaluation[name] for name in ("mean_reward", "std_reward", "mean_length")}
            line["eval/steps"] = float(steps)
            self.evaluation = None if steps < self.config.steps else self.evaluation
        for writer in self._writers:
            try:
                writer.write(steps, line)
            except OSError as error:
                self.log(f"warning: metrics at {steps:,} steps are lost ({error}): make room.")
        self._latest, self._line_steps, self._next_line = {**self._latest, **line}, steps, steps + self._log_every
        self._sums.clear()
        self._watch.interval.clear()

    def _evaluate_if_due(self, progress: Progress, learner: Learner, last: bool) -> bool:
        options = self.config.eval
        due = options.every and progress.steps >= self._next_evaluation
        if not options.episodes or not (due or last):
            return False
        self._run_evaluation(learner)
        self._next_evaluation = progress.steps + options.every
        return True

    def _run_evaluation(self, learner: Learner) -> None:
        self.terminal.begin("evaluating")
        replay = self._checkpoints.replay
        paused = replay.paused() if replay is not None else nullcontext()
        with self._watch.timed("evaluation"), paused:
            found = self._evaluate(learner.agent_on_cpu(), self.must_stop)
        self.evaluation = found.summary()
        self._mean_reward = self.evaluation["mean_reward"]
        self.directory.log(f"evaluation: {self.evaluation['mean_reward']:.2f} over {len(found.returns)} episodes")
