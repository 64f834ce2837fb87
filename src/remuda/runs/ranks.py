"""What a run does differently if torchrun has started this process as one of several ranks."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Never

from remuda.agents import NetFactory
from remuda.build.ranks import difference, follow, join_torchrun
from remuda.build.recipe import make_recipe
from remuda.config.run_config import RunConfig, to_dict
from remuda.envs import EnvInfo, EnvSpec
from remuda.errors import ConfigError
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


def run_rank(torchrun: Torchrun, config: RunConfig, spec: EnvSpec, info: EnvInfo, net: NetFactory | None) -> Never:
    """Train as a rank other than rank 0 until rank 0 ends the run, and then exit from the process.

    torchrun passes signals on to all ranks. Only rank 0 handles them, and tells all other ranks when to stop.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    recipe = make_recipe(config, spec, info, net)
    with closing(join_torchrun(torchrun, config, lambda: None)) as collective:
        follow(config, recipe, collective)
    raise SystemExit(0)


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
