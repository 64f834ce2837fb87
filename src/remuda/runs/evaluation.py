"""The evaluations of a run: when they are due, which episodes are played, and their results.

evaluations = Evaluations(config, play, directory, terminal, stopwatch)
if evaluations.is_due(steps):
    evaluations.run(learner, replay, must_stop)
    evaluations.take_metrics(steps)                  # {"eval/mean_reward": ..., "eval/steps": ...}

play_episodes(config, spec, 20, agent).summary()     # episodes outside of training, as `Run.evaluate` plays them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeAlias

from remuda.build.envs import make_some_envs, num_workers
from remuda.config.fields import parse_seeds
from remuda.config.run_config import RunConfig
from remuda.core import Agent, Replay, derive_seed
from remuda.envs import EnvSpec
from remuda.learning.learner import Learner
from remuda.logs.stopwatch import Stopwatch
from remuda.logs.terminal import Terminal
from remuda.runs.directory import RunDirectory
from remuda.runs.intervals import Interval
from remuda.sampling.evaluation import Evaluation, evaluate
from remuda.schemes.learning_round import torch_threads

MAX_EVAL_ENVS = 8
# Evaluates an agent; the second argument is a function that returns whether to stop.
EvaluateAgent = Callable[[Agent, Callable[[], bool]], Evaluation]


Result: TypeAlias = dict[str, Any]  # the content of result.json, or of its entry `eval`


class Evaluations:
    """Evaluates the agent between rounds, and keeps results until they are written to a metrics line.

    Results of an evaluator process (`eval.cpu_fraction`) arrive through `add_concurrent`.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluate_agent: EvaluateAgent,
        directory: RunDirectory,
        terminal: Terminal,
        stopwatch: Stopwatch,
    ) -> None:
        self.interval = Interval(config.eval.every)
        # Summary of the newest evaluation. It is cleared once a metrics line contains it, except at the last step,
        # because `RunLog.finish` adds it to the run's result.
        self.result: Result | None = None
        self.evaluate_agent = evaluate_agent
        self._concurrent: Mapping[str, Any] | None = None  # the newest result of the evaluator process
        self._config, self._directory, self._terminal, self._stopwatch = config, directory, terminal, stopwatch

    def is_due(self, steps: int) -> bool:
        """Return whether an evaluation is due after `steps` env steps: every `eval.every` steps and at the end."""
        is_last = steps >= self._config.steps
        return bool(self._config.eval.episodes) and (is_last or self.interval.is_due(steps))

    def run(self, learner: Learner, replay: Replay | None, must_stop: Callable[[], bool]) -> float:
        """Play the episodes of one evaluation, during which samplers begin no rollouts; return the mean return.

        Raise Interrupted if `must_stop` returns True.
        """
        self._terminal.begin("evaluating")
        paused = replay.paused() if replay is not None else nullcontext()
        with self._stopwatch.timed("evaluation"), paused:
            found = self.evaluate_agent(learner.agent_on_cpu(), must_stop)
        self.result = found.summary()
        mean_reward = float(self.result["mean_reward"])
        self._directory.log(f"evaluation: mean return {mean_reward:.2f} over {len(found.returns)} episodes")
        return mean_reward

    def add_concurrent(self, found: Mapping[str, Any]) -> None:
        """Add a result of the evaluator process: an evaluation of the weights after `found["steps"]` steps."""
        self._concurrent = found
        with suppress(OSError):  # a full disk is reported when the next metrics line is written
            self._directory.add_evaluation(found)

    def take_metrics(self, steps: int) -> dict[str, float]:
        """Return the metrics of the results that no metrics line contains yet.

        Clear `result`, except at the last step.
        """
        metrics: dict[str, float] = {}
        if self._concurrent is not None:
            metrics |= _metrics_of(self._concurrent, self._concurrent["steps"])
            self._concurrent = None
        if self.result is not None:
            metrics |= _metrics_of(self.result, steps)
            if steps < self._config.steps:
                self.result = None
        return metrics


def _metrics_of(found: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Return the metrics of an evaluation of the weights after `steps` steps."""
    names = ("mean_reward", "std_reward", "mean_length")
    return {**{f"eval/{name}": found[name] for name in names}, "eval/steps": float(steps)}


def play_episodes(
    config: RunConfig,
    spec: EnvSpec,
    episodes: int,
    agent: Agent,
    should_stop: Callable[[], bool] = lambda: False,
    explore: bool = False,
    workers: int | None = None,
    threads: int | None = None,
) -> Evaluation:
    """Play evaluation episodes in separate envs, so that training is not affected.

    By default, the numbers of env `workers` (0: envs in this process) and torch `threads` are those of the run, but
    there is at most one worker per env.
    """
    count = min(episodes, MAX_EVAL_ENVS)
    seeds = [[eval_seed(config, k) for k in range(i, episodes, count)] for i in range(count)]
    if workers is None:
        workers = 0 if not config.has_workers else min(num_workers(config), count)
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    envs = make_some_envs(config, limited, count, 1, workers, should_stop, seeds)
    # Limit torch's threads: with too many threads, a small net was 80 times slower on a busy machine with two cores.
    with closing(envs), torch_threads(config.scheme_options.threads if threads is None else threads):
        return evaluate(envs, agent, episodes, explore=explore, seed=config.eval.seed)


def eval_seed(config: RunConfig, number: int) -> int:
    """Return the seed for evaluation episode `number`: from `eval.seeds`, or derived from `eval.seed`."""
    if config.eval.seeds is None:
        return derive_seed(config.eval.seed, number)
    given = parse_seeds(config.eval.seeds, "eval.seeds")
    return given[number % len(given)]


def eval_episodes(config: RunConfig) -> int:
    """Return the number of episodes per evaluation: `eval.episodes`, or one for each of `eval.seeds`."""
    given = config.eval.seeds
    return config.eval.episodes if given is None else len(parse_seeds(given, "eval.seeds"))
