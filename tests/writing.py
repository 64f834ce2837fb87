"""Samplers that write to a replay without a learner, and checks of the rows of the counting env."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from remuda.build.envs import agent_view, num_workers
from remuda.build.recipe import make_recipe
from remuda.build.replay import make_replay
from remuda.build.workers import make_replay_writers
from remuda.config.resolve import resolve_config
from remuda.learning.weights import SharedWeights

SOON = 60.0  # a timeout in seconds for what takes one second on an idle machine
DEFAULTS: dict[str, Any] = {
    "seed": 3,
    "steps": 1500,
    "sampler": {"envs": 4, "workers": 2},
    "agent": {"hidden": (16,)},
    "algo": {"learning_starts": 300, "batch_size": 16},
    "replay": {"capacity": 5000, "ratio": 4.0},
    "eval": {"episodes": 2},
    "log": {"tensorboard": False, "every": 100},
}


def merged(settings: dict[str, Any]) -> dict[str, Any]:
    options = dict(DEFAULTS)
    for key, value in settings.items():
        options[key] = {**options[key], **value} if isinstance(options.get(key), dict) else value
    return options


class Setup:
    """Replay writers and their replay, without a learner."""

    def __init__(self, env: str, **settings: Any) -> None:
        options = merged(settings)
        groups = {name: value for name, value in options.items() if isinstance(value, dict)}
        short = {"algo": "dqn", "env": env, "scheme": "async", "steps": 10**6, "seed": 3}
        config, spec, info = resolve_config(short, groups)
        recipe = make_recipe(config, spec, info)
        self.learner = recipe.make_learner()
        agent = self.learner.algorithm.agent
        self.workers = num_workers(config)
        self.weights = SharedWeights(agent, 0)
        self.replay: Any = make_replay(config, info, agent.initial_state(1), 0, self.workers)
        self.prepare(self.replay)
        self.writers = make_replay_writers(
            config, spec, agent_view(config, info), self.workers, self.weights, self.replay, lambda: False
        )

    def prepare(self, replay: Any) -> None:
        """Fill the replay before writers start; subclasses override it."""

    def __enter__(self) -> Setup:
        self.writers.start(3)
        return self

    def __exit__(self, *error: object) -> None:
        self.writers.close()
        self.replay.close()
        self.weights.close()

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + SOON
        while not condition():
            self.writers.poll(0)
            self.replay.sync()
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.005)


COUNTING: dict[str, Any] = {
    "envs": {"kwargs": {"lengths": [3, 5, 2]}},
    "sampler": {"envs": 4, "workers": 2},
    "replay": {"capacity": 20_000, "ratio": None, "n_step": 2},
    "algo": {"learning_starts": 0, "train_freq": 5, "batch_size": 64},
}


def check_rows(replay: Any) -> int:
    """Check that the stored rows of every env are consecutive, and return how many episodes were cut short."""
    ring, broken = replay.ring, 0
    for group in range(ring.groups):
        end = int(ring.written[group])
        number = np.arange(ring.counters.oldest(group), end)
        for env in range(*ring.columns(group).indices(ring.envs)):
            rows = ring.take(number, np.full(len(number), env))
            for t in range(len(number) - 1):
                _, episode, step = rows.obs[t]
                _, next_episode, next_step = rows.obs[t + 1]
                if rows.mask[t]:
                    assert (next_episode, next_step) == (episode, step + 1)
                    assert rows.reward[t] == 100 * episode + step + 1 + rows.action[t] / 4
                elif not rows.mask[t + 1] and (next_episode, next_step) == (episode, step):
                    continue  # rows that a writer had begun when it died
                else:
                    assert next_step == 0
                    broken += step < (3, 5, 2)[int(episode - 1) % 3]
    return broken
