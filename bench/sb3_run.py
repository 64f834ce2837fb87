"""Train one Stable-Baselines3 run with given settings, in its own virtual environment (`make peers`).

    .venv-sb3/bin/python bench/sb3_run.py --algo ppo --env CartPole-v1 --seed 1 --steps 100000 --out FILE.json

Writes {"steps": [...], "returns": [...], "eval": [...], "seconds": ..., "steps_per_second": ...}. "returns" holds the
mean return of the last episodes (100, or stats_window_size) after each rollout, like Remuda's rollout/ep_rew_mean.
"eval" holds the returns of 100 greedy episodes at the end.
"""

import argparse
import json
import time

import numpy as np
import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


class Curve(BaseCallback):
    """Record the mean return of the last episodes, and the seconds so far, after each rollout in which one ended."""

    def __init__(self):
        super().__init__()
        self.steps, self.returns, self.seconds = [], [], []
        self._start, self._newest = time.perf_counter(), None

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        if self.model.ep_info_buffer and self.model.ep_info_buffer[-1] is not self._newest:
            self._newest = self.model.ep_info_buffer[-1]
            self.seconds.append(time.perf_counter() - self._start)
            self.steps.append(self.num_timesteps)
            self.returns.append(float(np.mean([episode["r"] for episode in self.model.ep_info_buffer])))


def with_schedules(settings):
    """Return the settings with each value [a, b] replaced by a linear schedule from a to b."""
    return {
        name: (lambda left, ab=value: ab[1] + (ab[0] - ab[1]) * left) if isinstance(value, list) else value
        for name, value in settings.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=["ppo", "sac"], default="ppo")
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="arguments of the algorithm; [a, b] is a linear schedule"
    )
    parser.add_argument("--out", required=True)
    given = parser.parse_args()

    torch.set_num_threads(1)
    settings = with_schedules(given.settings)
    envs = make_vec_env(given.env, n_envs=given.envs, seed=given.seed)
    kind = {"ppo": PPO, "sac": SAC}[given.algo]
    model = kind("MlpPolicy", envs, seed=given.seed, device="cpu", **settings)
    curve = Curve()
    start = time.perf_counter()
    model.learn(given.steps, callback=curve)
    seconds = time.perf_counter() - start
    test_envs = make_vec_env(given.env, n_envs=8, seed=1_000_000)
    returns, _ = evaluate_policy(model, test_envs, n_eval_episodes=100, return_episode_rewards=True)
    result = {
        "settings": given.settings,
        "steps": curve.steps,
        "returns": curve.returns,
        "seconds_at": curve.seconds,
        "eval": [float(value) for value in returns],
        "seconds": seconds,
        "steps_per_second": curve.steps[-1] / seconds,
    }
    with open(given.out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
