"""What a run does differently if torchrun has started this process as one of several ranks."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from types import FrameType
from typing import Never, Self

from remuda.agents import NetFactory
from remuda.build.ranks import difference, follow
from remuda.build.recipe import make_recipe
from remuda.build.torchrun_ranks import FAILURE_NOTICE, join_torchrun
from remuda.collectives import Health
from remuda.config.run_config import RunConfig, to_dict
from remuda.envs import EnvInfo, EnvSpec
from remuda.errors import ConfigError, DamagedReplay, Interrupted
from remuda.runs.directory import RUNS, RunDirectory, safe_name, stored_form
from remuda.torchrun import Torchrun, read_torchrun, refuse_many_processes


def enter_torchrun(
    config: RunConfig,
    spec: EnvSpec,
    info: EnvInfo,
    net: NetFactory | None,
    out: str | Path | None,
    resume: bool,
) -> tuple[str | Path | None, bool]:
    """Return the run's directory and whether to resume; without torchrun, these are `out` and `resume` as given.

    If torchrun has started this process as any rank but rank 0, this function trains and does not return.
    """
    if not config.scheme_entry.has_ranks:
        refuse_many_processes(config.scheme)
        return out, resume
    torchrun = read_torchrun()
    if torchrun is None:
        return out, resume
    if torchrun.rank:
        run_rank(torchrun, config, spec, info, net)
    return (out, True) if resume else place_of_run(torchrun, config, out)


def failure_published(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context that tells the other ranks of torchrun, if any, when this one fails before it joins them.

    Raises ConfigError if this process has already trained a run under torchrun.
    """
    torchrun = read_torchrun() if config.scheme_entry.has_ranks else None
    return nullcontext() if torchrun is None else FAILURE_NOTICE.published(torchrun)


class FollowerSignals:
    """Context manager in which a rank other than rank 0 passes its stop signals on to rank 0.

    torchrun sends SIGTERM to the ranks of one machine only, so rank 0 may not receive the signal itself. Rank 0 then
    ends the run for all ranks. A second signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.health: Health | None = None  # None until this rank has joined the others

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # Python delivers signals to it only
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self.health is not None:
            self.health.pass_signal(number)

    def joined(self, health: Health) -> None:
        self.health = health
        if self.received is not None:  # the signal arrived just before
            health.pass_signal(self.received)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived before this rank has joined the others."""
        if self.received is not None and self.health is None:
            error = Interrupted(f"stopped by {self.received.name} before training began.")
            error.signal = self.received
            raise error


def run_rank(torchrun: Torchrun, config: RunConfig, spec: EnvSpec, info: EnvInfo, net: NetFactory | None) -> Never:
    """Train as a rank other than rank 0 until rank 0 ends the run, and then exit from the process."""
    with FollowerSignals() as signals:
        recipe = make_recipe(config, spec, info, net)
        while True:
            with closing(join_torchrun(torchrun, config, signals.check)) as collective:
                FAILURE_NOTICE.is_awaited = False
                signals.joined(collective.health)
                try:
                    follow(config, recipe, collective)
                    break
                except DamagedReplay:  # rank 0 starts again from an earlier checkpoint
                    FAILURE_NOTICE.is_awaited = True
                finally:
                    signals.health = None
        raise SystemExit(0 if signals.received is None else 128 + signals.received)


def place_of_run(torchrun: Torchrun, config: RunConfig, out: str | Path | None) -> tuple[Path, bool]:
    """Return the directory of a run that torchrun started, and whether to resume the run there.

    If a rank fails, torchrun starts all ranks again with the same command. Therefore all starts by the same torchrun
    process use the same directory, and resume the run there if one of them began or continued it. Any other run in
    this directory is refused later, as without torchrun.
    """
    name = safe_name(f"{config.algo}-{config.env}-{config.seed}")
    path = Path(RUNS) / f"{name}-torchrun-{torchrun.launch}" if out is None else Path(out)
    if not (path / "config.yaml").is_file():
        return path, False
    run = RunDirectory.open(path)
    if torchrun.launch not in run.launches():
        return path, False
    if (found := difference(run.read_config(), stored_form(to_dict(config)))) is not None:
        raise ConfigError(f"out={path} already holds a run with another {found}: choose another --out.")
    return path, True
