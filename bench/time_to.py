"""Measure seconds from the start of the process until an agent reaches a goal, for Remuda and Stable-Baselines3.

    .venv/bin/python bench/time_to.py              # PPO: CartPole-v1 to 475 and Acrobot-v1 to -100, five seeds each
    .venv/bin/python bench/time_to.py --env HalfCheetah-v5 --seeds 3 --out docs/speed/time-to-3000.json  # SAC: hours

The goal is a mean return over the last training episodes, checked after every rollout. Contenders alternate seed by
seed, and each has the machine to itself. The time includes imports, building envs and all training up to the goal.
Every run is recorded when it ends; with `--resume`, runs that the file --out already holds are not repeated.

For PPO, SB3 (after `make peers`) uses the hyperparameters of RL Baselines3 Zoo and steps envs in its own process.

For SAC, docs/speed.md describes the settings of each contender and how they were chosen (bench/speed_page.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LONGEST_SECONDS = 3600.0  # a run that has not reached the goal by then counts as failed


@dataclass(frozen=True)
class Theirs:
    """Settings of a run of SB3."""

    settings: dict[str, Any]  # [a, b] is a linear schedule from a to b
    n_envs: int = 1
    normalize: bool = False
    threads: int = 1  # torch threads


@dataclass(frozen=True)
class Task:
    """A goal and its contenders by name: arguments of remuda.train (`ours`) and settings of SB3 (`theirs`)."""

    algo: str
    goal: float
    window: int  # number of episodes over which returns are averaged
    ours: dict[str, dict[str, Any]]
    theirs: dict[str, Theirs]
    steps: int = 1_000_000


MANY_STEPS = {"sampler": {"envs": 32}, "replay": {"ratio": 2}, "algo": {"batch_size": 64, "learning_rate": 1e-3}}
SOME_STEPS = {
    "sampler": {"envs": 12},
    "replay": {"ratio": 32 / 3},
    "algo": {"batch_size": 128, "learning_rate": 1e-3},
}
TWO_THREADS = {"scheme": {"name": "serial", "threads": 2}}
TASKS = {
    "CartPole-v1": Task(
        "ppo",
        goal=475.0,
        window=20,
        ours={"ours": {}},
        theirs={
            "zoo": Theirs(
                {
                    "n_steps": 32,
                    "batch_size": 256,
                    "gae_lambda": 0.8,
                    "gamma": 0.98,
                    "n_epochs": 20,
                    "learning_rate": [1e-3, 0.0],
                    "clip_range": [0.2, 0.0],
                },
                n_envs=8,
            )
        },
        steps=100_000,
    ),
    "Acrobot-v1": Task(
        "ppo",
        goal=-100.0,
        window=20,
        ours={"ours": {}},
        theirs={
            "zoo": Theirs(
                {"n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4}, n_envs=16, normalize=True
            )
        },
    ),
    "HalfCheetah-v5": Task(
        "sac",
        goal=3_000.0,
        window=10,
        ours={
            "async": {**MANY_STEPS, "scheme": "async"},
            "serial, same": {**MANY_STEPS, **TWO_THREADS},
            "serial, 12 steps": {**SOME_STEPS, **TWO_THREADS},
            "serial": TWO_THREADS,
        },
        theirs={
            "sb3, same": Theirs(
                {"learning_starts": 10_000, "batch_size": 64, "learning_rate": 1e-3}, n_envs=32, threads=2
            ),
            "sb3": Theirs({"learning_starts": 10_000}, threads=2),
        },
    ),
}
PPO_TASKS = ("CartPole-v1", "Acrobot-v1")


def remuda_seconds(env: str, name: str, seed: int) -> tuple[float, int] | None:
    """Train, and return the seconds and env steps until the goal was reached; None if it was not."""
    import remuda

    task = TASKS[env]
    returns: deque[float] = deque(maxlen=task.window)
    found: list[tuple[float, int]] = []

    def is_good(round: Any) -> bool:
        returns.extend(episode.values["ep_rew"] for episode in round.episodes)
        if not found and len(returns) == task.window and statistics.fmean(returns) >= task.goal:
            found.append((since_start(), round.progress.steps))
        return bool(found)

    remuda.keep_memory()  # as `remuda train` does
    with tempfile.TemporaryDirectory() as directory:
        remuda.train(
            task.algo,
            env=env,
            seed=seed,
            out=Path(directory) / "run",
            callbacks=is_good,
            quiet=True,
            eval={"episodes": 0},
            **task.ours[name],
        )
    return found[0] if found else None


def sb3_seconds(env: str, name: str, seed: int) -> tuple[float, int] | None:
    import torch
    from sb3_run import with_schedules
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    task = TASKS[env]
    theirs = task.theirs[name]
    torch.set_num_threads(theirs.threads)
    envs: Any = make_vec_env(env, n_envs=theirs.n_envs, seed=seed)
    if theirs.normalize:
        envs = VecNormalize(envs)
    kind = {"ppo": PPO, "sac": SAC}[task.algo]
    settings = {"seed": seed, "device": "cpu", "stats_window_size": task.window, **with_schedules(theirs.settings)}
    model = kind("MlpPolicy", envs, **settings)
    found: list[tuple[float, int]] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return not found

        def _on_rollout_end(self) -> None:
            # These returns come from SB3's Monitor, so they are not normalized.
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if len(returns) == task.window and statistics.fmean(returns) >= task.goal:
                found.append((since_start(), self.num_timesteps))

    model.learn(task.steps, callback=Watch())
    return found[0] if found else None


def since_start() -> float:
    """Return the seconds since the start of this process, including the start of the interpreter."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def take_turns(env: str, seeds: int, out: Path) -> None:
    """Run all contenders of a task in turn, except for runs that the file `out` already holds."""
    task = TASKS[env]
    sb3 = str(ROOT / ".venv-sb3" / "bin" / "python")
    pythons = dict.fromkeys(task.ours, sys.executable) | dict.fromkeys(task.theirs, sb3)
    report = json.loads(out.read_text()) if out.exists() else {}
    found: dict[str, list[list[float]]] = {name: [] for name in pythons}
    found |= report.get(env, {}).get("seconds and steps", {})
    for seed in range(1, seeds + 1):
        for name, python in pythons.items():
            if len(found[name]) >= seed:
                continue
            words = [python, __file__, "--one", name, "--env", env, "--seed", str(seed)]
            said = subprocess.run(
                words,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=LONGEST_SECONDS,
            )
            answer = json.loads(said.stdout.splitlines()[-1])
            found[name].append(answer or [float("inf"), float("inf")])
            print(env, seed, name, answer, flush=True)
            out.write_text(
                json.dumps(report | {env: {"goal": task.goal, "seconds and steps": found}}, indent=1) + "\n"
            )
    medians = {name: statistics.median(turn[0] for turn in turns) for name, turns in found.items()}
    first = next(iter(found))
    for name, seconds in medians.items():
        if name != first:
            times = f"{seconds / medians[first]:.2f} times as fast"
            print(f"{env} to {task.goal:g}: {first} {medians[first]:.1f} s, {name} {seconds:.1f} s: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--env", choices=TASKS, help="run only this env")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out, and make the others")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # makes one run of this contender, in a separate process
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "time-to.json")
    given = parser.parse_args()
    if given.one:
        is_ours = given.one in TASKS[given.env].ours
        print(json.dumps((remuda_seconds if is_ours else sb3_seconds)(given.env, given.one, given.seed)))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if not given.resume:
        given.out.unlink(missing_ok=True)
    for env in [given.env] if given.env else PPO_TASKS:
        take_turns(env, given.seeds, given.out)


if __name__ == "__main__":
    main()
