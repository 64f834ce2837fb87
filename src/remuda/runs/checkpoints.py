"""The checkpoints of one run: what goes into them, which are kept, and how exactly a run continues from each.

checkpoints = RunCheckpoints(directory, options, say)
checkpoints.save(learner, progress, state_of(round), journal_state)      # returns while a thread still writes
checkpoints.mark_best(step, mean_reward)                                 # checkpoint.keep=best
checkpoints.wait()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remuda.config.run_options import CheckpointOptions
from remuda.core import Replay
from remuda.data.packing import pack
from remuda.errors import CheckpointError, NoState
from remuda.learning import checkpoint
from remuda.learning.learner import Learner
from remuda.learning.saver import Saver
from remuda.recipe import Progress, Round
from remuda.runs.directory import RunDirectory

CUT_SHORT = "its last round was stopped before all of its updates were made"


@dataclass(frozen=True)
class SamplerState:
    """What a checkpoint holds of the sampler, and why a run resumed from it is not bit-equal, if it is not."""

    blob: bytes | None
    inexact: str | None = None
    is_between_cuts: bool = False  # a run that cuts episodes goes back from here to its last cut, to be bit-equal


def state_of(round: Round) -> SamplerState:
    """Return the sampler's state after this round."""
    if round.get_state is None:
        return SamplerState(None, "asynchronous samplers start new episodes")
    if round.was_cut and round.is_whole:
        return SamplerState(None)  # new episodes start here in a run that is never stopped, too
    cuts = round.was_cut or round.cut_follows
    try:
        blob = None if round.was_cut else round.get_state()
    except NoState as error:
        reason = f"the state of its envs cannot be saved ({error}), so new episodes start"
        return SamplerState(None, reason, cuts)
    return SamplerState(blob, None if round.is_whole else CUT_SHORT, cuts)


def state_in(found: checkpoint.Checkpoint | None) -> SamplerState:
    """Return the sampler's state that the checkpoint of a resumed run holds."""
    assert found is not None
    return SamplerState(found.blobs.get("sampler"), found.progress.get("inexact"), found.is_between_cuts)


class RunCheckpoints:
    """Writes checkpoints of a run's learner, progress, sampler and replay; the only writer of their directory."""

    def __init__(self, directory: RunDirectory, options: CheckpointOptions, log: Callable[[str], None]) -> None:
        self.replay: Replay | None = None
        self.saved_steps = 0  # steps that need not be sampled again when the run is resumed
        self.best: dict[str, float] | None = None  # step and mean_reward of the best evaluation so far
        self._directory, self._options, self._say = directory, options, log
        self._count = 0
        self._saved: tuple[int, int] | None = None  # rounds and updates of the last checkpoint
        self._saver = Saver(directory.checkpoints, options.keep, self._written)

    def resume(self, found: checkpoint.Checkpoint, version: int) -> Progress:
        """Continue the counts of the run that wrote this checkpoint; return its progress."""
        saved = dict(found.progress)
        self._count, self.best = saved.pop("checkpoints", 0), saved.pop("best", None)
        saved.pop("inexact", None)
        progress = Progress(**saved)
        self._saved, self.saved_steps = (progress.rounds, version), progress.steps
        return progress

    def restore(self, found: checkpoint.Checkpoint, state: dict[str, Any]) -> None:
        """Load what the replay held when this checkpoint was written."""
        assert self.replay is not None
        self.replay.load(self._directory.checkpoints / checkpoint.REPLAY, state)

    def has(self, progress: Progress, learner: Learner) -> bool:
        """Whether the last checkpoint holds this state already."""
        return self._saved == (progress.rounds, learner.version)

    def save(self, learner: Learner, progress: Progress, sampler: SamplerState, journal: dict[str, Any]) -> None:
        """Copy everything, and write it in a thread; a full disk costs this checkpoint and not the run."""
        self._count += 1
        blobs = {"journal": pack(journal)} | ({} if sampler.blob is None else {"sampler": sampler.blob})
        files: list[str] = []
        self._saver.wait()  # pruning must know all files that are there
        try:
            directory = self._directory.checkpoints / checkpoint.REPLAY
            replayed = None if self.replay is None else self.replay.save(directory)
        except OSError as error:
            self._not_saved(progress.steps, error)
            return
        if replayed is not None:
            blobs["replay"], files = pack(replayed), replayed["files"]
        counts = {**asdict(progress), "checkpoints": self._count, "best": self.best, "inexact": sampler.inexact}
        taken = checkpoint.snapshot(
            progress.steps, learner.state_dict(), counts, blobs, files, sampler.is_between_cuts
        )
        self._saved = (progress.rounds, learner.version)  # only now: saving the replay may have failed
        self._saver.save(taken, self._count)

    def mark_best(self, step: int, mean_reward: float) -> None:
        """Keep the checkpoint of this step, if the disk had room for it, until a better one is marked."""
        self._saver.wait()
        if (self._directory.checkpoints / f"step-{step}").is_dir():
            checkpoint.point_best(self._directory.checkpoints, step)
            self._directory.log(f"step-{step} is the best checkpoint so far: mean return {mean_reward:.2f}")

    def is_best(self, step: int, mean_reward: float) -> bool:
        """Whether checkpoint.keep=best asks for a checkpoint of the weights that were just evaluated."""
        if self._options.keep != "best" or (self.best is not None and mean_reward <= self.best["mean_reward"]):
            return False
        self.best = {"step": step, "mean_reward": mean_reward}
        return True

    def poll(self) -> None:
        self._saver.poll()

    def wait(self) -> None:
        self._saver.wait()

    def _written(self, taken: checkpoint.Snapshot, found: Path | OSError) -> None:
        if isinstance(found, OSError):
            self._not_saved(taken.step, found)
            return
        self.saved_steps = taken.step
        self._directory.log(f"wrote {found.name}")

    def _not_saved(self, step: int, error: OSError) -> None:
        """Log that a full disk cost a checkpoint: the run continues, and the checkpoint before this one is whole."""
        self._say(f"warning: no checkpoint was written at {step:,} steps ({error}): make room.")
        self._saved = None


class CutWatch:
    """Follows the cuts of checkpoint.cut_episodes, and warns once if episodes are too long to end between two."""

    def __init__(self, num_envs: int, every: int, log: Callable[[str], None]) -> None:
        self.is_between = False  # episodes are cut, and the last round was not
        self.last_steps = 0  # steps done when they were last cut
        self._num_envs, self._every, self._say = num_envs, every, log
        self._finished: set[int] = set()  # envs that have finished an episode since the last cut
        self._has_warned = False

    def watch(self, round: Round) -> None:
        self.is_between = round.cut_follows
        self._finished.update(episode.env for episode in round.episodes)
        if not round.was_cut:
            return
        unfinished, self.last_steps = self._num_envs - len(self._finished), round.progress.steps
        if unfinished and not self._has_warned:
            self._has_warned = True
            self._say(
                f"warning: {unfinished} of {self._num_envs} envs finished no episode in the {self._every:,} steps "
                "between two cuts: such episodes never end; use a larger checkpoint.every, or leave out "
                "checkpoint.cut_episodes."
            )
        self._finished.clear()


def find_checkpoint(run: Path, exact_until: int = 0) -> checkpoint.Checkpoint | None:
    """Return the newest whole checkpoint that the run continues from.

    A run that cuts episodes (checkpoint.cut_episodes) and has fewer than `exact_until` steps goes back to its last
    cut. None: there is none, and the run starts again from the beginning, with the same seed.
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
    """Return a run's checkpoint by its step, as `best` or `latest`, or, without a name, the newest that is whole."""
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
