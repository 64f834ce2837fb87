"""Things of the user's own, named as `package.module:Name`."""

from __future__ import annotations

from typing import Any

from remuda.envs.paths import load_module
from remuda.errors import ConfigError, EnvSpecError, nearest


def import_object(path: str, option: str) -> Any:
    """What `package.module:Name` names."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{option}={path!r} is not known: use mlp, or your own as package.module:Name.")
    try:
        module = load_module(module_name)
    except EnvSpecError as error:
        raise ConfigError(f"{option}={path!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        names = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(f"{option}={path!r}: {module_name} has no {name}: {nearest(name, names)}") from None
