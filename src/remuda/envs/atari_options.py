"""Settings of Atari games, merged from the user's options, the env's keyword arguments and the defaults of the id.

game = resolve_game("ALE/Pong-v5", gymnasium.spec("ALE/Pong-v5").kwargs, {}, AtariOptions(episodic_life=True))
game.frame_skip, game.sticky                             # 4, 0.25: from the id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remuda.errors import EnvSpecError

ENTRY_POINT = "ale_py.env:AtariEnv"
# Keyword arguments that `envs.atari.AtariEnv` does not support. If one is set, ale-py's own Gymnasium env is used.
GYMNASIUM_KWARGS = ("obs_type", "continuous", "continuous_action_threshold", "sound_obs")
KWARGS = (
    "frameskip",
    "repeat_action_probability",
    "full_action_space",
    "max_num_frames_per_episode",
    "mode",
    "difficulty",
    "render_mode",
)


@dataclass(frozen=True)
class AtariOptions:
    """Preprocessing of Atari games. An option that is None is taken from envs.kwargs, or else from the env id."""

    noop_max: int = 30
    """A game starts with fewer no-ops than this; the number is drawn from the env's seed."""
    frame_skip: int | None = None
    """Frames for which each action is repeated; the observation is the maximum of the last two."""
    sticky: float | None = None
    """Probability, in every frame, that the console repeats its last action instead."""
    screen_size: int = 84
    """Height and width of a frame, in pixels."""
    interpolation: Literal["area", "linear"] = "area"
    """How frames are downscaled; the native env supports area only."""
    frame_stack: int = 4
    """Number of frames in an observation, the newest last."""
    episodic_life: bool = False
    """A lost life ends an episode for the learner; logged scores are those of whole games."""
    fire_reset: bool = False
    """Press FIRE at the start of a game or life, in games that have this action."""
    full_action_set: bool | None = None
    """Use all 18 actions of the console instead of those that the game supports."""

    def __post_init__(self) -> None:
        for name, least in (("noop_max", 0), ("frame_skip", 1), ("screen_size", 8), ("frame_stack", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise EnvSpecError(f"{name}={value} of the Atari options is too small: use {least} or more.")
        if self.sticky is not None and not 0.0 <= self.sticky <= 1.0:
            raise EnvSpecError(f"sticky={self.sticky} is not a probability: use 0 to 1, such as 0.25.")
        if self.interpolation not in ("area", "linear"):
            raise EnvSpecError(f"interpolation={self.interpolation!r} is not known: use area or linear.")

    def changed(self) -> str:
        """Return the options that differ from the defaults, as text for error messages."""
        options, defaults = asdict(self), asdict(AtariOptions())
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value != defaults[name])


@dataclass(frozen=True)
class AtariGame:
    """One game with all its settings. What Atari options and envs.kwargs do not set is taken from the id."""

    label: str
    rom: str
    frame_skip: int | tuple[int, int]  # a number of frames, or (low, high): every step draws from range(low, high)
    sticky: float
    full_action_set: bool
    max_frames: int | None  # number of frames after which a game is truncated; None for no limit
    mode: int | None
    difficulty: int | None
    options: AtariOptions


def resolve_game(
    label: str, registered: Mapping[str, Any], kwargs: Mapping[str, Any], options: AtariOptions
) -> AtariGame | None:
    """Return the settings of an Atari id, or None if its arguments need ale-py's own Gymnasium env.

    `registered` are the keyword arguments with which the id is registered; `kwargs` are given by the user. Raise
    EnvSpecError if `options` and `kwargs` disagree or a value is invalid.
    """
    if any(({**registered, **kwargs}).get(name) for name in GYMNASIUM_KWARGS):
        return None
    if unknown := kwargs.keys() - set(KWARGS) - set(GYMNASIUM_KWARGS):
        raise EnvSpecError(f"{label} has no kwargs {', '.join(sorted(unknown))}: it takes {', '.join(KWARGS)}.")
    values = {**registered, **kwargs}

    def choose(option: str, name: str, default: object) -> Any:
        wanted = getattr(options, option)
        if wanted is None:
            return values.get(name, default)
        if name in kwargs and kwargs[name] != wanted:
            raise EnvSpecError(
                f"envs.{option}={wanted} and {name}={kwargs[name]} in envs.kwargs disagree for {label}: give one."
            )
        return wanted

    skip = choose("frame_skip", "frameskip", 4)
    if isinstance(skip, list | tuple):
        skip = tuple(skip)
        if len(skip) != 2 or not 1 <= skip[0] < skip[1]:
            raise EnvSpecError(
                f"frameskip={list(skip)} of {label} is not a range: give [low, high], with 1 or more for low."
            )
    elif type(skip) is not int or skip < 1:
        raise EnvSpecError(f"frameskip={skip!r} of {label} is not a number of frames: use 1 or more.")
    sticky = choose("sticky", "repeat_action_probability", 0.25)
    if not 0.0 <= sticky <= 1.0:
        raise EnvSpecError(f"repeat_action_probability={sticky} of {label} is not a probability: use 0 to 1.")
    return AtariGame(
        label,
        values["game"],
        skip,
        float(sticky),
        bool(choose("full_action_set", "full_action_space", False)),
        values.get("max_num_frames_per_episode"),
        values.get("mode"),
        values.get("difficulty"),
        options,
    )
