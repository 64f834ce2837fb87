"""Contenders of a benchmark: processes that take turns (slices), because the speed of a shared machine changes.

contender = Contender([[sys.executable, __file__, "--serve", "pool"]])   # one or more commands, run simultaneously
found, cpu = contender.slice(0.5)          # each process reads "0.5" and answers with one line of JSON

serve(lambda amount: {"steps": ...})       # in the process of a contender, once it is ready
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

REFUSAL = "cannot: "  # a contender that cannot run prints a line that consists of this text and the reason


def serve(take: Callable[[float], dict[str, Any]]) -> None:
    """Print "ready"; then call `take` with each number read from standard input, and print the result as JSON."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(take(float(line))), flush=True)


class Contender:
    """One of the programs that a benchmark compares: starts its processes and reads their answers."""

    def __init__(self, commands: Sequence[Sequence[object]]) -> None:
        self._processes: list[Any] = [
            subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # because MuJoCo prints a warning for every env that is built
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
    def _read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.startswith(REFUSAL):
            raise ConfigError(line.removeprefix(REFUSAL).strip())
        if not line:
            command = shlex.join(map(str, process.args)) if isinstance(process.args, list) else process.args
            raise TrainingError(f"a contender failed: run it alone to see why: {command!s}.")
        return line

    def slice(self, amount: float) -> tuple[list[dict[str, Any]], float]:
        """Send `amount` to all processes and wait for their answers.

        Return the answers, and the CPU seconds that the processes and their children used meanwhile, in total.
        """
        before = self._cpu()
        for process in self._processes:
            with suppress(BrokenPipeError):  # if the process has died, `_read` will raise an error
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
    """Return the CPU seconds, user plus system, of a process and all its descendants."""
    try:
        import psutil
    except ImportError:
        raise ConfigError("benchmarks need psutil to count CPU seconds: pip install psutil.") from None
    root = psutil.Process(pid)
    total = 0.0
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def give_out(report: dict[str, Any], out: Path | None) -> None:
    """Print `report` as JSON. If `out` is not None, also write the report to the file `out`."""
    text = json.dumps(report, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def median_and_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of `ratios`, and the lower and upper end of its 95 % bootstrap interval."""
    array = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(0, len(array), (10_000, len(array)))
    low, high = np.percentile(np.median(array[draws], axis=1), [2.5, 97.5])
    return float(np.median(array)), float(low), float(high)
