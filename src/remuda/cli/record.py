"""`remuda record`: a video of a run's agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remuda.cli.options import Parser


def run(command: str, argv: Sequence[str]) -> int:
    parser = Parser(prog="remuda record", description="Film greedy episodes of a run's agent.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--episodes", type=int, default=1, help="how many, one after the other (1)")
    parser.add_argument("--seed", type=int, help="seed of the first episode (the run's eval.seed)")
    parser.add_argument("--checkpoint", metavar="STEP", help="step of a checkpoint, or best (the newest)")
    parser.add_argument("--out", type=Path, metavar="FILE.mp4", help="(RUN/videos/step-N.mp4)")
    found = parser.parse(argv)

    from remuda.runs.api import Run

    path, returns = Run(found.run, checkpoint=found.checkpoint).record(found.episodes, found.seed, found.out)
    print(f"returns {', '.join(f'{value:.1f}' for value in returns)} -> {path}")
    return 0
