"""The counting env of tests/counting.py as a vector env with next-step autoreset. All envs share one marker."""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


class CountingVectorEnv(VectorEnv):
    """A vector env written with arrays, which shares no code with the env that it is compared to."""

    def __init__(self, num_envs=1, lengths=(3, 5, 2)):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.lengths = num_envs, np.array(lengths)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.marker = seed % 1000
        self.episode, self.steps = np.ones(self.num_envs, int), np.zeros(self.num_envs, int)
        self.is_over = np.zeros(self.num_envs, bool)
        return self.observe(), {}

    def observe(self):
        marker = np.full(self.num_envs, self.marker)
        return np.stack([marker, self.episode, self.steps], axis=1).astype(np.float32)

    def step(self, actions):
        began = self.is_over.copy()
        self.episode += began
        self.steps = np.where(began, 0, self.steps + 1)
        ends = self.steps >= self.lengths[(self.episode - 1) % len(self.lengths)]
        reward = np.where(began, 0.0, 100.0 * self.episode + self.steps + actions / 4)
        self.is_over = ends & ~began
        is_odd = self.episode % 2 == 1
        return self.observe(), reward, self.is_over & is_odd, self.is_over & ~is_odd, {}
