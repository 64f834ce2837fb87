"""The metrics of a run: they are collected in every round, and written as one line every `log.every` steps.

    metrics = RunMetrics(config, stopwatch, log)
    with metrics.open(directory, resumed_at=None):      # metrics.jsonl, metrics.csv, TensorBoard, Weights & Biases
        metrics.start(steps)
        while training:
            metrics.add(round)
            if metrics.lines.is_due(steps):
                metrics.write_line(round.progress, learner.version, {"eval/mean_reward": 21.5})

Episode statistics cover the last `log.window` episodes. Metrics that rounds report are averaged over the rounds since
the previous line, with the exceptions that `summarize` (logs/meters.py) documents. Counters such as rollout/episodes
cover the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TypedDict

from remuda.config.run_config import RunConfig, to_dict
from remuda.logs.meters import Window, as_number, summarize
from remuda.logs.stopwatch import Stopwatch
from remuda.logs.writers import MetricsFile, TensorBoard, WandB, Writer
from remuda.recipe import Progress, Round
from remuda.runs.directory import RunDirectory
from remuda.runs.intervals import Interval

LINES_PER_RUN = 200


class MetricsState(TypedDict):
    """State of a run's metrics in a checkpoint."""

    window: list[dict[str, float]]  # values of the last episodes
    sums: dict[str, list[float]]  # one value per round since the last line, by metric
    first_steps: int  # number of env steps before the first round
    total: dict[str, float]  # seconds by activity
    elapsed: float  # seconds since the run started


class RunMetrics:
    """Collects the metrics of rounds and writes them to every writer of the run."""

    def __init__(self, config: RunConfig, stopwatch: Stopwatch, log: Callable[[str], None]) -> None:
        self.lines = Interval(config.log.every or max(1, config.steps // LINES_PER_RUN))
        self.latest: dict[str, float] = {}  # the newest value of every metric that has been written
        self._config, self._stopwatch, self._log = config, stopwatch, log
        self._window = Window(config.log.window)
        self._values: dict[str, list[float]] = defaultdict(list)  # one value per round since the last line, by metric
        self._writers: list[Writer] = []
        self._first_steps = 0  # env steps of the warm-up, which `steps_per_second` excludes
        self._line_steps = 0  # steps done when the last line was written

    @contextmanager
    def open(self, directory: RunDirectory, resumed_at: int | None) -> Iterator[None]:
        """Keep the metric writers open inside the context.

        For a resumed run, `resumed_at` is the step from which it continues; metrics of later steps are deleted first.
        """
        options = self._config.log
        with ExitStack() as stack:
            files = stack.enter_context(closing(MetricsFile(directory.path)))
            self._writers = [files]
            if resumed_at is not None:
                files.resume(resumed_at)
            if options.tensorboard:
                board = stack.enter_context(closing(TensorBoard(directory.tb)))
                self._writers.append(board)
                if resumed_at is not None:
                    board.resume(resumed_at)
            if options.wandb:
                online = WandB(options.wandb, directory.path, to_dict(self._config))
                self._writers.append(stack.enter_context(closing(online)))
            yield

    def start(self, steps: int, saved: MetricsState | None = None) -> None:
        """Start counting before the first round. In a resumed run, `saved` is the saved result of `get_state`."""
        self._first_steps = self._line_steps = steps
        self._stopwatch.restart()
        if saved is None:
            return
        self._first_steps = saved["first_steps"]
        self._stopwatch.total.update(saved["total"])
        self._window.set_state(saved["window"])
        self._values.update(saved["sums"])

    def get_state(self) -> MetricsState:
        """Return the state from which a resumed run continues its unfinished metrics line and its total times."""
        return {
            "window": self._window.get_state(),
            "sums": dict(self._values),
            "first_steps": self._first_steps,
            "total": dict(self._stopwatch.total),
            "elapsed": self._stopwatch.elapsed(),
        }

    def add(self, round: Round) -> None:
        """Add the episodes and metrics of one round."""
        for episode in round.episodes:
            self._window.add(episode.values)
        for name, value in round.metrics.items():
            self._values[name].append(as_number(name, value))

    def write_line(self, progress: Progress, updates: int, evaluation: Mapping[str, float]) -> None:
        """Write one line: the metrics of the rounds since the last line, and of `evaluation`, which may be empty."""
        steps, interval = progress.steps, self._stopwatch.interval
        seconds = sum(interval.values()) or 1.0
        line = self._window.summary()
        line |= {name: summarize(name, values) for name, values in self._values.items()}
        line |= {f"limits/{name}": interval[name] / seconds for name in ("env", "inference", "update", "wait")}
        line |= {
            "train/n_updates": float(updates),
            "rollout/episodes": float(progress.episodes),
            "rollout/restarts": float(progress.restarts),
            "rollout/dropped": float(progress.dropped),
            "rollout/cut": float(progress.cut),
            "time/total_timesteps": float(steps),
            "time/iterations": float(progress.rounds),
            "time/fps": (steps - self._line_steps) / seconds,
            "time/time_elapsed": self._stopwatch.elapsed(),
            **evaluation,
        }
        for writer in self._writers:
            try:
                writer.write(steps, line)
            except OSError as error:
                self._log(f"warning: the metrics at {steps:,} steps could not be written ({error}): make room.")
        self.latest |= line
        self._line_steps = steps
        self.lines.restart(steps)
        self._values.clear()
        interval.clear()

    def steps_per_second(self, steps: int) -> float:
        """Return the env steps per second of the whole run, without warm-up, evaluations and checkpoints."""
        seconds = self._stopwatch.trained()
        return (steps - self._first_steps) / seconds if seconds else 0.0
