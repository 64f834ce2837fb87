"""Verdict at the end of a run: the activity that limited the run's speed, and changes that would make it faster.

>>> verdict({"env": 1.0, "update": 3.0}, {"update": "a smaller net would lift it"})
('update', 'limited by updates, 75 % of the time: a smaller net would lift it.')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from remuda.build.envs import num_workers
from remuda.config.run_config import RunConfig
from remuda.errors import ConfigError
from remuda.machine import usable_cores

NAMES = {
    "env": "the envs",
    "inference": "inference",
    "update": "updates",
    "wait": "waiting for the slowest env worker",
    "evaluation": "evaluations",
    "checkpoint": "checkpoints",
}
ACT = "workers that act (--sampler.inference workers)"


def verdict(seconds: Mapping[str, float], remedies: Mapping[str, str]) -> tuple[str, str]:
    """Return the activity of `NAMES` that took the most `seconds`, and a sentence for the log with its remedy.

    The activity is "nothing" if no time was measured.
    """
    spent = {name: seconds.get(name, 0.0) for name in NAMES}
    limit = max(spent, key=lambda name: spent[name])
    if spent[limit] <= 0.0:
        return "nothing", "nothing was measured that could limit this run."
    share = 100 * spent[limit] / sum(seconds.values())
    return (
        limit,
        f"limited by {NAMES[limit]}, {share:.0f} % of the time: {remedies.get(limit, 'see docs/samplers.md')}.",
    )


def remedies_for(config: RunConfig, cores: int | None = None) -> dict[str, str]:
    """Return, for each activity, a phrase for the log: changes that would help if this activity limits the run."""
    cores = usable_cores() if cores is None else cores
    act = [ACT] if _may_act_in_workers(config) else []
    faster = ["more envs that act together (--sampler.envs)", "a smaller net", *act]
    return {
        "env": _for_envs(config, cores),
        "inference": f"{_either(faster)} would lift it",
        "update": _for_updates(config, cores),
        "wait": _for_waiting(config, act),
        "evaluation": "fewer of them (--eval.every) or fewer episodes (--eval.episodes) would lift it",
        "checkpoint": "fewer of them (--checkpoint.every) or a faster disk would lift it",
    }


def _either(ways: Sequence[str]) -> str:
    return f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]


def _for_envs(config: RunConfig, cores: int) -> str:
    if config.scheme_entry.has_ranks:
        if config.num_parts * max(1, config.sampler.workers) < cores:
            return "more ranks (--scheme.ranks) or env workers in each (--sampler.workers) would lift it"
    elif not config.has_workers and cores > 1:
        if (parts := config.num_parts) > 1:
            return f"a process for each part (--scheme replicas --scheme.ranks {parts}) would lift it"
        return f"worker processes on all {cores} cores (--scheme parallel) would lift it"
    workers = num_workers(config) if config.has_workers else 0
    if config.has_workers and workers < cores:
        for count in range(cores, workers, -1):
            if _may_have_workers(config, count):
                return f"more workers (--sampler.workers {count}) would lift it"
        return "more envs, and as many workers (--sampler.envs, --sampler.workers), would lift it"
    return "a faster env or a machine with more cores would lift it"


def _may_act_in_workers(config: RunConfig) -> bool:
    """Return whether sampler.inference=workers is possible and not set yet."""
    if not config.has_workers or config.sampler.inference == "workers":
        return False
    try:
        replace(config, sampler=replace(config.sampler, inference="workers"))
    except ConfigError:
        return False
    return True


def _may_have_workers(config: RunConfig, count: int) -> bool:
    """Return whether the envs of this run can be divided among `count` workers."""
    try:
        num_workers(replace(config, sampler=replace(config.sampler, workers=count)))
    except ConfigError:
        return False
    return True


def _for_updates(config: RunConfig, cores: int) -> str:
    ways = [*config.algo_options.faster_updates(), "a smaller net"]
    if config.scheme_options.threads < cores:
        ways.append(f"for a large net more threads (--scheme.threads {cores})")
    return f"{_either(ways)} would lift it"


def _for_waiting(config: RunConfig, act: Sequence[str]) -> str:
    if config.sampler.inference == "workers":  # these allow neither --sampler.slots 2 nor --scheme serial
        return "more envs for each worker (--sampler.envs) would lift it"
    ways = [*act, "more envs for each worker (--sampler.envs)"]
    has_halves = config.sampler.envs // config.num_parts % 2 == 0
    if config.sampler.slots == 1 and has_halves and not config.is_asynchronous:
        ways.insert(0, "a second group that steps meanwhile (--sampler.slots 2)")
    none = "without --sampler.workers" if config.scheme_entry.has_ranks else "--scheme serial"
    return f"{' or '.join([*ways, f'no workers for cheap envs ({none})'])} would lift it"
