"""ale-py's own vector env: Atari games in C++ threads, with the same frames as AtariEnv.

    vector = make(resolve("ALE/Pong-v5"), num_envs=8, threads=2)

Every option of AtariVectorEnv is set, because its defaults clip rewards, press FIRE and disable sticky actions. Its
option for episodic life would start a new game at every lost life, so its option life_loss_info is used instead: that
option only reports lost lives. After a lost life, AtariEnv resets by taking one no-op or FIRE action in the same
game. This backend does the same, by replacing the agent's next action with the no-op or FIRE.

One difference from AtariEnv remains. If a game ends during this no-op or FIRE (in practice, by its limit of frames),
this backend gives a second reset row (mask False), whereas AtariEnv starts an episode that ends with its first step.
The statistics of the episodes are the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from remuda.core import Array
from remuda.envs.atari import opening
from remuda.envs.atari_options import AtariGame
from remuda.envs.episodes import CONTINUES
from remuda.envs.spec import EnvSpec

NAME = "ale"
IS_SAME_GAME = True
NO_LIMIT = 2**31 - 1


def offer(spec: EnvSpec) -> str | None:
    """Return why ale-py's vector env cannot play this env exactly as AtariEnv does, or None if it can."""
    game = spec.game
    if game is None:
        return "as it is not an Atari game that is shown as frames"
    if game.options.interpolation != "area":
        return f"as it has no interpolation={game.options.interpolation}"
    if not isinstance(game.frame_skip, int):
        return f"as it draws no frameskip={list(game.frame_skip)}"
    if game.mode is not None or game.difficulty is not None:
        return f"as it sets no mode={game.mode} and difficulty={game.difficulty}"
    if (limit := gymnasium.spec(spec.id).max_episode_steps) is not None:
        return f"as it counts frames, not the id's {limit} steps"
    if importlib.util.find_spec("ale_py.vector_env") is None:
        return "as this ale-py has no vector env (pip install 'ale-py>=0.12')"
    return None


def make(spec: EnvSpec, num_envs: int, threads: int) -> AleVectorEnv:
    game = spec.game
    assert game is not None
    return AleVectorEnv(game, num_envs, threads)


class AleVectorEnv:
    """A `NativeVectorEnv` that wraps ale-py's AtariVectorEnv."""

    def __init__(self, game: AtariGame, num_envs: int, threads: int) -> None:
        options = game.options
        self._max_frames = NO_LIMIT if game.max_frames is None else game.max_frames
        vector = importlib.import_module("ale_py.vector_env").AtariVectorEnv(
            game.rom,
            num_envs,
            batch_size=0,
            num_threads=threads,
            thread_affinity_offset=-1,
            max_num_frames_per_episode=self._max_frames,
            repeat_action_probability=game.sticky,
            full_action_space=game.full_action_set,
            continuous=False,
            autoreset_mode="NextStep",
            img_height=options.screen_size,
            img_width=options.screen_size,
            grayscale=True,
            stack_num=options.frame_stack,
            frameskip=game.frame_skip,
            maxpool=True,
            noop_max=options.noop_max,
            episodic_life=False,
            life_loss_info=options.episodic_life,
            reward_clipping=False,
            use_fire_reset=options.fire_reset,
        )
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self._vector: Any = vector
        self._is_episodic = options.episodic_life
        codes = [int(action.value) for action in vector.ale.get_action_set()]
        self._opening = opening(codes, options.fire_reset)
        self._num_envs = num_envs

    def begin(self, seeds: Sequence[int]) -> Array:
        obs, info = self._vector.reset(seed=np.asarray(seeds))
        self._lives, self._first_frame = info["lives"], info["episode_frame_number"].copy()
        self._has_lost = np.zeros(self._num_envs, bool)  # envs that just lost a life and whose game continues
        self._is_over = np.zeros(self._num_envs, bool)
        self._carried = np.zeros(self._num_envs, np.float32)
        return obs  # type: ignore[no-any-return]

    def restart(self, which: NDArray[np.bool_]) -> Array:
        obs, info = self._vector.reset(options={"reset_mask": which})
        self._lives, frames = info["lives"], info["episode_frame_number"]
        self._first_frame[which] = frames[which]
        self._has_lost[which] = self._is_over[which] = False
        self._carried[which] = 0.0
        return obs  # type: ignore[no-any-return]

    def send(self, actions: Array) -> None:
        if self._is_episodic and self._has_lost.any():
            actions = np.where(self._has_lost, self._opening, actions)
        self._vector.send(actions)

    def recv(self) -> tuple[Array, Array, Array, Array, dict[str, Array]]:
        obs, reward, terminated, truncated, info = self._vector.recv()
        if not self._is_episodic:
            return obs, reward, terminated, truncated, {"lives": info["lives"]}
        lives, frames = info["lives"], info["episode_frame_number"]
        self._first_frame[self._is_over] = frames[self._is_over]
        is_within_limit = frames - self._first_frame < self._max_frames
        # A termination while lives are left counts as a lost life, not as the end of the game: with random actions,
        # none of ale-py's 104 games ever ended while lives were left.
        is_lost = terminated & (lives > 0) & (lives < self._lives) & is_within_limit
        self._is_over = (terminated | truncated) & ~is_lost
        was_opening, self._lives = self._has_lost, lives
        self._has_lost = is_lost & ~was_opening
        terminated = terminated & ~(was_opening & is_lost)
        is_carried = was_opening & ~self._is_over
        reward = reward + self._carried
        self._carried = np.where(is_carried, reward, 0).astype(np.float32)
        reward = np.where(is_carried, 0, reward)
        return obs, reward, terminated, truncated, {"lives": lives, CONTINUES: self._has_lost}

    def close(self) -> None:
        self._vector = None  # the destructor of ale-py's object ends its threads
