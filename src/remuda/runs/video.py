"""Videos of an agent playing.

record(run, episodes=3)                                # RUN/videos/step-200000.mp4, and the episodes' returns

use_headless_rendering()                               # before the env's libraries are imported
with VideoWriter(Path("episode.mp4"), fps=30) as video:
    record_episode(env, policy, seed=0, video=video, should_stop=lambda: False)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from ctypes.util import find_library
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remuda.config.run_config import RunConfig
from remuda.envs import EnvInfo, EnvSpec
from remuda.envs.episodes import CONTINUES
from remuda.errors import ConfigError, EnvSpecError, Interrupted
from remuda.runs.checkpoints import named_checkpoint
from remuda.runs.evaluation import eval_seed
from remuda.runs.policy import Policy
from remuda.runs.signals import StopSignals
from remuda.schemes.learning_round import torch_threads

if TYPE_CHECKING:
    from remuda.runs.api import Run

DEFAULT_FPS = 30
Frame = NDArray[np.uint8]


def record(run: Run, episodes: int = 1, seed: int | None = None, out: Path | None = None) -> tuple[Path, list[float]]:
    """Record greedy episodes of a run as one mp4 file; return the path of the file and the episodes' returns."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} is too small: record at least 1.")
    if seed is not None and seed < 0:
        raise ConfigError(f"seed={seed} is too small: it must be at least 0.")
    use_headless_rendering()
    config, spec, info = run.setup("remuda.Run({}).record()")
    if seed is not None:
        config = replace(config, eval=replace(config.eval, seed=seed, seeds=None))
    if "rgb_array" not in info.render_modes:
        raise EnvSpecError(
            f"{spec.label} cannot be recorded: its render modes are {', '.join(info.render_modes) or 'none'}, "
            "and a video needs rgb_array."
        )
    policy = run.policy()
    target = out or run.path / "videos" / f"step-{named_checkpoint(run.path, run.checkpoint).step}.mp4"
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    returns = []
    with (
        closing(limited.build(render_mode="rgb_array")) as env,
        VideoWriter(target, info.fps) as video,
        torch_threads(config.scheme_options.threads),
        StopSignals() as signals,  # without these handlers, pygame would swallow SIGTERM
    ):
        for number in range(episodes):
            total = record_episode(
                env, policy, eval_seed(config, number), video, lambda: signals.received is not None
            )
            if total is None:
                stopped = Interrupted(f"stopped by {signals.name}: no video was made.")
                stopped.signal = signals.received or stopped.signal
                raise stopped
            returns.append(total)
    return target, returns


def record_episode(
    env: Any, policy: Policy, seed: int, video: VideoWriter, should_stop: Callable[[], bool]
) -> float | None:
    """Record one greedy episode of a Gymnasium env; return the sum of rewards, or None if `should_stop` ended it."""
    obs, _ = env.reset(seed=seed)
    video.add(render_frame(env))
    total, is_over, state, reward = 0.0, False, None, 0.0
    while not is_over:
        if should_stop():
            return None
        action, state = policy.act(obs, state, reward=reward)
        obs, reward, terminated, truncated, info = env.step(action)
        video.add(render_frame(env))
        total, is_over = total + float(reward), terminated or truncated
        if is_over and info.get(CONTINUES):  # a lost life ended the episode for the learner, but the game goes on
            obs, _ = env.reset()
            is_over, state = False, None
    return total


def use_headless_rendering() -> None:
    """Let SDL and MuJoCo render without a display, unless the user chose otherwise.

    This sets environment variables, so it must be called before the env's libraries are imported.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("MUJOCO_GL"):
        return
    if find_library("EGL") and find_library("OpenGL"):
        os.environ["MUJOCO_GL"] = "egl"
    elif find_library("OSMesa"):
        os.environ["MUJOCO_GL"] = "osmesa"


def render_frame(env: Any) -> Frame:
    """Return an image of the env's current state."""
    try:
        frame = env.render()
        if not isinstance(frame, np.ndarray):
            raise TypeError(f"render() returned a {type(frame).__name__}")
    except Exception as error:
        raise EnvSpecError(
            f"{env.spec.id if env.spec else env} cannot be rendered here ({type(error).__name__}: {error}): provide "
            "a display (DISPLAY); MuJoCo needs none if MUJOCO_GL is egl (Debian: libegl1 libopengl0) or osmesa "
            "(libosmesa6) before Python starts."
        ) from error
    return frame


def refuse_unfilmable(config: RunConfig, spec: EnvSpec, info: EnvInfo) -> None:
    """Raise ConfigError if eval.video is set but codecs are missing or the env does not render images."""
    if config.eval.video:
        require_codecs()
    if config.eval.video and "rgb_array" not in info.render_modes:
        raise ConfigError(
            f"eval.video: {spec.label} has no render mode rgb_array and cannot be filmed: leave it out."
        )


def require_codecs() -> None:
    """Raise ConfigError if the packages that encode videos are not installed."""
    if not all(find_spec(name) for name in ("imageio", "av")):  # imageio's pyav plugin needs av
        raise ConfigError("videos need imageio and PyAV: pip install 'remuda[video]'.")


class VideoWriter:
    """Writes frames to an H.264 file with widely supported settings.

    The file `target` appears only when the video is complete; after an error, no incomplete file remains.
    """

    def __init__(self, target: Path, fps: float | None) -> None:
        unusable = ConfigError(
            f"out={target} cannot be written: use a name that ends in .mp4, in a directory where you may write."
        )
        if target.suffix != ".mp4":
            raise unusable
        require_codecs()
        import imageio.v3

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._target, self._partial = target, target.with_name(f".writing-{target.name}")
            self._file = imageio.v3.imopen(self._partial, "w", plugin="pyav")
        except OSError as error:  # the message of imageio is about plugins, not about the directory
            raise unusable from error
        self._file.init_video_stream("libx264", fps=round(fps or DEFAULT_FPS), pixel_format="yuv420p")

    def add(self, frame: Frame) -> None:
        """Append a frame [height, width, 3]; yuv420p needs even sizes, so an odd last row or column is cropped."""
        height, width = frame.shape[:2]
        self._file.write_frame(np.ascontiguousarray(frame[: height // 2 * 2, : width // 2 * 2]))

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self._target)
        else:
            self._partial.unlink(missing_ok=True)
