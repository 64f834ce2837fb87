"""Convert settings of earlier versions to their present form."""

from __future__ import annotations

import logging
from collections.abc import Mapping

Groups = Mapping[str, Mapping[str, object]]


def upgraded(values: Mapping[str, object], groups: Groups) -> tuple[dict[str, object], Groups]:
    """Return settings `values` and options `groups` with two options of version 0.1 replaced by settings.

    `algo.variant`, the import path of an algorithm's class, is now the setting `algo`. `scheme.device` is now the
    setting `device`. Every config.yaml of version 0.1 contains both options. A warning is logged only for values that
    change the run.
    """
    values = dict(values)
    groups, variant = without_option(groups, "algo", "variant")
    if is_set(variant):
        values["algo"] = str(variant)
        notify("algo.variant=%s is now the algorithm itself: remuda train %s, without the option.", variant, variant)
    groups, device = without_option(groups, "scheme", "device")
    if is_set(device):
        values.setdefault("device", str(device))
        if str(device) != "cpu":
            notify("scheme.device=%s is now --device %s.", device, device)
    return values, groups


def without_option(groups: Groups, group: str, name: str) -> tuple[Groups, object]:
    """Return `groups` without the option `group.name`, and the value of this option, or None if it is not there."""
    options = groups.get(group, {})
    if not isinstance(options, Mapping) or name not in options:
        return groups, None
    return {**groups, group: {key: value for key, value in options.items() if key != name}}, options[name]


def is_set(value: object) -> bool:
    return value is not None and str(value).lower() != "none"


def notify(text: str, *values: object) -> None:
    logging.getLogger("remuda").warning(text, *values)
