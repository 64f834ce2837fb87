"""The Atari env compared with the emulator: frames, skips, lives, seeds, and the precedence of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ale_py
import cv2
import numpy as np
import pytest
from ale_py import roms

from remuda.envs import AtariOptions, EnvSpec, make_envs, resolve
from remuda.envs.atari import AtariEnv
from remuda.errors import EnvSpecError

NO_OP, FIRE = 0, 1


def build(env: str = "ALE/Breakout-v5", kwargs: dict[str, Any] | None = None, **options: Any) -> AtariEnv:
    made = resolve(env, kwargs, AtariOptions(**options)).build()
    assert isinstance(made, AtariEnv)
    return made


def emulator(rom: str, seed: int, sticky: float = 0.0) -> Any:
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    ale.loadROM(roms.get_rom_path(rom))
    ale.reset_game()
    return ale


# --- precedence of settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "skip", "sticky"),
    [
        ("ALE/Pong-v5", 4, 0.25),
        ("ale_py:ALE/Pong-v5", 4, 0.25),
        ("PongNoFrameskip-v4", 1, 0.0),
        ("PongNoFrameskip-v0", 1, 0.25),
        ("Pong-v4", (2, 5), 0.0),
        ("Pong-v0", (2, 5), 0.25),
    ],
)
def test_settings_of_an_id_apply(env: str, skip: Any, sticky: float) -> None:
    spec = resolve(env)
    for each in (spec, EnvSpec.from_json(spec.to_json())):
        game = each.game
        assert game is not None
        assert (game.rom, game.frame_skip, game.sticky) == ("pong", skip, sticky)
        assert (game.full_action_set, game.max_frames, game.mode, game.difficulty) == (False, 108_000, None, None)


def test_options_and_kwargs_override_the_id() -> None:
    kwargs = {"frameskip": [2, 3], "repeat_action_probability": 0, "mode": 0, "max_num_frames_per_episode": 50}
    spec = resolve("ALE/Pong-v5", kwargs, AtariOptions(full_action_set=True, screen_size=64))
    game = EnvSpec.from_json(spec.to_json()).game
    assert game is not None
    assert (game.frame_skip, game.sticky, game.mode, game.max_frames) == ((2, 3), 0.0, 0, 50)
    assert (game.full_action_set, game.options.screen_size) == (True, 64)
    game = resolve(resolve("ALE/Pong-v5"), None, AtariOptions(frame_skip=3, sticky=0.5)).game
    assert game is not None
    assert (game.frame_skip, game.sticky) == (3, 0.5)
    assert build("ALE/Pong-v5").action_space.n == 6
    assert build("ALE/Pong-v5", full_action_set=True).action_space.n == 18


@pytest.mark.parametrize(
    ("kwargs", "options", "parts"),
    [
        ({"frameskip": 2}, {"frame_skip": 4}, ["envs.frame_skip=4 and frameskip=2", "disagree"]),
        ({"frameskip": 0}, {}, ["frameskip=0", "use 1 or more"]),
        ({"frameskip": [3, 3]}, {}, ["frameskip=[3, 3]", "range"]),
        ({"repeat_action_probability": 2}, {}, ["not a probability"]),
        ({"frame_skip": 2}, {}, ["has no kwargs frame_skip", "frameskip"]),
        ({"mode": 77}, {}, ["mode=77", "use one of 0, 1"]),
        ({"difficulty": 9}, {}, ["difficulty=9", "use one of 0, 1"]),
        ({"render_mode": "human"}, {}, ["render_mode='human'", "rgb_array"]),
        ({}, {"noop_max": -1}, ["noop_max=-1"]),
        ({}, {"sticky": 1.5}, ["sticky=1.5"]),
        ({}, {"interpolation": "cubic"}, ["interpolation='cubic'"]),
        ({"obs_type": "ram"}, {"episodic_life": True}, ["episodic_life=True", "leave the Atari options"]),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(kwargs: Any, options: Any, parts: list[str]) -> None:
    with pytest.raises(EnvSpecError) as caught:
        resolve("ALE/Pong-v5", kwargs, AtariOptions(**options)).build()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text


def test_atari_options_are_refused_for_other_envs() -> None:
    assert resolve("CartPole-v1", None, AtariOptions()).atari is None
    with pytest.raises(EnvSpecError, match=r"sticky=0.1: CartPole-v1 is not an Atari game"):
        resolve("CartPole-v1", None, AtariOptions(sticky=0.1))


@pytest.mark.parametrize(
    ("kwargs", "shape"),
    [({"obs_type": "ram"}, (128,)), ({"obs_type": "rgb"}, (210, 160, 3)), ({"continuous": True}, (210, 160, 3))],
)
def test_kwargs_of_the_gymnasium_env_select_it(kwargs: Any, shape: tuple[int, ...]) -> None:
    env = resolve("ALE/Pong-v5", kwargs).build()
    assert not isinstance(env.unwrapped, AtariEnv)
    assert env.observation_space.shape == shape
    env.close()


# --- observations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interpolation", "flag"), [("area", cv2.INTER_AREA), ("linear", cv2.INTER_LINEAR)])
def test_frames_equal_those_of_the_emulator(interpolation: Any, flag: int) -> None:
    env = build("ALE/Pong-v5", noop_max=0, sticky=0.0, interpolation=interpolation)
    ale = emulator("pong", seed=3)
    actions = ale.getMinimalActionSet()

    def shown(frame: Any) -> Any:
        return cv2.resize(frame, (84, 84), interpolation=flag)

    obs, info = env.reset(seed=3)
    frames = [np.zeros((84, 84), np.uint8)] * 3 + [shown(ale.getScreenGrayscale())]
    assert np.array_equal(obs, frames)
    assert info == {"lives": ale.lives()}
    kept, copies = [], []
    for action in np.random.default_rng(0).integers(0, 6, 80):
        reward = 0
        for _ in range(4):
            before = ale.getScreenGrayscale()
            reward += ale.act(actions[action])
        frames = [*frames[1:], shown(np.maximum(before, ale.getScreenGrayscale()))]
        obs, got, terminated, truncated, _ = env.step(action)
        assert np.array_equal(obs, frames)
        assert (got, terminated, truncated) == (reward, False, False)
        kept.append(obs)
        copies.append(obs.copy())
    assert np.array_equal(kept, copies)  # returned observations are not overwritten
    assert env._ale.getEpisodeFrameNumber() == 4 * 80  # frames are skipped once, not twice


def test_observation_shape_follows_screen_size_and_frame_stack() -> None:
    env = build(screen_size=48, frame_stack=2)
    assert env.observation_space.shape == (2, 48, 48)
    assert env.observation_space.contains(env.reset(seed=1)[0])


def test_render_returns_the_screen_and_frame_rate() -> None:
    env = resolve("ALE/Breakout-v5").build(render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == (210, 160, 3)
    assert env.metadata == {"render_modes": ["rgb_array"], "render_fps": 15.0}
    assert build("BreakoutNoFrameskip-v4").metadata["render_fps"] == 60.0
    assert build("Breakout-v4").metadata["render_fps"] == 20.0  # 2, 3 or 4 frames


# --- seeds, no-ops and limits ---------------------------------------------------------------------------------------


def test_frame_skip_is_drawn_from_its_range_at_every_step() -> None:
    env = build("Breakout-v4", noop_max=0)
    env.reset(seed=1)
    counts, before = [], 0
    for _ in range(60):
        env.step(NO_OP)
        counts.append(env._ale.getEpisodeFrameNumber() - before)
        before += counts[-1]
    assert set(counts) == {2, 3, 4}


def play(env: AtariEnv, seed: int, actions: Any) -> list[Any]:
    seen = [env.reset(seed=seed)[0].tobytes()]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        seen.append((obs.tobytes(), reward, terminated, truncated))
        if terminated or truncated:
            seen.append(env.reset()[0].tobytes())
    return seen


def test_equal_seeds_repeat_and_different_seeds_do_not() -> None:
    actions = np.random.default_rng(0).integers(0, 4, 260)
    first, second = build(), build()  # sticky actions with probability 0.25 and random no-ops
    play(second, 9, actions[:30])
    assert play(first, 5, actions) == play(second, 5, actions)
    assert play(first, 6, actions) != play(second, 5, actions)


def test_sticky_is_passed_to_the_emulator() -> None:
    always = build(sticky=1.0, noop_max=0)
    assert play(always, 1, [FIRE] * 40) == play(always, 1, [NO_OP] * 40)  # no action ever replaces the first no-op
    never = build(sticky=0.0, noop_max=0)
    assert play(never, 1, [FIRE] * 40) != play(never, 1, [NO_OP] * 40)


def test_every_number_of_no_ops_below_noop_max_is_drawn() -> None:
    env = build(noop_max=5, sticky=0.0)
    env.reset(seed=2)
    counts = []
    for _ in range(60):
        env.reset()
        counts.append(env._ale.getEpisodeFrameNumber())
    assert set(counts) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("noop_max", [0, 1])
def test_games_start_without_no_ops_if_none_are_below_noop_max(noop_max: int) -> None:
    env = build(noop_max=noop_max, sticky=0.0)
    for seed in range(8):
        env.reset(seed=seed)
        assert env._ale.getEpisodeFrameNumber() == 0


def test_game_is_truncated_at_its_frame_limit() -> None:
    env = build(kwargs={"max_num_frames_per_episode": 101}, noop_max=30)
    env.reset(seed=1)
    ends = [env.step(NO_OP)[2:4] for _ in range(26)]
    assert ends == [(False, False)] * 25 + [(False, True)]
    env.reset()
    assert env.step(NO_OP)[3] is False


# --- lives ----------------------------------------------------------------------------------------------------------


def test_lost_life_ends_an_episode_and_the_game_continues() -> None:
    env = build(noop_max=0, sticky=0.0, episodic_life=True)
    env.reset(seed=1)
    lives, frames, ends = 5, 0, []
    for step in range(2000):
        obs, _, terminated, truncated, info = env.step(step % 4)
        assert not truncated
        if not terminated:
            continue
        ends.append((info["lives"], info.get("episode_continues", False)))
        if not info.get("episode_continues"):
            break
        lives -= 1
        frames = env._ale.getEpisodeFrameNumber()
        after, info = env.reset()
        assert info == {"lives": lives}
        assert env._ale.getEpisodeFrameNumber() == frames + 4  # one no-op in the same game
        assert np.array_equal(after[:3], obs[1:])  # and its frame after those of the last observation
    assert ends == [(4, True), (3, True), (2, True), (1, True), (0, False)]
    assert env.reset()[1] == {"lives": 5}
    assert env._ale.getEpisodeFrameNumber() == 0


def lose_a_life(env: AtariEnv) -> None:
    env.reset(seed=1)
    while not env.step(FIRE)[2]:
        pass


def test_seed_starts_a_new_game_even_after_a_lost_life() -> None:
    env = build(noop_max=0, episodic_life=True)
    lose_a_life(env)
    assert env.reset(seed=4)[1] == {"lives": 5}


def test_reward_of_the_no_op_after_a_lost_life_is_added_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    env = build(noop_max=0, sticky=0.0, episodic_life=True)
    lose_a_life(env)
    with monkeypatch.context() as patch:
        patch.setattr(env, "_act", lambda action: (7.0, False))
        env.reset()
    assert env.step(NO_OP)[1] == 7.0
    assert env.step(NO_OP)[1] == 0.0


def test_frame_limit_reached_by_that_no_op_ends_the_next_step() -> None:
    env = build(noop_max=0, sticky=0.0, episodic_life=True)
    lose_a_life(env)
    frames = env._ale.getEpisodeFrameNumber()
    env = build(noop_max=0, sticky=0.0, episodic_life=True, kwargs={"max_num_frames_per_episode": frames + 2})
    lose_a_life(env)
    env.reset()
    _, reward, terminated, truncated, info = env.step(FIRE)
    assert (reward, terminated, truncated, info) == (0.0, False, True, {"lives": 4})
    assert env._ale.getEpisodeFrameNumber() == frames + 2
    assert env.reset()[1] == {"lives": 5}


def test_fire_starts_a_game_and_every_life() -> None:
    waiting = build(noop_max=0, fire_reset=False, episodic_life=True)
    waiting.reset(seed=1)
    assert not any(waiting.step(NO_OP)[2] for _ in range(150))  # without FIRE there is no ball
    env = build(noop_max=0, sticky=0.0, fire_reset=True, episodic_life=True)
    env.reset(seed=1)
    lives = []
    for _ in range(300):
        *_, terminated, _, info = env.step(NO_OP)
        if terminated:
            lives.append(info["lives"])
            env.reset()
    assert lives[:3] == [4, 3, 2]


def test_scores_of_whole_games_are_reported() -> None:
    spec = resolve("ALE/Breakout-v5", None, AtariOptions(episodic_life=True))
    whole = replace(spec, atari=AtariOptions())
    results = {}
    for each in (spec, whole):
        with make_envs(each, 1, 1, backend="python") as envs:
            envs.reset(seed=3)
            envs.recv()
            total, ends, actions = 0.0, 0, np.random.default_rng(0)
            while not (episodes := envs.episodes()):
                envs.send(0, actions.integers(0, 4, 1))
                _, step = envs.recv()
                total += float(step.reward[0])
                ends += int(step.terminated[0])
            assert episodes[0].values["ep_rew"] == total
            assert episodes[0].values["info/lives"] == 0.0
            results[each.atari] = ends
    assert results == {spec.atari: 5, whole.atari: 1}
