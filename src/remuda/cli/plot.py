"""`remuda plot`: plot learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remuda.cli.options import Parser


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(
        prog="remuda plot",
        description="Plot learning curves. Runs that differ only in their seed become one curve\nwith a band.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--metric",
        default="rollout/ep_rew_mean",
        metavar="NAME",
        help="metric to plot (default: rollout/ep_rew_mean)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help="file to write (default: curve.png in the first run)"
    )
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)

    from remuda.runs.plots import distinct, plot_runs

    runs = distinct(found.runs)
    out = found.out or found.runs[0] / "curve.png"
    plot_runs(runs, out, metric=found.metric)
    print(f"{len(runs)} run{'s' if len(runs) > 1 else ''} -> {out}")
    return 0
