"""Measure how fast this tree trains and steps envs, relative to another commit, in alternating slices.

    .venv/bin/python bench/commit_speed.py --base COMMIT --out commit-speed.json        # about 25 minutes
    .venv/bin/python bench/commit_speed.py --base COMMIT --only ppo-cartpole --slices 20

COMMIT is checked out in a temporary worktree, as bench/fingerprints.py does. For each case both trees start the same
training, which then waits. The trees take turns: a training continues for SETTLE_SECONDS, is then measured for
`--seconds`, and waits again. The ratio of two consecutive slices is one sample. The result is the median of these
ratios with its 95 % bootstrap interval; above 1, this tree is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import remuda
from remuda.bench.turns import Contender, cpu_seconds, give_out, median_and_interval

SETTLE_SECONDS = 1.0  # asynchronous samplers have filled their buffers while the learner waited
RUN = {"eval": {"episodes": 0}, "log": {"every": 1_000_000}, "checkpoint": {"every": 0}}

Job = dict[str, Any]
TRAININGS: dict[str, Job] = {
    "ppo-cartpole-serial": {"algo": "ppo", "env": "CartPole-v1", "scheme": "serial", "warm_up": 8_192},
    "ppo-cartpole-parallel": {"algo": "ppo", "env": "CartPole-v1", "scheme": "parallel", "warm_up": 8_192},
    "ppo-pong-serial": {"algo": "ppo", "env": "ALE/Pong-v5", "scheme": "serial", "warm_up": 2_048},
    "impala-pong-async": {"algo": "impala", "env": "ALE/Pong-v5", "scheme": "async", "warm_up": 4_096},
    "sac-halfcheetah-serial": {"algo": "sac", "env": "HalfCheetah-v5", "scheme": "serial", "warm_up": 10_500},
    "sac-halfcheetah-async": {"algo": "sac", "env": "HalfCheetah-v5", "scheme": "async", "warm_up": 10_500},
}
POOL = "pool-stepping"
POOL_JOB = {"bench": "envs", "name": "pool", "env": "HalfCheetah-v5", "envs": 8, "workers": 2}


class Slices:
    """A callback that pauses a training after its warm-up and lets it continue for one slice at a time."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.amount = 0.0  # seconds of the present slice
        self.settled_at: float | None = None  # time at which the present slice begins to be measured
        self.start: tuple[int, float, float] | None = None  # steps, time and CPU seconds when measuring began

    def __call__(self, round: Any) -> bool:
        """Return True, which ends the training, once standard input is closed."""
        steps, now = round.progress.steps, time.perf_counter()
        if steps < self.warm_up:
            return False
        if self.settled_at is None:
            print("ready", flush=True)
            return self._wait()
        if self.start is None:
            if now >= self.settled_at:
                self.start = steps, now, cpu_seconds(os.getpid())
            return False
        first, began, cpu = self.start
        if now < began + self.amount:
            return False
        used = cpu_seconds(os.getpid()) - cpu
        print(json.dumps({"count": steps - first, "seconds": now - began, "cpu_seconds": used}), flush=True)
        return self._wait()

    def _wait(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return True
        self.amount, self.start = float(line), None
        self.settled_at = time.perf_counter() + SETTLE_SECONDS
        return False


def train(job: Job) -> None:
    """Run a training whose callback reads slices from standard input."""
    slices = Slices(job.pop("warm_up"))
    # `remuda train` calls it; commits before it was a function of its own did so inside of `remuda.train`.
    getattr(remuda, "keep_memory", lambda: None)()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        name, env = job.pop("algo"), job.pop("env")
        remuda.train(name, env, **job, **RUN, steps=10**9, seed=1, out=out, callbacks=[slices], quiet=True)


def command(tree: Any, name: str) -> list[object]:
    """Return the command that runs a case in a tree."""
    environment = ["env", f"PYTHONPATH={tree.path / 'src'}"]
    if name == POOL:
        return [*environment, tree.python, "-m", "remuda.bench.contenders", json.dumps(POOL_JOB)]
    return [*environment, tree.python, __file__, "--serve", name]


def imported_from(tree: Any) -> Path:
    words = [str(word) for word in (*command(tree, "")[:3], "-c", "import remuda; print(remuda.__file__)")]
    return Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())


def measure(name: str, base: Any, new: Any, slices: int, seconds: float) -> dict[str, Any]:
    """Return the rates of both trees in every slice, and their ratios."""
    both = {"base": Contender([command(base, name)]), "new": Contender([command(new, name)])}
    rates: dict[str, list[float]] = {tree: [] for tree in both}
    costs: dict[str, list[float]] = {tree: [] for tree in both}
    try:
        for number in range(slices):
            for tree in sorted(both, reverse=bool(number % 2)):  # each tree is first in every other pair
                (found,), cpu = both[tree].slice(seconds)
                rates[tree].append(found["count"] / found["seconds"])
                costs[tree].append(found.get("cpu_seconds", cpu) / found["count"])
    finally:
        for each in both.values():
            each.close()
    ratio, low, high = median_and_interval([a / b for a, b in zip(rates["new"], rates["base"], strict=True)])
    cpu_ratio = statistics.median(a / b for a, b in zip(costs["new"], costs["base"], strict=True))
    print(f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f}), CPU per step {cpu_ratio:.3f}", file=sys.stderr, flush=True)
    return {"ratio": ratio, "interval": [low, high], "cpu_per_step_ratio": cpu_ratio, "steps_per_second": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit to compare the working tree with")
    parser.add_argument("--base-python", type=Path, help="interpreter for it; by default a new environment is made")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of a slice (default: 6)")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        train(dict(TRAININGS[options.serve]))
        return
    names = [name for name in (*TRAININGS, POOL) if options.only in name]
    if not options.base or not names:
        parser.error("give --base COMMIT" if not options.base else f"no case contains {options.only!r}")
    from fingerprints import ROOT, Tree, checked_out, run

    commit = run(["git", "rev-parse", f"{options.base}^{{commit}}"]).strip()
    new = Tree("new", ROOT, Path(sys.executable))
    given = options.base_python and Path(os.path.abspath(options.base_python))
    with checked_out(commit, given) as base:
        for tree in (base, new):
            if tree.path not in imported_from(tree).parents:
                raise SystemExit(f"{tree.name}: remuda is not imported from {tree.path}.")
        cases = {name: measure(name, base, new, options.slices, options.seconds) for name in names}
    give_out({"base": commit, "slices": options.slices, "seconds": options.seconds, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
