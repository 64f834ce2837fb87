"""Small tasks that cannot be solved without memory: `Remuda/Recall-v0` and `Remuda/CartPolePositions-v0`.

remuda train ppo --env Remuda/Recall-v0 --agent.core lstm          # right in every episode
remuda train ppo --env Remuda/Recall-v0                            # right in half of them
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray


class Recall(gymnasium.Env):  # type: ignore[misc]
    """A cue is shown at the first step; `delay` steps later it must be named: 1 point if it is right.

    What is seen are the cue (one-hot, at the first step alone) and whether now is the time to answer. Actions before
    that change nothing.
    """

    def __init__(self, cues: int = 2, delay: int = 10) -> None:
        self.cues, self.delay = cues, delay
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(cues)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self.cues)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        is_answer = self._step == self.delay
        reward = float(is_answer and int(action) == self._cue)
        self._step += 1
        return self._observe(), reward, is_answer, False, {}

    def _observe(self) -> NDArray[np.float32]:
        obs = np.zeros(self.cues + 1, np.float32)
        if self._step == 0:
            obs[self._cue] = 1.0
        obs[-1] = self._step == self.delay
        return obs


class CartPolePositions(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """CartPole-v1 that shows where cart and pole are, and not how fast they move."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))
        space = self.env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.observation_space = gymnasium.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[::2]
