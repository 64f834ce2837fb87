"""Measure the seconds from a command to the first update of a run, and to the end of `remuda --help`.

    .venv/bin/python bench/start_up.py --out runs/bench/start-up.json

The run writes a metrics line after every rollout, so its first line marks the first update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REMUDA = str(Path(sys.executable).with_name("remuda"))
TRAIN = "train ppo --env CartPole-v1 --scheme parallel --sampler.workers 2 --quiet --eval.episodes 0 --log.every 1"


def to_first_update() -> float:
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "run" / "metrics.jsonl"
        start = time.perf_counter()
        words = [REMUDA, *TRAIN.split(), "--steps", "2048", "--out", str(lines.parent)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
            while not (lines.exists() and lines.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit("the run ended before its first line of metrics")
                time.sleep(0.002)
            return time.perf_counter() - start


def to_help() -> float:
    start = time.perf_counter()
    subprocess.run([REMUDA, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/start-up.json"))
    given = parser.parse_args()
    found = {"first update": [], "help": []}
    for _ in range(given.times):
        found["first update"].append(to_first_update())
        found["help"].append(to_help())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, seconds in found.items():
        print(f"{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
