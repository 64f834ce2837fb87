"""Atari games with the usual preprocessing, as a single env that gives the same frames as ale-py's vector env.

    game = resolve_game("ALE/Pong-v5", gymnasium.spec("ALE/Pong-v5").kwargs, {}, AtariOptions(episodic_life=True))
    env = AtariEnv(game)
    obs, info = env.reset(seed=1)                            # uint8 [4, 84, 84], the newest frame last
    obs, reward, terminated, truncated, info = env.step(2)   # raw reward; info has "lives"
    if info.get("episode_continues"):                        # a life was lost and the game is not over:
        obs, info = env.reset()                              # continues the same game

All random numbers are drawn as ale-py's vector env draws them, so the same seed and actions give the same frames,
rewards and ends of episodes. Three details therefore differ from other Atari wrappers:

- A game starts with fewer than noop_max no-ops, or with none if noop_max is 0.
- In the first stack of a game, all frames except the newest are zero.
- Frame skipping stops where the game ends, so the newest frame of a game's last observation usually repeats the
  previous frame.

With episodic_life, a lost life ends the learner's episode. The next reset takes one no-op (or FIRE) action in the
same game, whereas the episodic life of ale-py's vector env would start a new game. The reward of this no-op or FIRE
is added to the reward of the next step, so that scores stay complete.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.envs.ale_state import get_console, set_console
from remuda.envs.atari_options import AtariGame
from remuda.errors import EnvSpecError

FRAMES_PER_SECOND = 60
NO_OP, FIRE = 0, 1  # codes of the console's actions
Frames: TypeAlias = NDArray[np.uint8]
Info: TypeAlias = dict[str, object]


class AtariEnv(gymnasium.Env):  # type: ignore[misc]
    """One Atari game on its own emulator."""

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
        self._last = np.zeros(self._ale.getScreenDims(), np.uint8)
        self._before = np.zeros_like(self._last)  # the screen before `_last`
        self._max_frames = 2**62 if game.max_frames is None else game.max_frames
        self._draws: np.random.RandomState | None = None
        self._continues = self._is_over = False
        self._carried = 0.0
        self._taken = [self._no_op, self._no_op]  # the last two requested actions, the newest first

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frames, Info]:
        """Start a new game; if only a life was lost and no seed is given, continue the current game instead."""
        super().reset(seed=seed)
        if seed is None and self._draws is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is not None:
            seed &= 0x7FFFFFFF  # not negative: the console reads a signed 32-bit int, and takes a random seed for -1
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
        """Return a random number of no-ops, by the algorithm of libstdc++'s uniform_int_distribution, as in ale-py.

        A 32-bit draw of std::mt19937 is multiplied by noop_max, or by 1 if noop_max is 0, and the result is the upper
        32 bits of the product. Draws that would make some results more likely than others are rejected.
        """
        assert self._draws is not None
        count = max(1, self.game.options.noop_max)
        while True:
            product = int(self._draws.randint(0, 1 << 32, dtype=np.uint32)) * count
            if product & 0xFFFFFFFF >= (1 << 32) % count:
                return product >> 32

    def step(self, action: int) -> tuple[Frames, float, bool, bool, Info]:
        lives = self._lives
        reward = self._carried
        if not self._is_over:
            earned, self._is_over = self._act(self._actions[action])
            reward += earned
        self._carried = 0.0
        info: Info = {"lives": self._lives}
        has_lost_life = self.game.options.episodic_life and 0 < self._lives < lives
        if not (self._is_over or has_lost_life):
            return self._stack, reward, False, False, info
        terminated = has_lost_life or self._ale.game_over(with_truncation=False)
        self._continues = not self._is_over
        if self._continues:
            info["episode_continues"] = True
        return self._stack, reward, terminated, not terminated, info

    def _act(self, action: Any) -> tuple[float, bool]:
        """Repeat an action for the frames of one step; return the sum of rewards, and whether the game is over.

        A game that has reached its limit of frames counts as over, too.
        """
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
        stack = np.empty_like(self._stack)  # a new array, because callers may keep the previous array
        stack[:-1] = self._stack[1:]
        self._stack = stack
        self._show()
        return float(reward), is_over

    def _show(self) -> None:
        """Downscale the maximum of the last two screens, and write the result to the newest frame of the stack."""
        np.maximum(self._last, self._before, out=self._last)
        self._cv2.resize(self._last, self._size, dst=self._stack[-1], interpolation=self._interpolation)

    def _load(self) -> None:
        self._ale.loadROM(self._rom)
        for name, wanted, available in (
            ("mode", self.game.mode, self._ale.getAvailableModes()),
            ("difficulty", self.game.difficulty, self._ale.getAvailableDifficulties()),
        ):
            if wanted is None:
                continue
            if wanted not in available:
                listed = ", ".join(str(value) for value in available)
                raise EnvSpecError(f"{name}={wanted} is not one of {self.game.label}: use one of {listed}.")
            (self._ale.setMode if name == "mode" else self._ale.setDifficulty)(wanted)

    def get_state(self) -> Info:
        """Return the state of the current game (see envs/states.py); `reset` must have been called before."""
        assert self._draws is not None
        return {
            "console": get_console(self._ale, self.game.sticky, self._taken),
            "draws": self._draws.get_state(legacy=False),
            "frames": (self._last, self._before, self._stack),
            "counts": (self._frames, self._lives, self._carried, self._continues, self._is_over),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        set_console(self._ale, state["console"], self.game.sticky)
        self._draws = np.random.RandomState()
        self._draws.set_state(state["draws"])
        self._last, self._before, self._stack = state["frames"]
        self._frames, self._lives, self._carried, self._continues, self._is_over = state["counts"]

    def render(self) -> NDArray[np.uint8]:
        """Return the screen of the console, [height, width, RGB]."""
        screen: NDArray[np.uint8] = self._ale.getScreenRGB()
        return screen

    def close(self) -> None:
        """Do nothing, because the emulator is freed together with this object."""


def opening(codes: list[int], fire_reset: bool) -> int:
    """Return the index in `codes` of the action to take after a lost life and, if it is FIRE, when a game starts.

    This is the index of FIRE if `fire_reset` is set and `codes` contains FIRE, otherwise the index of the no-op, or 0
    if `codes` contains neither.
    """
    wanted = FIRE if fire_reset and FIRE in codes else NO_OP
    return codes.index(wanted) if wanted in codes else 0


def _require(module: str, label: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = "opencv-python-headless" if module == "cv2" else "ale_py"
        raise EnvSpecError(f"{label} needs the package {package}: pip install 'remuda[atari]'.") from None
