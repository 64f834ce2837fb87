"""An env that reads the size of its observations from a file when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Shifting(gymnasium.Env):  # type: ignore[type-arg]
    """An env with episodes of ten steps and constant observations."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file: str) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (int(Path(file).read_text()),), np.float32)
        self.count = 0

    def _seen(self) -> Any:
        return np.full(self.observation_space.shape, 0.5, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._seen(), 1.0, False, self.count >= 10, {}


def make(file: str) -> Shifting:
    return Shifting(file)
