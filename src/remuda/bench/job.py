"""Run PPO with given settings and measure its speed: the Remuda side of `remuda bench ppo`.

    python -m remuda.bench.job --job JOB.json --out OUT.json

The scripts for other libraries (bench/peers) read the same jobs and write the same kinds of results: the env steps,
seconds and CPU seconds from the end of the warm-up to the end of the last round. The run is an ordinary call of
`remuda.train`, which also writes metrics and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import remuda
from remuda.bench.turns import cpu_seconds
from remuda.envs import is_atari
from remuda.recipe import Round

# Settings for all libraries, by env id or pattern of ids. The settings of CartPole-v1 are the defaults: they apply to
# envs that match no pattern, and they supply the values that other entries leave out.
JOBS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "envs": 8,
        "n_steps": 128,
        "minibatches": 4,
        "epochs": 4,
        "net": "mlp",
        "hidden": [64, 64],
        "activation": "tanh",
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "learning_rate": 3e-4,
        "clip": 0.2,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "normalize_advantage": True,
        "normalize_obs": False,
        "normalize_reward": False,
        "threads": 1,
        "warm_up": 8192,
        "steps": 61_440,
    },
    "ALE/*": {"net": "nature", "clip": 0.1, "ent_coef": 0.01, "threads": 2, "warm_up": 1024, "steps": 3072},
    "HalfCheetah-v5": {
        "n_steps": 256,
        "minibatches": 16,
        "epochs": 10,
        "normalize_obs": True,
        "normalize_reward": True,
        "warm_up": 4096,
        "steps": 12_288,
    },
}


def complete(env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete job for an env: the defaults, overridden by the env's entry in `JOBS` and by `given`."""
    return {**JOBS["CartPole-v1"], **(settings_for(env) or {}), "env": env, "seed": 1, **given}


def settings_for(env: str) -> dict[str, Any] | None:
    return next((settings for pattern, settings in JOBS.items() if fnmatchcase(env, pattern)), None)


class Stopwatch:
    """Callback that reads the clock after `warm_up` env steps and again after `steps` more, then stops the run."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.due, self.steps = warm_up, steps
        self.seen: list[tuple[int, float, float]] = []

    def __call__(self, round: Round) -> bool:
        done = round.progress.steps
        if done >= self.due and len(self.seen) < 2:
            self.seen.append((done, time.perf_counter(), cpu_seconds(os.getpid())))
            self.due = done + self.steps
        return len(self.seen) == 2

    def result(self) -> dict[str, Any]:
        (steps, seconds, cpu), (last_steps, last_seconds, last_cpu) = self.seen
        return {"steps": last_steps - steps, "seconds": last_seconds - seconds, "cpu_seconds": last_cpu - cpu}


def options(job: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a job to Remuda's options, as {group: {option: value}}."""
    is_image = job["net"] == "nature"
    workers = {"workers": job["workers"]} if job.get("workers") and job.get("scheme", "serial") != "serial" else {}
    return {
        "sampler": {"envs": job["envs"], "decorrelate": 0, **workers, **job.get("sampler", {})},
        "agent": {
            "net": job["net"],
            "hidden": job["hidden"],
            "activation": job["activation"],
            "shared": is_image,
            "normalize_obs": job["normalize_obs"],
            "center_images": False,
        },
        "algo": {
            "n_steps": job["n_steps"],
            "batch_size": job["envs"] * job["n_steps"] // job["minibatches"],
            "n_epochs": job["epochs"],
            "clip_range": job["clip"],
            "clip_reward": is_image,
            **{
                name: job[name]
                for name in (
                    *("gamma", "gae_lambda", "learning_rate", "ent_coef", "vf_coef", "max_grad_norm"),
                    *("normalize_advantage", "normalize_reward"),
                )
            },
        },
        "envs": {"backend": job.get("backend", "auto"), **({"sticky": 0.0} if is_atari(job["env"]) else {})},
        "eval": {"episodes": 0},
        # Write metrics rarely, because other libraries write none. By default, a short run writes them every round.
        "log": {"every": job["warm_up"] + job["steps"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    job = json.loads(given.job.read_text())
    watch = Stopwatch(job["warm_up"], job["steps"])
    scheme = {"name": job.get("scheme", "serial"), "threads": job["threads"]}
    remuda.keep_memory()  # as the command `remuda train` does
    with tempfile.TemporaryDirectory() as directory:
        remuda.train(
            "ppo",
            env=job["env"],
            steps=job["warm_up"]
            + job["steps"]
            + 2 * job["envs"] * job["n_steps"],  # more steps than needed, because the stopwatch stops the run
            seed=job["seed"],
            scheme=scheme,
            out=Path(directory) / "run",
            callbacks=watch,
            quiet=True,
            **options(job),
        )
    envs_in = "native envs" if is_atari(job["env"]) and job.get("backend", "auto") == "auto" else "Python"
    found = {"library": "remuda", "version": version("remuda"), **watch.result(), "envs_in": envs_in}
    found["note"] = f"scheme {scheme['name']}, torch threads {scheme['threads']}"
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
