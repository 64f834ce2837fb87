"""The scheme whose actors never wait for the learner, nor the learner for actors: `async`.

`Asynchronous`: workers fill slots with rollouts, each at its own pace and with the newest weights when it begins one;
the learner takes what is full, learns, and publishes. Every batch knows how old it is: `lag/*` on every metrics line,
and what is older than `max_lag` updates is dropped. With max_lag=0 nobody begins before the newest weights are out,
and the run is the synchronous one.

`AsynchronousReplay`: workers write rows straight into the learner's replay; the learner draws what is due, learns,
and publishes after some updates, or once statistics of observations have moved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from remuda.core import (
    Evaluator,
    Log,
    Progress,
    Recipe,
    Replay,
    ReplayWriters,
    RolloutSource,
    Round,
    SharedReplay,
    Weights,
    derive_seed,
)
from remuda.errors import Interrupted
from remuda.learning.learner import Learner
from remuda.schemes.synchronous import learn, learn_due, torch_threads

REST_SECONDS = 0.001  # between two looks for something to learn from
ROUND_SECONDS = 0.05  # after which a round ends in which nothing was due


@dataclass(frozen=True)
class Asynchronous:
    """Runs a recipe with this many acting workers."""

    workers: int
    max_lag: int | None = None  # updates by which a rollout may be behind its learner; None: any

    def run(self, recipe: Recipe, log: Log) -> Learner:
        with ExitStack() as stack:
            learner, progress, weights, replay, evaluator = open_parts(recipe, log, stack)
            agent = learner.agent_on_cpu()
            stream = stack.enter_context(
                closing(
                    recipe.make_source(agent, weights, self.workers, progress.rounds, self.max_lag, log.must_stop)
                )
            )
            with saved_when_stopped(log):
                log.restore(replay)
                dropped, restarts = progress.dropped, progress.restarts
                start(recipe, stream, progress, learner.version)
                log.begin()
                must_end = log.should_stop()
                while progress.steps < recipe.steps and not must_end:
                    try:
                        round = self._round(recipe, learner, replay, stream, progress, log)
                    finally:  # also what a round has learned that is cut short
                        weights.publish(learner.version)
                    stream.release(learner.version)
                    progress.dropped, progress.restarts = dropped + stream.dropped, restarts + stream.restarts()
                    round.evaluations = evaluator.poll(learner.version, progress.steps) if evaluator else []
                    must_end = log.round(round)
            return learner

    @staticmethod
    def _round(
        recipe: Recipe, learner: Learner, replay: Replay, stream: RolloutSource, progress: Progress, log: Log
    ) -> Round:
        """One rollout, as soon as there is one."""
        start = time.perf_counter()
        rollout = stream.take(learner.version, log.must_stop)
        waited = time.perf_counter() - start
        learner.set_progress(progress.steps / recipe.steps)
        metrics, _ = learn(learner, replay, rollout, log.must_stop)
        metrics |= stream.metrics()
        progress.steps += int(rollout.steps.mask.sum())
        progress.rounds += 1
        episodes = stream.episodes()
        progress.episodes += len(episodes)
        seconds = {"update": time.perf_counter() - start - waited, **shares(waited, stream.take_seconds())}
        return Round(progress, learner, episodes, metrics, seconds, replay)


@dataclass(frozen=True)
class AsynchronousReplay:
    """Runs a recipe whose replay samplers write to, these many groups of envs."""

    workers: int

    def run(self, recipe: Recipe, log: Log) -> Learner:
        with ExitStack() as stack:
            learner, progress, weights, replay, evaluator = open_parts(recipe, log, stack)
            with saved_when_stopped(log), ExitStack() as sampling:  # saved when nobody writes to the replay any more
                log.restore(replay)
                if progress.rounds:
                    replay.cut()
                feed = sampling.enter_context(
                    closing(recipe.make_writers(weights, replay, self.workers, progress.rounds, log.must_stop))
                )
                restarts = progress.restarts
                start(recipe, feed, progress, learner.version)
                log.begin()
                must_end = log.should_stop()
                while progress.steps < recipe.steps and not must_end:
                    before = learner.version, learner.statistics_version
                    try:
                        round = self._round(recipe, learner, replay, feed, progress, log)
                    except BaseException:  # no Round will tell of these
                        progress.episodes += len(feed.episodes())
                        raise
                    finally:
                        if (learner.version, learner.statistics_version) != before:
                            weights.publish(learner.version)
                        progress.restarts = restarts + feed.restarts()
                    round.evaluations = evaluator.poll(learner.version, progress.steps) if evaluator else []
                    must_end = log.round(round)
            return learner

    @staticmethod
    def _round(
        recipe: Recipe, learner: Learner, replay: SharedReplay, feed: ReplayWriters, progress: Progress, log: Log
    ) -> Round:
        """Some updates as soon as they are due; none, if for a while none are."""
        begin = time.perf_counter()
        left = recipe.steps - progress.steps
        fresh = replay.sync(left)
        while not replay.is_due and time.perf_counter() < begin + ROUND_SECONDS:
            feed.poll(learner.version)
            if log.must_stop():
                raise Interrupted("asked to stop while waiting for samplers")
            time.sleep(REST_SECONDS)
            fresh += replay.sync(left - fresh)
        waited = time.perf_counter() - begin

        def must_stop() -> bool:
            feed.poll(learner.version)  # so that the ages of acting weights are those of this moment
            return log.must_stop()

        learner.set_progress(progress.steps / recipe.steps)
        age = feed.take_lag()
        acted = learner.version - age
        try:
            metrics = learn_due(learner, replay, acted, int(acted), must_stop)
            before = -1
            while fresh >= left and replay.is_throttled and replay.is_due and before < learner.version:
                before = learner.version  # the last steps are owed as many updates as all others
                metrics = learn_due(learner, replay, acted, int(acted), must_stop)
        finally:
            for rollout in replay.new_observations():
                learner.finish(rollout)
        metrics |= replay.metrics() | {"lag/acting_weights": age}
        progress.steps += fresh
        replay.commit()
        progress.rounds += 1
        if fresh >= left:  # nobody samples any more, and nobody will hear of it later
            feed.drain()
        episodes = feed.episodes()
        progress.episodes += len(episodes)
        seconds = {"update": time.perf_counter() - begin - waited, **shares(waited, feed.take_seconds())}
        return Round(progress, learner, episodes, metrics, seconds, replay)


@contextmanager
def saved_when_stopped(log: Log) -> Iterator[None]:
    """Save what an interrupted round has learned: asynchronous runs are not resumed bit for bit anyway."""
    try:
        yield
    except Interrupted as error:
        log.save_if_stopped(error)


def open_parts(
    recipe: Recipe, log: Log, stack: ExitStack
) -> tuple[Learner, Progress, Weights, Any, Evaluator | None]:
    """What both have, closed with the stack. Envs begin anew: what they were doing belongs to no round."""
    stack.enter_context(torch_threads(recipe.num_threads))
    learner = recipe.make_learner()
    stack.callback(learner.close)
    progress, _ = log.resume(learner)
    weights = stack.enter_context(closing(recipe.make_weights(learner.algorithm.agent, learner.version)))
    replay = stack.enter_context(closing(recipe.make_replay(learner.agent_on_cpu(), progress.rounds)))
    stack.push(log.save_if_failed)  # when nobody samples any more, and there still is a replay
    evaluator = recipe.make_evaluator(weights, learner.version, progress.steps)
    return learner, progress, weights, replay, evaluator and stack.enter_context(closing(evaluator))


def start(recipe: Recipe, actors: RolloutSource | ReplayWriters, progress: Progress, version: int) -> None:
    """Envs begin, other ones where a run is resumed."""
    if progress.steps >= recipe.steps:
        return
    is_new = progress.rounds == 0
    seed = recipe.seed if is_new else derive_seed(recipe.seed, progress.rounds)
    progress.steps += actors.start(seed, recipe.warm_up if is_new else 0, version)


def shares(waited: float, busy: dict[str, float]) -> dict[str, float]:
    """What the learner waited for, by what its workers did meanwhile."""
    total = sum(busy.values())
    return {name: waited * seconds / total if total else 0.0 for name, seconds in busy.items()}
