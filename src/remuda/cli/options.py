"""Command-line options made from the option dataclasses: each field becomes `--group.field` with its help text."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple, NoReturn

from remuda.config.fields import annotation_of
from remuda.errors import ConfigError, nearest

# Placeholders for values in help texts, by the declared type of the field.
PLACEHOLDERS = {
    "int": "N",
    "float": "X",
    "float | Auto": "X",
    "bool": "true|false",
    "tuple[int, ...]": "N,N",
    "dict[str, Any]": "JSON",
}
# Without this pattern, argparse mistakes -1e3 for the name of an option.
NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)
LONGEST_PLACEHOLDER = 24  # number of characters; a longer list of choices appears in the help text instead


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Argparse's formatter with a wider column for option names, because most names contain their group."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=30, **settings)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap a help text without breaking it at the hyphens of names such as impala-fixup."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Section(NamedTuple):
    """A section of the help, with the options of one group."""

    title: str
    arguments: argparse._ArgumentGroup

    @property
    def actions(self) -> list[argparse.Action]:
        return [action for action in self.arguments._group_actions if action.help != argparse.SUPPRESS]


class Parser(argparse.ArgumentParser):
    """An argument parser that reports every error as a ConfigError with one sentence.

    It is based on argparse rather than tyro, because importing tyro takes 0.16 s, more than the 0.13 s of the whole
    `remuda train ppo --help`, and because tyro prints errors as boxes of several lines.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", Formatter)
        super().__init__(allow_abbrev=False, **settings)
        self._negative_number_matcher = NEGATIVE_NUMBER
        self.elsewhere: dict[str, str] = {}  # such as {"--algo.tau": "sac, not of ppo"}, for errors
        self.sections: dict[str, Section] = {}  # the section of each group of options

    def add_section(self, group: str, title: str) -> argparse._ArgumentGroup:
        """Add a section for a group of options to the help; return its argparse group."""
        arguments = self.add_argument_group(f"{group} ({title})")
        self.sections[group] = Section(title, arguments)
        return arguments

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # flush here, where `main` can still handle the BrokenPipeError of `--help | head`
        super().exit(status, message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`; raise ConfigError for an unknown option, with the most similar options as a suggestion."""
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


def complete_with(action: argparse.Action, values: Iterable[str] | Callable[[], Iterable[str]]) -> None:
    """Let shell completion offer `values` for an argument, without restricting what the parser accepts.

    If `values` is a function, it is called only to complete a line. Argparse's `choices` is not used, because it
    would refuse other values before the package can explain why they are wrong.
    """

    def completer(**_: object) -> list[str]:
        return list(values() if callable(values) else values)

    action.completer = completer  # type: ignore[attr-defined]  # the attribute that argcomplete reads


def add_group(
    parser: Parser, group: str, title: str, *kinds: type[Any], is_shown: Callable[[str], bool] = lambda name: True
) -> None:
    """Add an option `--group.field` for each field of the dataclasses `kinds`, and a section of the help for them.

    If several of the dataclasses have a field of the same name, they share one option, and the help lists the default
    of each. The help shows only options whose field names satisfy `is_shown`. The other options are parsed as well,
    so that a later check can explain why they are refused.
    """
    section = parser.add_section(group, title)
    for item in {item.name: item for kind in kinds for item in fields(kind)}.values():
        defaults = [found.default for kind in kinds for found in fields(kind) if found.name == item.name]
        shown = dict.fromkeys(_shown({} if default is MISSING else default) for default in defaults)
        kind = annotation_of(item).removesuffix("| None").strip()
        placeholder, text = _placeholder(item, kind), item.metadata["help"].replace("%", "%%")
        choices: tuple[str, ...] = item.metadata.get("choices", ())
        if choices and placeholder == "NAME":
            text += f"; one of {', '.join(choices)}"
        is_bool = kind == "bool"
        action = section.add_argument(
            f"--{group}.{item.name}",
            metavar=placeholder,
            nargs="?" if is_bool else None,
            const="true" if is_bool else None,
            help=f"{text} (default: {' or '.join(shown)})" if is_shown(item.name) else argparse.SUPPRESS,
        )
        complete_with(action, ("true", "false") if is_bool else choices)


def _placeholder(item: Field[object], kind: str) -> str:
    if "choices" in item.metadata:
        listed = "|".join(item.metadata["choices"])
        return listed if len(listed) <= LONGEST_PLACEHOLDER else "NAME"
    if item.metadata.get("schedule"):
        return "X"
    return PLACEHOLDERS.get(kind, "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def given(found: argparse.Namespace, groups: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return the options that the user set, as {group: {option: value}}."""
    out: dict[str, dict[str, object]] = {group: {} for group in groups}
    for name, value in vars(found).items():
        group, dot, option = name.partition(".")
        if dot and value is not None:
            out[group][option] = value
    return out
