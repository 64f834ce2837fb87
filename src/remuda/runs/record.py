"""Videos of an agent at play."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from remuda.build.envs import eval_seed
from remuda.errors import ConfigError, EnvSpecError, Interrupted
from remuda.runs.checkpoints import named_checkpoint
from remuda.runs.signals import StopSignals
from remuda.runs.video import Film, draw_without_screen, play
from remuda.schemes.learning_round import torch_threads

if TYPE_CHECKING:
    from remuda.runs.api import Run


def record(run: Run, episodes: int = 1, seed: int | None = None, out: Path | None = None) -> tuple[Path, list[float]]:
    """Film episodes of a run into an mp4; return the file and the episodes' returns."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} is too small: film at least 1.")
    if seed is not None and seed < 0:
        raise ConfigError(f"seed={seed} is too small: it must be at least 0.")
    draw_without_screen()
    config, spec, info = run.setup("remuda.Run({}).record()")
    if seed is not None:
        config = replace(config, eval=replace(config.eval, seed=seed, seeds=None))
    if "rgb_array" not in info.render_modes:
        raise EnvSpecError(
            f"{spec.label} cannot be filmed: its render modes are {', '.join(info.render_modes) or 'none'}, "
            "and a video needs rgb_array."
        )
    policy = run.policy()
    target = out or run.path / "videos" / f"step-{named_checkpoint(run.path, run.checkpoint).step}.mp4"
    limited = replace(spec, max_steps=config.eval.max_steps or None)
    returns = []
    with (
        closing(limited.build(render_mode="rgb_array")) as env,
        Film(target, info.fps) as film,
        torch_threads(config.scheme_options.threads),
        StopSignals() as signals,  # pygame would swallow SIGTERM
    ):
        for number in range(episodes):
            found = play(env, policy, eval_seed(config, number), film, lambda: signals.received is not None)
            if found is None:
                stopped = Interrupted(f"stopped by {signals.name}: no video was made.")
                stopped.signal = signals.received or stopped.signal
                raise stopped
            returns.append(found)
    return target, returns
