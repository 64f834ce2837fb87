"""Verdict at the end of a run: the activity that limited the run's speed, and changes that would make it faster.

>>> verdict({"env": 1.0, "update": 3.0}, {"update": "a smaller net would lift it"})
('update', 'limited by updates, 75 % of the time: a smaller net would lift it.')
"""

from __future__ import annotations

from collections.abc import Mapping
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


def verdict(seconds: Mapping[str, float], remedies: Mapping[str, str]) -> tuple[str, str]:
    """Return the activity of `NAMES` that took the most time, and a sentence about it for the log."""
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
    is_parallel = config.has_workers
    workers = num_workers(config) if is_parallel else 0
    return {
        "env": _for_envs(config, is_parallel, workers, cores),
        "inference": "more envs that act together (--sampler.envs) or a smaller net would lift it"
        + (
            ", or workers that act (--sampler.inference workers)"
            if is_parallel and config.sampler.inference == "central"
            else ""
        ),
        "update": _for_updates(config, cores),
        "wait": _for_waiting(config),
        "evaluation": "fewer of them (--eval.every) or fewer episodes (--eval.episodes) would lift it",
        "checkpoint": "fewer of them (--checkpoint.every) or a faster disk would lift it",
    }


def _for_envs(config: RunConfig, is_parallel: bool, workers: int, cores: int) -> str:
    if not is_parallel and cores > 1:
        return f"worker processes on all {cores} cores (--scheme parallel) would lift it"
    if is_parallel and workers < cores:
        for count in range(cores, workers, -1):
            if _may_have_workers(config, count):
                return f"more workers (--sampler.workers {count}) would lift it"
        return "more envs, and as many workers (--sampler.envs, --sampler.workers), would lift it"
    return "a faster env or a machine with more cores would lift it"


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
    return f"{', '.join(ways[:-1])} or {ways[-1]} would lift it" if len(ways) > 1 else f"{ways[0]} would lift it"


def _for_waiting(config: RunConfig) -> str:
    if config.sampler.inference == "workers":  # such runs have one slot, and not --scheme serial
        return "more envs for each worker (--sampler.envs) would lift it"
    ways = ["workers that act (--sampler.inference workers)"]
    if config.sampler.slots == 1 and config.has_workers and not config.is_asynchronous:
        ways.insert(0, "a second group that steps meanwhile (--sampler.slots 2)")
    ways.append("more envs for each worker (--sampler.envs), or none for cheap envs (--scheme serial),")
    return f"{' or '.join(ways)} would lift it"
