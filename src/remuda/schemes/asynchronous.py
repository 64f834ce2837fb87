"""The scheme `async`: samplers, learner and evaluator run asynchronously.

`Asynchronous`: workers fill slots of shared memory with rollouts. A worker that runs the policy itself samples each
rollout with the weights that are newest when the rollout begins. The learner takes the slots that are full, learns
from them, and publishes its weights. Every metrics line shows the age of the data as `lag/*`, and rollouts older than
`max_lag` updates are dropped. With max_lag=0 no worker begins a rollout before the newest weights are published. If,
in addition, a batch has as many sequences as there are envs, the parameters are the same as in a synchronous run.

`AsynchronousReplay`: workers write rows straight into the learner's replay. The learner draws the batches that are
due, learns from them, and publishes its weights after a few updates, or when its observation statistics have changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import cast

from remuda.core import Replay, SharedReplay, Weights, derive_seed
from remuda.errors import Interrupted
from remuda.learning.learner import Learner
from remuda.recipe import AsyncSampler, Evaluator, Log, Progress, Recipe, ReplayWriters, RolloutSource, Round
from remuda.schemes.learning_round import learn, learn_due, rounds, torch_threads

POLL_SECONDS = 0.001  # time between two checks whether updates are due
ROUND_SECONDS = 0.05  # time after which a round ends if no update is due


@dataclass(frozen=True)
class Asynchronous:
    """Runs a recipe whose sampler workers hand rollouts to the learner."""

    workers: int
    # A rollout that waits for the learner is dropped once the oldest weights that sampled it are more than `max_lag`
    # updates older than the learner's. None sets no limit.
    max_lag: int | None = None

    def rounds(self, recipe: Recipe, log: Log) -> Iterator[Round | None]:
        with ExitStack() as stack:
            learner, progress, weights, replay, evaluator = open_parts(recipe, log, stack)
            agent = learner.agent_on_cpu()
            source = stack.enter_context(
                closing(
                    recipe.make_source(agent, weights, self.workers, progress.rounds, self.max_lag, log.must_stop)
                )
            )
            with saved_when_stopped(log):
                log.restore(replay)
                dropped, restarts = progress.dropped, progress.restarts
                start(recipe, source, progress, learner.version)

                def make_round() -> Round:
                    try:
                        round = self._round(recipe, learner, replay, source, progress, log)
                    finally:  # the updates of an interrupted round are published, too
                        weights.publish(learner.version)
                    source.release(learner.version)
                    progress.dropped, progress.restarts = dropped + source.dropped, restarts + source.restarts()
                    round.evaluations = evaluator.poll(learner.version, progress.steps) if evaluator else []
                    return round

                yield from rounds(recipe, log, progress, make_round)

    @staticmethod
    def _round(
        recipe: Recipe, learner: Learner, replay: Replay, source: RolloutSource, progress: Progress, log: Log
    ) -> Round:
        """Wait for a rollout and learn from it."""
        start = time.perf_counter()
        rollout = source.take(learner.version, log.must_stop)
        waited = time.perf_counter() - start
        learner.set_progress(progress.steps / recipe.steps)
        metrics, _ = learn(learner, replay, rollout, log.must_stop)
        metrics |= source.metrics()
        progress.steps += rollout.num_real
        progress.rounds += 1
        episodes = source.episodes()
        progress.episodes += len(episodes)
        seconds = {"update": time.perf_counter() - start - waited, **shares(waited, source.take_seconds())}
        return Round(progress, learner, episodes, metrics, seconds, replay)


@dataclass(frozen=True)
class AsynchronousReplay:
    """Runs a recipe whose sampler workers write to the replay."""

    workers: int

    def rounds(self, recipe: Recipe, log: Log) -> Iterator[Round | None]:
        with ExitStack() as stack:
            learner, progress, weights, opened, evaluator = open_parts(recipe, log, stack)
            replay = cast(SharedReplay, opened)  # recipes for this scheme make a SharedReplay
            # The inner stack closes the samplers before an interrupted run is saved, so that workers stop writing.
            with saved_when_stopped(log), ExitStack() as sampling:
                log.restore(replay)
                if progress.rounds:
                    replay.cut()
                writers = sampling.enter_context(
                    closing(recipe.make_writers(weights, replay, self.workers, progress.rounds, log.must_stop))
                )
                restarts = progress.restarts
                start(recipe, writers, progress, learner.version)

                def make_round() -> Round:
                    before = learner.version, learner.statistics_version
                    try:
                        round = self._round(recipe, learner, replay, writers, progress, log)
                    except BaseException:  # no Round reports the episodes of a failed round, so count them here
                        progress.episodes += len(writers.episodes())
                        raise
                    finally:
                        if (learner.version, learner.statistics_version) != before:
                            weights.publish(learner.version)
                        progress.restarts = restarts + writers.restarts()
                    round.evaluations = evaluator.poll(learner.version, progress.steps) if evaluator else []
                    return round

                yield from rounds(recipe, log, progress, make_round)

    @staticmethod
    def _round(
        recipe: Recipe, learner: Learner, replay: SharedReplay, writers: ReplayWriters, progress: Progress, log: Log
    ) -> Round:
        """Wait until updates are due, for at most ROUND_SECONDS, and then make them."""
        begin = time.perf_counter()
        left = recipe.steps - progress.steps
        steps = replay.sync(left)
        while not replay.is_due and time.perf_counter() < begin + ROUND_SECONDS:
            writers.poll(learner.version)
            if log.must_stop():
                raise Interrupted("asked to stop while waiting for samplers")
            time.sleep(POLL_SECONDS)
            steps += replay.sync(left - steps)
        waited = time.perf_counter() - begin

        def must_stop() -> bool:
            writers.poll(learner.version)  # called after every update, because lags are measured in updates
            return log.must_stop()

        learner.set_progress(progress.steps / recipe.steps)
        lag, largest_lag = writers.take_lag()
        acted, oldest = learner.version - lag, learner.version - largest_lag
        try:
            metrics = learn_due(learner, replay, acted, oldest, must_stop)
            before = -1
            # One call of `learn_due` makes only a limited number of the updates that are due. In the last round of a
            # throttled run, call it again while updates are due, until a repeated call makes none.
            while steps >= left and replay.is_throttled and replay.is_due and before < learner.version:
                before = learner.version
                metrics = learn_due(learner, replay, acted, oldest, must_stop)
        finally:
            for rollout in replay.new_observations():
                learner.finish(rollout)
        metrics |= replay.metrics() | {"lag/acting_weights": lag}
        progress.steps += steps
        replay.commit()
        progress.rounds += 1
        if steps >= left:  # sampling has ended, so this is the last chance to receive statistics
            writers.drain()
        episodes = writers.episodes()
        progress.episodes += len(episodes)
        seconds = {"update": time.perf_counter() - begin - waited, **shares(waited, writers.take_seconds())}
        return Round(progress, learner, episodes, metrics, seconds, replay)


@contextmanager
def saved_when_stopped(log: Log) -> Iterator[None]:
    """Save the run when it is interrupted, even in the middle of a round.

    Asynchronous runs do not resume bit for bit in any case, so nothing is lost by saving an incomplete round.
    """
    try:
        yield
    except Interrupted as error:
        log.save_if_stopped(error)


def open_parts(
    recipe: Recipe, log: Log, stack: ExitStack
) -> tuple[Learner, Progress, Weights, Replay, Evaluator | None]:
    """Create the objects that both schemes of this module need, and resume a saved run; `stack` closes them."""
    stack.enter_context(torch_threads(recipe.num_threads))
    learner = recipe.make_learner()
    stack.callback(learner.close)
    progress, _ = log.resume(learner)  # the samplers' state is not used, because envs start new episodes
    weights = stack.enter_context(closing(recipe.make_weights(learner.algorithm.agent, learner.version)))
    replay = stack.enter_context(closing(recipe.make_replay(learner.agent_on_cpu(), progress.rounds)))
    stack.push(log.save_if_failed)  # called after the samplers are closed and before the replay is closed
    evaluator = recipe.make_evaluator(weights, learner.version, progress.steps)
    return learner, progress, weights, replay, evaluator and stack.enter_context(closing(evaluator))


def start(recipe: Recipe, sampler: AsyncSampler, progress: Progress, version: int) -> None:
    """Start the samplers, unless all steps are done. A resumed run uses other env seeds than a new run."""
    if progress.steps >= recipe.steps:
        return
    is_new = progress.rounds == 0
    seed = recipe.seed if is_new else derive_seed(recipe.seed, progress.rounds)
    progress.steps += sampler.start(seed, recipe.warm_up if is_new else 0, version)


def shares(waited: float, busy: dict[str, float]) -> dict[str, float]:
    """Divide the learner's waiting time among activities, in proportion to the time that workers spent on each."""
    total = sum(busy.values())
    return {name: waited * seconds / total if total else 0.0 for name, seconds in busy.items()}
