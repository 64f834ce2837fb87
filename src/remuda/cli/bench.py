"""`remuda bench`: compare the speed of several programs (contenders), which take turns."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from remuda.bench.turns import Contender, median_and_interval
from remuda.cli.options import Parser
from remuda.errors import ConfigError, Interrupted, TrainingError, nearest

DESCRIPTION = """\
benchmarks:
  envs      step envs with random actions: in this process, in a pool of
            workers, and in Gymnasium's vector envs
  sampler   collect rollouts with PPO's agent: serial, central inference, two
            alternating groups of envs, inference in the workers
  update    PPO's updates: hand-written gradients (small nets), autograd,
            torch.compile, two threads
  ppo       whole runs of PPO with equal settings: Remuda and, after
            `make peers`, other libraries

Contenders take turns, because the speed of a machine drifts. The result is the
median of the ratios within each turn, with its 95 % bootstrap interval. Ratios
near 1 need ten slices.
"""
PEERS = ("sb3", "cleanrl", "sample-factory", "tianshou", "rllib")
LONGEST_RUN_SECONDS = 3600.0

Turns = dict[str, list[dict[str, Any]]]  # maps each contender to the results of its turns, in order


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(prog="remuda bench", description="Measure speed. Contenders take turns.", epilog=DESCRIPTION)
    parser.add_argument(
        "what",
        choices=("envs", "sampler", "update", "ppo"),
        metavar="BENCHMARK",
        help="envs, sampler, update or ppo, see below",
    )
    parser.add_argument("--env", default="CartPole-v1", help="environment (default: CartPole-v1)")
    parser.add_argument("--envs", type=int, default=0, metavar="N", help="number of envs (default: 8; for envs 32)")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="worker processes (default: one per core)"
    )
    parser.add_argument("--slices", type=int, default=3, metavar="N", help="turns of each contender (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="X", help="length of a turn, except for ppo (default: 1)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="env steps in a turn of ppo (default: by env)"
    )
    parser.add_argument("--only", default="", metavar="NAMES", help="contenders, separated by commas (default: all)")
    parser.add_argument(
        "--peers-at", type=Path, default=Path(), metavar="DIR", help="where `make peers` was run (default: .)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all measurements to this file as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)
    if found.slices < 1 or found.seconds <= 0:
        raise ConfigError(f"--slices {found.slices} --seconds {found.seconds} measures nothing: use values above 0.")
    for name in ("envs", "workers", "steps"):
        if (number := getattr(found, name)) < 0:
            raise ConfigError(f"--{name} {number} is below 0: leave it out, or give a number above 0.")
    check_env(found.env)
    with ended_by_signals():
        turns, unit = measure_runs(found) if found.what == "ppo" else measure_parts(found)
    report = {"bench": found.what, "env": found.env, "machine": machine(), **summary(turns, unit)}
    if found.out is not None:
        found.out.parent.mkdir(parents=True, exist_ok=True)
        found.out.write_text(json.dumps({**report, "slices": turns}, indent=1) + "\n")
    print(json.dumps(report) if found.json else table(report))
    return 0


def check_env(env: str) -> None:
    """Raise a UsageError for an unusable env before any contender starts."""
    from remuda.envs import probe, resolve

    probe(resolve(env))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise Interrupted on SIGINT and SIGTERM, so that `finally` blocks in the context end all started processes."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped = Interrupted(f"stopped by {signal.Signals(number).name} before the measurement was complete.")
        stopped.signal = number
        raise stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure_parts(found: argparse.Namespace) -> tuple[Turns, str]:
    """Measure contenders that keep one process for all turns.

    Return each contender's results, one per turn, and the unit of the number `count` in every result.
    """
    from remuda.bench.contenders import NAMES, UNITS

    envs = found.envs or (32 if found.what == "envs" else 8)
    names = chosen(found.only, NAMES[found.what])
    job = {"bench": found.what, "env": found.env, "envs": envs, "workers": found.workers}
    contenders: dict[str, Contender] = {}
    try:
        for name in names:
            command = [sys.executable, "-m", "remuda.bench.contenders", json.dumps({**job, "name": name})]
            try:
                contenders[name] = Contender([command])
            except (ConfigError, TrainingError) as error:
                leave_out(found.only, error)
        turns: Turns = {name: [] for name in contenders}
        for _ in range(found.slices):
            for name, contender in contenders.items():
                (answer,), cpu = contender.slice(found.seconds)
                turns[name].append({**answer, "cpu_seconds": cpu})
    finally:
        for contender in contenders.values():
            contender.close()
    return turns, UNITS[found.what]


def measure_runs(found: argparse.Namespace) -> tuple[Turns, str]:
    """Measure contenders that start a new run for each turn. The start-up and warm-up of a run are not measured.

    Return each contender's results, one per turn, and the unit of the number `count` in every result.
    """
    from remuda.bench.job import complete

    commands = ours_and_peers(found.peers_at, found.env)
    names = chosen(found.only, tuple(commands))
    given = {name: getattr(found, name) for name in ("envs", "steps", "workers") if getattr(found, name)}
    turns: Turns = {name: [] for name in names}
    for _ in range(found.slices):
        for name in list(turns):
            command, settings = commands[name]
            try:
                turns[name].append(one_run([*command], complete(found.env, {**given, **settings})))
            except TrainingError as error:
                leave_out(found.only, error)
                del turns[name]
                continue
            print(f"  {name}: {rate(turns[name][-1]):,.0f} steps/s", file=sys.stderr)
    return turns, "env steps"


def leave_out(only: str, error: ConfigError | TrainingError) -> None:
    """Print why a contender is left out, or raise `error` if the user chose contenders by --only."""
    if only:
        raise error
    print(f"  left out: {error}", file=sys.stderr)


def ours_and_peers(place: Path, env: str) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Return the command of each contender, and the settings in which its job differs from the default job.

    `place` is the directory in which `make peers` was run. Libraries that it has not installed there are left out.
    """
    from remuda.envs import choose_backend, resolve

    ours = [sys.executable, "-m", "remuda.bench.job"]
    found: dict[str, tuple[list[str], dict[str, Any]]] = {
        "remuda": (ours, {}),
        "remuda parallel": (ours, {"scheme": "parallel"}),
        "remuda workers act": (ours, {"scheme": "parallel", "sampler": {"inference": "workers"}}),
    }
    if choose_backend(resolve(env)) is not None:  # a run uses native envs, so also measure a run without them
        found["remuda single envs"] = ours, {"scheme": "parallel", "backend": "python"}
    for peer in PEERS:
        python, scripts = place / f".venv-{peer}" / "bin" / "python", place / "bench" / "peers"
        script = next(iter(sorted(scripts.glob(f"{peer.replace('-', '_')}*.py"))), None)
        if (python.parent.parent / ".installed").exists() and script is not None:
            found[peer] = ([str(python), str(script)], {})
    return found


def one_run(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        job_file, out = Path(directory) / "job.json", Path(directory) / "out.json"
        job_file.write_text(json.dumps(job))
        words = [*command, "--job", str(job_file), "--out", str(out)]
        reason = run_to_the_end(words, Path(directory) / "stderr.txt")
        if not out.exists():
            raise TrainingError(
                f"{Path(command[-1]).name} failed ({reason}): run it alone, or leave it out with --only."
            )
        found = json.loads(out.read_text())
    how = f"{found['library']} {found['version']}; envs in {found['envs_in']}; {found['note']}"
    return {"count": found["steps"], "seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"], "how": how}


def run_to_the_end(words: list[str], log: Path) -> str:
    """Run a command with its stderr redirected to the file `log`; return the last line of stderr.

    Processes that the command leaves running are killed. A command that takes longer than LONGEST_RUN_SECONDS is
    killed as well, and TrainingError is raised.
    """
    with log.open("w+") as stderr:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            process.wait(LONGEST_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise TrainingError(
                f"{shlex.join(words[:2])} took more than {LONGEST_RUN_SECONDS:.0f} seconds: give it fewer --steps."
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kills the children of the process as well
            process.wait()
        stderr.seek(0)
        return (stderr.read().strip().splitlines() or ["no message"])[-1]


def chosen(only: str, names: Sequence[str]) -> list[str]:
    wanted = [name.strip() for name in only.split(",")] if only else list(names)
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--only {name} is not a contender here: {nearest(name, names)}")
    return wanted


def rate(turn: dict[str, Any]) -> float:
    found: float = turn["count"] / turn["seconds"]
    return found


def summary(turns: Turns, unit: str) -> dict[str, Any]:
    """Return the median speed and median CPU seconds of each contender.

    For every turn, the speed of the first contender is divided by the speed of this contender. The entry
    `first_is_times` is the median of these ratios, and `interval` is the 95 % bootstrap interval of the median.
    """
    if not turns:
        raise TrainingError("no contender could run: the reasons are above.")
    first = next(iter(turns))
    rows = {}
    for name, mine in turns.items():
        ratios = [rate(first_turn) / rate(turn) for first_turn, turn in zip(turns[first], mine, strict=True)]
        middle, low, high = median_and_interval(ratios)
        rows[name] = {
            "per_second": statistics.median(rate(turn) for turn in mine),
            "cpu_seconds_per_1000": statistics.median(1e3 * turn["cpu_seconds"] / turn["count"] for turn in mine),
            "first_is_times": middle,
            "interval": [low, high],
        } | ({"how": mine[0]["how"]} if "how" in mine[0] else {})
    return {"unit": unit, "first": first, "turns": len(turns[first]), "contenders": rows}


def table(report: dict[str, Any]) -> str:
    first, unit = report["first"], report["unit"]
    lines = [
        f"{report['bench']}, {report['env']}, {report['turns']} turns of each; {report['machine']}",
        "",
        f"| | {unit}/s, median | CPU seconds per 1,000 | {first} is ... times as fast (95 % interval) |",
        "|---|---|---|---|",
    ]
    for name, row in report["contenders"].items():
        low, high = row["interval"]
        ratio = "" if name == first else f"{row['first_is_times']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {name} | {row['per_second']:,.0f} | {row['cpu_seconds_per_1000']:.3f} | {ratio} |")
    notes = [f"- {name}: {row['how']}" for name, row in report["contenders"].items() if "how" in row]
    return "\n".join([*lines, "", *notes] if notes else lines)


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}"
    )
