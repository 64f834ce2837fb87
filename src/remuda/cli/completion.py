"""Shell completion of the `remuda` command, by argcomplete.

To complete a line, the shell runs `remuda` with these environment variables: _ARGCOMPLETE is the number of words up
to and including the program's name, COMP_LINE is the line, and COMP_POINT is the position of the cursor. The shell
reads the completions from file descriptor 8.
"""

from __future__ import annotations

import importlib
import os

import argcomplete
from argcomplete.lexers import split_line

from remuda.cli import COMMANDS
from remuda.cli.options import Parser, complete_with


def complete() -> None:
    """Write the completions of the line in COMP_LINE, and exit."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    _, _, _, words, _ = split_line(line, point)  # `words` are those before the word at the cursor
    start = int(os.environ["_ARGCOMPLETE"])
    command, arguments = words[start : start + 1], words[start + 1 :]
    if command and command[0] in COMMANDS:
        # Only the parser of this command is built, so argcomplete must treat `remuda COMMAND` as the program's name.
        os.environ["_ARGCOMPLETE"] = str(start + 1)
        parser = importlib.import_module(f"remuda.cli.{COMMANDS[command[0]][0]}").make_parser(command[0], arguments)
    else:
        parser = Parser(prog="remuda")
        complete_with(parser.add_argument("command", metavar="COMMAND"), COMMANDS)
        parser.add_argument("--version", action="store_true")
    argcomplete.autocomplete(parser, always_complete_options=False)
