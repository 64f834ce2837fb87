"""Families of ids that a package of their own registers, and what their envs need to be of use here.

    register("MiniGrid-Empty-5x5-v0")          # imports minigrid, or says which extra installs it
    env = adapt(gymnasium.make("MiniGrid-Empty-5x5-v0"))

A family is one line in FAMILIES.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from dataclasses import dataclass
from typing import Any

import gymnasium

from remuda.errors import EnvSpecError

logger = logging.getLogger("remuda.envs")

MINIGRID_HIGHEST = 10  # the largest number of an object, colour or state that a MiniGrid image holds
LEGACY_ATARI = re.compile(r"[A-Z]\w*-v[04]")  # Pong-v4, without a namespace; also what other ids look like
OWN = {  # what this package itself registers, when it is asked for
    "Remuda/Mock-v0": "remuda.envs.mock:MockEnv",
    "Remuda/Recall-v0": "remuda.envs.memory_envs:Recall",
    "Remuda/CartPolePositions-v0": "remuda.envs.memory_envs:CartPolePositions",
}


@dataclass(frozen=True)
class Family:
    """Ids that match `pattern` come from `package`, which our extra of that name installs."""

    pattern: re.Pattern[str]
    package: str
    extra: str


FAMILIES = (
    Family(re.compile(r"ALE/|\w+NoFrameskip-"), "ale_py", "atari"),
    Family(re.compile(r"MinAtar/"), "minatar", "minatar"),
    Family(re.compile(r"MiniGrid-|BabyAI-"), "minigrid", "minigrid"),
)


def family_of(name: str) -> Family | None:
    return next((family for family in FAMILIES if family.pattern.match(name)), None)


def register(name: str) -> None:
    """Let the package that knows this id register it; says which extra to install if it is not there."""
    if name in gymnasium.registry:
        return
    if name in OWN:
        register_own()
    elif family := family_of(name):
        try:
            import_family(family.package)
        except ModuleNotFoundError:
            raise EnvSpecError(
                f"{name} needs the package {family.package}: pip install 'remuda[{family.extra}]'."
            ) from None
    elif LEGACY_ATARI.fullmatch(name):
        with contextlib.suppress(ModuleNotFoundError):  # the id may be a misspelt one of Gymnasium's own
            import_family("ale_py")


def import_family(package: str) -> None:
    importlib.import_module(package)  # ale_py and minigrid register their envs when they are imported
    if package == "minatar" and not any(known.startswith("MinAtar/") for known in gymnasium.registry):
        importlib.import_module("minatar.gym").register_envs()


def register_own() -> None:
    for name, entry_point in OWN.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point)


def is_registered_by_import(name: str, entry_point: object) -> bool:
    """Whether another process registers this id by itself when `register` is called there."""
    family = family_of(name) or (FAMILIES[0] if LEGACY_ATARI.fullmatch(name) else None)
    return name in OWN or (family is not None and str(entry_point).startswith(f"{family.package}."))


def forward_mujoco_warnings() -> None:
    """Let MuJoCo warn in the log, of each thing once.

    By itself it prints every warning for every env, and leaves MUJOCO_LOG.TXT wherever the user stands.
    """
    mujoco = importlib.import_module("mujoco")
    if mujoco.get_mju_user_warning() is not None:
        return
    told = set()

    def tell(text: str) -> None:
        what = re.sub(r"[-+\d.]+", "", text)  # times and places differ
        if what not in told:
            told.add(what)
            # what is out of date is in the model's file: the maker of the env can change it, who trains cannot
            logger.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)

    mujoco.set_mju_user_warning(tell)


def adapt(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """What was made, with what the family needs around it."""
    known = env.spec
    if known is not None and str(known.entry_point).startswith("minigrid."):
        space = env.observation_space
        if isinstance(space, gymnasium.spaces.Dict) and {"image", "mission"} <= set(space.spaces):
            return MiniGridObservation(env)
    return env


class MiniGridObservation(gymnasium.ObservationWrapper[Any, Any, Any]):  # type: ignore[misc]
    """MiniGrid's observation without the mission's text, its image with the bounds that its numbers really have."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        entries = dict(env.observation_space.spaces)
        del entries["mission"]
        image = entries["image"]
        entries["image"] = gymnasium.spaces.Box(0, MINIGRID_HIGHEST, image.shape, image.dtype)
        self.observation_space = gymnasium.spaces.Dict(entries)

    def observation(self, observation: Any) -> Any:
        return {name: value for name, value in observation.items() if name != "mission"}
