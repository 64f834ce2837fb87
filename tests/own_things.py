"""User-defined envs and nets, some of them faulty. Env workers can import this module."""

import time
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from remuda.processes import worker_main as serving

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Late(gymnasium.Env):
    """An env that is valid for `good_episodes` episodes and then has the fault `fault` at step `at`."""

    def __init__(self, fault="none", at=7, render_mode=None, good_episodes=0, length=20):
        self.observation_space, self.action_space = BOX, spaces.Discrete(2)
        self.fault, self.at, self.time, self.good_episodes = fault, at, 0, good_episodes
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.good_episodes -= self.time > 0
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.time += 1
        obs, reward = np.full(4, 0.1, np.float32), 1.0
        if self.time == self.at and self.good_episodes <= 0:
            if self.fault == "nan_obs":
                obs[2] = np.nan
            elif self.fault == "nan_reward":
                reward = float("nan")
            elif self.fault == "shape":
                obs = np.zeros(5, np.float32)
            elif self.fault == "dtype":
                obs = obs.astype(np.complex128)
            elif self.fault == "raise":
                raise RuntimeError("the env is on strike")
        return obs, reward, False, self.time >= self.length, {}


def late(**kwargs):
    return Late(**kwargs)


class Slow(Late):
    """An env that sleeps in every step, or, with `only_seed`, only if it was reset with this seed."""

    def __init__(self, seconds=0.02, only_seed=None):
        super().__init__()
        self.seconds, self.only_seed, self.seed = seconds, only_seed, None

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed)

    def step(self, action):
        if self.only_seed in (None, self.seed):
            time.sleep(self.seconds)
        return super().step(action)


class Flaky(gymnasium.Wrapper):
    """A wrapper that raises randomly, as envs that are accessed over a network do."""

    def __init__(self, env, step, reset):
        super().__init__(env)
        self.chances = {"step": step, "reset": reset}
        self.draw = np.random.default_rng()

    def _perhaps_fail(self, name):
        if self.draw.random() < self.chances[name]:
            raise ConnectionError(f"{name} failed randomly")

    def reset(self, **kwargs):
        self._perhaps_fail("reset")
        return self.env.reset(**kwargs)

    def step(self, action):
        self._perhaps_fail("step")
        return self.env.step(action)


def flaky_cartpole(**chances):
    return Flaky(gymnasium.make("CartPole-v1"), **chances)


def slow_later(seconds):
    """Return an env that is fast for the first steps of an episode, so that a probe finds no problem."""
    env = Slow(0.0)
    fast_step = env.step

    def step(action):
        env.seconds = seconds if env.time >= 3 else 0.0
        return fast_step(action)

    env.step = step
    return env


def slow(**kwargs):
    return Slow(**kwargs)


class SlowSaveable(Slow):
    """An env that is ten times slower after its first 40 steps, and whose state can be saved."""

    calls = 0

    def step(self, action):
        self.calls += 1
        if self.calls > 40:
            time.sleep(9 * self.seconds)
        return super().step(action)

    def get_state(self):
        return self.time, self.calls

    def set_state(self, state):
        self.time, self.calls = state


def slow_saveable(**kwargs):
    return SlowSaveable(**kwargs)


class Hanging(Late):
    """An env that never returns from a step after the first `after` steps."""

    def __init__(self, after, how):
        super().__init__()
        self.left, self.how = after, how

    def step(self, action):
        self.left -= 1
        while self.left < 0:
            if self.how == "sleep":
                time.sleep(1000)
        return super().step(action)


def hanging(**kwargs):
    return Hanging(**kwargs)


class Odd(Late):
    """An env that renders images with odd height and width."""

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def render(self):
        picture = np.zeros((33, 47, 3), np.uint8)
        picture[:, : self.time] = 255
        return picture


def odd(**kwargs):
    return Odd(**kwargs)


def always_raises():
    env = Late()

    def step(action):
        raise RuntimeError("never")

    env.step = step
    return env


def list_reward():
    env = Late()
    env.step = lambda action: (np.zeros(4, np.float32), np.array([1.0]), False, False, {})
    return env


def no_info():
    env = Late()
    env.step = lambda action: (np.zeros(4, np.float32), 1.0, True, False, None)
    return env


def slow_to_build():
    """Return an env that takes 5 s to build in a worker, and no time in a probe."""
    if serving.IN_WORKER:
        time.sleep(5)
    return Late()


def slow_to_rebuild(file, seconds):
    """Return an env that takes `seconds` to build in a worker once `file` exists."""
    if serving.IN_WORKER and Path(file).exists():
        time.sleep(seconds)
    return Late()


def endless():
    """Return an env whose episodes never end, and which has no registered time limit."""
    env = Late()
    env.step = lambda action: (np.zeros(4, np.float32), 1.0, False, False, {})
    return env


def lying_shape():
    env = Late()
    env.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    return env


def lying_dtype():
    env = Late()
    env.reset = lambda seed=None, options=None: (np.zeros(4, np.float64), {})
    return env


def lossy_dtype():
    env = Late()
    env.observation_space = spaces.Box(0, 255, (4,), np.uint8)
    env.reset = lambda seed=None, options=None: (np.full(4, 0.5), {})
    return env


def text_obs():
    env = Late()
    env.observation_space = spaces.Text(5)
    return env


def integer_action():
    env = Late()
    env.action_space = spaces.Box(0, 3, (2,), np.int64)
    return env


def unbounded():
    env = Late()
    env.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return env


def two_choices():
    env = Late()
    env.action_space = spaces.MultiDiscrete([2, 3])
    return env


def no_env():
    return {"not": "an env"}


def raising():
    raise RuntimeError("the env is on strike")


def __getattr__(name):
    # Nets need torch, which workers that import this module for its envs must not load.
    if name in ("Net", "BadNet"):
        import own_nets

        return getattr(own_nets, name)
    raise AttributeError(name)


def __dir__():
    return [*globals(), "Net", "BadNet"]
