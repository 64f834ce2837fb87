"""What limits a run, and what would lift it.

>>> verdict({"env": 1.0, "update": 3.0}, {"update": "a smaller net would lift it"})
('update', 'limited by updates, 75 % of the time: a smaller net would lift it.')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from remuda.build.envs import num_workers
from remuda.config.algo_options import OffPolicyOptions, PPOOptions
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
    """The activity that took most of the time, and a sentence; of what nobody claimed there is nothing to say."""
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
    """What would lift each limit, with the options that this run has."""
    cores = usable_cores() if cores is None else cores
    is_parallel = config.scheme != "serial"
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
    """Whether so many can share its envs."""
    try:
        num_workers(replace(config, sampler=replace(config.sampler, workers=count)))
    except ConfigError:
        return False
    return True


def _for_updates(config: RunConfig, cores: int) -> str:
    ways = ["a smaller net"]
    if isinstance(config.algo_options, PPOOptions):
        ways = ["larger minibatches (--algo.batch_size)", *ways]
    if getattr(config.algo_options, "n_epochs", 1) > 1:
        ways = ["fewer epochs (--algo.n_epochs)", *ways]
    if isinstance(config.algo_options, OffPolicyOptions):
        ways = ["fewer drawn rows per step (--replay.ratio)", *ways]
    if config.scheme_options.threads < cores:
        ways.append(f"for a large net more threads (--scheme.threads {cores})")
    return f"{', '.join(ways[:-1])} or {ways[-1]} would lift it" if len(ways) > 1 else f"{ways[0]} would lift it"


def _for_waiting(config: RunConfig) -> str:
    if config.sampler.inference == "workers":  # who take no turns, and need processes
        return "more envs for each worker (--sampler.envs) would lift it"
    ways = ["workers that act (--sampler.inference workers)"]
    if config.sampler.slots == 1 and config.scheme == "parallel":
        ways.insert(0, "a second group that steps meanwhile (--sampler.slots 2)")
    ways.append("more envs for each worker (--sampler.envs), or none for cheap envs (--scheme serial),")
    return f"{' or '.join(ways)} would lift it"
