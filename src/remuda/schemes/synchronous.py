"""The schemes `serial` and `parallel`: sample a rollout, learn from it, publish the weights, and repeat.

`serial` steps the envs in this process and `parallel` in worker processes. Inference and learning are the same code
on the same batches, so both give the same parameters, bit for bit. Sampler workers that run the policy themselves
(sampler.inference=workers) use smaller batches, whose matrix products may round differently.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

from remuda.core import Replay, derive_seed
from remuda.errors import Interrupted
from remuda.learning.restoring import of_this_version
from remuda.recipe import Log, Progress, Recipe, Round, Sampler
from remuda.schemes.learning_round import learn, rounds, torch_threads


@dataclass(frozen=True)
class Synchronous:
    """Runs a recipe with `workers` env workers; 0 keeps the envs in this process."""

    workers: int = 0

    def rounds(self, recipe: Recipe, log: Log) -> Iterator[Round | None]:
        with ExitStack() as stack:
            stack.enter_context(torch_threads(recipe.num_threads))
            learner = recipe.make_learner()
            stack.callback(learner.close)
            progress, state = log.resume(learner)
            agent = learner.algorithm.agent
            weights = stack.enter_context(closing(recipe.make_weights(agent, learner.version)))
            replay = stack.enter_context(closing(recipe.make_replay(agent, progress.rounds)))
            stack.push(log.save_if_failed)  # called after the sampler is closed and before the replay is closed
            sampler = stack.enter_context(
                closing(recipe.make_sampler(agent, weights, self.workers, progress.rounds, log.must_stop))
            )
            try:
                log.restore(replay)
                restarts = self._start(recipe, sampler, replay, progress, state)

                def make_round() -> Round:
                    rollout = sampler.collect()
                    start = time.perf_counter()
                    learner.set_progress(progress.steps / recipe.steps)
                    metrics, is_whole = learn(learner, replay, rollout, log.must_stop, recipe.updates)
                    weights.publish(learner.version)
                    progress.steps += rollout.num_real
                    progress.rounds += 1
                    seconds = {**sampler.take_seconds(), "update": time.perf_counter() - start}
                    episodes = sampler.episodes()
                    progress.episodes += len(episodes)
                    progress.restarts = restarts + sampler.restarts()
                    round = Round(
                        progress, learner, episodes, metrics, seconds, replay, sampler.get_state, is_whole=is_whole
                    )
                    self._cut_if_due(round, recipe, sampler)
                    return round

                yield from rounds(recipe, log, progress, make_round)
            except Interrupted as error:  # raised only while sampling, so the last round is complete
                log.save_if_stopped(error)

    @staticmethod
    def _start(recipe: Recipe, sampler: Sampler, replay: Replay, progress: Progress, state: bytes | None) -> int:
        """Reset the sampler, or restore its saved `state` if there is one; do neither if all steps are done.

        Returns the number of env restarts so far that `sampler.restarts()` does not include.
        """
        if progress.steps >= recipe.steps:
            return progress.restarts
        if state is not None:
            with of_this_version():
                sampler.set_state(state)
            return progress.restarts - sampler.restarts()
        is_new = progress.rounds == 0
        if not is_new:
            replay.cut()
        seed = recipe.seed if is_new else derive_seed(recipe.seed, progress.rounds)
        progress.steps += sampler.reset(seed, recipe.warm_up if is_new else 0)
        return progress.restarts

    @staticmethod
    def _cut_if_due(round: Round, recipe: Recipe, sampler: Sampler) -> None:
        """Start new episodes in all envs every `cut_every` rounds, so that a resume from these rounds is exact."""
        if not recipe.cut_every:
            return
        round.was_cut = round.progress.rounds % recipe.cut_every == 0
        round.cut_follows = not round.was_cut
        if round.was_cut and round.progress.steps < recipe.steps:
            round.progress.cut += sampler.running()
            sampler.reset(derive_seed(recipe.seed, round.progress.rounds))
            round.replay.cut()
