"""The episodes of an evaluation: how many, with which seeds, and how they are played."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from remuda.build.envs import make_some_envs, num_workers
from remuda.config.fields import parse_seeds
from remuda.config.run_config import RunConfig
from remuda.core import derive_seed
from remuda.envs import EnvSpec
from remuda.sampling.evaluation import Evaluation, evaluate
from remuda.schemes.synchronous import torch_threads

MAX_EVAL_ENVS = 8


def play_episodes(
    config: RunConfig,
    spec: EnvSpec,
    episodes: int,
    agent: Any,
    should_stop: Callable[[], bool] = lambda: False,
    explore: bool = False,
    workers: int | None = None,
    threads: int | None = None,
) -> Evaluation:
    """Episodes with the seeds of the evaluation, in envs of their own: training is not disturbed.

    Their `workers`, and `threads` of torch, are by default those of the run; no workers if it has none.
    """
    count = min(episodes, MAX_EVAL_ENVS)
    seeds = [[eval_seed(config, k) for k in range(i, episodes, count)] for i in range(count)]
    if workers is None:
        workers = 0 if config.scheme == "serial" else min(num_workers(config), count)
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    envs = make_some_envs(config, limited, count, 1, workers, should_stop, seeds)
    # With more threads than it needs, a small net was 80 times slower on a busy machine of two cores.
    with closing(envs), torch_threads(config.scheme_options.threads if threads is None else threads):
        return evaluate(envs, agent, episodes, explore=explore, seed=config.eval.seed)


def eval_seed(config: RunConfig, number: int) -> int:
    """Of an evaluation's episode: one of those given, or drawn from eval.seed."""
    if config.eval.seeds is None:
        return derive_seed(config.eval.seed, number)
    given = parse_seeds(config.eval.seeds, "eval.seeds")
    return given[number % len(given)]


def eval_episodes(config: RunConfig) -> int:
    """Of each evaluation: as many as asked for, or one for each given seed."""
    given = config.eval.seeds
    return config.eval.episodes if given is None else len(parse_seeds(given, "eval.seeds"))
