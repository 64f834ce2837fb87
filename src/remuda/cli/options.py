"""Command-line options out of config dataclasses: every field becomes `--group.field`, with its sentence as help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from remuda.config.fields import annotation_of
from remuda.errors import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """Argparse whose complaints are one sentence.

    Why not tyro: its import takes 0.16 s, all of `remuda train ppo --help` 0.13 s; its errors are boxes of lines.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self.elsewhere: dict[str, str] = {}  # options of others: who has them

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # of --help, so that `main` hears of a reader that went away
        super().exit(status, message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        found, unknown = self.parse_known_args(argv)
        if unknown:
            known = [text for action in self._actions for text in action.option_strings]
            first = unknown[0].partition("=")[0]
            if first in self.elsewhere:
                raise ConfigError(f"{first} is an option of {self.elsewhere[first]}: leave it out, or train that.")
            if first.startswith("-"):
                raise ConfigError(f"{first} is not an option of {self.prog}: {nearest(first, known)}")
            raise ConfigError(f"{first!r} is one argument too many for {self.prog}: see {self.prog} --help.")
        return found


def add_group(parser: Parser, group: str, *kinds: type[Any]) -> None:
    """One option per field of the dataclass; of several, one per field of any, with the defaults of each."""
    title = (kinds[0].__doc__ or "").strip().splitlines()[0].rstrip(".")
    section = parser.add_argument_group(f"{group}: {title}")
    for item in {item.name: item for kind in kinds for item in fields(kind)}.values():
        defaults = [found.default for kind in kinds for found in fields(kind) if found.name == item.name]
        shown = dict.fromkeys(_shown({} if default is MISSING else default) for default in defaults)
        text = item.metadata["help"].replace("%", "%%")
        if "choices" in item.metadata:
            text += f"; one of {', '.join(item.metadata['choices'])}"
        is_bool = annotation_of(item) == "bool"
        section.add_argument(
            f"--{group}.{item.name}",
            metavar=item.name.upper(),
            nargs="?" if is_bool else None,
            const="true" if is_bool else None,
            help=f"{text} ({' or '.join(shown)})",
        )


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def given(found: argparse.Namespace, groups: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the user set, by group."""
    out: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for name, value in vars(found).items():
        group, dot, option = name.partition(".")
        if dot and value is not None:
            out[group][option] = value
    return out
