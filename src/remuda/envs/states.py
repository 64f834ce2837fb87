"""The state of an env, so that a run can go on exactly where it stopped: taken and put back without pickle.

    state = get_state(env)                    # plain values and arrays; NoState says what cannot be saved
    set_state(another, state)                 # made in the same way: from here on both answer alike, bit by bit

An env is saved layer by layer, from its outermost wrapper to the env itself. Layers that are known: Gymnasium's
wrappers, classic control and toy text, MuJoCo, Atari, MinAtar, and this package's own. Any other class offers two
methods, and its random numbers, if they are Gymnasium's `np_random`, are saved for it:

    class MyEnv(gymnasium.Env):
        def get_state(self):                  # plain values and arrays: all that differs from a newly made env
            return {"position": self.position, "left": self.left}

        def set_state(self, state):
            self.position, self.left = state["position"], state["left"]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from remuda.errors import NoState

WRAPPERS = "gymnasium.wrappers"
MUJOCO = "gymnasium.envs.mujoco."
# What differs between an env that has been played and a new one, by module and class: of exactly this class, as one
# that is derived from it may have more.
SAVED: dict[str, dict[str, tuple[str, ...]]] = {
    "gymnasium.envs.classic_control": {
        "cartpole.CartPoleEnv": ("state", "steps_beyond_terminated"),
        "acrobot.AcrobotEnv": ("state",),
        "pendulum.PendulumEnv": ("state", "last_u"),
        "mountain_car.MountainCarEnv": ("state",),
        "continuous_mountain_car.Continuous_MountainCarEnv": ("state",),
    },
    "gymnasium.envs.toy_text": {
        "frozen_lake.FrozenLakeEnv": ("s", "lastaction"),
        "cliffwalking.CliffWalkingEnv": ("s", "lastaction"),
        "taxi.TaxiEnv": ("s", "lastaction", "fickle_step", "taxi_orientation"),
        "blackjack.BlackjackEnv": ("dealer", "player", "dealer_top_card_suit", "dealer_top_card_value_str"),
    },
    WRAPPERS: {
        "common.TimeLimit": ("_elapsed_steps",),
        "common.Autoreset": ("autoreset",),
        "common.OrderEnforcing": ("_has_reset",),
        "common.PassiveEnvChecker": ("checked_reset", "checked_step", "checked_render", "checked_data_reuse"),
        "common.RecordEpisodeStatistics": (
            "episode_count",
            "episode_returns",
            "episode_lengths",
            "return_queue",
            "length_queue",
        ),
        "stateful_observation.DelayObservation": ("observation_queue",),
        "stateful_observation.TimeAwareObservation": ("timesteps",),
        "stateful_observation.FrameStackObservation": ("obs_queue", "padding_value"),
        "stateful_observation.NormalizeObservation": ("obs_rms", "_update_running_mean"),
        "stateful_observation.MaxAndSkipObservation": ("_obs_buffer",),
        "stateful_action.StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
        "stateful_action.RepeatAction": (),
        "stateful_reward.NormalizeReward": ("discounted_reward", "return_rms", "_update_running_mean"),
        "atari_preprocessing.AtariPreprocessing": ("obs_buffer", "lives", "game_over"),
    },
    "remuda.envs": {
        "memory.Recall": ("_cue", "_step"),
        "memory.CartPolePositions": (),
        "mock.MockEnv": ("_step",),
        "families.MiniGridObservation": (),
    },
}
ATTRIBUTES = {f"{room}.{name}": names for room, classes in SAVED.items() for name, names in classes.items()}
STATELESS = tuple(f"{WRAPPERS}.{name}." for name in ("transform_observation", "transform_action", "transform_reward"))
# MuJoCo's arrays that an env may read before the next step computes them anew, by the beginnings of their names
READABLE = ("x", "c", "q", "geom_", "site_", "actuator_", "sensordata", "subtree_", "ten_length", "ten_velocity")
MOMENTS = ("mean", "var", "count")  # of Gymnasium's running statistics


class Adapter(NamedTuple):
    """How the state of one layer is taken and put back."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def get_state(env: Any) -> list[Any]:
    """One entry for each layer, outermost first, and last the random numbers of the env itself."""
    layers = list(_layers(env))
    return [*(_adapter(layer).get(layer) for layer in layers), _get_random(layers[-1])]


def set_state(env: Any, state: list[Any]) -> None:
    *layers, random = state
    found = list(_layers(env))
    for layer, saved in zip(found, layers, strict=True):
        _adapter(layer).set(layer, saved)
    _set_random(found[-1], random)


def why_not(env: Any) -> str | None:
    """What keeps this env from being saved; None if nothing does."""
    try:
        for layer in _layers(env):
            _adapter(layer)
    except NoState as error:
        return str(error)
    return None


def _layers(env: Any) -> Iterator[Any]:
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def _adapter(layer: Any) -> Adapter:
    kind = type(layer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if callable(getattr(kind, "get_state", None)) and callable(getattr(kind, "set_state", None)):
        return Adapter(lambda layer: layer.get_state(), lambda layer, state: layer.set_state(state))
    if name in ATTRIBUTES:
        return _listed(ATTRIBUTES[name])
    if name.startswith(STATELESS):
        return _listed(())
    if name.startswith(MUJOCO) and hasattr(layer, "data"):
        return Adapter(_get_mujoco, _set_mujoco)
    if name.startswith("minatar."):
        return Adapter(_get_minatar, _set_minatar)
    raise NoState(f"{kind.__qualname__} has no get_state() and set_state()")


# --- random numbers -------------------------------------------------------------------------------------------------


def _get_random(env: Any) -> Any:
    generator = getattr(env, "_np_random", None)
    if generator is None:
        return None
    return {"seed": getattr(env, "_np_random_seed", None), "state": generator.bit_generator.state}


def _set_random(env: Any, state: Any) -> None:
    if state is None:
        return
    # in place: an env may have handed its generator to others
    if getattr(env, "_np_random", None) is None:
        env._np_random, _ = gymnasium.utils.seeding.np_random(0)
    env._np_random.bit_generator.state = state["state"]
    env._np_random_seed = state["seed"]


# --- kinds of layers ------------------------------------------------------------------------------------------------


def _listed(names: tuple[str, ...]) -> Adapter:
    """Attributes; those that are not there before the first reset are left out."""

    def get(layer: Any) -> Any:
        values = vars(layer)
        return {name: _get_moments(values[name]) for name in names if name in values}

    def put(layer: Any, state: Any) -> None:
        for name, value in state.items():
            if isinstance(value, dict) and value.keys() == set(MOMENTS):
                for part in MOMENTS:
                    setattr(getattr(layer, name), part, value[part])
            else:
                setattr(layer, name, value)

    return Adapter(get, put)


def _get_moments(value: Any) -> Any:
    if type(value).__name__ != "RunningMeanStd":
        return value
    return {part: getattr(value, part) for part in MOMENTS}


def _get_mujoco(env: Any) -> Any:
    """What the physics go on from, and what an env may read of the last step: positions of bodies, forces."""
    mujoco = importlib.import_module("mujoco")
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    physics = np.zeros(mujoco.mj_stateSize(env.model, spec))
    mujoco.mj_getState(env.model, env.data, physics, spec)
    return {"physics": physics, "derived": {name: getattr(env.data, name).copy() for name in _arrays(env.data)}}


def _set_mujoco(env: Any, state: Any) -> None:
    mujoco = importlib.import_module("mujoco")
    for name, array in state["derived"].items():
        getattr(env.data, name)[...] = array
    mujoco.mj_setState(env.model, env.data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)


def _arrays(data: Any) -> list[str]:
    return [name for name in dir(data) if name.startswith(READABLE) and isinstance(getattr(data, name), np.ndarray)]


def _get_minatar(env: Any) -> Any:
    game = env.game
    inner = {name: value for name, value in vars(game.env).items() if name != "random"}
    return {"last_action": game.last_action, "game": inner, "random": game.random.get_state(legacy=False)}


def _set_minatar(env: Any, state: Any) -> None:
    game = env.game
    vars(game.env).update(state["game"])
    game.last_action = state["last_action"]
    game.random = game.env.random = np.random.RandomState()
    game.random.set_state(state["random"])
