"""Wall-clock seconds from the start of the process until an agent is good, ours with its preset against SB3's zoo.

    .venv/bin/python bench/time_to.py                  # CartPole-v1 to 475 and Acrobot-v1 to -100, five seeds each

Good is a mean of at least the goal over the last 20 training episodes, looked at after every rollout; both libraries
take turns, seed by seed. Imports, building of envs and all of the training up to there are counted. SB3 (after
`make peers`) has the hyperparameters of RL Baselines3 Zoo, and envs in its own process.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOALS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0}
ZOO: dict[str, dict[str, Any]] = {  # [a, b]: from a to b, in a line
    "CartPole-v1": {
        "n_envs": 8,
        "steps": 100_000,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": [1e-3, 0.0],
        "clip_range": [0.2, 0.0],
    },
    "Acrobot-v1": {
        "n_envs": 16,
        "steps": 1_000_000,
        "normalize": True,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "gamma": 0.99,
        "n_epochs": 4,
    },
}
WINDOW = 20


def ours(env: str, seed: int, scheme: str) -> tuple[float, int] | None:
    import remuda

    returns: deque[float] = deque(maxlen=WINDOW)
    reached: list[int] = []

    def is_good(round: Any) -> bool:
        returns.extend(episode.values["ep_rew"] for episode in round.episodes)
        if len(returns) == WINDOW and statistics.fmean(returns) >= GOALS[env]:
            reached.append(round.progress.steps)
        return bool(reached)

    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        watch = lambda round: is_good(round) and (seconds.append(since_start()) or True)  # noqa: E731
        remuda.train(
            "ppo",
            env=env,
            seed=seed,
            scheme=scheme,
            out=Path(directory) / "run",
            callbacks=watch,
            quiet=True,
            eval={"episodes": 0},
        )
    return (seconds[0], reached[0]) if reached else None


def zoo(env: str, seed: int) -> tuple[float, int] | None:
    import torch
    from sb3_run import with_schedules
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)  # the fastest for nets this small
    settings = with_schedules(ZOO[env])
    steps, count = settings.pop("steps"), settings.pop("n_envs")
    envs: Any = make_vec_env(env, n_envs=count, seed=seed)
    if settings.pop("normalize", False):
        envs = VecNormalize(envs)
    model = PPO("MlpPolicy", envs, seed=seed, device="cpu", stats_window_size=WINDOW, **settings)
    found: list[tuple[float, int]] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return not found

        def _on_rollout_end(self) -> None:
            returns = [
                episode["r"] for episode in self.model.ep_info_buffer
            ]  # as the monitor saw them, not normalised
            if len(returns) == WINDOW and statistics.fmean(returns) >= GOALS[env]:
                found.append((since_start(), self.num_timesteps))

    model.learn(steps, callback=Watch())
    return found[0] if found else None


def since_start() -> float:
    """Seconds since this process was started, interpreter included."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scheme", default="serial", help="of ours")
    parser.add_argument("--env", default="", help="only this one")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # ours or zoo: one run, in a process of its own
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "time-to.json")
    given = parser.parse_args()
    if given.one:
        print(
            json.dumps(
                ours(given.env, given.seed, given.scheme) if given.one == "ours" else zoo(given.env, given.seed)
            )
        )
        return
    pythons = {"ours": sys.executable, "zoo": str(ROOT / ".venv-sb3" / "bin" / "python")}
    report: dict[str, Any] = {}
    for env in [given.env] if given.env else GOALS:
        found: dict[str, list[list[float]]] = {name: [] for name in pythons}
        for seed in range(1, given.seeds + 1):
            for name, python in pythons.items():
                words = [python, __file__, "--one", name, "--env", env, "--seed", str(seed), "--scheme", given.scheme]
                said = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                answer = json.loads(said.stdout.splitlines()[-1])
                found[name].append(answer or [float("inf"), float("inf")])
                print(env, seed, name, answer, flush=True)
        ratios = [b[0] / a[0] for a, b in zip(found["ours"], found["zoo"], strict=True)]
        medians = {name: statistics.median(turn[0] for turn in turns) for name, turns in found.items()}
        report[env] = {"goal": GOALS[env], "seconds and steps": found, "median seconds": medians, "ratios": ratios}
        mine, theirs = medians["ours"], medians["zoo"]
        print(f"{env} to {GOALS[env]:g}: ours {mine:.1f} s, zoo {theirs:.1f} s: {theirs / mine:.2f} times as fast")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
