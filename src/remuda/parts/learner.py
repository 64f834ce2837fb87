"""Learning of a run that is divided into parts: one update from the gradients of all parts.

Every part computes the gradient of its own batch. Each gradient is multiplied by the number of rows over which the
part's loss is averaged. The products are added in the order of parts, and the sum is divided by the number of rows of
all parts: the result is the gradient of the mean loss. If the algorithm's loss is a sum over rows, the gradients are
only added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from remuda.core import CountsLearnedRows, SeparableAlgorithm, Statistics
from remuda.data import Batch, Rollout, leaves
from remuda.devices import CPU, send
from remuda.errors import RanksDiverged
from remuda.learning.gradients import Gradients, Pieces
from remuda.learning.learner import Learner
from remuda.parts.group import Group
from remuda.parts.metrics import PartMetrics, merge
from remuda.parts.replay import PartedBatch
from remuda.parts.sampler import PartedRollout
from remuda.recipe import Applied

# The vector of a part consists of three numbers, which are its number of rows and two requests (PartedUpdates), then
# one flag for each parameter group (whether the part has a gradient of this group), and then the gradients.
NUM_LEADING = 3


@dataclass(frozen=True)
class PartedGradients(Gradients):
    """The gradients of this process's parts. `pieces` and `metrics` are empty; `priority` has one entry per part."""

    parts: tuple[Gradients | None, ...] = ()  # None for parts without a batch
    rows: tuple[float, ...] = ()  # number of rows over which each part's losses are averaged


class PartedLearner(Learner):
    """A `Learner` whose rollouts, batches and gradients are those of several parts.

    All processes of the run apply the same updates and absorb the same statistics, in the same order, so their
    parameters stay equal bit for bit.
    """

    def __init__(self, group: Group, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        algorithm, self._group = self.algorithm, group
        # Whether losses are sums over rows; otherwise they are means, and a part is weighted by its number of rows.
        self.adds_losses = isinstance(algorithm, SeparableAlgorithm) and algorithm.gradient_reduction == "sum"
        self._prepared = [PartMetrics() for _ in group.local]  # metrics that `prepare` has computed
        self._metrics = [PartMetrics() for _ in group.local]  # metrics of the updates after `prepare`
        group.serve("set_option", self._set_here)
        group.serve("digest", lambda _: [digest(self.state_dict())] * len(group.local))

    def set_option(self, name: str, value: str | float | None) -> None:
        """Use another value of an option in all processes. Under `replicas`, only the leader may call this."""
        self._group.call("set_option", [name, value])

    def _set_here(self, argument: Sequence[Any]) -> Sequence[None]:
        super().set_option(*argument)
        return [None] * len(self._group.local)

    def check_agreement(self) -> None:
        """Raise RanksDiverged if the learners of the run's processes differ.

        Under `replicas`, only the leader may call this.
        """
        if len(self._group.local) == self._group.count:
            return
        sums = self._group.call("digest")
        for part, found in enumerate(sums):
            if found != sums[0]:
                raise RanksDiverged(
                    f"the parameters, statistics or optimizer of {self._group.name_of(part)} differ from those of "
                    "rank 0, because one rank only was changed (Training.set reaches all), or because the ranks "
                    "compute differently: continue from the last checkpoint with --resume."
                )

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Batch:
        """Absorb the reward statistics of all parts, and return the batches of this process's parts."""
        parts = cast(PartedRollout, rollout).parts
        for statistics in self._exchange([self.algorithm.reward_statistics(part) for part in parts]):
            self.algorithm.absorb(statistics)
        batches = tuple(self.algorithm.prepare(part) for part in parts)
        for metrics, batch, part in zip(self._prepared, batches, parts, strict=True):
            metrics.add(batch.metrics, float(part.num_real))
        return cast(Batch, PartedBatch(batches))

    def gradients(self, batch: Batch) -> Gradients:
        """Compute the gradients of this process's parts, each with the random numbers of its part."""
        found: list[Gradients | None] = []
        rows: list[float] = []
        clock = self.clock
        for part, own in zip(self._group.local, cast(PartedBatch, batch).parts, strict=True):
            self.clock = replace(clock, part=part)
            found.append(None if own is None else super().gradients(own))
            rows.append(0.0 if own is None else self._num_learned(own))
        self.clock = clock
        for metrics, gradients, count in zip(self._metrics, found, rows, strict=True):
            metrics.add({} if gradients is None else gradients.metrics, count)
        stop = any(gradients is not None and gradients.stop for gradients in found)
        priority = cast(Tensor, [None if gradients is None else gradients.priority for gradients in found])
        return PartedGradients({}, self.version, {}, priority, stop, tuple(found), tuple(rows))

    def _num_learned(self, batch: Batch) -> float:
        """Return the number of rows over which the losses of a batch are averaged."""
        if isinstance(self.algorithm, CountsLearnedRows):
            return float(self.algorithm.num_learned(batch))
        return float(batch.steps.mask.sum())

    def finish(self, rollout: Rollout) -> dict[str, float]:
        """Absorb the observation statistics of all parts; return the metrics of all parts since `prepare`."""
        parts = cast(PartedRollout, rollout).parts
        found = [
            statistics for statistics in self._exchange([self.obs_statistics(part) for part in parts]) if statistics
        ]
        for statistics in found:
            self.algorithm.absorb(statistics)
        self.statistics_version += bool(found)
        return {f"train/{name}": value for name, value in self._merged_metrics().items()}

    def _merged_metrics(self) -> dict[str, float]:
        """Return the metrics of all parts since `prepare`; losses that are sums over rows are added over parts."""
        pooled = {name: type(metric) for each in self._prepared for name, metric in each.pooled.items()}
        taken = [(early.take(), late.take()) for early, late in zip(self._prepared, self._metrics, strict=True)]
        parts = self._group.gather(taken)
        late = [part[1] for part in parts]
        losses = {name for part in late for name in part["values"] if name.endswith("loss")}
        return {
            **merge([part[0] for part in parts], pooled),
            **merge(late, {}, losses if self.adds_losses else ()),
        }

    def _exchange(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the statistics of all parts, given those of this process's parts."""
        if not any(statistics):  # true in all processes or in none, as it depends on the configuration
            return []
        arrays = [{name: value.numpy() for name, value in part.items()} for part in statistics]
        return [
            {name: torch.from_numpy(value) for name, value in part.items()} for part in self._group.gather(arrays)
        ]


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 sum of a tree of tensors and plain values."""
    found = hashlib.sha256()
    for path, leaf in leaves(state):
        found.update(path.encode())
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


class PartedUpdates:
    """`recipe.Updates` that add the gradients of all parts and apply the sum once in every process.

    Two requests are sent together with the gradients, so that all processes act on them at the same update: to end
    the round without this update (algo.target_kl), and to interrupt the round after this update (a stop signal).
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._wants_interrupt = self._is_interrupted = False

    def exchange(self, learner: Learner, gradients: Gradients) -> Applied:
        own, is_sum = cast(PartedGradients, gradients), cast(PartedLearner, learner).adds_losses
        sizes = {name: len(vector) for name, vector in learner.vectors.items()}
        header = NUM_LEADING + len(sizes)
        slots = self._group.vectors(header + sum(sizes.values()))
        for slot, part, rows in zip(slots, own.parts, own.rows, strict=True):
            has_gradient = [part is not None and name in part.pieces for name in sizes]
            slot[:header] = torch.tensor([rows, own.stop, self._wants_interrupt, *has_gradient], dtype=slot.dtype)
            write_weighted(slot[header:], part, sizes, 1.0 if is_sum else rows)
        total = self._group.sum()
        rows, stop, interrupt, *found = total[:header].tolist()
        total = send(total, learner.device)
        self._is_interrupted = interrupt > 0
        if stop or not rows:
            return Applied(0, stop=stop > 0)
        pieces, start = dict[str, Pieces](), header
        for (name, size), count in zip(sizes.items(), found, strict=True):
            vector = total[start : start + size]
            if count:
                lengths = [parameter.numel() for parameter in learner.parameters[name]]
                pieces[name] = torch.split(vector if is_sum else vector / rows, lengths)
            start += size
        before = learner.version
        metrics = learner.apply(replace(own, pieces=pieces))
        return Applied(learner.version - before, False, metrics, float(before - own.version))

    def agree(self, stop: bool) -> bool:
        """Return whether all processes interrupt the round now. `stop` is sent with the next gradients."""
        self._wants_interrupt = stop
        return self._is_interrupted


def write_weighted(vector: Tensor, gradients: Gradients | None, sizes: Mapping[str, int], weight: float) -> None:
    """Write the gradients of all groups, times `weight`, to `vector`. A group without a gradient gets zeros.

    `vector` is on the CPU. Gradients on another device are first written to a vector there, so that one copy moves
    all of them.
    """
    device = device_of(gradients)
    if device != vector.device:
        there = torch.empty(len(vector), device=device)
        write_weighted(there, gradients, sizes, weight)
        vector.copy_(there)
        return
    start = 0
    for name, size in sizes.items():
        pieces = () if gradients is None else gradients.pieces.get(name, ())
        if not pieces:
            vector[start : start + size] = 0.0
        end = start
        for piece in pieces:
            end += piece.numel()
            torch.mul(piece, weight, out=vector[end - piece.numel() : end])
        start += size


def device_of(gradients: Gradients | None) -> torch.device:
    pieces = () if gradients is None else tuple(gradients.pieces.values())
    return pieces[0][0].device if pieces else CPU
