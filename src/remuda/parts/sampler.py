"""Sampling of a run that is divided into parts: every part has its own share of the envs, and its own sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from remuda.core import Episode
from remuda.data import Rollout
from remuda.data.packing import pack, unpack
from remuda.errors import ConfigError, Interrupted, NoState
from remuda.parts.group import Group
from remuda.recipe import Sampler

logger = logging.getLogger("remuda.parts")


@dataclass(frozen=True, eq=False)
class PartedRollout:
    """The rollouts of this process's parts, with the number of real steps of all parts of the run."""

    parts: tuple[Rollout, ...]
    num_real: int

    def versions(self) -> tuple[float, int]:
        """Return the mean and the lowest version of the weights that acted, which are the same in all parts."""
        return self.parts[0].versions()


class PartedSampler:
    """A `recipe.Sampler` of several parts. Its counts, episodes and times are those of the whole run."""

    def __init__(self, samplers: Sequence[Sampler], num_envs: int, group: Group) -> None:
        """`samplers` has one sampler for each part of this process. Every part has `num_envs` envs."""
        self._samplers, self._group = samplers, group
        self._envs = [torch.arange(part * num_envs, (part + 1) * num_envs) for part in group.local]
        self._episodes: list[Episode] = []
        self._seconds: dict[str, float] = {}
        self._restarts = self._running = 0
        group.serve("sampler", lambda _: [self._state_of(sampler) for sampler in samplers])

    def reset(self, seed: int, warm_up: int = 0) -> int:
        taken: list[int] = self._all_or_none(lambda: [sampler.reset(seed, warm_up) for sampler in self._samplers])
        return sum(taken)

    def _all_or_none(self, work: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of `work` for all parts. If one process is interrupted, raise Interrupted in all."""
        try:
            results: list[Any] = work()
        except Interrupted as error:
            self._group.ask_to_stop()
            self._group.gather([None] * len(self._samplers))
            raise error
        found = self._group.gather(results)
        if None in found:
            raise Interrupted("another part of the run was asked to stop while sampling")
        return found

    def collect(self) -> Rollout:
        self._group.begin_round()
        rollouts = list[Rollout]()

        def work() -> list[Any]:
            rollouts.extend(sampler.collect() for sampler in self._samplers)
            return [self._report(*pair) for pair in zip(self._samplers, rollouts, strict=True)]

        found = self._all_or_none(work)
        # Every rank receives the warnings of all ranks, but only rank 0 logs them. If another rank logged them, it
        # would send them to rank 0 again, in every round.
        if 0 in self._group.local:
            for part, each in enumerate(found):
                for line in each["lines"]:
                    logger.warning("rank %d: %s", part, line.removeprefix("warning: "))
        self._episodes = [Episode(**episode) for each in found for episode in each["episodes"]]
        # Parts of one process take turns, so their times are added. Processes run at the same time, so the times of
        # different processes are averaged.
        ways = self._group.count // len(self._samplers)
        self._seconds = {name: sum(each["seconds"][name] for each in found) / ways for name in found[0]["seconds"]}
        self._restarts, self._running = (sum(each[name] for each in found) for name in ("restarts", "running"))
        parts = tuple(replace(rollout, envs=envs) for rollout, envs in zip(rollouts, self._envs, strict=True))
        # The scheme and the learning round treat the result as a Rollout; only a PartedLearner uses its parts.
        return PartedRollout(parts, sum(each["steps"] for each in found))  # type: ignore[return-value]

    def _report(self, sampler: Sampler, rollout: Rollout) -> dict[str, Any]:
        return {
            "steps": rollout.num_real,
            "episodes": [{"env": each.env, "values": dict(each.values)} for each in sampler.episodes()],
            "seconds": sampler.take_seconds(),
            "restarts": sampler.restarts(),
            "running": sampler.running(),
            "lines": self._group.take_lines(),
        }

    def take_seconds(self) -> dict[str, float]:
        return self._seconds

    def episodes(self) -> list[Episode]:
        return self._episodes

    def restarts(self) -> int:
        return self._restarts

    def running(self) -> int:
        return self._running

    @staticmethod
    def _state_of(sampler: Sampler) -> bytes | str:
        """Return the state of a sampler, or the reason why it cannot be saved."""
        try:
            return sampler.get_state()
        except NoState as error:
            return str(error)

    def get_state(self) -> bytes:
        """Return the states of all parts. Under `replicas`, only the leader may call this."""
        states = self._group.call("sampler")
        for state in states:
            if isinstance(state, str):
                raise NoState(state)
        return pack(states)

    def set_state(self, state: bytes) -> None:
        states = unpack(state)
        if len(states) != self._group.count:
            raise ConfigError(
                f"this run was made by {len(states)} parts or ranks, not by {self._group.count}: use as many."
            )

        def work() -> list[Any]:
            for part, sampler in zip(self._group.local, self._samplers, strict=True):
                sampler.set_state(states[part])
            return [sampler.restarts() for sampler in self._samplers]

        self._restarts = sum(self._all_or_none(work))  # a stop signal may interrupt only some of the processes

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()
