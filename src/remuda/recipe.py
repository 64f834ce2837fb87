"""Interfaces of a run: the factories of a `Recipe`, the samplers they make, and what a `Scheme` reports to a `Log`.

These are dataclasses and protocols without behavior, as in core.py. A scheme calls the factories in the processes
that need the results, and runs rounds of learning until the recipe's steps are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from remuda.core import Agent, Episode, Replay, SharedReplay, Weights
from remuda.data.rollout import Rollout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from remuda.errors import Interrupted
    from remuda.learning.gradients import Gradients
    from remuda.learning.learner import Learner
    from remuda.parts.group import Group

ShouldStop = Callable[[], bool]


class Sampler(Protocol):
    """A sampler that collects rollouts synchronously. It owns its envs."""

    def reset(self, seed: int, warm_up: int = 0) -> int:
        """Start every env with at most `warm_up` random steps; return the number of random steps over all envs."""

    def collect(self) -> Rollout:
        """Return T rows of every env, sampled with one version of the weights; valid until the next call."""

    def take_seconds(self) -> dict[str, float]: ...  # seconds of "env", "inference" and "wait" since the last call
    def episodes(self) -> list[Episode]: ...  # episodes that finished since the last call
    def restarts(self) -> int: ...  # how often envs were rebuilt, because they raised or their worker was lost
    def running(self) -> int: ...  # envs that were in the middle of an episode when the last rollout ended

    def get_state(self) -> bytes:
        """Return everything that later rollouts depend on, except the weights and the row number.

        Raise NoState if this state cannot be saved.
        """

    def set_state(self, state: bytes) -> None: ...  # called instead of `reset`, to continue from this state
    def close(self) -> None: ...


class AsyncSampler(Protocol):
    """The interface that all asynchronous samplers share. They own their envs."""

    def start(self, seed: int, warm_up: int = 0, version: int = 0) -> int:
        """Start sampling for a learner at `version`; return the number of random steps over all envs."""

    def take_seconds(self) -> dict[str, float]: ...  # mean seconds of a worker, by activity, since the last call
    def episodes(self) -> list[Episode]: ...  # episodes that have finished since the last call
    def restarts(self) -> int: ...  # how often envs were rebuilt so far
    def close(self) -> None: ...


class RolloutSource(AsyncSampler, Protocol):
    """Asynchronous samplers from which the learner takes rollouts as they become ready."""

    dropped: int  # rollouts that were too old to be used

    def take(self, version: int, should_stop: ShouldStop) -> Rollout:
        """Wait for a rollout that a learner at `version` may use; raise Interrupted if `should_stop()` is True."""

    def release(self, version: int) -> None:
        """Allow the memory of the last rollout to be reused; call this after publishing weights of `version`."""

    def metrics(self) -> dict[str, float]: ...


class ReplayWriters(AsyncSampler, Protocol):
    """Asynchronous samplers that write their rows to a replay."""

    def poll(self, version: int) -> None:
        """Record the learner's current version; raise the error that ended sampling, if there was one."""

    def take_lag(self) -> tuple[float, int]: ...  # mean and largest lag since the last call, in updates
    def drain(self) -> None: ...  # wait for the statistics of all written rows, for a limited time


@dataclass(frozen=True)
class Applied:
    """The outcome of `Updates.exchange` for the gradients of one batch."""

    versions: int  # updates applied by this call; 0 if the update was skipped, or if the round stops
    stop: bool  # whether the round ends without applying these gradients
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    gradient_to_update: float = 0.0  # number of updates between computing and applying the gradients


class Updates(Protocol):
    """Decides where and when gradients that a learner has computed are applied to its parameters."""

    def exchange(self, learner: Learner, gradients: Gradients) -> Applied: ...
    def agree(self, stop: bool) -> bool: ...  # asks all processes to end the round if `stop`; returns whether they do


class Evaluator(Protocol):
    """A process that evaluates the newest weights while training goes on."""

    def poll(self, version: int, steps: int) -> list[dict[str, object]]:
        """Record that `version` was published after `steps` env steps; return the new evaluations, if any."""

    def close(self) -> None: ...


@dataclass
class Progress:
    """Counters of a run, saved with every checkpoint."""

    steps: int = 0  # real env steps, including the warm-up
    rounds: int = 0  # completed rounds
    episodes: int = 0
    restarts: int = 0  # envs that were rebuilt
    dropped: int = 0  # rollouts that were too old to learn from
    cut: int = 0  # episodes that were ended early because of `Recipe.cut_every`


def refuse_division(group: Group) -> Recipe:
    raise NotImplementedError("this recipe is for one process.")


@dataclass(frozen=True)
class Recipe:
    """What to learn: factories that a scheme calls in the process that needs the result."""

    seed: int
    steps: int  # real env steps after which the run is done
    make_learner: Callable[[], Learner]
    # Arguments: agent, rounds done. Returns a SharedReplay if samplers write to the replay.
    make_replay: Callable[[Agent, int], Replay]
    make_weights: Callable[[nn.Module, int], Weights]  # arguments: agent, version of its parameters
    # Arguments: agent, weights, number of env workers (0: envs in this process), rounds done, should_stop.
    make_sampler: Callable[[Agent, Weights, int, int, ShouldStop], Sampler]
    # Arguments: agent, weights, number of sampler workers, rounds done, max_lag, should_stop.
    make_source: Callable[[Agent, Weights, int, int, int | None, ShouldStop], RolloutSource]
    # Arguments: weights, replay, number of sampler workers, rounds done, should_stop.
    make_writers: Callable[[Weights, SharedReplay, int, int, ShouldStop], ReplayWriters]
    # Arguments: weights, their version, steps done. Returns None if the run has no evaluator.
    make_evaluator: Callable[[Weights, int, int], Evaluator | None] = lambda weights, version, steps: None
    num_threads: int = 1  # torch threads of the learner's process
    warm_up: int = 0  # maximum number of random steps per env before the first rollout
    # Every `cut_every` rounds all envs start new episodes, so that a run resumed from such a round is bit-equal to an
    # uninterrupted run even if the state of its envs cannot be saved (checkpoint.cut_episodes). 0 means never.
    cut_every: int = 0
    updates: Updates | None = None  # None: a learner applies its gradients at once
    # For a run that is divided among processes: returns the recipe of the parts that belong to this process.
    divide: Callable[[Group], Recipe] = refuse_division
    describe: Callable[[], Mapping[str, object]] = dict  # returns a blueprint (build/blueprint.py) for other ranks


@dataclass
class Round:
    """What a scheme reports to the log after each round of learning."""

    progress: Progress
    learner: Learner
    episodes: list[Episode]
    metrics: dict[str, float]  # values for the log, named train/*, lag/*, async/* or replay/*
    seconds: dict[str, float]  # seconds of the round by use: env, inference, update, wait
    replay: Replay
    # Returns the sampler's state for a checkpoint, or raises NoState; None for asynchronous samplers.
    get_state: Callable[[], bytes] | None = None
    is_last: bool = False  # True if the run ends with this round; set once the log has recorded the round
    is_whole: bool = True  # False if a stop signal ended the round before all due updates were made
    was_cut: bool = False  # True if all envs start new episodes after this round (`Recipe.cut_every`)
    cut_follows: bool = False  # True if only a later round will be cut, so that a resume from this one is not exact
    evaluations: list[dict[str, object]] = field(default_factory=list)  # new results of the Evaluator


class Log(Protocol):
    """The log of a run, to which a scheme reports every round. The log saves checkpoints, and may stop the run."""

    def resume(self, learner: Learner) -> tuple[Progress, bytes | None]:
        """Load the last checkpoint into the learner; return the counters, and the sampler's state if it was saved."""

    def restore(self, replay: Replay) -> None: ...  # load the replay of the last checkpoint, before the first round
    def begin(self) -> None: ...  # start to measure steps per second, after warm-up
    def round(self, round: Round) -> bool: ...  # record a round; return whether to stop now
    def save(self, round: Round) -> None: ...  # write a checkpoint of the round unless it has one
    def should_stop(self) -> bool: ...  # True once a signal has arrived: stop at the end of this round
    def must_stop(self) -> bool: ...  # True if this round must end early, some time after a signal
    def pass_signal(self, number: int) -> None: ...  # act as if this process had received a stop signal

    def save_if_failed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what was learned if an error ends the run; call this before learner and replay are closed.

        The arguments are those of `__exit__`.
        """

    def save_if_stopped(self, error: Interrupted) -> None: ...  # save what was learned if a signal interrupts a round


class Scheme(Protocol):
    """How to run a recipe: which process does what, and which processes wait for each other."""

    def rounds(self, recipe: Recipe, log: Log) -> Iterator[Round | None]:
        """Yield None when training can begin, then each round after the log has recorded it.

        The learner is passed to `Log.resume` first. The iterator must be exhausted or closed, because its end closes
        what the recipe's factories have made.
        """
