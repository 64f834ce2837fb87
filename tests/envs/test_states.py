"""An env continues exactly from the state that was saved in another env of the same kind."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.envs.classic_control import CartPoleEnv

from remuda.data.packing import pack, unpack
from remuda.envs import resolve
from remuda.envs.atari_options import AtariOptions
from remuda.envs.states import get_state, set_state, why_not
from remuda.errors import NoState


def play(env: Any, actions: list[Any]) -> bytes:
    """Return all results of stepping as bytes, so that floats are compared exactly."""
    seen = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        numbers = {key: value for key, value in info.items() if not isinstance(value, dict)}
        seen.append((obs, reward, bool(terminated), bool(truncated), numbers))
        if terminated or truncated:
            seen.append(env.reset())
    return pack(seen)


def check(make: Any, steps: int, seed: int = 3) -> None:
    """Save after some steps, restore in an env that was never reset and in a used one, and compare later steps."""
    env = make()
    env.action_space.seed(seed)
    env.reset(seed=seed)
    before, after = ([env.action_space.sample() for _ in range(steps)] for _ in range(2))
    play(env, before)
    state = pack(get_state(env))
    expected = play(env, after)
    new, used = make(), make()
    used.reset(seed=seed + 1)
    play(used, before[: steps // 3])
    for other in (new, used):
        set_state(other, unpack(state))
        assert play(other, after) == expected
        assert pack(get_state(other)) == pack(get_state(env))


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "Acrobot-v1",
        "Pendulum-v1",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "FrozenLake-v1",
        "CliffWalking-v1",
        "Taxi-v4",
        "Blackjack-v1",
        "Remuda/Recall-v0",
        "Remuda/CartPolePositions-v0",
        "Remuda/Mock-v0",
    ],
)
def test_small_envs_continue_from_a_saved_state(name: str) -> None:
    check(lambda: resolve(name).build(), 300)


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Pusher-v5"])
def test_mujoco_envs_continue_from_a_saved_state(name: str) -> None:
    check(lambda: resolve(name).build(), 60)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["Humanoid", "HumanoidStandup", "Walker2d", "Swimmer", "Reacher", "InvertedPendulum", "InvertedDoublePendulum"],
)
def test_other_mujoco_envs_continue_from_a_saved_state(name: str) -> None:
    check(lambda: resolve(f"{name}-v5").build(), 200)


@pytest.mark.parametrize("name", ["Breakout", "Asterix", "Seaquest", "SpaceInvaders", "Freeway"])
def test_minatar_games_continue_from_a_saved_state(name: str) -> None:
    check(lambda: resolve(f"MinAtar/{name}-v1").build(), 150)


@pytest.mark.parametrize("steps", [1, 90])
@pytest.mark.parametrize(
    "options",
    [AtariOptions(), AtariOptions(sticky=0.0), AtariOptions(sticky=0.5, episodic_life=True, fire_reset=True)],
    ids=["as the id says", "not sticky", "very sticky, one life"],
)
def test_atari_games_continue_from_a_saved_state(options: AtariOptions, steps: int) -> None:
    check(lambda: resolve("ALE/Breakout-v5", None, options).build(), steps)


@pytest.mark.long
@pytest.mark.parametrize("game", ["Pong", "SpaceInvaders", "Qbert", "Seaquest"])
def test_atari_games_continue_from_states_saved_at_many_moments(game: str) -> None:
    """The emulator state lacks the last executed action; a wrong one would change later steps of some saves."""
    make = resolve(f"ALE/{game}-v5").build
    env = make()
    env.action_space.seed(1)
    env.reset(seed=1)
    for moment in range(40):
        actions = [env.action_space.sample() for _ in range(10)]
        play(env, actions[: 1 + moment % 7])
        other = make()
        set_state(other, unpack(pack(get_state(env))))
        assert play(other, actions) == play(env, actions), moment


def test_saving_does_not_change_an_atari_game() -> None:
    env, other = resolve("ALE/Breakout-v5").build(), resolve("ALE/Breakout-v5").build()
    actions = np.random.default_rng(0).integers(0, 4, 60).tolist()
    env.reset(seed=1)
    other.reset(seed=1)
    for action in actions:
        get_state(env)
        assert play(env, [action]) == play(other, [action])


WRAPPED = {
    "stack": lambda env: wrappers.FrameStackObservation(env, 3),
    "delay": lambda env: wrappers.DelayObservation(env, 2),
    "time": lambda env: wrappers.TimeAwareObservation(env),
    "normalised observations": wrappers.NormalizeObservation,
    "normalised rewards": wrappers.NormalizeReward,
    "sticky": lambda env: wrappers.StickyAction(env, 0.3),
    "repeated": lambda env: wrappers.RepeatAction(env, 2),
    "max and skip": lambda env: wrappers.MaxAndSkipObservation(env, 2),
    "statistics": wrappers.RecordEpisodeStatistics,
    "scaled": lambda env: wrappers.RescaleObservation(env, np.float32(-1), np.float32(1)),
    "transformed": lambda env: wrappers.TransformReward(env, lambda reward: 2 * reward),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_envs_continue_from_a_saved_state(name: str) -> None:
    env = "MountainCarContinuous-v0" if name == "scaled" else "CartPole-v1"
    check(lambda: WRAPPED[name](gymnasium.make(env)), 100)


class Own(gymnasium.Env):
    """A user's env: a walk with random steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal()
        return np.array([self.place]), {}

    def step(self, action: int) -> Any:
        self.place += self.np_random.normal() + action
        return np.array([self.place]), self.place, abs(self.place) > 5, False, {}


class Saved(Own):
    def get_state(self) -> Any:
        return {"place": self.place}

    def set_state(self, state: Any) -> None:
        self.place = state["place"]


def test_user_env_needs_two_methods_and_its_generator_is_saved() -> None:
    check(lambda: gymnasium.wrappers.TimeLimit(Saved(), 20), 100)


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (Own, "Own"),
        (lambda: gymnasium.wrappers.TimeLimit(Own(), 20), "Own"),
        (lambda: resolve("MiniGrid-Empty-5x5-v0").build(), "EmptyEnv"),
        (type("MyCartPole", (CartPoleEnv,), {}), "MyCartPole"),
    ],
)
def test_env_that_cannot_be_saved_is_named(make: Any, culprit: str) -> None:
    env = make()
    env.reset(seed=0)
    assert why_not(env) == f"{culprit} has no get_state() and set_state()"
    with pytest.raises(NoState, match=culprit):
        get_state(env)


def test_why_not_is_none_for_envs_that_can_be_saved() -> None:
    assert why_not(resolve("CartPole-v1").build()) is None
