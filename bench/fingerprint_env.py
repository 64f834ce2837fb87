"""A small env with Dict observations for bench/fingerprint_job.py; env workers import it by its import path."""

import gymnasium
import numpy as np
from gymnasium import spaces


class DictEnv(gymnasium.Env):
    """Move a point toward a goal; the observation says on which side it is. Deterministic for a given seed.

    Episodes terminate at the goal and are truncated after `length` steps. The state of the env can be saved, so a
    resumed run is bit-equal to an uninterrupted one.
    """

    def __init__(self, is_continuous: bool = False, length: int = 13) -> None:
        self.observation_space = spaces.Dict(
            {
                "position": spaces.Box(-4.0, 4.0, (2,), np.float32),
                "goal": spaces.Dict({"side": spaces.Discrete(2), "flags": spaces.MultiBinary(3)}),
            }
        )
        self.is_continuous, self.length, self.time = is_continuous, length, 0
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32) if is_continuous else spaces.Discrete(4)
        self.position, self.side = np.zeros(2, np.float32), 0

    def _observe(self):
        flags = np.array([self.time % 2, self.time > 6, self.position[0] > 0], np.int8)
        return {"position": self.position.copy(), "goal": {"side": self.side, "flags": flags}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.side, self.time = int(self.np_random.integers(2)), 0
        return self._observe(), {}

    def step(self, action):
        if self.is_continuous:
            move = np.asarray(action, np.float32)
        else:
            move = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)[int(action)]
        self.position = np.clip(self.position + np.float32(0.5) * move, -4, 4).astype(np.float32)
        self.time += 1
        goal = np.array([1.5 if self.side else -1.5, 0], np.float32)
        distance = float(np.abs(self.position - goal).sum())
        return self._observe(), -distance, distance < 0.5, self.time >= self.length, {}

    def get_state(self):
        return {"position": self.position, "side": self.side, "time": self.time}

    def set_state(self, state):
        self.position, self.side, self.time = state["position"], state["side"], state["time"]


def make(**kwargs):
    return DictEnv(**kwargs)
