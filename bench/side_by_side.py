"""Measure SAC's updates per second with actor and critics in two threads against one after the other.

    .venv/bin/python bench/side_by_side.py --out docs/speed/side-by-side.json     # 4 minutes; nothing else should run

Each way is a separate process that waits for its turn; slices alternate. An update comprises what it does in
bench/updates.py, with the same nets and sizes. If computed in turn, PyTorch divides each operation among its threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from updates import ours, serve_updates, take_turns

from remuda.bench.turns import Contender, give_out, median_and_interval

# For each way: threads of PyTorch, whether actor and critics are computed side by side, and hand-written gradients.
WAYS = {
    "side by side": (1, True, True),
    "in turn, 2 threads": (2, False, True),
    "in turn, 1 thread": (1, False, True),
    "side by side, autograd": (1, True, False),
    "in turn, 2 threads, autograd": (2, False, False),
    "in turn, 1 thread, autograd": (1, False, False),
}


def serve_one(name: str, batch: int) -> None:
    threads, is_side_by_side, by_hand = WAYS[name]
    settings = {"actor_device": "cpu"} if is_side_by_side else {}
    update = ours("sac", batch, threads, by_hand, **settings)
    torch.set_num_threads(threads)
    serve_updates(update)


def compare(batch: int, rounds: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve"]
    contenders = {name: Contender([[*command, name, "--batch", batch]]) for name in WAYS}
    rates, cpu = take_turns(contenders, rounds, seconds)
    ratios = {}
    for name in WAYS:
        kind = ", autograd" if name.endswith("autograd") else ""
        pairs = zip(rates[name], rates[f"in turn, 2 threads{kind}"], strict=True)
        ratios[name] = median_and_interval([a / b for a, b in pairs])
    return {
        "batch": batch,
        "rounds": rounds,
        "seconds": seconds,
        "updates_per_second": {name: statistics.median(each) for name, each in rates.items()},
        "cpu_seconds_per_update": {name: statistics.median(each) for name, each in cpu.items()},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=256, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_one(given.serve, given.batch)
        return
    give_out({"batches": [compare(256, given.rounds, 1.0), compare(8192, given.rounds, 3.0)]}, given.out)


if __name__ == "__main__":
    main()
