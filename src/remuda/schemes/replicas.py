"""The scheme `replicas`: several ranks each sample and learn from one part of the run, and add their gradients.

Every rank is a process that runs the synchronous scheme on its share of the envs, of every minibatch and of the
replay. remuda.parts combines gradients, statistics and counts, so all ranks make the same updates. Rank 0 leads: it
alone has the run directory, evaluates, and saves the states of all ranks. It also decides when the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from remuda.core import Replay
from remuda.data import map_tree
from remuda.errors import Interrupted
from remuda.learning.learner import Learner
from remuda.parts import PartedReplay, RankGroup, attempt
from remuda.parts.replay import look_for, visible_file
from remuda.recipe import Log, Progress, Recipe, Round
from remuda.schemes.synchronous import Synchronous

# An OpenGroup starts or joins the ranks. Its second argument is a function that returns whether a signal ends the
# round early; the third one is called with the number of a signal that only another rank has received.
OpenGroup = Callable[[Recipe, Callable[[], bool], Callable[[int], None]], AbstractContextManager[RankGroup]]


@dataclass(frozen=True)
class Replicas:
    """Runs a recipe in the ranks that `open_group` provides, with `workers` env workers per rank (0: none)."""

    open_group: OpenGroup
    workers: int = 0

    def rounds(self, recipe: Recipe, log: Log) -> Iterator[Round | None]:
        """Yield the rounds of rank 0, the leader. At its end, this iterator lets all other ranks end the run, too."""
        opened: list[RankGroup] = []

        def must_stop() -> bool:
            """Return whether followers must end their round now, which is never the case between two rounds.

            While followers wait for the next round, `RankGroup.call` limits the time for their answers.
            """
            return log.must_stop() and not any(group.followers_wait for group in opened)

        with self.open_group(recipe, must_stop, log.pass_signal) as group:
            opened.append(group)
            group.must_stop = log.must_stop
            try:
                yield from Synchronous(self.workers).rounds(recipe.divide(group), cast(Log, LeaderLog(log, group)))
                group.end()
            except GeneratorExit:
                group.end()
                raise
            except BaseException as error:
                group.fail(error)
                raise

    def follow(self, recipe: Recipe, group: RankGroup) -> None:
        """Run a follower, which is any rank but rank 0, until the leader ends the run."""
        try:
            for _ in Synchronous(self.workers).rounds(recipe.divide(group), FollowerLog(group)):
                pass
        except BaseException as error:
            group.fail(error)
            raise


class LeaderLog:
    """The log of rank 0. It sends the resumed checkpoint to the other ranks, which wait while it logs and saves."""

    def __init__(self, log: Log, group: RankGroup) -> None:
        self._log, self._group = log, group
        self.should_stop, self.pass_signal = log.should_stop, log.pass_signal

    def must_stop(self) -> bool:
        self._group.collective.health.progress += 1
        return self._log.must_stop()

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        progress, state = self._log.resume(learner)
        is_new = progress == Progress()
        saved = {"learner": pack_learner(learner), "progress": asdict(progress), "sampler": state}
        self._group.gather([None if is_new else saved])
        return progress, state

    def restore(self, replay: Replay) -> None:
        parted = cast(PartedReplay, replay)
        own = attempt(lambda: self._log.restore(replay))
        with visible_file(parted) as file:
            self._group.gather([(file, parted.loaded)])
            # If the files of any part are damaged, all ranks raise DamagedReplay; rank 0 then starts them again from
            # an earlier checkpoint.
            self._group.gather_outcomes(own)

    def begin(self) -> None:
        self._group.expect_followers()
        self._log.begin()

    def round(self, round: Round) -> bool:
        self._group.expect_followers()
        return self._log.round(round)

    def save(self, round: Round) -> None:
        self._log.save(round)

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Interrupted | GeneratorExit):
            self._group.fail(error)  # the other ranks are in the middle of a round, and cannot answer any more
        self._log.save_if_failed(kind, error, trace)

    def save_if_stopped(self, error: Interrupted) -> None:
        self._group.expect_followers()  # the other ranks were interrupted, too, and now answer the leader's calls
        self._log.save_if_stopped(error)


class FollowerLog:
    """The log of every rank except rank 0. It writes nothing, and answers the leader's calls between two rounds."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._has_ended = False
        self._progress = Progress()

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        saved = self._group.gather([None])[0]
        if saved is None:
            return self._progress, None
        learner.load_state_dict(unpack_learner(saved["learner"]))
        self._progress = Progress(**saved["progress"])
        return self._progress, saved["sampler"]

    def restore(self, replay: Replay) -> None:
        file, loaded = self._group.gather([None])[0]

        def load() -> None:
            look_for(file)
            if loaded is not None:
                replay.load(Path(loaded[0]), loaded[1])

        self._group.gather_outcomes(attempt(load))

    def begin(self) -> None:
        self._has_ended = not self._group.follow()

    def round(self, round: Round) -> bool:
        self._has_ended = not self._group.follow()
        return self._has_ended

    def save(self, round: Round) -> None:
        """Do nothing, because the leader requests this rank's state when it saves a checkpoint."""

    def should_stop(self) -> bool:
        return self._has_ended

    def must_stop(self) -> bool:
        return self._group.is_asked_to_stop()

    def pass_signal(self, number: int) -> None:
        """Do nothing: signals are passed on to the leader only."""

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing, because the leader saves the run."""

    def save_if_stopped(self, error: Interrupted) -> None:
        while self._group.follow():
            pass


def pack_learner(learner: Learner) -> object:
    """Return the state of a learner as plain values and arrays, for the other ranks."""
    return map_tree(lambda leaf: leaf.cpu().numpy() if isinstance(leaf, Tensor) else leaf, learner.state_dict())


def unpack_learner(state: Any) -> Any:
    return map_tree(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, state)
