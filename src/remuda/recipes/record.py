"""Videos of an agent at play."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from remuda.envs.episodes import CONTINUES
from remuda.errors import ConfigError, EnvSpecError, Interrupted
from remuda.learning.checkpoint import load_newest
from remuda.recipes.api import Run
from remuda.recipes.parts import eval_seed
from remuda.recipes.policy import Policy
from remuda.recipes.signals import StopSignals
from remuda.schemes.synchronous import torch_threads

DEFAULT_FPS = 30


def record(
    path: Path, episodes: int = 1, seed: int | None = None, out: Path | None = None
) -> tuple[Path, list[float]]:
    """Film episodes of a run into an mp4; returns the file and the episodes' returns."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} is too small: film at least 1.")
    if seed is not None and seed < 0:
        raise ConfigError(f"seed={seed} is too small: it must be at least 0.")
    run = Run(path)
    config, spec, info = run.setup()
    if seed is not None:
        config = replace(config, eval=replace(config.eval, seed=seed, seeds=None))
    if "rgb_array" not in info.render_modes:
        raise EnvSpecError(
            f"{spec.label} cannot be filmed: its render modes are {', '.join(info.render_modes) or 'none'}, "
            "and a video needs rgb_array."
        )
    policy = run.policy()
    step = load_newest(path / "checkpoints").step
    target = out or path / "videos" / f"step-{step}.mp4"
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures without a screen, and without complaints about it
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    returns = []
    with (
        closing(limited.build(render_mode="rgb_array")) as env,
        Film(target, info.fps) as film,
        torch_threads(config.scheme_options.threads),
        StopSignals() as signals,  # pygame would swallow SIGTERM
    ):
        for number in range(episodes):
            returns.append(_play(env, policy, eval_seed(config, number), film, signals))
    return target, returns


class Film:
    """Even-sized H.264 frames that every player shows; the file appears when it is whole."""

    def __init__(self, target: Path, fps: float | None) -> None:
        mistake = ConfigError(
            f"out={target} cannot be filmed into: give a name that ends in .mp4, in a place of yours."
        )
        if target.suffix != ".mp4":
            raise mistake
        try:
            import av  # noqa: F401  (what imageio's pyav plugin needs)
            import imageio.v3
        except ImportError:
            raise ConfigError("videos need imageio and PyAV: pip install 'remuda[video]'.") from None
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


def _play(env: Any, policy: Policy, seed: int, film: Film, signals: StopSignals) -> float:
    obs, _ = env.reset(seed=seed)
    film.add(env.render())
    total, over, state, reward = 0.0, False, None, 0.0
    while not over:
        if signals.received is not None:
            stopped = Interrupted(f"stopped by {signals.name}: no video was made.")
            stopped.signal = signals.received
            raise stopped
        action, state = policy.act(obs, state, reward=reward)
        obs, reward, terminated, truncated, info = env.step(action)
        film.add(env.render())
        total, over = total + float(reward), terminated or truncated
        if over and info.get(CONTINUES):  # an end for the learner alone, such as a lost life: the game goes on
            obs, _ = env.reset()
            over, state = False, None
    return total
