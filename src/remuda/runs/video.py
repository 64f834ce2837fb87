"""Episodes as films."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.envs.episodes import CONTINUES
from remuda.errors import ConfigError, EnvSpecError
from remuda.runs.policy import Policy

DEFAULT_FPS = 30


def draw_without_screen() -> None:
    """Pictures where there is no screen, and no complaints about it; before the env's libraries are imported."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("MUJOCO_GL"):
        return
    if find_library("EGL") and find_library("OpenGL"):
        os.environ["MUJOCO_GL"] = "egl"
    elif find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"


def draw(env: Any) -> NDArray[Any]:
    """A picture of the env as it is."""
    try:
        frame = env.render()
        if not isinstance(frame, np.ndarray):
            raise TypeError(f"render() returned a {type(frame).__name__}")
    except Exception as error:
        raise EnvSpecError(
            f"{env.spec.id if env.spec else env} cannot be drawn here ({type(error).__name__}: {error}): give it a "
            "screen (DISPLAY); MuJoCo needs none where MUJOCO_GL is egl (Debian: libegl1 libopengl0) or osmesa "
            "(libosmesa6) before Python starts."
        ) from error
    return frame


def require_codecs() -> None:
    if not all(find_spec(name) for name in ("imageio", "av")):  # av is what imageio's pyav plugin needs
        raise ConfigError("videos need imageio and PyAV: pip install 'remuda[video]'.")


class Film:
    """Even-sized H.264 frames that every player shows; the file appears when it is whole."""

    def __init__(self, target: Path, fps: float | None) -> None:
        mistake = ConfigError(
            f"out={target} cannot be filmed into: give a name that ends in .mp4, in a place of yours."
        )
        if target.suffix != ".mp4":
            raise mistake
        require_codecs()
        import imageio.v3

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._target, self._aside = target, target.with_name(f".writing-{target.name}")
            self._file = imageio.v3.imopen(self._aside, "w", plugin="pyav")
        except OSError as error:  # imageio's words for it are of no use to anybody
            raise mistake from error
        self._file.init_video_stream("libx264", fps=round(fps or DEFAULT_FPS), pixel_format="yuv420p")

    def add(self, frame: Any) -> None:
        height, width = frame.shape[:2]
        self._file.write_frame(np.ascontiguousarray(frame[: height // 2 * 2, : width // 2 * 2]))

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._aside.replace(self._target)
        else:
            self._aside.unlink(missing_ok=True)


def play(env: Any, policy: Policy, seed: int, film: Film, should_stop: Callable[[], bool]) -> float | None:
    """One episode; returns its return, or None where it was stopped."""
    obs, _ = env.reset(seed=seed)
    film.add(draw(env))
    total, over, state, reward = 0.0, False, None, 0.0
    while not over:
        if should_stop():
            return None
        action, state = policy.act(obs, state, reward=reward)
        obs, reward, terminated, truncated, info = env.step(action)
        film.add(draw(env))
        total, over = total + float(reward), terminated or truncated
        if over and info.get(CONTINUES):  # an end for the learner alone, such as a lost life: the game goes on
            obs, _ = env.reset()
            over, state = False, None
    return total
