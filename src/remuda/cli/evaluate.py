"""`remuda eval`: play greedy episodes with the newest weights of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from remuda.cli.options import Parser


def make_parser(command: str, argv: Sequence[str]) -> Parser:
    parser = Parser(prog="remuda eval", description="Evaluate the newest weights of a run over whole episodes.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="number of episodes (default: 20)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the episodes (default: the run's eval.seed)")
    parser.add_argument("--checkpoint", metavar="STEP", help="step of a checkpoint, or best (default: the newest)")
    parser.add_argument(
        "--sample", action="store_true", help="sample actions from the policy instead of taking the greedy ones"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(command: str, argv: Sequence[str]) -> int:
    found = make_parser(command, argv).parse(argv)

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
