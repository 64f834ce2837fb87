"""Contenders that take turns: processes that wait, each for its slice, because a shared machine's speed drifts.

contender = Contender([[sys.executable, __file__, "--serve", "pool"]])   # several commands: side by side
found, cpu = contender.slice(0.5)          # every process got "0.5" and answered with one line of JSON

serve(lambda amount: {"steps": ...})       # what such a process does once it is ready
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from remuda.errors import ConfigError, TrainingError

REFUSAL = "cannot: "  # what a contender says instead of being ready, and the reason


def serve(take: Callable[[float], dict[str, Any]]) -> None:
    """A slice for every line on stdin, which says how much."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(take(float(line))), flush=True)


class Contender:
    """The driver's side."""

    def __init__(self, commands: Sequence[Sequence[object]]) -> None:
        self._processes: list[Any] = [
            subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # MuJoCo warns for every env that is built
                text=True,
            )
            for command in commands
        ]
        try:
            for process in self._processes:
                self._read(process)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _read(process: Any) -> str:
        line: str = process.stdout.readline()
        if line.startswith(REFUSAL):
            raise ConfigError(line.removeprefix(REFUSAL).strip())
        if not line:
            raise TrainingError(f"a contender failed: run it by itself to see why: {shlex.join(process.args)}.")
        return line

    def slice(self, amount: float) -> tuple[list[dict[str, Any]], float]:
        """What every process found, and the CPU seconds of all of them and their children."""
        before = self._cpu()
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has died: reading says so
                process.stdin.write(f"{amount}\n")
                process.stdin.flush()
        found = [json.loads(self._read(process)) for process in self._processes]
        return found, self._cpu() - before

    def _cpu(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of all that it started."""
    try:
        import psutil
    except ImportError:
        raise ConfigError("benchmarks count CPU seconds with psutil: pip install psutil.") from None
    root = psutil.Process(pid)
    total = 0.0
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def give_out(report: dict[str, Any], out: Path | None) -> None:
    """As JSON on the screen, and in a file if one was named."""
    text = json.dumps(report, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def median_and_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between what 95 % of its bootstrap samples lie."""
    array = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(0, len(array), (10_000, len(array)))
    low, high = np.percentile(np.median(array[draws], axis=1), [2.5, 97.5])
    return float(np.median(array)), float(low), float(high)
