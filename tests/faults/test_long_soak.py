"""Hundreds of kills, and envs that fail by chance: minutes each."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import remuda
from remuda.envs import make_envs, resolve
from remuda.learning.checkpoint import load_newest
from remuda.recipes.presets import PPO

pytestmark = pytest.mark.long

LENGTHS = [3, 5, 2]


def test_three_hundred_killed_workers_leave_every_other_row_right():
    """Counting envs in 4 workers, one of which dies every few steps: rows go on as computed, or start anew."""
    num_envs, kills, chance = 8, 300, random.Random(1)
    spec = resolve("counting:make", {"lengths": LENGTHS})
    with make_envs(spec, num_envs, num_workers=4, max_worker_restarts=10_000) as envs:
        envs.reset(seed=7)
        slot, step = envs.recv()
        obs = step.obs.copy()
        done = killed = rebuilt = 0
        until_kill = 5
        while killed < kills:
            action = obs[:, 2].astype(np.int64) % 4
            envs.send(slot, action)
            until_kill -= 1
            if until_kill == 0:
                victim = chance.choice([found["pid"] for found in envs.inspect_workers() if found])
                os.kill(victim, signal.SIGKILL)
                killed, until_kill = killed + 1, chance.randint(1, 12)
            slot, step = envs.recv()
            for b in range(num_envs):
                _, episode, time_ = obs[b]
                ended = time_ >= LENGTHS[(int(episode) - 1) % 3]
                if step.mask[b]:  # an ordinary step of the same episode
                    assert not ended
                    assert step.obs[b].tolist() == [obs[b][0], episode, time_ + 1]
                    assert step.reward[b] == pytest.approx(100 * episode + time_ + 1 + action[b] / 4)
                else:  # the next episode, or the first of a rebuilt env
                    assert step.reward[b] == 0
                    assert step.obs[b][2] == 0
                    if step.obs[b][1] == 1 and not (ended and episode == 0):
                        rebuilt += 1
                    else:
                        assert ended
                        assert step.obs[b].tolist() == [obs[b][0], episode + 1, 0]
                done += int(step.mask[b])
            obs = step.obs.copy()
        assert done > 1000
        assert envs.restarts() >= rebuilt > kills, "each worker had two envs"


def steps_to_400(path, seed, kwargs):
    """Env steps until the last 20 episodes had a mean of 400, and how many envs were rebuilt on the way."""
    returns, reached = [], []

    def watch(round):
        returns.extend(episode.values["ep_rew"] for episode in round.episodes)
        if len(returns) >= 20 and np.mean(returns[-20:]) >= 400:
            reached.append((round.progress.steps, round.progress.restarts))
            return True
        return False

    env, options = "own_things:flaky_cartpole", {"eval": {"episodes": 0}, "envs": {"kwargs": kwargs}}
    remuda.train(
        "ppo", env, steps=200_000, seed=seed, scheme="parallel", out=path, quiet=True, callbacks=[watch],
        **(PRESET | options),
    )  # fmt: skip
    return reached[0]


def test_training_survives_envs_that_fail_by_chance(tmp_path):
    """5e-4 per step and 5e-3 per reset: CartPole still reaches 400 within 1.3 x the clean number of steps."""
    seeds = range(1, 8)  # of a few seeds the spread between them would be larger than what is looked for
    clean = [steps_to_400(tmp_path / f"clean-{seed}", seed, {"step": 0.0, "reset": 0.0}) for seed in seeds]
    flaky = [steps_to_400(tmp_path / f"flaky-{seed}", seed, {"step": 5e-4, "reset": 5e-3}) for seed in seeds]
    assert all(restarts == 0 for _, restarts in clean)
    assert all(restarts > 5 for _, restarts in flaky)
    assert np.median([steps for steps, _ in flaky]) <= 1.3 * np.median([steps for steps, _ in clean])


# The env is CartPole under another name: its preset has to be given; with smaller steps than that has, because it
# would be solved before many envs have failed.
PRESET = {group: values for group, values in PPO["CartPole-*"].items() if group != "run"}
PRESET["algo"] = {**PRESET["algo"], "learning_rate": "linear(1e-3, 0)"}


def test_thirty_kills_of_the_whole_run_each_resumed(tmp_path):
    path, chance = tmp_path / "run", random.Random(2)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    base = [sys.executable, "-m", "remuda", "train"]
    fresh = ["ppo", "--env", "CartPole-v1", "--scheme", "parallel", "--steps", "5_000_000", "--out", str(path)]
    fresh += ["--checkpoint.every", "256", "--log.every", "256", "--quiet"]
    shared_before, step = set(os.listdir("/dev/shm")), 0
    for number in range(30):
        arguments = fresh if number == 0 else ["--resume", str(path), "--quiet"]
        process = subprocess.Popen([*base, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while newest(path) <= step:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        found = load_newest(path / "checkpoints")
        assert found.step > step, "each life gets further than the one before"
        step = found.step
    assert set(os.listdir("/dev/shm")) == shared_before


def newest(path: Path) -> int:
    steps = [int(p.name[5:]) for p in (path / "checkpoints").glob("step-*") if (p / "manifest.json").exists()]
    return max(steps, default=0)
