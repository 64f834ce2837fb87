"""An env with arbitrary spaces and an arbitrary cost per step, for speed tests: `Remuda/Mock-v0`.

    env = MockEnv(observation={"box": [84, 84, 4], "dtype": "uint8"}, action={"discrete": 6}, seconds=0.001)
    obs, _ = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(0)

    remuda train ppo --env Remuda/Mock-v0 --envs.kwargs '{"observation": {"dict": {"image": {"box": [8, 8]}}}}'

Spaces are JSON: {"box": shape, "dtype", "low", "high"}, {"discrete": n, "start"}, {"multidiscrete": [n, ...]},
{"multibinary": n}, {"dict": {name: space}}, {"tuple": [space, ...]}. Only the first key of each object is required.
Observations come from a table of 8 samples that is repeated in every episode, so that they take no time to compute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.errors import EnvSpecError

OBSERVATIONS = 8
KINDS = ("box", "discrete", "multidiscrete", "multibinary", "dict", "tuple")


def space_from_json(values: Any, which: str) -> gymnasium.Space:
    """Return the Gymnasium space that this JSON describes; `which` names the space in errors."""
    kind = next((kind for kind in KINDS if isinstance(values, Mapping) and kind in values), None)
    if kind is None:
        raise EnvSpecError(
            f"{which}={values!r} of the mock env is not a space: give an object with one of {', '.join(KINDS)}."
        )
    form = values[kind]
    try:
        match kind:
            case "box":
                dtype = np.dtype(values.get("dtype", "float32"))
                is_float = dtype.kind == "f"
                low = values.get("low", -1.0 if is_float else np.iinfo(dtype).min)
                high = values.get("high", 1.0 if is_float else np.iinfo(dtype).max)
                return gymnasium.spaces.Box(low, high, tuple(form), dtype.type)
            case "discrete":
                return gymnasium.spaces.Discrete(form, start=values.get("start", 0))
            case "multidiscrete":
                return gymnasium.spaces.MultiDiscrete(form)
            case "multibinary":
                return gymnasium.spaces.MultiBinary(form)
            case "dict":
                return gymnasium.spaces.Dict(
                    {name: space_from_json(entry, f"{which}.{name}") for name, entry in form.items()}
                )
            case _:
                entries = [space_from_json(entry, f"{which}.{index}") for index, entry in enumerate(form)]
                return gymnasium.spaces.Tuple(entries)
    except EnvSpecError:
        raise
    except Exception as error:  # for wrong values, Gymnasium raises AssertionError and numpy TypeError
        raise EnvSpecError(f"{which}={values!r} of the mock env is not a space ({error}): fix it.") from error


class MockEnv(gymnasium.Env):  # type: ignore[misc]
    """An env that computes nothing. A step spins or sleeps for `seconds`, and an episode has `length` steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self,
        observation: Mapping[str, object] | None = None,
        action: Mapping[str, object] | None = None,
        seconds: float = 0.0,
        wait: Literal["busy", "sleep"] = "busy",
        length: int = 100,
        reward: float = 1.0,
        ends: Literal["terminate", "truncate"] = "terminate",
        render_mode: str | None = None,
    ) -> None:
        if wait not in ("busy", "sleep") or ends not in ("terminate", "truncate"):
            raise EnvSpecError(
                f"wait={wait!r}, ends={ends!r} of the mock env: wait is busy or sleep, ends is terminate or truncate."
            )
        if length < 1 or seconds < 0:
            raise EnvSpecError(
                f"length={length}, seconds={seconds} of the mock env: use 1 step or more, and 0 seconds or more."
            )
        self.observation_space = space_from_json(observation or {"box": [4]}, "observation")
        self.action_space = space_from_json(action or {"discrete": 2}, "action")
        self.render_mode = render_mode
        self._seconds, self._is_busy = seconds, wait == "busy"
        self._length, self._reward, self._terminates = length, float(reward), ends == "terminate"
        self.observation_space.seed(0)
        self._observations = [self.observation_space.sample() for _ in range(OBSERVATIONS)]
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observations[0], {}

    def step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        if self._seconds and self._is_busy:
            end = time.perf_counter() + self._seconds
            while time.perf_counter() < end:
                pass
        elif self._seconds:
            time.sleep(self._seconds)
        self._step += 1
        is_last = self._step >= self._length
        obs = self._observations[self._step % OBSERVATIONS]
        return obs, self._reward, is_last and self._terminates, is_last and not self._terminates, {}

    def render(self) -> NDArray[np.uint8]:
        """Return a gray image that gets lighter towards the end of the episode."""
        return np.full((64, 64, 3), min(255, 255 * self._step // self._length), np.uint8)
