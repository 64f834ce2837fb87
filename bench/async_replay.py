"""Measure whole runs of SAC under --scheme async: replay ratio, age of the samplers' weights, cost of an evaluator.

    .venv/bin/python bench/async_replay.py --out docs/speed/async-replay.json       # about eight minutes

Replay ratios are computed from updates, batch size and steps; the run's own metric is not used. To measure the cost
of an evaluator, runs with and without one alternate. The result is the ratio of their rates within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import remuda
from remuda.bench.turns import give_out, median_and_interval

RATIOS = (0.5, 1.0, 8.0, None)
STARTS, BATCH = 1_000, 256
PUBLISH_EVERY = 10


def run(env: str, steps: int, ratio: float | None, share: float = 0.0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train, and return the result of the run and its lines of metrics."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        done = remuda.train(
            "sac",
            env,
            scheme={"name": "async", "publish_every": PUBLISH_EVERY},
            steps=steps,
            seed=1,
            out=path,
            quiet=True,
            algo={"learning_starts": STARTS, "batch_size": BATCH},
            replay={"ratio": ratio},
            sampler={"envs": 1, "workers": 1},
            eval={"episodes": 5, "cpu_fraction": share},
            log={"tensorboard": False, "every": 100},
            checkpoint={"every": 0},
        )
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return done.result, lines


def ratios(env: str) -> list[dict[str, Any]]:
    """For each ratio, measure the rows learned from per step after the warm-up, and the age of samplers' weights."""
    found = []
    for ratio in RATIOS:
        steps = STARTS + int(200 * BATCH / ratio if ratio is not None and ratio < 8 else 20_000)
        result, lines = run(env, steps, ratio)
        ages = [line["lag/acting_weights"] for line in lines if line["time/total_timesteps"] > 2 * STARTS]
        measured = result["updates"] * BATCH / (result["steps"] - STARTS)
        found.append(
            {
                "ratio": ratio,
                "measured": measured,
                "steps": result["steps"],
                "updates": result["updates"],
                "median_age_in_intervals": statistics.median(ages) / PUBLISH_EVERY,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def evaluator(env: str, share: float, steps: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        for name, part in (("without", 0.0), ("with", share)):
            rates[name].append(run(env, steps, float(BATCH), part)[0]["steps_per_second"])
        print(json.dumps({name: each[-1] for name, each in rates.items()}), flush=True)
    kept = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    return {"share": share, "steps": steps, "rounds": rounds, "rates": rates, "kept": median_and_interval(kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1", help="env for the ratios")
    parser.add_argument("--watched", default="HalfCheetah-v5", help="env for the evaluator")
    parser.add_argument("--share", type=float, default=0.1, help="fraction of a core for the evaluator")
    parser.add_argument("--steps", type=int, default=2_500, help="steps of each run with or without an evaluator")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = {
        "env": given.env,
        "batch": BATCH,
        "publish_every": PUBLISH_EVERY,
        "ratios": ratios(given.env),
        "watched": given.watched,
        "evaluator": evaluator(given.watched, given.share, given.steps, given.rounds),
    }
    give_out(report, given.out)


if __name__ == "__main__":
    main()
