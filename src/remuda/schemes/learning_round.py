"""One round of learning, the same for all schemes: make the updates that are due, and average their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from remuda.core import Replay
from remuda.data import Rollout
from remuda.errors import Interrupted
from remuda.learning.learner import Learner


def learn(
    learner: Learner, replay: Replay, rollout: Rollout, must_stop: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], bool]:
    """Add a rollout to the replay and make the updates that are due.

    Returns the mean of each metric, and whether the round was completed without an interruption.

    If `must_stop` returns True between two updates, the round ends there and keeps the updates it has made.
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
    """Learn from all batches that are due, and return the mean of each metric.

    `collected_by` and `oldest` are the mean and the lowest version of the weights that sampled the newest rows.
    Raises Interrupted, after a complete update, if `must_stop` returns True.
    """
    seen: dict[str, list[torch.Tensor | float]] = defaultdict(list)
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
    # The lag from gradient to update is 0, because gradients are applied to the parameters they were computed from.
    return {**{name: mean(values) for name, values in seen.items()}, "lag/gradient_to_update": 0.0}


def mean(values: list[torch.Tensor | float]) -> float:
    """Return the mean of tensors or floats. Reading a tensor waits for its device, so call this once per round."""
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
