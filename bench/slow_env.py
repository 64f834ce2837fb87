"""Measure what one slow env costs the others under --scheme async.

    .venv/bin/python bench/slow_env.py --out docs/speed/slow-env.json      # four minutes

Eight envs sleep for 4 ms per step, each in its own worker. In every second run, the first env sleeps ten times as
long. The result is the rate of the other seven envs relative to a run without a slow env, for inference in the
workers and for inference in one inference server.
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
from remuda.core import derive_seed

SECONDS, ENVS, SEED, SLOWER = 0.004, 8, 1, 10


class SleepingEnv(gymnasium.Env):
    """An env with episodes of 20 steps, which is slow from the moment when it is reset with the seed `slow_seed`."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, slow_seed=None):
        self._slow_seed, self._seconds, self._steps = slow_seed, SECONDS, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None and seed == self._slow_seed:
            self._seconds = SLOWER * SECONDS
        self._steps = 0
        return self._seen(), {}

    def step(self, action):
        time.sleep(self._seconds)
        self._steps += 1
        return self._seen(), 1.0, self._steps == 20, False, {}

    def _seen(self):
        return np.full(4, self._steps / 20, np.float32)


class Clock:
    """Callback that counts the steps of all envs except the first, from the end of a warm-up, and ends the run."""

    def __init__(self, warm_up, seconds):
        self._begin, self._seconds, self.steps = None, seconds, 0
        self._warm_up = warm_up

    def __call__(self, round):
        now = time.monotonic()
        if self._begin is None:
            self._begin = now + self._warm_up
        if now < self._begin:
            return False
        self.steps += sum(episode.values["ep_len"] for episode in round.episodes if episode.env != 0)
        self.elapsed = now - self._begin
        return self.elapsed >= self._seconds


def rate(act, has_slow, seconds):
    """Return the steps per second of all envs except the first, which is slow if `has_slow`."""
    clock = Clock(2.0, seconds)
    kwargs = {"slow_seed": derive_seed(SEED, 0, 0)} if has_slow else {}
    with tempfile.TemporaryDirectory() as directory:
        remuda.train(
            "impala",
            "slow_env:SleepingEnv",
            scheme="async",
            steps=10_000_000,
            seed=SEED,
            sampler={"envs": ENVS, "workers": ENVS, "inference": act},
            algo={"n_steps": 20, "batch_size": 8},
            envs={"kwargs": json.dumps(kwargs)},
            eval={"episodes": 0},
            log={"tensorboard": False},
            callbacks=clock,
            quiet=True,
            out=Path(directory) / "run",
        )
    return clock.steps / clock.elapsed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {"seconds": SECONDS, "envs": ENVS, "slower": SLOWER, "acting": {}}
    for act in ("workers", "central"):
        rates = [[rate(act, has_slow, given.seconds) for has_slow in (False, True)] for _ in range(given.turns)]
        ratios = [slow / even for even, slow in rates]
        found["acting"][act] = {"rates": rates, "share": median_and_interval(ratios)}
        print(f"{act}: the rest keep {found['acting'][act]['share']} of their rate, {rates}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
