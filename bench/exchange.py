"""Measure what it costs ranks of one host to add their gradients: the vector of a net with 10 million parameters.

    .venv/bin/python bench/exchange.py --out docs/speed/exchange.json      # about a minute

Three contenders take turns in the same processes:

| | |
|---|---|
| gloo all-reduce | torch.distributed's sum, whose order depends on the number of ranks |
| ordered sum over gloo | `GlooCollective`, as between hosts |
| shared memory | `SharedCollective`, the default on one host; ordered, too |

A turn repeats the exchange: every rank writes its gradient to the collective's vector, and receives the sum. For
comparison, the ranks also compute a gradient of such a net from 128 rows each, at the same time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import AllreduceOptions, FileStore, PrefixStore, ProcessGroupGloo, ReduceOp

from remuda.bench.turns import median_and_interval
from remuda.collectives import GlooCollective, SharedCollective

NAMES = ("gloo all-reduce", "ordered sum over gloo", "shared memory")
GRADIENT, ROWS = "for comparison, a gradient of 128 rows", 128


class Exchanges:
    """The three ways to add vectors, as one rank sees them."""

    def __init__(self, directory, rank, size, length):
        torch.set_num_threads(1)
        store = FileStore(f"{directory}/store", size)
        self.ordered = GlooCollective(PrefixStore("ordered", store), rank, size, "host", "127.0.0.1")
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        self._group = ProcessGroupGloo(PrefixStore("plain", store), rank, size, options)
        if rank == 0:
            self.shared = SharedCollective.create(
                size, "host", lambda address: store.set("address", json.dumps(address))
            )
        else:
            self.shared = SharedCollective.join(json.loads(store.get("address")), rank, "host")
        self._reduce = AllreduceOptions()
        self._reduce.reduceOp = ReduceOp.SUM
        self._gradient, self._plain = torch.randn(length), torch.zeros(length)
        width = round((length / 3) ** 0.5)
        layers = [torch.nn.Linear(width, width) for _ in range(3)]
        self._net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        self._rows = torch.randn(ROWS, width)

    def run(self, name):
        if name == GRADIENT:
            torch.autograd.grad(self._net(self._rows).square().mean(), list(self._net.parameters()))
        elif name == NAMES[0]:
            self._plain.copy_(self._gradient)
            self._group.allreduce([self._plain], self._reduce).wait()
        else:
            collective = self.shared if name == NAMES[2] else self.ordered
            collective.vector(len(self._gradient)).copy_(self._gradient)
            collective.sum()

    def measure(self, turns, repetitions):
        """Return milliseconds and CPU milliseconds per exchange, for each contender and turn."""
        found = {name: [] for name in (*NAMES, GRADIENT)}
        for turn in range(turns + 1):
            for name in found:
                self.shared.gather(b"")  # all ranks begin a turn together
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(repetitions):
                    self.run(name)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if turn:  # the first turn allocates memory
                    found[name].append((1e3 * wall / repetitions, 1e3 * cpu / repetitions))
        return found

    def close(self):
        self.shared.close()
        self.ordered.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = given.directory or made
        command = [sys.executable, __file__, *sys.argv[1:], "--directory", directory]
        others = [] if given.rank else [subprocess.Popen([*command, "--rank", str(r)]) for r in range(1, given.ranks)]
        exchanges = Exchanges(directory, given.rank, given.ranks, given.parameters)
        measured = exchanges.measure(given.turns, given.repetitions)
        exchanges.close()
        for other in others:
            other.wait(timeout=60)
    if given.rank:
        return
    found = {"ranks": given.ranks, "parameters": given.parameters, "milliseconds": {}, "cpu_milliseconds": {}}
    for name, turns in measured.items():
        found["milliseconds"][name] = median_and_interval([wall for wall, _ in turns])
        found["cpu_milliseconds"][name] = statistics.median(cpu for _, cpu in turns)
        print(f"{name}: {found['milliseconds'][name]} ms, CPU of rank 0 {found['cpu_milliseconds'][name]:.1f} ms")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
