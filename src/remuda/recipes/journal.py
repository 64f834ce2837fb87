"""The journal of a run: told of every round, it keeps metrics, evaluates, writes checkpoints and says when to stop.

with Journal(...).open() as journal:
    learner = scheme.run(recipe, journal)
    result = journal.finish(learner)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remuda.core import Progress, Replay, Round
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError, ConfigError, Interrupted, NoState, RemudaError
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.restoring import must_fit, of_this_version
from remuda.learning.saver import Saver
from remuda.logs.advice import resume_advice
from remuda.logs.meters import Window, summarise
from remuda.logs.notices import warnings_go_to
from remuda.logs.rundir import RunDirectory
from remuda.logs.terminal import Terminal, where_time_went
from remuda.logs.writers import MetricsFile, TensorBoard, WandB, Writer
from remuda.recipes.config import RunConfig, to_dict
from remuda.recipes.parts import eval_episodes
from remuda.recipes.signals import StopSignals
from remuda.recipes.verdict import remedies_for, verdict
from remuda.sampling.evaluation import Evaluation

Callback = Callable[[Round], Any]  # sees every round; returning True stops the run
LINES_PER_RUN = 200


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
        self._interval: dict[str, float] = defaultdict(float)  # seconds since the last line, by activity
        self._total: dict[str, float] = defaultdict(float)
        self._log_every = config.log.every or max(1, config.steps // LINES_PER_RUN)
        self._checkpoints, self._saved_steps = 0, 0
        self._saved: tuple[int, int] | None = None  # rounds and updates of the last checkpoint
        self._saver = Saver(directory.checkpoints, config.checkpoint.keep, self._written)
        self._has_begun = False
        self._kept: dict[str, Any] | None = None  # where the journal of a resumed run stood
        self._learner: Learner | None = None
        self._replay: Replay | None = None
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
                self._kept = unpack(resume_from.blobs["journal"])
                done -= self._kept["is_owed"]  # the line of that step is written again
        with ExitStack() as stack:
            stack.callback(self.terminal.close)
            stack.enter_context(warnings_go_to(self.say))
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
                self._saver.wait()  # the directory is about to be somebody else's
                raise
            self._saver.wait()
            self.say(where_time_went(self._total))
            self.say(verdict(self._total, remedies_for(self.config))[1])

    # --- what the scheme calls ---

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        """Counters and the sampler's state, and into the learner the weights, that the run starts from."""
        self._learner = learner
        found = self.resume_from
        if found is not None:
            with must_fit(found.path):
                learner.load_state_dict(found.learner)
            self._checkpoints = found.progress.pop("checkpoints", 0)
            with of_this_version():
                self.progress = Progress(**found.progress)
            self._saved, self._saved_steps = (self.progress.rounds, learner.version), self.progress.steps
            if self.progress.rounds == 0:
                self.progress.steps = 0  # warm-up is taken again
            for sentence in found.skipped:
                self.say(f"warning: {sentence}")
            self.say(f"resumed from step-{found.step}: {self.progress.steps:,} of {self.config.steps:,} steps done")
        elif self.is_resumed:
            self.say("no checkpoint was written before the run ended: it begins anew, with the same seed")
        self.say(f"{self.directory.path}: {self.config.sampler.envs} envs, settings in config.yaml")
        self._started = time.perf_counter()
        return self.progress, None if found is None else found.blobs.get("sampler")

    def restore(self, replay: Replay) -> None:
        """What the run had collected when its checkpoint was written."""
        self._replay = replay
        found = self.resume_from
        if found is not None and "replay" in found.blobs:
            with of_this_version():
                replay.load(self.directory.checkpoints / checkpoint.REPLAY, unpack(found.blobs.pop("replay")))

    def begin(self) -> None:
        """Warm-up is over: rates and intervals count from here."""
        self.directory.point_latest()
        self.directory.log(f"training begins at {self.progress.steps:,} steps")
        self._has_begun = True
        self._count_from_here()
        if self._kept is not None:
            self._window.set_state(self._kept["window"])
            self._sums.update(self._kept["sums"])
            if self._kept["is_owed"]:
                assert self._learner is not None
                self._evaluate_and_write(self.progress, self._learner)

    def _count_from_here(self) -> None:
        steps = self._first_steps = self._line_steps = self.progress.steps
        self._mark = time.perf_counter()
        points = [steps + every for every in (self._log_every, self.config.checkpoint.every, self.config.eval.every)]
        if self._kept is not None:  # the earlier of both: intervals may have been made shorter
            points = [min(point, kept) for point, kept in zip(points, self._kept["next"], strict=True)]
        self._next_line, self._next_checkpoint, self._next_evaluation = points

    def round(self, round: Round) -> bool:
        for episode in round.episodes:
            self._window.add(episode.values)
        for name, value in round.metrics.items():
            self._sums[name].append(value)
        for found in round.evaluations:
            self._watched = found
            with suppress(OSError):  # the newest is in the next metrics line, too, which says what is wrong
                self.directory.add_evaluation(found)
        self._saver.poll()
        self._count(round.seconds)
        self._learner = round.learner
        steps, last = round.progress.steps, round.progress.steps >= self.config.steps
        if last:
            self.save(round, is_owed=True)  # before the evaluation, which an env may still spoil
        try:
            self._evaluate_and_write(round.progress, round.learner)
        except Interrupted:
            self.say("the evaluation was stopped before its end: it is done when the run is resumed")
            if round.get_state is not None:
                self.save(round, is_owed=True)
            return True
        self.terminal.update(self._latest, steps)
        every = self.config.checkpoint.every
        is_due = round.was_cut or (every and steps >= self._next_checkpoint)
        if is_due and not last and round.get_state is not None:
            self._next_checkpoint = steps + every
            self.save(round)
        if True in [callback(round) for callback in self.callbacks]:  # all of them see it
            self.stopped_by = "callback"
        must_end = self.stopped_by is not None or self.should_stop()
        if must_end and round.get_state is not None:
            self.save(round)
        return must_end

    def should_stop(self) -> bool:
        return self.signals.received is not None

    def must_stop(self) -> bool:
        """Before training begins at once; later a round may take its time to end by itself."""
        return self.should_stop() and (not self._has_begun or time.monotonic() > self.signals.deadline)

    # --- the end ---

    def finish(self, learner: Learner) -> dict[str, Any]:
        """The last evaluation; what result.json says."""
        self._saver.wait()
        signal = self.signals.received
        complete = self.progress.steps >= self.config.steps
        advice = resume_advice(self.directory.path, to_dict(self.config))
        if complete and not self.progress.rounds:
            raise ConfigError(
                f"all of --steps {self.config.steps:,} went into the random steps that spread the envs "
                "(sampler.decorrelate): use more steps, or fewer of these."
            )
        if complete and self._saved_steps < self.progress.steps:
            raise CheckpointError(
                f"what was learned could not be saved after {self.progress.steps:,} steps{self._what_is_lost()}: "
                f"make room, then continue with: {advice}"
            )
        status = "complete" if complete else f"stopped by {signal.name if signal else self.stopped_by}"
        if not complete:
            self.say(f"{status} after {self.progress.steps:,} steps{self._what_is_lost()}; continue with: {advice}")
        if self.evaluation is None and signal is None and self.config.eval.episodes:
            self.terminal.note(f"evaluating {eval_episodes(self.config)} greedy episodes")
            with suppress(Interrupted):
                self._run_evaluation(learner)
        trained = sum(seconds for name, seconds in self._total.items() if name not in ("evaluation", "checkpoint"))
        steps = self.progress.steps - self._first_steps
        return {
            "status": status,
            "steps": self.progress.steps,
            "updates": learner.version,
            "episodes": self.progress.episodes,
            "seconds": round(time.perf_counter() - self._started, 3),
            "steps_per_second": round(steps / trained, 1) if trained else 0.0,
            "time": {name: round(seconds, 3) for name, seconds in self._total.items()},
            "limit": verdict(self._total, {})[0],
            "eval": self.evaluation,
        }

    def _what_is_lost(self) -> str:
        """Of a round that was given up, or of rounds after which this env allows no checkpoint."""
        lost = self.progress.steps - self._saved_steps
        return f", of which the last {lost:,} will be done again" if lost else ""

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was learned before something broke; nothing if nothing was. The envs begin anew from there."""
        if isinstance(error, RemudaError) and not isinstance(error, Interrupted):
            self.save_if_stopped()

    def save_if_stopped(self) -> None:
        """What was learned before a run was interrupted within a round; for schemes that are not exact anyway."""
        rounds, learner = self.progress.rounds, self._learner
        if learner is not None and rounds and self._saved != (rounds, learner.version):
            try:
                self._write(learner, None)
            except RemudaError as another:  # why the run ends is what the user must know of
                self.say(f"warning: what was learned since the last checkpoint is lost ({another})")

    def save(self, round: Round, is_owed: bool = False) -> None:
        """A checkpoint of the end of this round, unless it is there already; `is_owed`: before its metrics line."""
        if self._saved == (round.progress.rounds, round.learner.version):
            return
        with self._timed("checkpoint"):
            try:
                state = round.get_state() if round.get_state is not None else None
            except NoState as error:  # found out late: statistics of the user's own, an env that changes its kind
                self.say(
                    f"warning: envs begin anew where this run is resumed from {self.progress.steps:,} ({error})."
                )
                state = None
            self._write(round.learner, state, is_owed)

    def _write(self, learner: Learner, sampler: bytes | None, is_owed: bool = False) -> None:
        self._checkpoints += 1
        kept = {
            "window": self._window.get_state(),
            "sums": dict(self._sums),
            "next": (self._next_line, self._next_checkpoint, self._next_evaluation),
            "is_owed": is_owed,
        }
        progress = {**asdict(self.progress), "checkpoints": self._checkpoints}
        blobs = {"journal": pack(kept)} | ({} if sampler is None else {"sampler": sampler})
        files: list[str] = []
        self._saver.wait()  # who prunes must know all files that are there
        try:
            directory = self.directory.checkpoints / checkpoint.REPLAY
            replayed = None if self._replay is None else self._replay.save(directory)
        except OSError as error:
            self._not_saved(self.progress.steps, error)
            return
        if replayed is not None:
            blobs["replay"], files = pack(replayed), replayed["files"]
        taken = checkpoint.snapshot(self.progress.steps, learner.state_dict(), progress, blobs, files)
        self._saved = (self.progress.rounds, learner.version)  # not before: writers of the replay may fail to stop
        self._saver.save(taken, self._checkpoints)

    def _written(self, taken: checkpoint.Snapshot, found: Path | OSError) -> None:
        if isinstance(found, OSError):
            self._not_saved(taken.step, found)
            return
        self._saved_steps = taken.step
        self.directory.log(f"wrote {found.name}")

    def _not_saved(self, step: int, error: OSError) -> None:
        """A full disk: the run goes on, and the checkpoint before this one is whole."""
        self.say(f"warning: no checkpoint was written at {step:,} steps ({error}): make room.")
        self._saved = None

    def say(self, line: str) -> None:
        self.terminal.note(line)
        self.directory.log(line)

    # --- details ---

    def _count(self, seconds: Mapping[str, float]) -> None:
        """Seconds of one round by activity; what nobody claimed is `other`."""
        now = time.perf_counter()
        claimed = {**seconds, "other": max(0.0, now - self._mark - sum(seconds.values()))}
        self._mark = now
        for name, value in claimed.items():
            self._interval[name] += value
            self._total[name] += value

    def _evaluate_and_write(self, progress: Progress, learner: Learner) -> None:
        """What is due at the end of a round."""
        last = progress.steps >= self.config.steps
        if self._evaluate_if_due(progress, learner, last) or last or progress.steps >= self._next_line:
            self._write_line(progress, learner)

    def _write_line(self, progress: Progress, learner: Learner) -> None:
        steps, seconds = progress.steps, sum(self._interval.values()) or 1.0
        line = self._window.summary()
        line |= {name: summarise(name, of) for name, of in self._sums.items()}
        line |= {f"limits/{name}": self._interval[name] / seconds for name in ("env", "inference", "update", "wait")}
        line |= {
            "train/n_updates": float(learner.version),  # so far: a count is no mean over rounds
            "rollout/episodes": float(progress.episodes),
            "rollout/restarts": float(progress.restarts),
            "rollout/dropped": float(progress.dropped),
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
                self.say(f"warning: metrics at {steps:,} steps are lost ({error}): make room.")
        self._latest, self._line_steps, self._next_line = {**self._latest, **line}, steps, steps + self._log_every
        self._sums.clear()
        self._interval.clear()

    def _evaluate_if_due(self, progress: Progress, learner: Learner, last: bool) -> bool:
        options = self.config.eval
        due = options.every and progress.steps >= self._next_evaluation
        if not options.episodes or not (due or last):
            return False
        self._run_evaluation(learner)
        self._next_evaluation = progress.steps + options.every
        return True

    def _run_evaluation(self, learner: Learner) -> None:
        paused = self._replay.paused() if self._replay is not None else nullcontext()
        with self._timed("evaluation"), paused:
            found = self._evaluate(learner.agent_on_cpu(), self.must_stop)
        self.evaluation = found.summary()
        self.directory.log(f"evaluation: {self.evaluation['mean_reward']:.2f} over {len(found.returns)} episodes")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._total[name] += time.perf_counter() - start
        self._mark = time.perf_counter()
