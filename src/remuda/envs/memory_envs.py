"""Small tasks that need memory: `Remuda/Recall-v0` and `Remuda/CartPolePositions-v0`.

remuda train ppo --env Remuda/Recall-v0 --agent.core lstm          # recalls the cue in every episode
remuda train ppo --env Remuda/Recall-v0                            # guesses, and is right in half of the episodes
"""

from __future__ import annotations

from typing import TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

Observation: TypeAlias = NDArray[np.float32]
Info: TypeAlias = dict[str, object]


class Recall(gymnasium.Env):  # type: ignore[misc]
    """Shows one of `cues` cues in the first observation and asks for it `delay` steps later.

    An observation is the cue (one-hot in the first observation, then zeros) and a flag that is 1 when the answer is
    due. Actions before the answer have no effect; the right answer gives reward 1.
    """

    def __init__(self, cues: int = 2, delay: int = 10) -> None:
        self.cues, self.delay = cues, delay
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(cues)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self.cues)), 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, Info]:
        is_answer = self._step == self.delay
        reward = float(is_answer and int(action) == self._cue)
        self._step += 1
        return self._observe(), reward, is_answer, False, {}

    def _observe(self) -> Observation:
        obs = np.zeros(self.cues + 1, np.float32)
        if self._step == 0:
            obs[self._cue] = 1.0
        obs[-1] = self._step == self.delay
        return obs


class CartPolePositions(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """CartPole-v1 whose observations hold the positions of cart and pole, without their velocities."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))
        space = self.env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.observation_space = gymnasium.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: Observation) -> Observation:
        return observation[::2]
