"""Schemes whose edges all wait: sample, learn, publish, and again.

`serial` steps the envs in this process, `parallel` in worker processes; inference and learning are the same code on
the same batches, so both give the same parameters, bit for bit. Workers that act themselves
(sampler.inference=workers) run inference on smaller batches, whose products may round differently.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from remuda.core import Log, Progress, Recipe, Replay, Round, Sampler, derive_seed
from remuda.data import Rollout
from remuda.errors import Interrupted
from remuda.learning.learner import Learner
from remuda.learning.restoring import of_this_version


@dataclass(frozen=True)
class Synchronous:
    """Runs a recipe with this many env workers; 0 keeps the envs in this process."""

    workers: int = 0

    def run(self, recipe: Recipe, log: Log) -> Learner:
        with ExitStack() as stack:
            stack.enter_context(torch_threads(recipe.num_threads))
            learner = recipe.make_learner()
            progress, state = log.resume(learner)
            agent = learner.algorithm.agent
            weights = stack.enter_context(closing(recipe.make_weights(agent, learner.version)))
            replay = stack.enter_context(closing(recipe.make_replay(agent, progress.rounds)))
            stack.push(log.save_if_failed)  # when nobody samples any more, and there still is a replay
            sampler = stack.enter_context(
                closing(recipe.make_sampler(agent, weights, self.workers, progress.rounds, log.must_stop))
            )
            try:
                log.restore(replay)
                restarts = self._start(recipe, sampler, replay, progress, state)
                log.begin()
                must_end = log.should_stop()
                while progress.steps < recipe.steps and not must_end:
                    rollout = sampler.collect()
                    start = time.perf_counter()
                    learner.set_progress(progress.steps / recipe.steps)
                    metrics, is_whole = learn(learner, replay, rollout, log.must_stop)
                    weights.publish(learner.version)
                    progress.steps += int(rollout.steps.mask.sum())
                    progress.rounds += 1
                    seconds = {**sampler.take_seconds(), "update": time.perf_counter() - start}
                    episodes = sampler.episodes()
                    progress.episodes += len(episodes)
                    progress.restarts = restarts + sampler.restarts()
                    round = Round(
                        progress, learner, episodes, metrics, seconds, replay, sampler.get_state, is_whole=is_whole
                    )
                    self._cut_if_due(round, recipe, sampler)
                    must_end = log.round(round)
            except Interrupted as error:  # while sampling: the learner is as the last round left it
                log.save_if_stopped(error)
            return learner

    @staticmethod
    def _start(recipe: Recipe, sampler: Sampler, replay: Replay, progress: Progress, state: bytes | None) -> int:
        """Where the run left off, or at the beginning; returns the restarts that the sampler knows nothing of."""
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
        """Every `cut_every` rounds, start new episodes in all envs: a run resumed from there repeats this one."""
        if not recipe.cut_every:
            return
        round.was_cut = round.progress.rounds % recipe.cut_every == 0
        round.cut_follows = not round.was_cut
        if round.was_cut and round.progress.steps < recipe.steps:
            round.progress.cut += sampler.running()
            sampler.reset(derive_seed(recipe.seed, round.progress.rounds))
            round.replay.cut()


def learn(
    learner: Learner, replay: Replay, rollout: Rollout, must_stop: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], bool]:
    """Learn what is due after a fresh rollout; return the mean of each metric, and whether all of it was learned.

    If `must_stop` becomes true between two updates, the round ends there and keeps the updates it has made.
    """
    batch = learner.prepare(rollout)
    version = rollout.steps.version
    collected_by, oldest = float(version.float().mean()), int(version.min())
    replay.add(batch)
    means, is_whole = {"lag/gradient_to_update": 0.0}, True
    try:
        means = learn_due(learner, replay, collected_by, oldest, must_stop)
    except Interrupted:
        is_whole = False
    learner.finish(rollout)
    return {**{f"train/{name}": mean([value]) for name, value in batch.metrics.items()}, **means}, is_whole


def learn_due(
    learner: Learner, replay: Replay, collected_by: float, oldest: int, must_stop: Callable[[], bool]
) -> dict[str, float]:
    """All batches that are due. `collected_by` and `oldest`: which weights acted last, on average and at worst."""
    seen: dict[str, list[Any]] = defaultdict(list)
    for minibatch in replay.batches():
        seen["lag/collect_to_gradient"].append(learner.version - collected_by)
        seen["lag/collect_to_gradient_max"] = [learner.version - oldest]
        result = learner.step(minibatch)
        replay.feedback(minibatch.key, result.priority)
        for name, value in result.metrics.items():
            seen[f"train/{name}"].append(value)
        if must_stop():
            raise Interrupted("asked to stop between two updates")
        if result.stop:
            break
    # Gradients are applied to the parameters they were computed from.
    return {**{name: mean(values) for name, values in seen.items()}, "lag/gradient_to_update": 0.0}


def mean(values: list[Any]) -> float:
    """Of tensors or floats; tensors are read only here, once per round."""
    if len(values) == 1:
        return float(values[0])
    if not any(isinstance(value, torch.Tensor) for value in values):
        return float(sum(values) / len(values))
    return float(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).mean())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many while it lasts, 0 being one, on which small networks are fastest; what the caller had is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
