"""Measure draws from a replay of a million rows: prioritized against Tianshou (numba), uniform against SB3.

    .venv/bin/python bench/replay.py                                   # all comparisons, 30 rounds: two minutes
    .venv/bin/python bench/replay.py --only prioritized --rounds 200 --out docs/speed/replay.json

Each contender is a separate process with one thread that waits for its turn; in each round every contender runs one
slice. The result is the median over rounds of the ratio of cycles per second, with its 95 % bootstrap interval. The
ratio of CPU seconds is reported too; it depends less on other processes that were running.

In `prioritized` and `uniform`, both replays hold 1,000,000 rows of HalfCheetah's sizes, and 256 are drawn at a time.
A cycle is:

prioritized  Draw a batch of observations, actions, rewards, next observations and importance weights, and feed back
             random positive errors of its rows. Remuda does more of a learner's work: it sums rewards over n steps
             (here 1), returns tensors, and ignores feedback for rows that were overwritten in the meantime.
tree         Only find the rows to draw, in proportion to a million priorities, and set new priorities for them.
uniform      Draw a batch as above without weights, and give no feedback. Stable-Baselines3 returns tensors too.

Peers are included after `make peers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remuda.bench.turns import Contender, median_and_interval, serve

ROOT = Path(__file__).parents[1]
ROWS, BATCH, ENVS, OBS, ACTION, ALPHA, BETA = 1_000_000, 256, 8, 17, 6, 0.6, 0.4
PEERS = {"prioritized": "tianshou", "tree": "tianshou", "uniform": "sb3"}
DRAWN = 1000  # batches of random errors, which are used in rotation
WARM_UP = 4000  # cycles, which set every priority about once
Cycle = Callable[[], object]


def ours(figure: str) -> Cycle:
    if figure == "tree":
        from remuda.replay.priorities import SumTree

        tree, numbers = SumTree(ROWS), np.random.default_rng(0)
        tree[:] = 1.0

        def find_and_set(priority: np.ndarray) -> None:
            tree.put(tree.find(numbers.random(BATCH) * tree.total), priority)

        return turn_over([each.numpy().astype(np.float64) for each in draw_errors()], find_and_set)
    replay = filled(figure == "prioritized")
    if figure == "uniform":
        return replay.draw

    def draw_and_feed_back(errors: torch.Tensor) -> None:
        replay.feedback(replay.draw().key, errors)

    return turn_over(draw_errors(), draw_and_feed_back)


def filled(is_prioritized: bool) -> Any:
    from remuda.data import Batch, Steps
    from remuda.replay import Priorities, TransitionReplay
    from remuda.replay.ring import Ring, Row

    one = np.zeros((), np.float32)
    example = Row(np.zeros(OBS, np.float32), np.zeros(ACTION, np.float32), one, one, np.zeros((), bool))
    ring = Ring(example, ROWS // ENVS + 1, ENVS)  # one row of each env cannot be drawn
    priorities = Priorities(ring, ALPHA) if is_prioritized else None
    options: dict[str, Any] = {"batch_size": BATCH, "ratio": 1.0, "warm_up": 0, "n_step": 1, "gamma": 0.99, "seed": 0}
    replay = TransitionReplay(ring, **options, priorities=priorities)
    axes = (1000, ENVS)
    for _ in range(ROWS // ENVS // axes[0]):
        obs, action = torch.rand(*axes, OBS), torch.rand(*axes, ACTION)
        steps = Steps(obs, action, torch.rand(axes), torch.ones(axes), torch.ones(axes, dtype=torch.bool), None, None)
        replay.add(Batch(steps, next_obs=torch.rand(ENVS, OBS)))
    assert ring.counters.count == ROWS
    return replay


def tianshou(figure: str) -> Cycle:
    from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer, SegmentTree

    if figure == "tree":
        tree, numbers = SegmentTree(ROWS), np.random.default_rng(0)
        tree[np.arange(ROWS)] = np.ones(ROWS)

        def find_and_set(priority: np.ndarray) -> None:
            index = tree.get_prefix_sum_idx(numbers.random(BATCH) * tree.reduce())
            tree[index] = priority

        return turn_over([each.numpy().astype(np.float64) for each in draw_errors()], find_and_set)
    never = np.zeros(ROWS, bool)
    fields = {"obs": rand(ROWS, OBS), "act": rand(ROWS, ACTION), "rew": rand(ROWS), "obs_next": rand(ROWS, OBS)}
    buffer = PrioritizedReplayBuffer(size=ROWS, alpha=ALPHA, beta=BETA)
    # Rows are added at once, because adding a million rows one at a time would take 15 minutes.
    buffer.update(ReplayBuffer.from_data(**fields, terminated=never, truncated=never, done=never))
    assert len(buffer) == ROWS

    def sample_and_update(errors: torch.Tensor) -> None:
        _, index = buffer.sample(BATCH)
        buffer.update_weight(index, errors)

    return turn_over(draw_errors(), sample_and_update)


def sb3(figure: str) -> Cycle:
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    spaces = (gymnasium.spaces.Box(-1, 1, (size,), np.float32) for size in (OBS, ACTION))
    buffer = ReplayBuffer(ROWS, *spaces, device="cpu", n_envs=ENVS)
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = rand(*array.shape)  # instead of 250,000 calls of add
    buffer.full = True
    return lambda: buffer.sample(BATCH)


def rand(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def draw_errors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(BATCH) + 0.01 for _ in range(DRAWN)]


def turn_over(inputs: list[Any], cycle: Callable[[Any], None]) -> Cycle:
    at = 0

    def turn() -> None:
        nonlocal at
        at += 1
        cycle(inputs[at % len(inputs)])

    return turn


def serve_one(who: str, figure: str) -> None:
    torch.set_num_threads(1)
    cycle = {"ours": ours, "tianshou": tianshou, "sb3": sb3}[who](figure)
    for _ in range(WARM_UP):
        cycle()

    def take(seconds: float) -> dict[str, float]:
        begin, cpu = time.perf_counter(), time.process_time()
        now, cycles = begin, 0
        while now < begin + seconds:
            for _ in range(20):
                cycle()
            cycles += 20
            now = time.perf_counter()
        return {"wall": 1e6 * (now - begin) / cycles, "cpu": 1e6 * (time.process_time() - cpu) / cycles}

    serve(take)


def start(who: str, figure: str) -> Contender:
    python = sys.executable if who == "ours" else ROOT / f".venv-{who}/bin/python"
    # Remuda is not installed for the interpreters of peers, which import only remuda.bench.turns; it needs numpy.
    words = ["env", f"PYTHONPATH={ROOT / 'src'}", "OMP_NUM_THREADS=1", "NUMBA_NUM_THREADS=1", python, __file__]
    return Contender([[*words, "--serve", who, "--only", figure]])


def compare(figure: str, rounds: int, seconds: float) -> dict[str, Any]:
    names = ("ours", PEERS[figure])
    contenders: dict[str, Contender] = {}
    slices: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for name in names:
            contenders[name] = start(name, figure)
        for turn in range(rounds + 1):
            for name in names if turn % 2 else names[::-1]:  # both orders, so that neither contender is always first
                (found,), _ = contenders[name].slice(seconds)
                if turn:  # the first turn is a warm-up
                    slices[name].append(found)
    finally:
        for each in contenders.values():
            each.close()
    result: dict[str, Any] = {"microseconds_per_cycle": slices}
    for clock in ("wall", "cpu"):
        middle, *interval = median_and_interval([b[clock] / a[clock] for a, b in zip(*slices.values(), strict=True)])
        medians = {name: statistics.median(one[clock] for one in found) for name, found in slices.items()}
        result[clock] = {"ratio": middle, "interval": interval, "medians": medians}
    return result


def sentence(figure: str, clock: str, found: dict[str, Any]) -> str:
    (low, high), sides = found["interval"], ", ".join(f"{name} {us:.0f} us" for name, us in found["medians"].items())
    return f"{figure}, {clock}: {found['ratio']:.2f} ({low:.2f} to {high:.2f}) times as fast; {sides}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a slice")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=["ours", "tianshou", "sb3"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_one(given.serve, given.only[0])
        return
    job = {"rows": ROWS, "batch": BATCH, "envs": ENVS, "rounds": given.rounds, "seconds": given.seconds}
    figures: dict[str, Any] = {}
    for figure in given.only:
        peer = PEERS[figure]
        if not (ROOT / f".venv-{peer}/.installed").exists():
            print(f"{figure}: left out, because {peer} is not installed (make peers)")
            continue
        figures[figure] = compare(figure, given.rounds, given.seconds)
        for clock in ("wall", "cpu"):
            print(sentence(figure, clock, figures[figure][clock]), flush=True)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({**job, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
