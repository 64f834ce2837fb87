"""Simulate how long an all-reduce takes among many hosts, with the state machines of `remuda.rpc.core.forest`.

    .venv/bin/python bench/forest.py --out forest.json

The model of a host: a full-duplex link of 1 Gb/s to a switch without congestion, 0.1 ms latency, and 50 us of CPU for
every message that is sent or received. Nothing is sent for real, so these are simulated times. The lower bound
2N / bandwidth is the time in which every host can send and receive each byte of the vector twice.
"""

import argparse
import heapq
import json
import time
from pathlib import Path

from remuda.rpc.core.forest import Forest, Reduction

BANDWIDTH = 125e6  # bytes per second, in each direction
LATENCY = 1e-4
CPU = 5e-5  # seconds of the sender and of the receiver for each message
HEADER = 100  # bytes of a message without payload


class Host:
    """The three resources of a host, each of which serves one message at a time."""

    def __init__(self) -> None:
        self.out = self.into = self.cpu = 0.0  # when each is free again


def simulate(peers: int, trees: int, arity: int, size: float, parts: int) -> float:
    """Return the simulated seconds until every member has the sum."""
    members = [str(index) for index in range(peers)]
    forest = Forest(members, trees, arity)
    each = size / parts
    reductions = {name: Reduction(forest, name, (1, 1), [each] * parts, lambda one, _other: one) for name in members}
    hosts = {name: Host() for name in members}
    queue: list[tuple[float, int, str, object, object]] = []
    count, end = 0, 0.0

    def send(source: str, effects: list, now: float) -> None:
        nonlocal count
        host = hosts[source]
        for effect in effects:
            host.cpu = max(host.cpu, now) + CPU
            host.out = max(host.out, host.cpu) + ((effect.payload or 0.0) + HEADER) / BANDWIDTH
            count += 1
            heapq.heappush(queue, (host.out + LATENCY, count, effect.to, effect.message, effect.payload))

    for name, reduction in reductions.items():
        send(name, reduction.start(), 0.0)
    while queue:
        arrived, _, to, message, payload = heapq.heappop(queue)
        host = hosts[to]
        # The first byte arrives one transfer time before the last one, unless the receiving link is busy.
        duration = ((payload or 0.0) + HEADER) / BANDWIDTH
        host.into = max(arrived, host.into + duration)
        host.cpu = max(host.cpu, host.into) + CPU
        end = max(end, host.cpu)
        send(to, reductions[to].on_message(message, payload), host.cpu)
    assert all(reduction.result is not None for reduction in reductions.values())
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--bytes", type=float, default=128e6, help="size of the vector")
    parser.add_argument("--parts", type=int, default=256, help="parts into which the vector is cut")
    given = parser.parse_args()
    bound = 2 * given.bytes / BANDWIDTH
    rows = []
    for peers in given.peers:
        for trees, arity in dict.fromkeys(
            [(1, peers - 1), (1, 2), (16, 2), (64, 4), (64, 8), (peers, 2), (peers, 4)]
        ):
            if (trees, arity) == (1, peers - 1) and peers > 64:
                continue  # a star of many hosts takes minutes of simulated time, and says nothing new
            begin = time.perf_counter()
            seconds = simulate(peers, trees, arity, given.bytes, given.parts)
            row = {"peers": peers, "trees": trees, "arity": arity, "seconds": seconds, "ratio": seconds / bound}
            rows.append(row)
            print(
                f"{peers:5} hosts, {trees:4} trees of arity {arity:2}: {seconds:8.3f} s, "
                f"{seconds / bound:6.2f} x 2N/bandwidth  (simulated in {time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
            if given.out:
                found = {"bytes": given.bytes, "parts": given.parts, "bandwidth": BANDWIDTH, "latency": LATENCY}
                given.out.write_text(
                    json.dumps({**found, "cpu": CPU, "simulated": True, "rows": rows}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
