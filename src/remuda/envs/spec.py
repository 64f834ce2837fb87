"""Which env to run: a Gymnasium id, an import path or a callable, resolved once and built in any process.

    spec = resolve("CartPole-v1")                                  # or "package:Id-v0", or "package.module:factory"
    spec = resolve(functools.partial(make_env, size=8))            # or a function, or a class
    spec = resolve("ALE/Pong-v5", atari=AtariOptions(sticky=0.0))  # an Atari game with the usual preprocessing
    env = spec.build()                                             # a gymnasium.Env
    same = EnvSpec.from_json(spec.to_json())                       # in a worker process

Every error is an EnvSpecError of one sentence: the value that was given, the rule that it breaks, the remedy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import gymnasium

from remuda.envs.atari import AtariEnv
from remuda.envs.atari_options import ENTRY_POINT, AtariGame, AtariOptions, resolve_game
from remuda.envs.families import adapt, forward_mujoco_warnings, is_registered_by_import, register
from remuda.envs.import_paths import as_json, describe, find, load_module, missing, sentence
from remuda.errors import EnvSpecError, nearest

Kwargs: TypeAlias = Mapping[str, Any]
Factory: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class EnvSpec:
    """How to build one env: by calling `make` with `kwargs`, or, if `make` is None, by its Gymnasium id `name`."""

    name: str
    kwargs: Kwargs = field(default_factory=dict)
    make: Factory | None = None
    max_steps: int | None = None  # episodes are truncated after this many steps, in addition to any limit of the env
    atari: AtariOptions | None = None  # None if the env is not an Atari game, or is ale-py's own Gymnasium env

    @property
    def label(self) -> str:
        return self.name

    @property
    def id(self) -> str:
        """The Gymnasium id without its `module:` prefix."""
        return self.name.partition(":")[2] or self.name

    @property
    def is_vector_only(self) -> bool:
        """Whether the id was registered only as a vector env, so that a native backend is needed."""
        return self.make is None and gymnasium.spec(self.id).entry_point is None

    @property
    def game(self) -> AtariGame | None:
        """The Atari game with all its settings; None for other envs."""
        if self.atari is None:
            return None
        return resolve_game(self.label, gymnasium.spec(self.id).kwargs, self.kwargs, self.atari)

    def build(self, **extra: object) -> gymnasium.Env:
        """Build a new env; `extra` are additional keyword arguments, such as render_mode."""
        kwargs = {**self.kwargs, **extra}
        env = self._call(kwargs) if self.make is not None else self._make(kwargs)
        if not isinstance(env, gymnasium.Env):
            kind = f"{type(env).__module__}.{type(env).__qualname__}"
            raise EnvSpecError(f"{self.label} made a {kind}, not a gymnasium.Env: return one, or wrap it in one.")
        return env if self.max_steps is None else gymnasium.wrappers.TimeLimit(env, self.max_steps)

    def _call(self, kwargs: Kwargs) -> object:
        """Call the factory; turn any exception into an EnvSpecError."""
        assert self.make is not None
        try:
            inspect.signature(self.make).bind(**kwargs)
        except TypeError as error:
            raise EnvSpecError(
                f"{self.label} cannot be called with ({_listed(kwargs)}), {error}: change envs.kwargs or the factory."
            ) from None
        except ValueError:
            pass  # built-in callables have no signature; the call below shows whether the arguments fit
        try:
            return self.make(**kwargs)
        except EnvSpecError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvSpecError(
                f"{self.label} raised {sentence(error)} when called with ({_listed(kwargs)}): "
                "fix it, or change envs.kwargs."
            ) from error

    def _make(self, kwargs: Kwargs) -> object:
        """Make the env of this Gymnasium id: an AtariEnv if `game` is not None, otherwise the registered env."""
        known = copy.deepcopy(gymnasium.spec(self.id))
        known.order_enforce = False  # omits the wrapper OrderEnforcing, which takes 0.3 us per step
        if known.entry_point is None:
            raise EnvSpecError(
                f"{self.label} was registered as a vector env only, and a single env is needed here: "
                "use envs.backend=gymnasium, without evaluation and videos."
            )
        try:
            if (game := self.game) is not None:
                env = AtariEnv(game, kwargs.get("render_mode"))
                limit = known.max_episode_steps
                return env if limit is None else gymnasium.wrappers.TimeLimit(env, limit)
            if _is_mujoco(known):
                forward_mujoco_warnings()
            return adapt(gymnasium.make(known, disable_env_checker=True, **kwargs))
        except EnvSpecError:
            raise
        except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
            if _is_mujoco(known):
                remedy = "pip install 'remuda[mujoco]' and use the newest version of the id."
            elif ".box2d" in str(known.entry_point):
                remedy = "pip install 'remuda[box2d]'."
            else:
                remedy = "install the package that it names."
            raise EnvSpecError(f"{self.label} needs a package ({sentence(error)}): {remedy}") from error
        except (Exception, SystemExit) as error:
            raise EnvSpecError(
                f"{self.label} could not be made with kwargs ({_listed(kwargs)}), {sentence(error)}: "
                "change envs.kwargs or fix the env."
            ) from error

    def to_json(self) -> dict[str, object]:
        """Return a JSON-compatible dict from which `from_json` makes the same spec in another process."""
        if self.make is None:
            return {
                "name": self.name,
                "kwargs": as_json(self.kwargs, self.label),
                "registered": _registration(self.id),
                "max_steps": self.max_steps,
                "atari": None if self.atari is None else asdict(self.atari),
            }
        make: Any = self.make
        kwargs = dict(self.kwargs)
        if isinstance(make, functools.partial):
            if make.args:
                raise EnvSpecError(
                    f"{self.label} is a partial with positional arguments, which cannot be sent to worker processes: "
                    "give them by keyword."
                )
            make, kwargs = make.func, {**make.keywords, **kwargs}
        found = {"factory": describe(make), "max_steps": self.max_steps}
        return {"name": self.name, "kwargs": as_json(kwargs, self.label), **found}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EnvSpec:
        """Return the spec that `to_json` described; register ids that the parent process had registered."""
        name, kwargs = values["name"], values["kwargs"]
        if "factory" in values:
            return cls(name, kwargs, find(values["factory"]), values["max_steps"])
        registered = values["registered"]
        if registered is not None and registered["id"] not in gymnasium.registry:
            registered = dict(registered)
            if isinstance(registered["entry_point"], dict):
                registered["entry_point"] = find(registered["entry_point"])
            gymnasium.register(**registered)
        atari = None if values["atari"] is None else AtariOptions(**values["atari"])
        return replace(resolve(name, kwargs, atari), max_steps=values["max_steps"])


def resolve(env: str | Factory | EnvSpec, kwargs: Kwargs | None = None, atari: AtariOptions | None = None) -> EnvSpec:
    """Return the spec of `env`, an id, import path or callable; import what `env` names, but build no env.

    For an id of ale-py, the spec builds an AtariEnv with the options `atari`, unless the id or `kwargs` need ale-py's
    own Gymnasium env (see GYMNASIUM_KWARGS in atari_options.py). An Atari option that is None is taken from `kwargs`,
    or else from the id.
    """
    return _with_atari(_find(env, dict(kwargs or {})), atari)


def is_atari(name: str) -> bool:
    """Return whether `name` is an id of ale-py with frames as observations, such as ALE/Pong-v5 or Pong-v4."""
    name = name.rpartition(":")[2]
    register(name)
    known = gymnasium.registry.get(name)
    return known is not None and known.entry_point == ENTRY_POINT and not known.kwargs.get("obs_type")


def _is_mujoco(known: gymnasium.envs.registration.EnvSpec) -> bool:
    return ".mujoco" in str(known.entry_point)


def _with_atari(spec: EnvSpec, options: AtariOptions | None) -> EnvSpec:
    known = None if spec.make is not None else gymnasium.spec(spec.id)
    if known is not None and known.entry_point == ENTRY_POINT:
        wanted = options or spec.atari or AtariOptions()
        if resolve_game(spec.label, known.kwargs, spec.kwargs, wanted) is not None:
            return replace(spec, atari=wanted)
    if options is not None and options.changed():
        raise EnvSpecError(
            f"{options.changed()}: {spec.label} is not an Atari game that is shown as frames, "
            "so leave the Atari options as they are."
        )
    return replace(spec, atari=None)


def _find(env: str | Factory | EnvSpec, kwargs: dict[str, object]) -> EnvSpec:
    if isinstance(env, EnvSpec):
        return replace(env, kwargs={**env.kwargs, **kwargs})
    if callable(env):
        return EnvSpec(_callable_name(env), kwargs, env)
    if not isinstance(env, str) or not env.strip():
        raise EnvSpecError(f"env={env!r} is not an env: give a Gymnasium id, package.module:factory or a callable.")
    module_name, colon, attribute = env.partition(":")
    if colon:
        module = load_module(module_name)
        factory = getattr(module, attribute, None)
        if callable(factory):
            return EnvSpec(env, kwargs, factory)
        if attribute not in gymnasium.registry and "-v" not in attribute:
            raise EnvSpecError(f"env={env!r}: {missing(module, attribute)}")
    _require_registered(env, attribute if colon else env)
    return EnvSpec(env, kwargs)


def _callable_name(env: Factory) -> str:
    if isinstance(env, functools.partial):
        return _callable_name(env.func)
    return str(getattr(env, "__qualname__", type(env).__qualname__))


def _listed(kwargs: Kwargs) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items())


def _require_registered(given: str, name: str) -> None:
    register(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about an outdated version is repeated when an env is made
            gymnasium.spec(name)
    except gymnasium.error.DeprecatedEnv as error:
        raise EnvSpecError(f"{given} is a retired version ({sentence(error)}): use the newest one.") from None
    except gymnasium.error.Error:
        similar = nearest(name, gymnasium.registry)
        raise EnvSpecError(
            f"{given} is not a registered Gymnasium id nor package.module:factory: {similar}"
        ) from None


def _registration(name: str) -> dict[str, object] | None:
    """Return the arguments of `gymnasium.register` for a user's id, or None if workers can register it themselves."""
    known = gymnasium.registry.get(name)
    if known is None or str(known.entry_point or known.vector_entry_point).startswith("gymnasium."):
        return None
    if is_registered_by_import(name, known.entry_point):
        return None
    if known.additional_wrappers:
        raise EnvSpecError(
            f"{name} was registered with additional_wrappers, which cannot be sent to worker processes: "
            "apply them in a factory function and use that as env."
        )
    entry = known.entry_point
    return {
        "id": known.id,
        "entry_point": entry if isinstance(entry, str) else describe(entry),
        "reward_threshold": known.reward_threshold,
        "nondeterministic": known.nondeterministic,
        "max_episode_steps": known.max_episode_steps,
        "order_enforce": known.order_enforce,
        "kwargs": as_json(known.kwargs, name),
    }
