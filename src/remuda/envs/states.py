"""Save and restore the state of an env without pickle, so that a run continues exactly where it stopped.

    state = get_state(env)                    # plain values and arrays; NoState names what cannot be saved
    set_state(another, state)                 # `another` was made like `env`; both now give bit-equal results

An env is saved layer by layer, from its outermost wrapper to the env itself. This module knows Gymnasium's wrappers,
classic control and toy text, MuJoCo, Atari, MinAtar, and the envs of this package. Any other class needs the methods
get_state() and set_state(), which need not save Gymnasium's random generator `np_random`:

    class MyEnv(gymnasium.Env):
        def get_state(self):                  # plain values and arrays: everything that differs from a newly made env
            return {"position": self.position, "left": self.left}

        def set_state(self, state):
            self.position, self.left = state["position"], state["left"]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium
import numpy as np

from remuda.errors import NoState

# Layer: an env or one of its wrappers, of any class. State: plain values and arrays that data/packing.py can pack.
Layer: TypeAlias = Any
State: TypeAlias = Any

WRAPPERS = "gymnasium.wrappers"
MUJOCO = "gymnasium.envs.mujoco."
# Attributes that change when an env is reset and stepped, by module and class. The entry of a class is not used for
# derived classes, because these may have more such attributes.
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
        "memory_envs.Recall": ("_cue", "_step"),
        "memory_envs.CartPolePositions": (),
        "mock.MockEnv": ("_step",),
        "families.MiniGridObservation": (),
    },
}
ATTRIBUTES = {f"{package}.{name}": names for package, classes in SAVED.items() for name, names in classes.items()}
STATELESS = tuple(f"{WRAPPERS}.{name}." for name in ("transform_observation", "transform_action", "transform_reward"))
# Name prefixes of the MuJoCo arrays that an env may read before the next step recomputes them.
READABLE = ("x", "c", "q", "geom_", "site_", "actuator_", "sensordata", "subtree_", "ten_length", "ten_velocity")
MOMENTS = ("mean", "var", "count")  # attributes of Gymnasium's RunningMeanStd


@runtime_checkable
class Saveable(Protocol):
    """An env or wrapper whose own methods save and restore its state."""

    def get_state(self) -> State:
        """Return plain values and arrays: everything in which this object differs from a newly made one."""

    def set_state(self, state: State) -> None:
        """Restore a state that `get_state` returned, so that the next step continues from it."""


class Adapter(NamedTuple):
    """Functions that save and restore the state of one layer."""

    get: Callable[[Layer], State]
    set: Callable[[Layer, State], None]


def get_state(env: gymnasium.Env) -> list[State]:
    """Return the states of all layers, the outermost first, followed by the state of the env's random generator."""
    layers = list(_layers(env))
    return [*(_adapter(layer).get(layer) for layer in layers), _get_random(layers[-1])]


def set_state(env: gymnasium.Env, state: list[State]) -> None:
    """Restore a state that `get_state` returned for an env with the same layers."""
    *layers, random = state
    found = list(_layers(env))
    for layer, saved in zip(found, layers, strict=True):
        _adapter(layer).set(layer, saved)
    _set_random(found[-1], random)


def why_not(env: gymnasium.Env) -> str | None:
    """Return why the state of this env cannot be saved, or None if it can be saved."""
    try:
        for layer in _layers(env):
            _adapter(layer)
    except NoState as error:
        return str(error)
    return None


def _layers(env: gymnasium.Env) -> Iterator[Layer]:
    """Yield the env and everything that it wraps, the outermost layer first."""
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def _adapter(layer: Layer) -> Adapter:
    """Return functions that save and restore this layer; raise NoState if its class is not known."""
    kind = type(layer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, Saveable):  # not isinstance, because wrapper objects forward attributes to their env
        return Adapter(lambda layer: layer.get_state(), lambda layer, state: layer.set_state(state))
    if name in ATTRIBUTES:
        return _attribute_adapter(ATTRIBUTES[name])
    if name.startswith(STATELESS):
        return _attribute_adapter(())
    if name.startswith(MUJOCO) and hasattr(layer, "data"):
        return Adapter(_get_mujoco, _set_mujoco)
    if name.startswith("minatar."):
        return Adapter(_get_minatar, _set_minatar)
    raise NoState(f"{kind.__qualname__} has no get_state() and set_state()")


# --- random numbers -------------------------------------------------------------------------------------------------


def _get_random(env: Layer) -> State:
    generator = env._np_random  # None until the first reset with a seed; the default is in gymnasium.Env
    if generator is None:
        return None
    return {"seed": env._np_random_seed, "state": generator.bit_generator.state}


def _set_random(env: Layer, state: State) -> None:
    if state is None:
        return
    # The generator is modified in place, because the env may have passed it to other objects.
    if env._np_random is None:
        env._np_random, _ = gymnasium.utils.seeding.np_random(0)
    env._np_random.bit_generator.state = state["state"]
    env._np_random_seed = state["seed"]


# --- kinds of layers ------------------------------------------------------------------------------------------------


def _attribute_adapter(names: tuple[str, ...]) -> Adapter:
    """Return an adapter that saves the attributes `names`, except those that a layer does not have yet."""

    def get(layer: Layer) -> State:
        values = vars(layer)
        return {name: _get_moments(values[name]) for name in names if name in values}

    def put(layer: Layer, state: State) -> None:
        for name, value in state.items():
            if isinstance(value, dict) and value.keys() == set(MOMENTS):
                for part in MOMENTS:
                    setattr(getattr(layer, name), part, value[part])
            else:
                setattr(layer, name, value)

    return Adapter(get, put)


def _get_moments(value: object) -> State:
    """Return a RunningMeanStd of Gymnasium as a dict, and any other value unchanged."""
    if type(value).__name__ != "RunningMeanStd":
        return value
    return {part: getattr(value, part) for part in MOMENTS}


def _get_mujoco(env: Layer) -> State:
    """Return the simulation's state, and the results of the last step that an env may read (positions, forces)."""
    mujoco = importlib.import_module("mujoco")
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    physics = np.zeros(mujoco.mj_stateSize(env.model, spec))
    mujoco.mj_getState(env.model, env.data, physics, spec)
    return {"physics": physics, "derived": {name: getattr(env.data, name).copy() for name in _arrays(env.data)}}


def _set_mujoco(env: Layer, state: State) -> None:
    mujoco = importlib.import_module("mujoco")
    for name, array in state["derived"].items():
        getattr(env.data, name)[...] = array
    mujoco.mj_setState(env.model, env.data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)


def _arrays(data: object) -> list[str]:
    return [name for name in dir(data) if name.startswith(READABLE) and isinstance(getattr(data, name), np.ndarray)]


def _get_minatar(env: Layer) -> State:
    game = env.game
    inner = {name: value for name, value in vars(game.env).items() if name != "random"}
    return {"last_action": game.last_action, "game": inner, "random": game.random.get_state(legacy=False)}


def _set_minatar(env: Layer, state: State) -> None:
    game = env.game
    vars(game.env).update(state["game"])
    game.last_action = state["last_action"]
    game.random = game.env.random = np.random.RandomState()
    game.random.set_state(state["random"])
