"""`remuda record`: record a video of a run's agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remuda.cli.options import Parser


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(prog="remuda record", description="Record greedy episodes of a run's agent as a video.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--episodes", type=int, default=1, metavar="N", help="number of episodes in the video (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the first episode (default: the run's eval.seed)"
    )
    parser.add_argument("--checkpoint", metavar="STEP", help="step of a checkpoint, or best (default: the newest)")
    parser.add_argument("--out", type=Path, metavar="FILE.mp4", help="file to write (default: RUN/videos/step-N.mp4)")
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)

    from remuda.runs.api import Run

    path, returns = Run(found.run, checkpoint=found.checkpoint).record(found.episodes, found.seed, found.out)
    print(f"returns {', '.join(f'{value:.1f}' for value in returns)} -> {path}")
    return 0
