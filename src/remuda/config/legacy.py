"""Convert settings of earlier versions to their present form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

Groups = Mapping[str, Mapping[str, Any]]


def without_variant(values: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Return `values` and `groups` with the option `algo.variant` replaced by the setting `algo`.

    Every config.yaml of version 0.1 contains `algo.variant`. If its value is not none, it is the import path of an
    algorithm's class.
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
