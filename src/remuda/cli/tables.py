"""`remuda algos`, `schemes` and `envs`: list what is available as a table."""

from __future__ import annotations

from collections.abc import Sequence

from remuda.cli.options import Parser

ALGOS = [
    ("a2c", "advantage actor-critic: one gradient of each rollout", "any", "serial, parallel"),
    (
        "appo",
        "asynchronous PPO: clipped ratio, data of older policies corrected by V-trace",
        "any",
        "serial, parallel, async",
    ),
    ("ddpg", "deep deterministic policy gradients, from a replay", "Box", "serial, parallel, async"),
    ("dqn", "deep Q-learning: double, dueling, C51, noisy by an option each", "Discrete", "serial, parallel, async"),
    ("impala", "policy gradient, data of older policies corrected by V-trace", "any", "serial, parallel, async"),
    ("ppo", "proximal policy optimisation: several epochs, clipped ratio", "any", "serial, parallel"),
    ("r2d1", "deep Q-learning with memory, from sequences", "Discrete", "serial, parallel, async"),
    ("rainbow", "deep Q-learning with all of these, n-step and prioritised", "Discrete", "serial, parallel, async"),
    ("sac", "soft actor-critic: reward and entropy", "Box", "serial, parallel, async"),
    ("td3", "DDPG with two critics, a delayed actor and smoothed targets", "Box", "serial, parallel, async"),
]
SCHEMES = [
    ("serial", "envs, policy and learner in one process"),
    ("parallel", "envs in worker processes, policy and learner in this one; same parameters as serial"),
    ("async", "workers act and a learner learns, each at its own pace; for impala, appo and all with a replay"),
]


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
        headers, rows = ("name", "what it does", "actions", "schemes"), ALGOS
    elif command == "schemes":
        headers, rows = ("name", "what it does"), SCHEMES  # type: ignore[assignment]
    else:
        from remuda.envs.catalog import list_envs

        headers, rows = ("id", "max steps", "made by"), list_envs(found.filter)  # type: ignore[assignment]
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
    return 0
