"""Train from a configuration: build what the run needs, train under its scheme, and write the run directory.

The command `remuda train` and the function `remuda.train` both exhaust the generator `train`. The chain of calls from
`train` to the loss is: `scheme.rounds` (schemes/synchronous.py), `learn` (schemes/learning_round.py),
`learner.gradients` (learning/learner.py), `algorithm.losses` (algorithms/ppo.py).
"""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TypeAlias

from remuda.agents import NetFactory
from remuda.build.envs import frame_skip_warning, num_workers
from remuda.build.recipe import make_recipe
from remuda.config.run_config import RunConfig, to_dict
from remuda.envs import EnvInfo, EnvSpec, refuse_in_worker
from remuda.errors import DamagedReplay, EnvFailed, Interrupted, RemudaError
from remuda.learning.checkpoint import Checkpoint, load_newest
from remuda.learning.weights import FileWeights
from remuda.logs.terminal import Terminal
from remuda.machine import existing_objects_frozen
from remuda.recipe import Recipe, Scheme
from remuda.runs.checkpoints import find_checkpoint
from remuda.runs.directory import SPACES, WEIGHTS, RunDirectory
from remuda.runs.evaluation import Result, eval_episodes, play_episodes
from remuda.runs.evaluator import EvaluatorProcess
from remuda.runs.profile import profiled
from remuda.runs.ranks import enter_torchrun, failure_published
from remuda.runs.run_log import RunLog
from remuda.runs.signals import STOPPING, StopSignals
from remuda.runs.spaces import write_spaces
from remuda.runs.stopping import Callback
from remuda.runs.video import refuse_unfilmable

Rounds: TypeAlias = Generator[RunLog, None, Result]


def exhaust(training: Rounds) -> Result:
    """Exhaust the generator `training`, and return its return value (see `train`)."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            result: Result = end.value
            return result


def train(
    config: RunConfig,
    spec: EnvSpec,
    info: EnvInfo,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    net: NetFactory | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    profile: bool = False,
) -> Rounds:
    """Train a run as configured: yield the log of the run when training can begin, and again after every round.

    The generator returns a dict with the content of result.json, the `path` of the run, and the `signal` that ended
    the run, or None.
    """
    refuse_in_worker()
    if config.has_replay_writers or (config.has_workers and config.sampler.inference == "workers"):
        # Store `workers` in config.yaml: its default depends on the machine, and checkpoints hold a state per worker.
        config = replace(config, sampler=replace(config.sampler, workers=num_workers(config)))
    refuse_unfilmable(config, spec, info)
    with failure_published(config):
        out, resume = enter_torchrun(config, spec, info, net, out, resume)
        recipe = make_recipe(config, spec, info, net)
        exact_until = config.steps if config.checkpoint.cut_episodes else 0
        found = find_checkpoint(Path(out), exact_until) if resume and out is not None else None
        while True:
            try:
                options = (config, spec, info, net, out, resume, callbacks, quiet, profile)
                return (yield from train_from(found, config.scheme_entry.make_scheme(config), recipe, *options))
            except DamagedReplay as error:  # raised here, because the replay reads its files only in the first round
                assert found is not None
                found = load_newest(found.path.parent, found.step, [*found.skipped, str(error)])


def train_from(
    found: Checkpoint | None,
    scheme: Scheme,
    recipe: Recipe,
    config: RunConfig,
    spec: EnvSpec,
    info: EnvInfo,
    net: NetFactory | None,
    out: str | Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    quiet: bool,
    profile: bool,
) -> Rounds:
    """Open the run directory and run the scheme, starting from checkpoint `found` if it is not None.

    The caller has already refused most invalid configurations, so that no directory is created or changed for them.
    """
    name = f"{config.algo}-{config.env}-{config.seed}"
    with (
        RunDirectory.create(out, name, to_dict(config), resume=resume) as directory,
        StopSignals(STOPPING) as signals,
    ):
        title, done = f"{config.algo} {config.env} {config.scheme}", found.step if found is not None else 0
        terminal = Terminal(config.steps, title, start_steps=done, file=sink(quiet))
        play = partial(play_episodes, config, spec, eval_episodes(config))
        journal = RunLog(directory, config, play, terminal, signals)
        try:
            if not (directory.path / SPACES).exists():  # a resumed run keeps its existing file
                write_spaces(directory.path, info.observation, info.action)
            with (
                journal.open(resume, found),
                profiled(directory.path / "profile" if profile else None) as count_round,
                existing_objects_frozen(),
            ):
                journal.callbacks = [*callbacks, count_round]
                if config.scheme_options.weights == "file":
                    path = directory.path / WEIGHTS
                    recipe = replace(recipe, make_weights=lambda agent, version: FileWeights(agent, path, version))
                if config.eval.cpu_fraction:
                    video = directory.videos / "newest.mp4" if config.eval.video else None
                    stop = journal.must_stop
                    watched = partial(EvaluatorProcess, config, spec, video=video, should_stop=stop, net=net)
                    recipe = replace(recipe, make_evaluator=watched)
                warn_if_nothing_is_learned(config, journal)
                if warning := frame_skip_warning(spec):
                    journal.log(f"warning: {warning}")
                for round in scheme.rounds(recipe, journal):
                    journal.last_round = round
                    yield journal
                result = journal.finish()
        except Interrupted as error:  # a signal arrived before training began
            if not resume:
                directory.discard()
            stopped = Interrupted(f"stopped by {signals.name} before training began: nothing was kept.")
            stopped.signal = signals.received or stopped.signal
            raise stopped from error
        except RemudaError as error:
            has_failed = isinstance(error, EnvFailed)
            if journal.progress.rounds == 0 and not resume and not has_failed:
                directory.discard()  # nothing was learned, so there is nothing to keep
            else:
                with suppress(OSError):  # on a full disk, raise the error of the run, not that of writing
                    directory.write_result({"status": "failed", "error": str(error), "steps": journal.progress.steps})
                is_new = not directory.has_traceback if has_failed else hasattr(error, "__notes__")
                directory.log(f"failed: {error}", "".join(format_exception(error)) if is_new else "")
            raise
        except OSError:  # such as too many open files
            if journal.progress.rounds == 0 and not resume:
                directory.discard()
            raise
        directory.write_result(result)
    return {**result, "path": str(directory.path), "signal": signals.received}


def warn_if_nothing_is_learned(config: RunConfig, journal: RunLog) -> None:
    """Log a warning if the run ends before its first update."""
    starts, steps = config.algo_options.random_steps, config.steps
    if config.algo_options.uses_replay and steps <= starts:
        journal.log(
            f"warning: learning would begin after algo.learning_starts={starts:,} steps, and there are {steps:,}."
        )


def sink(quiet: bool) -> io.StringIO | None:
    """Return the file for the terminal view: a buffer that is never read if `quiet`, or None for standard output."""
    return io.StringIO() if quiet else None
