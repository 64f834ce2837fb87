"""The list of registered environments, for `remuda envs`."""

from __future__ import annotations

import contextlib

import gymnasium

from remuda.envs.families import FAMILIES, import_family, register_own


def list_envs(filter: str = "") -> list[tuple[str, str, str]]:
    """Return (id, step limit, module) of the newest version of every env whose id contains `filter`.

    Case is ignored. The limit is "-" if there is none. The installed packages of `FAMILIES` are imported first, so
    that their envs are listed.
    """
    register_own()
    for family in FAMILIES:
        with contextlib.suppress(ImportError):
            import_family(family.package)
    newest: dict[str, gymnasium.envs.registration.EnvSpec] = {}
    for spec in gymnasium.registry.values():
        key = f"{spec.namespace}/{spec.name}"
        if key not in newest or (spec.version or 0) > (newest[key].version or 0):
            newest[key] = spec
    found = [spec for spec in newest.values() if filter.lower() in spec.id.lower()]
    return [
        (spec.id, str(spec.max_episode_steps or "-"), _module(spec.entry_point or spec.vector_entry_point))
        for spec in sorted(found, key=lambda spec: str(spec.id).lower())
    ]


def _module(entry_point: object) -> str:
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    return str(getattr(entry_point, "__module__", "-"))
