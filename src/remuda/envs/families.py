"""Families of env ids that other packages register, and the wrappers that their envs need.

    register("MiniGrid-Empty-5x5-v0")          # imports minigrid; if it is missing, the error says how to install it
    env = adapt(gymnasium.make("MiniGrid-Empty-5x5-v0"))

To support another family, add a line to FAMILIES.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import gymnasium

from remuda.errors import EnvSpecError

logger = logging.getLogger("remuda.envs")

MINIGRID_MAX = 10  # the largest code of an object, color or state in a MiniGrid image
LEGACY_ATARI = re.compile(r"[A-Z]\w*-v[04]")  # matches ids such as Pong-v4; ids of other envs may match, too
OWN = {  # envs of this package, registered on demand
    "Remuda/Mock-v0": "remuda.envs.mock:MockEnv",
    "Remuda/Recall-v0": "remuda.envs.memory_envs:Recall",
    "Remuda/CartPolePositions-v0": "remuda.envs.memory_envs:CartPolePositions",
}


@dataclass(frozen=True)
class Family:
    """Env ids that match `pattern`. `package` registers them, and `pip install remuda[extra]` installs `package`."""

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
    """Register this id if it belongs to Remuda or a known family; raise EnvSpecError if the package is missing."""
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
        with contextlib.suppress(ModuleNotFoundError):  # not an error: the id may belong to another package
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
    """Return whether another process can register this id by calling `register`."""
    family = family_of(name) or (FAMILIES[0] if LEGACY_ATARI.fullmatch(name) else None)
    return name in OWN or (family is not None and str(entry_point).startswith(f"{family.package}."))


def forward_mujoco_warnings() -> None:
    """Log MuJoCo's warnings, each kind once.

    By default MuJoCo prints every warning for every env, and writes MUJOCO_LOG.TXT to the current directory.
    """
    mujoco = importlib.import_module("mujoco")
    if mujoco.get_mju_user_warning() is not None:
        return
    logged = set()

    def log_once(text: str) -> None:
        kind = re.sub(r"[-+\d.]+", "", text)  # remove times and positions, which vary among warnings of a kind
        if kind not in logged:
            logged.add(kind)
            # Warnings about deprecated elements are only debug messages, because the elements are in the model file,
            # which only the author of the env can change.
            logger.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)

    mujoco.set_mju_user_warning(log_once)


def adapt(env: gymnasium.Env) -> gymnasium.Env:
    """Return the env, inside a wrapper if its family needs a wrapper."""
    known = env.spec
    if known is not None and str(known.entry_point).startswith("minigrid."):
        space = env.observation_space
        if isinstance(space, gymnasium.spaces.Dict) and {"image", "mission"} <= set(space.spaces):
            return MiniGridObservation(env)
    return env


class MiniGridObservation(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """Removes the mission text from MiniGrid's observation, and narrows the image's bounds to the codes in use."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        entries = dict(env.observation_space.spaces)
        del entries["mission"]
        image = entries["image"]
        entries["image"] = gymnasium.spaces.Box(0, MINIGRID_MAX, image.shape, image.dtype)
        self.observation_space = gymnasium.spaces.Dict(entries)

    def observation(self, observation: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in observation.items() if name != "mission"}
