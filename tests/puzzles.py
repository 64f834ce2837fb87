"""Small envs with a known optimum, for tests of learning. Env workers can import this module."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Identity(gymnasium.Env):
    """An env whose reward is 1 if the action equals the observed number. The optimal return is 10.

    Episodes have 10 steps and are truncated or terminated, as `ends` says.
    """

    def __init__(self, n=4, start=0, ends="truncate", kind="discrete"):
        self.n, self.start, self.ends, self.kind = n, start, ends, kind
        self.action_space = spaces.Discrete(n, start=start)
        self.observation_space = {
            "discrete": spaces.Discrete(n, start=start),
            "float": spaces.Box(0.0, 1.0, (n,), np.float32),
            "float64": spaces.Box(0.0, 1.0, (n,), np.float64),
            "uint8": spaces.Box(0, 255, (n,), np.uint8),
            "image": spaces.Box(0, 255, (n, 2, 2), np.uint8),
            "bool": spaces.Box(0, 1, (n,), bool),
            "int": spaces.Box(-5, 5, (n,), np.int32),
        }[kind]

    def _show(self):
        self.shown = int(self.np_random.integers(self.n))
        if self.kind == "discrete":
            return self.shown + self.start
        space = self.observation_space
        obs = np.zeros(space.shape, space.dtype)
        obs[self.shown] = 255 if self.kind in ("uint8", "image") else 1
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked = 0
        return self._show(), {}

    def step(self, action):
        reward = float(int(action) - self.start == self.shown)
        self.asked += 1
        over = self.asked == 10
        return self._show(), reward, over and self.ends == "terminate", over and self.ends == "truncate", {}


class Follow(gymnasium.Env):
    """An env whose reward is the negative squared distance of a Box action to the observation.

    Episodes are truncated after 10 steps. The optimal return is 0.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked = 0
        return self._show(), {}

    def _show(self):
        self.shown = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.shown.copy()

    def step(self, action):
        assert self.action_space.contains(action)
        self.asked += 1
        reward = -float(np.square(action - self.shown).sum())
        return self._show(), reward, False, self.asked == 10, {}


class Clockwork(gymnasium.Env):
    """An env with a reward of 1 for every action and episodes of 10 steps, for tests of the learned value.

    If episodes are truncated, the value of every step is 1 / (1 - gamma). If they terminate, it is the discounted
    sum of the remaining rewards.

    The observation is the one-hot encoded step. Under truncation it is the step modulo 5, because the time limit must
    not be visible, and the observation at the limit must be one in which the agent also acts.
    """

    observation_space = spaces.Box(0.0, 1.0, (11,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ends="truncate"):
        self.ends = ends

    def _show(self):
        obs = np.zeros(11, np.float32)
        obs[self.time % 5 if self.ends == "truncate" else self.time] = 1
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._show(), {}

    def step(self, action):
        self.time += 1
        over = self.time == 10
        return self._show(), 1.0, over and self.ends == "terminate", over and self.ends == "truncate", {}


class Corridor(gymnasium.Env):
    """A corridor whose end gives a reward of 1. Leaving it gives 0.2, which is worse if gamma is large."""

    observation_space = spaces.Discrete(6)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.time = 0
        return self.place, {}

    def step(self, action):
        self.time += 1
        if action == 0:
            return self.place, 0.2, True, False, {}
        self.place += 1
        return self.place, float(self.place == 5), self.place == 5, False, {}


class Nested(gymnasium.Env):
    """An env with nested observations of every kind, and MultiDiscrete actions that start at 1 and at 0.

    The reward is 0.5 for the number in "left" and 0.5 for the second bit of "inner". The optimal return is 10.
    """

    observation_space = spaces.Dict(
        {
            "left": spaces.Discrete(3, start=5),
            "inner": spaces.Tuple(
                (spaces.MultiBinary(2), spaces.Dict({"x": spaces.Box(-1.0, 1.0, (2,), np.float32)}))
            ),
            "image": spaces.Box(0, 255, (5, 5, 2), np.uint8),
            "dials": spaces.MultiDiscrete([2, 3]),
        }
    )
    action_space = spaces.MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked = 0
        return self._show(), {}

    def _show(self):
        self.left, self.bits = int(self.np_random.integers(3)), self.np_random.integers(0, 2, 2).astype(np.int8)
        return {
            "left": self.left + 5,
            "inner": (self.bits, {"x": self.np_random.uniform(-1, 1, 2).astype(np.float32)}),
            "image": self.np_random.integers(0, 256, (5, 5, 2)).astype(np.uint8),
            "dials": np.array([self.np_random.integers(2), self.np_random.integers(3)]),
        }

    def step(self, action):
        assert self.action_space.contains(action)
        reward = 0.5 * float(action[0] - 1 == self.left) + 0.5 * float(action[1] == self.bits[1])
        self.asked += 1
        return self._show(), reward, False, self.asked == 10, {}


class Mixed(gymnasium.Env):
    """An env whose actions are a Tuple of Discrete and Box, or a Dict of both and a MultiBinary.

    With a Tuple, the reward is 1 for the observed number, minus the squared distance to the observed float. With a
    Dict, the number and the two bits share this reward. The optimal return is 10.
    """

    observation_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-0.8, 0.8, (1,), np.float32)))

    def __init__(self, kind="tuple"):
        parts = {"which": spaces.Discrete(3), "how": spaces.Box(-1.0, 1.0, (1,), np.float32)}
        self.kind = kind
        if kind == "tuple":
            self.action_space = spaces.Tuple(tuple(parts.values()))
        else:
            self.action_space = spaces.Dict({**parts, "bits": spaces.MultiBinary(2)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked = 0
        return self._show(), {}

    def _show(self):
        self.which = int(self.np_random.integers(3))
        self.how = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.which, self.how.copy()

    def step(self, action):
        assert self.action_space.contains(action), action
        which, how = action if self.kind == "tuple" else (action["which"], action["how"])
        share = 1.0 if self.kind == "tuple" else 0.5
        reward = share * float(which == self.which) - float(np.square(how - self.how).sum())
        if self.kind == "dict":  # one bit must tell whether the number is 0, the other must always be set
            reward += 0.25 * float(action["bits"][0] == (self.which == 0)) + 0.25 * float(action["bits"][1] == 1)
        self.asked += 1
        return self._show(), reward, False, self.asked == 10, {}


def identity(**kwargs):
    return Identity(**kwargs)


def follow():
    return Follow()


def clockwork(**kwargs):
    return Clockwork(**kwargs)


def corridor():
    return Corridor()


def nested():
    return Nested()


def mixed(**kwargs):
    return Mixed(**kwargs)
