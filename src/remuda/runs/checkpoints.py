"""The checkpoints of one run: what they contain, when they are written, and which of them allow an exact resume.

checkpoints = RunCheckpoints(directory, options, stopwatch, log, get_log_state)
checkpoints.save_if_due(round, is_last=False)          # a thread writes the checkpoint in the background
checkpoints.save_if_best(learner, progress, mean_reward, lambda: state_of(round))      # checkpoint.keep=best
checkpoints.wait()
find_checkpoint(run)                                   # the checkpoint that a resumed run continues from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from remuda.config.run_options import CheckpointOptions
from remuda.core import Replay
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError, NoState, RemudaError
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.restoring import of_this_version
from remuda.learning.saver import Saver
from remuda.logs.stopwatch import Stopwatch
from remuda.parts import PartedReplay
from remuda.recipe import Progress, Round
from remuda.runs.directory import RunDirectory
from remuda.runs.intervals import Interval

CUT_SHORT = "its last round was stopped before all of its updates were made"
LOG_STATE = "journal"  # name of the blob with the state of the run's log; existing checkpoints contain this name
# If a round takes longer than this, a stop signal may interrupt the next round, which is probably as slow. Therefore
# the sampler's state after the slow round is kept in memory.
SLOW_ROUND_SECONDS = 1.0


@dataclass(frozen=True)
class SamplerState:
    """The sampler's part of a checkpoint, and whether a run resumed from it is bit-equal to an uninterrupted run."""

    blob: bytes | None  # the saved state of the sampler; None if a resumed run starts new episodes
    inexact: str | None = None  # the reason why the resumed run is not bit-equal; None if it is bit-equal
    is_between_cuts: bool = False  # if True, an exact resume needs an earlier checkpoint, made when episodes were cut


FAILED = SamplerState(None, "a round failed, so new episodes start")
MID_ROUND = "the run was stopped in the middle of a round, so new episodes start"


def state_of(round: Round) -> SamplerState:
    """Return the sampler's state after this round, for a checkpoint."""
    if round.get_state is None:
        return SamplerState(None, "asynchronous samplers start new episodes")
    if round.was_cut and round.is_whole:
        return SamplerState(None)  # exact, because all envs start new episodes here in an uninterrupted run, too
    cuts = round.was_cut or round.cut_follows
    try:
        blob = None if round.was_cut else round.get_state()
    except NoState as error:
        reason = f"the state of its envs cannot be saved ({error}), so new episodes start"
        return SamplerState(None, reason, cuts)
    return SamplerState(blob, None if round.is_whole else CUT_SHORT, cuts)


def state_in(found: checkpoint.Checkpoint | None) -> SamplerState:
    """Return the sampler's state in the checkpoint `found`, from which a run is resumed."""
    assert found is not None
    return SamplerState(found.blobs.get("sampler"), found.progress.get("inexact"), found.is_between_cuts)


class RunCheckpoints:
    """Writes checkpoints of a run's learner, progress, sampler and replay. Nothing else writes to their directory."""

    def __init__(
        self,
        directory: RunDirectory,
        options: CheckpointOptions,
        stopwatch: Stopwatch,
        log: Callable[[str], None],
        get_log_state: Callable[[bool], Mapping[str, object]],
    ) -> None:
        """Prepare to write checkpoints to `directory`.

        `get_log_state` returns the state of the run's log for a checkpoint. Its argument is True if the metrics line
        of the checkpoint's step is not written yet.
        """
        self.interval = Interval(options.every)
        self.replay: Replay | None = None
        self.saved_steps = 0  # number of env steps at the newest checkpoint on disk
        self.best: dict[str, float] | None = None  # step and mean_reward of the best evaluation so far
        self._directory, self._options, self._stopwatch = directory, options, stopwatch
        self._log, self._get_log_state = log, get_log_state
        self._count = 0
        self._saved: tuple[int, int] | None = None  # numbers of rounds and updates at the last checkpoint
        self._held: tuple[int, SamplerState] | None = None  # kept by `hold_if_slow`: rounds done, sampler's state
        self._saver = Saver(directory.checkpoints, options.keep, self._on_written)

    def resume(self, found: checkpoint.Checkpoint, version: int) -> Progress:
        """Restore the counts from checkpoint `found`, saved after `version` updates; return the saved `Progress`."""
        saved = dict(found.progress)
        self._count, self.best = saved.pop("checkpoints", 0), saved.pop("best", None)
        saved.pop("inexact", None)
        progress = Progress(**saved)
        self._saved, self.saved_steps = (progress.rounds, version), progress.steps
        return progress

    def restore_replay(self, found: checkpoint.Checkpoint | None, replay: Replay) -> None:
        """Include `replay` in checkpoints from now on, and load its content from checkpoint `found`, if any."""
        self.replay, directory = replay, self._directory.checkpoints / checkpoint.REPLAY
        if isinstance(replay, PartedReplay):
            replay.directory = directory
        if found is not None and "replay" in found.blobs:
            with of_this_version():
                state = unpack(found.blobs.pop("replay"))
                replay.load(directory, state)

    # --- when to save ---

    def save_if_due(self, round: Round, is_last: bool) -> None:
        """Write a checkpoint if `checkpoint.every` or a cut of all episodes requires one after this round.

        If `is_last`, write none: `RunLog` saves the last round itself.
        """
        steps = round.progress.steps
        if (round.was_cut or (self.interval.is_due(steps) and not round.cut_follows)) and not is_last:
            self.interval.restart(steps)
            self.save(round)

    def save_if_best(
        self, learner: Learner, progress: Progress, mean_reward: float, get_sampler_state: Callable[[], SamplerState]
    ) -> None:
        """With checkpoint.keep=best, keep a checkpoint of the weights just evaluated if they are the best so far."""
        is_worse = self.best is not None and mean_reward <= self.best["mean_reward"]
        if self._options.keep != "best" or is_worse:
            return
        self.best = {"step": progress.steps, "mean_reward": mean_reward}
        # Overwrite an existing checkpoint of this step: it was saved before the evaluation, so it lacks the result.
        with self._stopwatch.timed("checkpoint"):
            self._write(learner, progress, get_sampler_state())
            self._mark_best(progress.steps, mean_reward)

    def save(self, round: Round, line_pending: bool = False) -> None:
        """Write a checkpoint of the state after this round, unless the last checkpoint holds the same state.

        `line_pending` is True if the metrics line of this round is not written yet; a resumed run then writes it.
        """
        if not self._has(round.progress, round.learner):
            with self._stopwatch.timed("checkpoint"):
                self._write(round.learner, round.progress, state_of(round), line_pending)

    def hold_if_slow(self, round: Round, seconds: float) -> None:
        """Keep the sampler's state in memory if this round was slow, in case a signal interrupts the next round."""
        if seconds > SLOW_ROUND_SECONDS:
            with self._stopwatch.timed("checkpoint"):
                self._held = (round.progress.rounds, state_of(round))

    def save_interrupted(self, learner: Learner | None, progress: Progress, is_between_cuts: bool) -> None:
        """Write a checkpoint after a signal interrupted a round.

        The checkpoint contains the sampler's state that `hold_if_slow` kept after the previous round, if any. Without
        that state, a run resumed from the checkpoint starts new episodes.
        """
        if self._held is not None and self._held[0] == progress.rounds:
            state = self._held[1]
        else:
            state = SamplerState(None, MID_ROUND, is_between_cuts)
        self._save_within_round(learner, progress, state)

    def save_failed(self, learner: Learner | None, progress: Progress) -> None:
        """Write a checkpoint after a round failed. A run resumed from the checkpoint starts new episodes."""
        self._save_within_round(learner, progress, FAILED)

    def _save_within_round(self, learner: Learner | None, progress: Progress, state: SamplerState) -> None:
        if learner is None or not progress.rounds or self._has(progress, learner):
            return
        try:
            self._write(learner, progress, state)
        except RemudaError as error:  # only logged, so that the error that ended the run is raised
            self._log(f"warning: what was learned since the last checkpoint is lost ({error})")

    # --- writing ---

    def _has(self, progress: Progress, learner: Learner) -> bool:
        """Return whether the last checkpoint was made at these numbers of rounds and updates."""
        return self._saved == (progress.rounds, learner.version)

    def _write(self, learner: Learner, progress: Progress, sampler: SamplerState, line_pending: bool = False) -> None:
        """Copy all states, and write the copy in a thread. If the disk is full, only this checkpoint is lost.

        Raise RanksDiverged if the ranks of the run do not agree, unless they have ended because a round failed.
        """
        if sampler is not FAILED:
            learner.check_agreement()
        self._count += 1
        blobs = {LOG_STATE: pack(self._get_log_state(line_pending))}
        if sampler.blob is not None:
            blobs["sampler"] = sampler.blob
        files: list[str] = []
        self._saver.wait()  # the saver's thread must not delete old files while the replay writes new ones
        try:
            directory = self._directory.checkpoints / checkpoint.REPLAY
            replay_state = None if self.replay is None else self.replay.save(directory)
        except OSError as error:
            self._on_full_disk(progress.steps, error)
            return
        if replay_state is not None:
            blobs["replay"], files = pack(replay_state), replay_state["files"]
        counts = {**asdict(progress), "checkpoints": self._count, "best": self.best, "inexact": sampler.inexact}
        snapshot = checkpoint.snapshot(
            progress.steps, learner.state_dict(), counts, blobs, files, sampler.is_between_cuts
        )
        self._saved = (progress.rounds, learner.version)  # set after saving the replay, which may fail
        self._saver.save(snapshot, self._count)

    def _mark_best(self, step: int, mean_reward: float) -> None:
        """Mark the checkpoint of this step, if it was written, as the best one, so that it is kept."""
        self._saver.wait()
        if (self._directory.checkpoints / f"step-{step}").is_dir():
            checkpoint.point_best(self._directory.checkpoints, step)
            self._directory.log(f"step-{step} is the best checkpoint so far: mean return {mean_reward:.2f}")

    def poll(self) -> None:
        """Log the checkpoint, if any, that has been written since the last call."""
        self._saver.poll()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete."""
        self._saver.wait()

    def _on_written(self, snapshot: checkpoint.Snapshot, found: Path | OSError) -> None:
        if isinstance(found, OSError):
            self._on_full_disk(snapshot.step, found)
            return
        self.saved_steps = snapshot.step
        self._directory.log(f"wrote {found.name}")

    def _on_full_disk(self, step: int, error: OSError) -> None:
        """Log that a checkpoint was not written; the run continues, and the previous checkpoint remains."""
        self._log(f"warning: no checkpoint was written at {step:,} steps ({error}): make room.")
        self._saved = None


class CutWatch:
    """Keeps track of cuts (checkpoint.cut_episodes). After a round with a cut, all envs start new episodes.

    Warns once if episodes are too long to end between two cuts.
    """

    def __init__(self, num_envs: int, every: int, log: Callable[[str], None]) -> None:
        self.is_between = False  # whether the last round ended without a cut, but a later round will be cut
        self.last_steps = 0  # steps done at the last cut
        self._num_envs, self._every, self._log = num_envs, every, log
        self._finished: set[int] = set()  # envs that have finished an episode since the last cut
        self._has_warned = False

    def add(self, round: Round) -> None:
        """Record the episodes of one round, and whether the round ended with a cut."""
        self.is_between = round.cut_follows
        self._finished.update(episode.env for episode in round.episodes)
        if not round.was_cut:
            return
        unfinished, self.last_steps = self._num_envs - len(self._finished), round.progress.steps
        if unfinished and not self._has_warned:
            self._has_warned = True
            self._log(
                f"warning: {unfinished} of {self._num_envs} envs finished no episode in the {self._every:,} steps "
                "between two cuts: such episodes never end; use a larger checkpoint.every, or leave out "
                "checkpoint.cut_episodes."
            )
        self._finished.clear()


def find_checkpoint(run: Path, exact_until: int = 0) -> checkpoint.Checkpoint | None:
    """Return the newest intact checkpoint from which the run may continue.

    With checkpoint.cut_episodes, a resume is exact only from a checkpoint at a cut, where all episodes ended. The
    caller then passes the run's total number of steps as `exact_until`. Checkpoints that were saved between cuts,
    after fewer than `exact_until` steps, are skipped. If no checkpoint is left, return None. The run then starts
    again from the beginning, with the same seed.
    """
    directory = run / "checkpoints"
    before: int | None = None
    skipped: list[str] = []
    while checkpoint.list_checkpoints(directory, before):
        found = checkpoint.load_newest(directory, before, skipped)
        if not found.is_between_cuts or found.progress["steps"] >= exact_until:
            return found
        before, skipped = found.step, found.skipped
    return None


def named_checkpoint(run: Path, name: int | str | None) -> checkpoint.Checkpoint:
    """Load a checkpoint by `name`: a step or "best"; "latest" and None stand for the newest intact checkpoint."""
    directory = run / "checkpoints"
    if name is None or name == "latest":
        return checkpoint.load_newest(directory)
    steps = [int(path.name.rpartition("-")[2]) for path in checkpoint.list_checkpoints(directory)]
    if name == "best":
        best = directory / checkpoint.BEST
        if best.is_dir():
            return checkpoint.load(best.resolve())
        raise CheckpointError(f"run {run} has no best checkpoint: train with checkpoint.keep=best and eval.every.")
    wanted = str(name).removeprefix("step-").replace("_", "")
    if not wanted.isdecimal() or int(wanted) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"checkpoint {name} of run {run} is not there: use one of {there}, best or latest.")
    return checkpoint.load(directory / f"step-{int(wanted)}")
