"""Measure how the rate of `replicas` grows with the number of ranks, if envs are slow.

    .venv/bin/python bench/ranks.py --out docs/speed/ranks.json      # about three minutes

Every rank steps one env, which sleeps for 10 ms per step, so that two cores are enough for all ranks, and learns from
its share of minibatches that grow with the number of ranks. The numbers of ranks take turns. The share is the rate
divided by the number of ranks times the rate of one rank in the same turn.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np

import remuda
from remuda.bench.turns import median_and_interval

SECONDS = 0.010
ALGO = {"ppo": {"n_steps": 256, "n_epochs": 10}, "dqn": {"learning_starts": 100, "train_freq": 8}}
BATCH = {"ppo": 128, "dqn": 32}  # rows of a minibatch per rank


class SleepingEnv(gymnasium.Env):
    """An env with episodes of 50 steps that sleeps in every step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action):
        time.sleep(SECONDS)
        self._steps += 1
        return self._seen(), 1.0, self._steps == 50, False, {}

    def _seen(self):
        return np.full(4, self._steps / 50, np.float32)


class Clock:
    """Callback that counts the steps of all ranks after a warm-up, and ends the run."""

    def __init__(self, warm_up, seconds):
        self._warm_up, self._seconds, self._begin = warm_up, seconds, None

    def __call__(self, round):
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now + self._warm_up
        if now < self._begin:
            self._first = now, round.progress.steps
            return False
        self.elapsed, self.steps = now - self._first[0], round.progress.steps - self._first[1]
        return self.elapsed >= self._seconds


def rate(algo, ranks, seconds):
    """Return the steps per second of all ranks together."""
    clock = Clock(1.0, seconds)
    with tempfile.TemporaryDirectory() as directory:
        remuda.train(
            algo,
            "ranks:SleepingEnv",
            scheme={"name": "replicas", "ranks": ranks},
            steps=10_000_000,
            sampler={"envs": ranks, "decorrelate": 0},
            algo=ALGO[algo] | {"batch_size": BATCH[algo] * ranks},
            eval={"episodes": 0},
            log={"tensorboard": False},
            callbacks=clock,
            quiet=True,
            out=Path(directory) / "run",
        )
    return clock.steps / clock.elapsed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="ppo", choices=("ppo", "dqn"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rates = [[rate(given.algo, ranks, given.seconds) for ranks in given.ranks] for _ in range(given.turns)]
    found = {"algo": given.algo, "env_seconds": SECONDS, "ranks": given.ranks, "rates": rates, "share": {}}
    for index, ranks in enumerate(given.ranks):
        shares = [turn[index] * given.ranks[0] / (ranks * turn[0]) for turn in rates]
        found["share"][str(ranks)] = median_and_interval(shares)
        print(f"{ranks} ranks: {median_and_interval([turn[index] for turn in rates])} steps/s, of linear {shares}")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
