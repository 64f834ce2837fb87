"""Measure the cost of policy lag with and without V-trace, by returns after training on rollouts of older weights.

    .venv/bin/python bench/lags.py --out docs/schemes/lags.json    # about fifteen minutes; also writes lags.md

Every rollout is sampled by weights that are exactly `lag` updates old. To force this lag, the run is synchronous and
weights are published `lag` updates late; under --scheme async, the lag is not controlled and differs from rollout to
rollout. With the correction `none`, the learner treats these rollouts as if the newest weights had sampled them, as
in an ablation of NAPPO.
"""

import argparse
import json
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from remuda.config.resolve import resolve_config
from remuda.learning.weights import SharedWeights
from remuda.runs import train as training

ROOT = Path(__file__).parents[1]
LAGS, CORRECTIONS = (0, 4, 16), ("vtrace", "none")


class LaggingWeights(SharedWeights):
    """Publishes weights as they were `lag` updates ago, and the initial weights until then."""

    def __init__(self, module, version=0, lag=0):
        self._lag, self._kept = lag, deque()
        super().__init__(module, version)

    def publish(self, version):
        newest = [tensor.clone() for tensor in self._tensors]
        self._kept.append((version, newest))
        while len(self._kept) > 1 and self._kept[1][0] <= version - self._lag:
            self._kept.popleft()
        version, old = self._kept[0]
        with torch.no_grad():
            for tensor, kept in zip(self._tensors, old, strict=True):
                tensor.copy_(kept)
            super().publish(version)
            for tensor, kept in zip(self._tensors, newest, strict=True):
                tensor.copy_(kept)


def returns_of(algo, env, steps, settings, seed, lag, correction):
    """Train, and return the mean return of greedy episodes with the final weights."""
    groups = {
        "algo": {**settings, "correction": correction},
        "sampler": {"inference": "workers"},
        "eval": {"episodes": 100},
        "log": {"tensorboard": False},
    }
    setup = resolve_config({"algo": algo, "env": env, "steps": steps, "seed": seed, "scheme": "parallel"}, groups)
    make_recipe = training.make_recipe

    def lagging(*args):
        return replace(make_recipe(*args), make_weights=lambda agent, version: LaggingWeights(agent, version, lag))

    training.make_recipe = lagging
    try:
        with tempfile.TemporaryDirectory() as directory:
            result = training.exhaust(training.train(*setup, out=Path(directory) / "run", quiet=True))
            line = json.loads((Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    finally:
        training.make_recipe = make_recipe
    assert round(line["lag/collect_to_gradient"]) == lag, "the lag is not the one that was forced"
    return result["eval"]["mean_reward"]


def page(found):
    lines = [
        "# The cost of lag, with and without V-trace",
        "",
        f"{found['algo']} on {found['env']}, {found['steps']:,} steps, seeds {found['seeds']}: mean return of 100",
        "greedy episodes with the final weights, and in parentheses that of each seed. Every rollout was sampled by",
        "weights that were older by exactly the lag. Without correction the learner treats it as if it were new.",
        f"`bench/lags.py` writes this page; settings that differ from the preset: {found['settings'] or 'none'}.",
        "",
        "| lag in updates | V-trace | no correction |",
        "|---|---|---|",
    ]
    for lag in found["lags"]:
        cells = [found["returns"][f"{correction} {lag}"] for correction in CORRECTIONS]
        shown = [f"{np.mean(cell):.3g} ({', '.join(f'{value:.3g}' for value in cell)})" for cell in cells]
        lines.append(f"| {lag} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="impala")
    parser.add_argument("--env", default="MinAtar/Breakout-v1")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--settings", type=json.loads, default={}, help='options of the algorithm: {"learning_rate": "1e-3"}'
    )
    parser.add_argument("--lags", type=int, nargs="+", default=LAGS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "schemes" / "lags.json")
    given = parser.parse_args()
    fixed = (given.algo, given.env, given.steps, given.settings)
    found = {**dict(zip(("algo", "env", "steps", "settings"), fixed, strict=True)), "seeds": given.seeds}
    found |= {"lags": given.lags, "returns": {}}
    for lag in given.lags:
        for correction in CORRECTIONS:
            own = [returns_of(*fixed, seed, lag, correction) for seed in given.seeds]
            found["returns"][f"{correction} {lag}"] = own
            print(f"lag {lag:2} {correction:7} {np.mean(own):7.1f}  {own}", flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
