"""The help of `remuda train`: a short overview, one group of options, or all of them."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from remuda.cli.options import Parser, complete_with
from remuda.errors import ConfigError, nearest

COMMON = (
    "--env",
    "--steps",
    "--seed",
    "--scheme",
    "--out",
    "--resume",
    "--config",
    "--sampler.envs",
    "--algo.learning_rate",
    "--eval.every",
)
EXAMPLES = """\
examples:
  remuda train ppo --env CartPole-v1 --steps 200_000 --seed 1
  remuda train sac --env Pendulum-v1 --algo.learning_rate 'linear(1e-3, 0)'
  remuda train ppo --env mypackage.envs:make --agent.net mypackage.nets:Net
  remuda train --config runs/latest/config.yaml --seed 2   repeat, new seed
  remuda train --resume runs/latest                        continue a run"""
PRESETS = "Options that you leave out come from a preset for the algorithm and the env."


class HelpAction(argparse.Action):
    """Print the help on the topic that follows --help, and exit."""

    def __init__(self, *args: Any, algo: str | None, **settings: Any) -> None:
        settings |= {"nargs": "?", "const": "", "default": argparse.SUPPRESS}
        super().__init__(*args, **settings)
        self.algo = algo

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        print(help_text(parser, self.algo, str(values)), end="")
        parser.exit()


def add_help(parser: Parser, algo: str | None) -> None:
    topics = [*parser.sections, "all"]
    action = parser.add_argument(
        "-h", "--help", action=HelpAction, algo=algo, metavar="GROUP", help=argparse.SUPPRESS
    )
    complete_with(action, topics)


def help_text(parser: Parser, algo: str | None, topic: str) -> str:
    """Return the help on `topic`: the name of a group of options, "all" for all groups, or "" for an overview."""
    topics = [*parser.sections, "all"]
    if topic and topic not in topics:
        raise ConfigError(f"--help {topic}: there is no such group of options: {nearest(topic, topics)}")
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, [], [])
    if not topic:
        return _overview(parser, formatter, algo)
    if topic != "all" and not parser.sections[topic].actions:
        formatter.add_text(f"{algo} does not use options of the group {topic}.")
        return formatter.format_help()
    formatter.add_text(PRESETS)
    for group, section in parser.sections.items():
        if section.actions and topic in (group, "all"):
            _add_section(formatter, str(section.arguments.title), section.actions)
    return formatter.format_help()


def _overview(parser: Parser, formatter: argparse.HelpFormatter, algo: str | None) -> str:
    by_name = {name: action for action in parser._actions for name in action.option_strings}
    _add_section(formatter, "common options", [by_name[name] for name in COMMON])
    titles = {group: section.title for group, section in parser.sections.items() if section.actions}
    width = max(map(len, titles))
    columns = shutil.get_terminal_size().columns - 2  # argparse wraps its own texts to this width
    groups = "\n".join(
        textwrap.fill(title, columns, initial_indent=f"  {group:<{width}}  ", subsequent_indent=" " * (width + 4))
        for group, title in titles.items()
    )
    name = algo or "ppo"
    more = f"`remuda train {name} --help sampler` shows one group, `--help all` all options."
    text = formatter.format_help()
    return f"{text}\ngroups of options:\n{groups}\n\n{PRESETS}\n{more}\n\n{EXAMPLES}\n"


def _add_section(formatter: argparse.HelpFormatter, title: str, actions: list[argparse.Action]) -> None:
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
