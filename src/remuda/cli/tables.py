"""`remuda algos`, `remuda schemes` and `remuda envs`: print a table of algorithms, schemes or envs."""

from __future__ import annotations

from collections.abc import Sequence

from remuda.cli.options import Parser
from remuda.registry import AlgorithmEntry, all_algorithms, all_schemes


def list_algorithms() -> list[tuple[str, str, str, str]]:
    """Return name, description, action spaces and schemes of every registered algorithm."""
    return [(entry.name, entry.description, entry.actions, schemes_of(entry)) for entry in all_algorithms()]


def schemes_of(entry: AlgorithmEntry) -> str:
    """Return the names of the schemes under which an algorithm runs with its default options."""
    return ", ".join(found.name for found in all_schemes() if entry.may_run_async or not found.is_asynchronous)


def list_schemes() -> list[tuple[str, str]]:
    """Return name and description of every registered scheme."""
    return [(entry.name, entry.description) for entry in all_schemes()]


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(prog=f"remuda {command}", description=f"List the {command}.")
    if command == "envs":
        parser.add_argument(
            "filter", nargs="?", default="", metavar="TEXT", help="list only ids that contain this text"
        )
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    if command == "algos":
        headers, rows = ("name", "what it does", "actions", "schemes"), list_algorithms()
    elif command == "schemes":
        headers, rows = ("name", "what it does"), list_schemes()  # type: ignore[assignment]
    else:
        from remuda.envs.catalog import list_envs

        headers, rows = ("id", "max steps", "made by"), list_envs(found.filter)  # type: ignore[assignment]
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
    return 0
