"""Options as fields of dataclasses: how they are declared, parsed and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, Literal

from remuda.errors import ConfigError, nearest
from remuda.learning.schedules import largest_value, parse_schedule


def option(default: object, help: str, **checks: object) -> Any:
    """Declare a field with its default, its help text and its rules.

    Rules are `low` and `high` (inclusive), `above` (exclusive), `choices`, `schedule` (True if the value may be a
    schedule) and `used_by` (features that a run must have to use the option, see used_options.py).
    """
    metadata = {"help": help, **checks}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """Base class of options dataclasses. It checks the rules of every field when an instance is made."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            check_value(f"{getattr(self, '_group', '')}{item.name}", getattr(self, item.name), item.metadata)


# Limits of numeric options. Larger numbers could overflow int64 or float32, and smaller floats could become 0.
LARGEST_INT, LARGEST_FLOAT, SMALLEST_FLOAT = 10**15, 1e30, 1e-30


def check_value(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    """Raise ConfigError if `value` breaks one of its field's `rules`, or a limit that all numeric options have."""
    if "choices" in rules and value is not None and value not in rules["choices"]:
        choices = ", ".join(map(str, rules["choices"]))
        raise ConfigError(f"{name}={value!r} is not one of {choices}: choose one of these.")
    if rules.get("schedule") and value is not None:
        parse_schedule(value, name)
        if largest_value(value) > (high := rules.get("high", LARGEST_FLOAT)):
            raise ConfigError(f"{name}={value} is too large: it must be at most {high} throughout the run.")
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{name}={number} is not finite: give a finite number.")
        if "low" in rules and number < rules["low"]:
            raise ConfigError(f"{name}={number} is too small: it must be at least {rules['low']}.")
        if "above" in rules and number <= rules["above"]:
            raise ConfigError(f"{name}={number} is too small: it must be above {rules['above']}.")
        high = rules.get("high", LARGEST_INT if isinstance(number, int) else LARGEST_FLOAT)
        if number > high:
            raise ConfigError(f"{name}={number} is too large: it must be at most {high}.")
        if isinstance(number, float) and number < -LARGEST_FLOAT:
            raise ConfigError(f"{name}={number} is too small: it must be at least {-LARGEST_FLOAT}.")
        if isinstance(number, float) and 0 < abs(number) < SMALLEST_FLOAT:
            raise ConfigError(f"{name}={number} is too close to 0: use 0, or at least {SMALLEST_FLOAT}.")


def fill(options: Any, values: Mapping[str, object], group: str) -> Any:
    """Return a copy of an options dataclass with `values`; raise ConfigError for unknown names or wrong types."""
    known = {item.name: item for item in fields(options)}
    changed: dict[str, object] = {name: getattr(options, name) for name in known}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{group}.{name} is not an option: {nearest(str(name), known)}")
        changed[name] = coerce(value, annotation_of(known[name]), f"{group}.{name}")
    return type(options)(**changed)


def annotation_of(item: Field[object]) -> str:
    """Return the type of a dataclass field as text, whether or not its module postpones annotations."""
    return item.type.__name__ if isinstance(item.type, type) else str(item.type)


Auto = Literal["auto"]  # an option with the value "auto" is determined by the run itself

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def coerce(value: object, annotation: str, name: str) -> Any:
    """Convert a value from the command line, YAML or Python to the type in `annotation`, the annotation of its field.

    Raise ConfigError, with `name` as the name of the option, if the value cannot be converted.
    """
    optional = annotation.endswith("| None")
    kind = annotation.removesuffix("| None").strip()
    if optional and (value is None or str(value).lower() in ("none", "null")):
        return None
    try:
        return _as(kind, value)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        expected = KINDS.get(kind, kind) + (" or none" if optional else "")
        raise ConfigError(f"{name}={value!r} is not {expected}: give {EXAMPLES.get(kind, 'one')}.") from None


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "float | Auto": "a number or auto",
    "bool": "true or false",
    "str": "text",
    "tuple[int, ...]": "a list of whole numbers",
    "dict[str, Any]": "a JSON object",
}
EXAMPLES = {
    "int": "for example 8",
    "float": "for example 0.5",
    "float | Auto": "for example 100, or auto",
    "bool": "true or false",
    "tuple[int, ...]": "for example 64,64",
    "dict[str, Any]": """for example '{"gravity": 9.8}'""",
}


def _as(kind: str, value: Any) -> Any:
    if kind == "bool":
        return value if isinstance(value, bool) else WORDS[str(value).lower()]
    if isinstance(value, bool):
        raise TypeError(value)
    if kind == "int":
        text = str(value).replace("_", "")
        if text.lstrip("+-").isdigit():
            return int(text)
        if not float(text).is_integer():  # "1e6" is accepted as a whole number
            raise ValueError(value)
        return int(float(text))
    if kind == "float" or (kind == "float | Auto" and str(value).lower() != "auto"):
        return float(value)
    if kind == "float | Auto":
        return "auto"
    if kind == "tuple[int, ...]":
        parts = value.replace(" ", "").strip("[]()").split(",") if isinstance(value, str) else value
        return tuple(_as("int", part) for part in parts if part != "")
    if kind == "dict[str, Any]":
        return _json_object(value)
    if value is None:
        raise TypeError(value)
    return str(value)


def _json_object(value: object) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise TypeError(value)
    return dict(found)


MOST_SEEDS = 1_000_000


def parse_seeds(text: str, name: str) -> list[int]:
    """Parse numbers and ranges: "0-3,7" becomes [0, 1, 2, 3, 7]."""
    seeds: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise ConfigError(f"{name}={text!r} is not a list of seeds: write numbers and ranges, as 0-199 or 3,5,8.")
        if int(last or first) - int(first) + len(seeds) >= MOST_SEEDS:
            raise ConfigError(f"{name}={text!r} has more than {MOST_SEEDS:,} seeds: leave it out instead.")
        seeds += range(int(first), int(last or first) + 1)
    return seeds
