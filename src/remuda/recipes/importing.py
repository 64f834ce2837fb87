"""Things of the user's own, named as `package.module:Name`."""

from __future__ import annotations

import importlib
from typing import Any

from remuda.errors import ConfigError, nearest


def import_object(path: str, option: str) -> Any:
    """What `package.module:Name` names."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{option}={path!r} is not known: use mlp, or your own as package.module:Name.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{option}={path!r}: module {module_name} cannot be imported ({error}): "
            "run from its directory, or install it."
        ) from None
    try:
        return getattr(module, name)
    except AttributeError:
        names = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(f"{option}={path!r}: {module_name} has no {name}: {nearest(name, names)}") from None
