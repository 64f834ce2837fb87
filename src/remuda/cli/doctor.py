"""`remuda doctor`: check this machine or an environment for problems."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remuda.cli.options import Parser
from remuda.config.fields import coerce
from remuda.logs.terminal import number
from remuda.machine import usable_cores

EXTRAS = {  # name of an extra: (package that the extra installs, purpose)
    "atari": ("ale_py", "Atari games"),
    "box2d": ("Box2D", "LunarLander, BipedalWalker, CarRacing"),
    "mujoco": ("mujoco", "MuJoCo physics"),
    "minatar": ("minatar", "MinAtar games"),
    "minigrid": ("minigrid", "MiniGrid worlds"),
    "envpool": ("envpool", "--envs.backend envpool"),
    "video": ("av", "remuda record"),
    "wandb": ("wandb", "--log.wandb"),
}


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(prog="remuda doctor", description="Check this machine, or with --env an environment.")
    parser.add_argument("--env", help="check this env: its contract, spaces and speed, and how its runs resume")
    parser.add_argument(
        "--envs.kwargs", dest="kwargs", default="{}", metavar="JSON", help="keyword arguments of the env"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)
    if found.env is None:
        machine, problems = examine_machine()
        report: dict[str, Any] = {**machine}
    else:
        from remuda.envs import choose_backend, examine, resolve
        from remuda.envs.check import WITH_NEW_EPISODES

        spec = resolve(found.env, coerce(found.kwargs, "dict[str, Any]", "envs.kwargs"))
        chosen = choose_backend(spec)
        report = {**asdict(examine(spec)), "backend": "python" if chosen is None else chosen.NAME}
        if chosen is not None:  # runs use native envs, whereas `examine` has checked a single Python env
            report["resume"] = f"{WITH_NEW_EPISODES}, because native envs keep their state to themselves"
        problems = report.pop("problems")
    if found.json:
        print(json.dumps({**report, "problems": problems}))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name.replace('_', ' '):<{width}}  {_shown(value)}")
        for problem in problems:
            print(f"problem: {problem}")
        print("no problems found" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    return number(value) if isinstance(value, float) else str(value)


def examine_machine() -> tuple[dict[str, str], list[str]]:
    """Return facts about this machine by name, and a list of problems, one sentence each."""
    problems = []
    report = {"python": platform.python_version(), "system": platform.platform()}
    for package in ("remuda", "torch", "gymnasium", "numpy"):
        report[package] = importlib.metadata.version(package)
    report["cores"] = f"{usable_cores()} usable of {os.cpu_count()}"
    memory = Path("/proc/meminfo")
    if memory.exists():
        lines = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        report["memory"] = f"{int(lines['MemAvailable'].split()[0]) / 2**20:.1f} GiB available"
    import torch

    report["cuda"] = f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "none"
    report["shared memory"] = "memfd" if hasattr(os, "memfd_create") else "unlinked temporary file"
    for extra, (package, purpose) in EXTRAS.items():
        there = importlib.util.find_spec(package) is not None
        report[f"[{extra}]"] = f"{purpose}: " + ("installed" if there else f"pip install 'remuda[{extra}]'")
    if not os.access(os.getcwd(), os.W_OK):
        problems.append(f"{os.getcwd()} is not writable, and runs go to ./runs: choose another directory with --out.")
    if shutil.disk_usage(os.getcwd()).free < 2**30:
        problems.append("less than 1 GiB of disk space is free here, and checkpoints may fail: free some space.")
    return report, problems
