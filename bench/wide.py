"""Compare MKL and oneDNN for the products of a wide linear layer: the reason for nets/wide.py.

    .venv/bin/python bench/wide.py --out docs/speed/wide.json        # some seconds; nothing else should run

Each round computes every product once and writes 48 MB before each, so that weights come from memory and not from the
cache, as in an update. Milliseconds are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from remuda.bench.turns import give_out
from remuda.nets.wide import HAS_ONEDNN, product

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS, OUTPUTS = 3136, 512
ROWS, THREADS = (1, 8, 32, 256), (1, 2)


def calls(rows: int) -> dict[str, Callable[[], object]]:
    x, weight, bias = torch.randn(rows, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    by_output = torch.randn(rows, OUTPUTS)
    return {
        "forward, mkl": lambda: torch.addmm(bias, x, weight.t()),
        "forward, onednn": lambda: product(x, weight, bias),
        "by inputs, mkl": lambda: torch.mm(by_output, weight),
        "by inputs, onednn": lambda: product(by_output, weight.t()),
        "by weights, mkl": lambda: torch.mm(by_output.t(), x),
        "by weights, onednn": lambda: product(by_output.t(), x.t()),
    }


def milliseconds(rows: int, turns: int) -> dict[str, float]:
    elsewhere, found = torch.empty(12_000_000), calls(rows)
    taken: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(turns + 2):
        for name, call in found.items():
            elsewhere.fill_(turn)
            start = time.perf_counter()
            call()
            if turn >= 2:  # oneDNN creates its primitives in the first turns
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(each), 3) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not HAS_ONEDNN:
        raise SystemExit("this build of torch has no oneDNN: there is nothing to compare.")
    report = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        report |= {f"{rows} rows, {threads} threads": milliseconds(rows, given.turns) for rows in ROWS}
    give_out({"inputs": INPUTS, "outputs": OUTPUTS, "milliseconds": report}, given.out)


if __name__ == "__main__":
    main()
