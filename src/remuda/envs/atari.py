"""Atari games with the usual preprocessing, one plain env for each: what ale-py's native vector env does with many.

    game = settle("ALE/Pong-v5", registered, {}, AtariOptions(episodic_life=True))
    env = AtariEnv(game)
    obs, info = env.reset(seed=1)                            # uint8 [4, 84, 84], newest frame last
    obs, reward, terminated, truncated, info = env.step(2)   # raw reward; info: lives
    if info.get("episode_continues"):                        # a life was lost, the game is not over:
        obs, info = env.reset()                              # goes on with it

Everything is drawn as the native env draws it, so the same seed and actions give the same frames, rewards and ends
there. Hence these habits, which other Atari wrappers do not share: up to noop_max - 1 no-ops, a first stack that is
empty but for its newest frame, and a last frame of a game that is the one before, as the skipping stops at the end.

A lost life is an end for the learner. The reset after it takes one no-op (or FIRE) action in the same game, where the
native env's own option would begin a new game; what it earns is added to the next reward, so that no score is lost.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.envs.ale_state import get_console, set_console
from remuda.errors import EnvSpecError

ENTRY_POINT = "ale_py.env:AtariEnv"
FRAMES_PER_SECOND = 60
NO_OP, FIRE = 0, 1  # of the console
OWN_KWARGS = ("obs_type", "continuous", "continuous_action_threshold", "sound_obs")  # ask for Gymnasium's own env
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
    """How Atari games are shown and played; None is what the id itself says."""

    noop_max: int = 30
    """Fewer no-ops than this are taken when a game begins, a number that the env's seed draws."""
    frame_skip: int | None = None
    """Frames for which each action is repeated; the last two of them are shown as their maximum."""
    sticky: float | None = None
    """Probability with which the console repeats its last action instead, in every frame."""
    screen_size: int = 84
    """Height and width of a frame, in pixels."""
    interpolation: Literal["area", "linear"] = "area"
    """How frames are made smaller; the native env knows area alone."""
    frame_stack: int = 4
    """Frames that an observation holds, the newest last."""
    episodic_life: bool = False
    """A lost life ends an episode for the learner; scores are those of whole games."""
    fire_reset: bool = False
    """Press FIRE when a game or a life begins, in games that have it."""
    full_action_set: bool | None = None
    """All 18 actions of the console, instead of those that the game knows."""

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
        """What differs from the defaults, for messages."""
        ours, usual = asdict(self), asdict(AtariOptions())
        return ", ".join(f"{name}={value!r}" for name, value in ours.items() if value != usual[name])


@dataclass(frozen=True)
class AtariGame:
    """One game with every setting decided: the user's options, else envs.kwargs, else the id's own."""

    label: str
    rom: str
    frame_skip: int | tuple[int, int]  # a range is drawn from anew for every step, its end not included
    sticky: float
    full_action_set: bool
    max_frames: int | None  # after which a game is truncated; None: never
    mode: int | None
    difficulty: int | None
    options: AtariOptions


def settle(
    label: str, registered: Mapping[str, Any], kwargs: Mapping[str, Any], options: AtariOptions
) -> AtariGame | None:
    """Every setting of this id; None where something is asked for that only Gymnasium's own env has."""
    if any(({**registered, **kwargs}).get(name) for name in OWN_KWARGS):
        return None
    if unknown := kwargs.keys() - set(KWARGS) - set(OWN_KWARGS):
        raise EnvSpecError(f"{label} has no kwargs {', '.join(sorted(unknown))}: it takes {', '.join(KWARGS)}.")
    values = {**registered, **kwargs}

    def decide(option: str, name: str, usual: Any) -> Any:
        wanted = getattr(options, option)
        if wanted is None:
            return values.get(name, usual)
        if name in kwargs and kwargs[name] != wanted:
            raise EnvSpecError(
                f"envs.{option}={wanted} and {name}={kwargs[name]} in envs.kwargs disagree for {label}: give one."
            )
        return wanted

    skip = decide("frame_skip", "frameskip", 4)
    if isinstance(skip, list | tuple):
        skip = tuple(skip)
        if len(skip) != 2 or not 1 <= skip[0] < skip[1]:
            raise EnvSpecError(f"frameskip={list(skip)} of {label} is no range: give [low, high], from 1 on.")
    elif type(skip) is not int or skip < 1:
        raise EnvSpecError(f"frameskip={skip!r} of {label} is no number of frames: use 1 or more.")
    sticky = decide("sticky", "repeat_action_probability", 0.25)
    if not 0.0 <= sticky <= 1.0:
        raise EnvSpecError(f"repeat_action_probability={sticky} of {label} is not a probability: use 0 to 1.")
    return AtariGame(
        label,
        values["game"],
        skip,
        float(sticky),
        bool(decide("full_action_set", "full_action_space", False)),
        values.get("max_num_frames_per_episode"),
        values.get("mode"),
        values.get("difficulty"),
        options,
    )


class AtariEnv(gymnasium.Env[NDArray[np.uint8], int]):  # type: ignore[misc]
    """One game on one emulator."""

    def __init__(self, game: AtariGame, render_mode: str | None = None) -> None:
        ale, roms = _require("ale_py", game.label), _require("ale_py.roms", game.label)
        self._cv2 = _require("cv2", game.label)
        if render_mode not in (None, "rgb_array"):
            raise EnvSpecError(f"render_mode={render_mode!r} is not one of {game.label}: use rgb_array.")
        self.game, self.render_mode, options = game, render_mode, game.options
        mean_skip = game.frame_skip if isinstance(game.frame_skip, int) else sum(game.frame_skip) / 2 - 0.5
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND / mean_skip}
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
        self._ale = ale.ALEInterface()
        self._ale.setFloat("repeat_action_probability", game.sticky)
        self._rom = roms.get_rom_path(game.rom)
        self._load()
        self._actions = self._ale.getLegalActionSet() if game.full_action_set else self._ale.getMinimalActionSet()
        codes = [action.value for action in self._actions]
        self._has_fire = options.fire_reset and FIRE in codes
        self._opening = self._actions[opening(codes, options.fire_reset)]
        self._no_op = ale.Action.NOOP
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))
        shape = (options.frame_stack, options.screen_size, options.screen_size)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._size = (options.screen_size, options.screen_size)
        self._interpolation = getattr(self._cv2, f"INTER_{options.interpolation.upper()}")
        self._last = np.zeros(self._ale.getScreenDims(), np.uint8)  # the last frame, and the one before it
        self._before = np.zeros_like(self._last)
        self._max_frames = 2**62 if game.max_frames is None else game.max_frames
        self._draws: np.random.RandomState | None = None
        self._continues = self._is_over = False
        self._carried = 0.0
        self._taken = [self._no_op, self._no_op]  # the last two actions, newest first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """A new game, or the same one where a life was lost; with a seed, always a new one."""
        super().reset(seed=seed)
        if seed is None and self._draws is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is not None:
            seed &= 0x7FFFFFFF  # the console's seed is an int of 32 bits, and -1 means "any"
            self._ale.setInt("random_seed", seed)
            self._load()
            self._draws = np.random.RandomState(seed)
            self._continues = False
        if self._continues:
            self._continues = False
            self._carried, self._is_over = self._act(self._opening)
        else:
            self._begin()
        return self._stack, {"lives": self._lives}

    def _begin(self) -> None:
        ale = self._ale
        ale.reset_game()
        if self._has_fire:
            ale.act(self._opening)
        for _ in range(self._count_no_ops() - self._has_fire):
            ale.act(self._no_op)
            if ale.game_over():
                ale.reset_game()
        self._frames, self._carried, self._is_over = 0, 0.0, False
        self._lives = ale.lives()
        ale.getScreenGrayscale(self._last)
        self._before.fill(0)
        self._stack = np.zeros(self.observation_space.shape or (), np.uint8)
        self._show()

    def _count_no_ops(self) -> int:
        """As std::uniform_int_distribution over std::mt19937 does it: the high word of draw x range, without bias."""
        assert self._draws is not None
        count = max(1, self.game.options.noop_max)
        while True:
            product = int(self._draws.randint(0, 1 << 32, dtype=np.uint32)) * count
            if product & 0xFFFFFFFF >= (1 << 32) % count:
                return product >> 32

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        lives = self._lives
        reward = self._carried
        if not self._is_over:
            earned, self._is_over = self._act(self._actions[action])
            reward += earned
        self._carried = 0.0
        info: dict[str, Any] = {"lives": self._lives}
        has_lost_life = self.game.options.episodic_life and 0 < self._lives < lives
        if not (self._is_over or has_lost_life):
            return self._stack, reward, False, False, info
        terminated = has_lost_life or self._ale.game_over(with_truncation=False)
        self._continues = not self._is_over
        if self._continues:
            info["episode_continues"] = True
        return self._stack, reward, terminated, not terminated, info

    def _act(self, action: Any) -> tuple[float, bool]:
        """Repeat an action; returns what it earned, and whether the game is over or has lasted long enough."""
        ale, skip, is_over, reward = self._ale, self.game.frame_skip, False, 0
        self._taken = [action, self._taken[0]]
        count = skip if isinstance(skip, int) else int(self.np_random.integers(*skip))
        for left in range(count, 0, -1):
            reward += ale.act(action)
            self._frames += 1
            is_over = self._frames >= self._max_frames or ale.game_over()
            if is_over:
                break
            if left <= 2:
                ale.getScreenGrayscale(self._last if left == 1 else self._before)
        self._lives = ale.lives()
        stack = np.empty_like(self._stack)  # never the one that was handed out: callers may keep it
        stack[:-1] = self._stack[1:]
        self._stack = stack
        self._show()
        return float(reward), is_over

    def _show(self) -> None:
        np.maximum(self._last, self._before, out=self._last)
        self._cv2.resize(self._last, self._size, dst=self._stack[-1], interpolation=self._interpolation)

    def _load(self) -> None:
        self._ale.loadROM(self._rom)
        for name, wanted, known in (
            ("mode", self.game.mode, self._ale.getAvailableModes()),
            ("difficulty", self.game.difficulty, self._ale.getAvailableDifficulties()),
        ):
            if wanted is None:
                continue
            if wanted not in known:
                listed = ", ".join(str(value) for value in known)
                raise EnvSpecError(f"{name}={wanted} is not one of {self.game.label}: use one of {listed}.")
            (self._ale.setMode if name == "mode" else self._ale.setDifficulty)(wanted)

    def get_state(self) -> dict[str, Any]:
        """Of a game that has begun; `envs/states.py` says what for."""
        assert self._draws is not None
        return {
            "console": get_console(self._ale, self.game.sticky, self._taken),
            "draws": self._draws.get_state(legacy=False),
            "frames": (self._last, self._before, self._stack),
            "counts": (self._frames, self._lives, self._carried, self._continues, self._is_over),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        set_console(self._ale, state["console"], self.game.sticky)
        self._draws = np.random.RandomState()
        self._draws.set_state(state["draws"])
        self._last, self._before, self._stack = state["frames"]
        self._frames, self._lives, self._carried, self._continues, self._is_over = state["counts"]

    def render(self) -> Any:
        """The console's screen, in colours."""
        return self._ale.getScreenRGB()

    def close(self) -> None:
        """Nothing is open: the emulator goes with the object."""


def opening(codes: list[int], fire_reset: bool) -> int:
    """Place of the action that goes on after a lost life; the first one in games whose set has no no-op."""
    wanted = FIRE if fire_reset and FIRE in codes else NO_OP
    return codes.index(wanted) if wanted in codes else 0


def _require(module: str, label: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = "opencv-python-headless" if module == "cv2" else "ale_py"
        raise EnvSpecError(f"{label} needs the package {package}: pip install 'remuda[atari]'.") from None
