"""Converts settings of earlier versions that have a different form now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

Groups = Mapping[str, Mapping[str, Any]]


def without_variant(values: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Return settings and groups of options in which the algorithm is named by the import path of its class.

    In version 0.1 the class was the value of the option `algo.variant`, which every config.yaml of 0.1 contains.
    """
    options = groups.get("algo", {})
    if not isinstance(options, Mapping) or "variant" not in options:
        return dict(values), groups
    path = options["variant"]
    groups = {**groups, "algo": {name: value for name, value in options.items() if name != "variant"}}
    if path is None or str(path).lower() == "none":
        return dict(values), groups
    logging.getLogger("remuda").warning(
        "algo.variant=%s is now the algorithm itself: remuda train %s, without the option.", path, path
    )
    return {**values, "algo": str(path)}, groups
