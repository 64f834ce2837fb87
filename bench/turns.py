"""Contenders that take turns: processes that wait, each for its slice, because a shared machine's speed drifts.

contender = Contender([[sys.executable, __file__, "--serve", "pool"]])   # several commands: side by side
found, cpu = contender.slice(0.5)          # every process got "0.5" and answered with one line of JSON

serve(lambda amount: {"steps": ...})       # what such a process does once it is ready
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def serve(take: Callable[[float], dict[str, Any]]) -> None:
    """A slice for every line on stdin, which says how much."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(take(float(line))), flush=True)


class Contender:
    """The driver's side."""

    def __init__(self, commands: Sequence[Sequence[object]]) -> None:
        self._processes = [
            subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # MuJoCo warns for every env that is built
                text=True,
            )
            for command in commands
        ]
        for process in self._processes:
            self._read(process)

    @staticmethod
    def _read(process: Any) -> str:
        line: str = process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender failed: {' '.join(process.args)}")
        return line

    def slice(self, amount: float) -> tuple[list[dict[str, Any]], float]:
        """What every process found, and the CPU seconds of all of them and their children."""
        before = self._cpu()
        for process in self._processes:
            process.stdin.write(f"{amount}\n")
            process.stdin.flush()
        found = [json.loads(self._read(process)) for process in self._processes]
        return found, self._cpu() - before

    def _cpu(self) -> float:
        import psutil  # which only the driver needs

        roots = [psutil.Process(process.pid) for process in self._processes]
        times = [each.cpu_times() for root in roots for each in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def median_and_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between what 95 % of its bootstrap samples lie."""
    array = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(0, len(array), (10_000, len(array)))
    low, high = np.percentile(np.median(array[draws], axis=1), [2.5, 97.5])
    return float(np.median(array)), float(low), float(high)
