"""Measure how much one checkpoint in twenty seconds slows the training of 10 million parameters.

    .venv/bin/python bench/checkpoints.py --slices 10

The run is PPO on CartPole with two nets of 2,240 x 2,240. Every slice is a separate run; slices with one checkpoint
and slices without alternate. Steps are timed after a warm-up. A slice takes about twenty seconds, because over a
whole minute the cost of one checkpoint would disappear in the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import remuda
from remuda.bench.job import Stopwatch
from remuda.bench.turns import median_and_interval

ROWS = 512  # rows of a rollout, which makes one update
SECONDS = 20


def one(steps: int, every: int) -> dict[str, float]:
    watch = Stopwatch(2 * ROWS, steps)
    remuda.keep_memory()  # as `remuda train` does
    with tempfile.TemporaryDirectory() as directory:
        run = remuda.train(
            "ppo",
            env="CartPole-v1",
            steps=6 * ROWS + steps,  # more than needed, because the stopwatch ends the run
            out=Path(directory) / "run",
            callbacks=watch,
            quiet=True,
            agent={"hidden": [2240, 2240]},
            sampler={"envs": 8},
            algo={"n_steps": ROWS // 8, "batch_size": ROWS, "n_epochs": 1},
            eval={"episodes": 0},
            checkpoint={"every": every, "keep": "all"},
            scheme={"name": "serial", "threads": 1},
        )
        written = len(list((run.path / "checkpoints").glob("step-*"))) - 1  # the run's last checkpoint is not timed
        parameters = sum(parameter.numel() for parameter in run.agent().parameters())
    return {**watch.result(), "checkpoints": written, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of a slice (default: about twenty seconds of work)"
    )
    parser.add_argument("--every", type=int, help=argparse.SUPPRESS)  # runs one slice, in a separate process
    parser.add_argument("--out", type=Path, default=Path("runs/checkpoints.json"))
    given = parser.parse_args()
    if given.every is not None:
        print(json.dumps(one(given.steps, given.every)))
        return
    steps = given.steps
    if not steps:
        trial = run_slice(8 * ROWS, 0)
        steps = round(SECONDS * trial["steps"] / trial["seconds"] / ROWS) * ROWS
    turns: dict[str, list[dict[str, float]]] = {"none": [], "one": []}
    for _ in range(given.slices):
        turns["none"].append(run_slice(steps, 0))
        turns["one"].append(run_slice(steps, 2 * ROWS + steps // 2))
        print(
            {name: round(found[-1]["steps"] / found[-1]["seconds"], 1) for name, found in turns.items()}, flush=True
        )
    assert all(turn["checkpoints"] == 1 for turn in turns["one"])
    assert all(turn["checkpoints"] == 0 for turn in turns["none"])
    pairs = list(zip(turns["none"], turns["one"], strict=True))
    ratios = [(b["steps"] / b["seconds"]) / (a["steps"] / a["seconds"]) for a, b in pairs]
    middle, low, high = median_and_interval(ratios)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"steps": steps, "slices": turns, "ratio": [middle, low, high]}, indent=1) + "\n")
    parameters = turns["none"][0]["parameters"]
    print(
        f"{parameters:,.0f} parameters, one checkpoint in a slice: {middle:.3f} ({low:.3f} to {high:.3f}) of the rate"
    )


def run_slice(steps: int, every: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--steps", str(steps), "--every", str(every)]
    found: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


if __name__ == "__main__":
    main()
