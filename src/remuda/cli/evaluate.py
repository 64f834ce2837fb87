"""`remuda eval`: greedy episodes with the newest weights of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from remuda.cli.options import Parser


def run(command: str, argv: Sequence[str]) -> int:
    parser = Parser(prog="remuda eval", description="Play whole episodes with a run's newest weights.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--episodes", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, help="seed of the episodes (the run's eval.seed)")
    parser.add_argument("--checkpoint", metavar="STEP", help="step of a checkpoint, or best (the newest)")
    parser.add_argument("--sample", action="store_true", help="sample actions instead of taking the best")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = parser.parse(argv)

    from remuda.runs.api import Run

    result = Run(found.run, checkpoint=found.checkpoint).evaluate(
        found.episodes, found.seed, deterministic=not found.sample
    )
    if found.json:
        print(json.dumps(result))
    else:
        print(
            f"mean return {result['mean_reward']:.2f} ± {result['std_reward']:.2f}, mean length "
            f"{result['mean_length']:.1f}, over {result['episodes']} episodes"
        )
    return 0
