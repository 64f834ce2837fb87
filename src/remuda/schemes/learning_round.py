"""The iterator of rounds that all schemes share, and a round of learning, which makes the updates that are due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from remuda.core import Replay
from remuda.data import Rollout
from remuda.devices import CPU, means_on_cpu
from remuda.errors import Interrupted
from remuda.learning.gradients import Gradients
from remuda.learning.learner import Learner
from remuda.recipe import Applied, Log, Progress, Recipe, Round, Updates


def rounds(recipe: Recipe, log: Log, progress: Progress, make_round: Callable[[], Round]) -> Iterator[Round | None]:
    """Yield None when training can begin, then each round after the log has recorded it."""
    log.begin()
    yield None
    must_end = log.should_stop()
    while progress.steps < recipe.steps and not must_end:
        round = make_round()
        must_end = log.round(round)
        round.is_last = must_end or progress.steps >= recipe.steps
        yield round
        if not round.is_last and log.should_stop():  # the iterator's caller or a signal has asked to stop
            log.save(round)
            must_end = True


class LocalUpdates:
    """Applies gradients at once, to the parameters from which they were computed."""

    def exchange(self, learner: Learner, gradients: Gradients) -> Applied:
        if gradients.stop:
            return Applied(0, stop=True)
        before = learner.version
        metrics = learner.apply(gradients)
        return Applied(learner.version - before, False, metrics, float(before - gradients.version))

    def agree(self, stop: bool) -> bool:
        return stop


LOCAL = LocalUpdates()


def learn(
    learner: Learner,
    replay: Replay,
    rollout: Rollout,
    must_stop: Callable[[], bool] = lambda: False,
    updates: Updates | None = None,
) -> tuple[dict[str, float], bool]:
    """Add a rollout to the replay and make the updates that are due.

    Returns the mean of each metric, and whether the round was completed without an interruption.

    If `must_stop` returns True between two updates, the round ends there. The updates that were made are kept.
    """
    batch = learner.prepare(rollout)
    collected_by, oldest = rollout.versions()
    replay.add(batch)
    means, is_whole = dict[str, float](), True
    try:
        means = learn_due(learner, replay, collected_by, oldest, must_stop, updates or LOCAL)
    except Interrupted:
        is_whole = False
    finished = learner.finish(rollout)
    prepared = {f"train/{name}": float(value) for name, value in batch.metrics.items()}
    return {**prepared, **means, **finished}, is_whole


def learn_due(
    learner: Learner,
    replay: Replay,
    collected_by: float,
    oldest: int,
    must_stop: Callable[[], bool],
    updates: Updates = LOCAL,
) -> dict[str, float]:
    """Learn from the batches that one call of `replay.batches` yields, and return the mean of each metric.

    `collected_by` and `oldest` are the mean and the lowest version of the weights that sampled the newest rows.
    Raises Interrupted after a complete update if `updates.agree(must_stop())` is True.
    """
    seen: dict[str, list[torch.Tensor | float]] = defaultdict(list)
    for minibatch in replay.batches():
        seen["lag/collect_to_gradient"].append(learner.version - collected_by)
        seen["lag/collect_to_gradient_max"] = [learner.version - oldest]
        gradients = learner.gradients(minibatch)
        applied = updates.exchange(learner, gradients)
        if applied.versions:
            seen["lag/gradient_to_update"].append(applied.gradient_to_update)
        is_skipped = not applied.versions and not applied.stop
        # An update is skipped if a gradient is not finite. Drop its priorities, which may then be infinite or NaN.
        replay.feedback(minibatch.key, None if is_skipped else gradients.priority)
        for name, value in (*gradients.metrics.items(), *applied.metrics.items()):
            seen[f"train/{name}"].append(value)
        if updates.agree(must_stop()):
            raise Interrupted("asked to stop between two updates")
        if applied.stop:
            break
    return {name: mean(values) for name, values in (seen if learner.device == CPU else means_on_cpu(seen)).items()}


def mean(values: list[torch.Tensor | float]) -> float:
    """Return the mean of floats, of tensors on the CPU, or of both."""
    if len(values) == 1:
        return float(values[0])
    if not any(isinstance(value, torch.Tensor) for value in values):
        return float(sum(values) / len(values))
    return float(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).mean())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within a context; 0 means one thread, which is fastest for small networks."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
