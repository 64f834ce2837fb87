"""Measure env steps per second of SAC with one update per step, against SB3, a CleanRL-style loop and Tianshou.

    .venv/bin/python bench/end_to_end.py                                    # three minutes, after `make peers`
    .venv/bin/python bench/end_to_end.py --rounds 20 --seconds 5 --out docs/speed/sac-end-to-end.json
    .venv/bin/python bench/end_to_end.py --only remuda sb3 sb3@1 sb3+fused tianshou+trainer   # with variants

The task is HalfCheetah-v5 with one env, batches of 256, nets of 256x256 (ReLU), learning rate 3e-4, tau 0.005, a
learned temperature and a replay for a million rows. `bench/peers/sac_common.py` has the settings, and
`bench/peers/sac_*.py` run the other libraries. Each contender is a separate process that waits for its turn; slices
alternate, because the speed of a machine drifts. Before its first slice, a contender takes 1,000 steps with random
actions and 100 with updates; the first round is not counted. A contender counts the steps of its optimizers, and the
comparison fails unless there is exactly one update per env step.

`remuda` is `Synchronous.run` itself, with the sampler, replay and learner of `remuda train sac --env HalfCheetah-v5`,
and a log that stores nothing and waits between slices; peers log nothing either. `remuda+journal` is a complete
`remuda.train` with metrics files and TensorBoard, which waits in a callback.

Ratios are computed in each round; results are medians with 95 % bootstrap intervals. `best` is the fastest peer of
each round. CPU seconds include all descendants of a contender. The two torch threads of a contender wait for each
other. If other processes run at the same time, the rate with two threads may fall to a tenth; then only contenders
with @1 (one thread) are meaningful.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import sac_common as common

from remuda.bench.turns import Contender, median_and_interval
from remuda.errors import ConfigError, RemudaError, TrainingError

ROOT = Path(__file__).parents[1]
# Virtual environment and script of each peer.
PEERS = {
    "sb3": (ROOT / ".venv-sb3", "sac_sb3.py"),
    "cleanrl-style": (ROOT / ".venv-cleanrl", "sac_cleanrl_style.py"),
    "tianshou": (ROOT / ".venv-tianshou", "sac_tianshou.py"),
}
# Flags that vary how a contender runs, given as NAME+FLAG.
FLAGS = {"remuda": ("journal",), "sb3": ("fused",), "cleanrl-style": ("fused",), "tianshou": ("fused", "trainer")}


class Turns:
    """A Log that stores nothing. After a slice it prints the result and waits for the next line of standard input.

    The protocol is that of `remuda.bench.turns.serve`, which cannot be used because the scheme runs the loop.
    """

    def __init__(self, note: str) -> None:
        self.note = note
        self._begin = self._end = 0.0
        self._before = (0, 0)
        self._is_ready = False

    def resume(self, learner: Any) -> tuple[Any, None]:
        from remuda.recipe import Progress

        return Progress(), None

    def restore(self, replay: Any) -> None: ...

    def begin(self) -> None: ...

    def save_if_failed(self, *error: Any) -> None: ...

    def save_if_stopped(self, error: BaseException) -> None: ...

    def save(self, round: Any) -> None: ...

    def should_stop(self) -> bool:
        return False

    def must_stop(self) -> bool:
        return False

    def round(self, round: Any) -> bool:
        now = time.perf_counter()
        if now < self._end or round.progress.steps < common.RANDOM + common.WARM_UP:
            return False
        done = (round.progress.steps, updates_of(round.learner))
        if self._is_ready:
            steps, updates = (after - before for after, before in zip(done, self._before, strict=True))
            answer = {"steps": steps, "seconds": now - self._begin, "updates": updates, "note": self.note}
            print(json.dumps(answer), flush=True)
        else:
            print("ready", flush=True)
            self._is_ready = True
        line = sys.stdin.readline()
        self._before, self._begin = done, time.perf_counter()
        self._end = self._begin + float(line or 0)
        return not line


def updates_of(learner: Any) -> int:
    """Return the number of optimizer steps; raise TrainingError if it differs between optimizers."""
    counts = {int(optimizer.steps) for optimizer in learner.optimizers.values()}
    if counts != {learner.version}:
        raise TrainingError(f"not every optimizer stepped as often as the others: {sorted(counts)}.")
    return int(learner.version)


def serve_ours(threads: int, has_journal: bool) -> None:
    import torch

    import remuda
    from remuda.build.recipe import make_recipe
    from remuda.config.resolve import resolve_config
    from remuda.machine import keep_memory

    groups: dict[str, Any] = {
        "algo": {
            "batch_size": common.BATCH,
            "learning_rate": str(common.RATE),
            "tau": common.TAU,
            "gamma": common.GAMMA,
            "learning_starts": common.RANDOM,
            "train_freq": 1,
            "gradient_steps": 1,
            "ent_coef": "auto",
        },
        "agent": {"hidden": common.HIDDEN, "activation": "relu"},
        "replay": {"capacity": common.REPLAY},
        "sampler": {"envs": 1},
        "scheme": {"threads": threads},
    }
    turns = Turns(f"remuda {remuda.__version__}, torch {torch.__version__}, torch threads {threads}")
    if has_journal:
        turns.note += ", with run directory and journal"
        quiet: dict[str, Any] = {"eval": {"episodes": 0}, "checkpoint": {"every": 0}}
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "run"
            remuda.train("sac", env=common.ENV, callbacks=[turns.round], out=out, quiet=True, **groups, **quiet)
        return
    config, spec, info = resolve_config({"algo": "sac", "env": common.ENV, "seed": 1}, groups)
    recipe = make_recipe(config, spec, info)
    keep_memory()  # `remuda train` also does this and what the next two lines do
    gc.collect()
    gc.freeze()
    for _ in config.scheme_entry.make_scheme(config).rounds(recipe, turns):
        pass


def parse(name: str, threads: int) -> tuple[str, list[str], int]:
    """Parse NAME, NAME+FLAG or NAME@THREADS into name, flags and number of threads."""
    rest, _, count = name.partition("@")
    who, *flags = rest.split("+")
    if who not in FLAGS or not set(flags) <= set(FLAGS[who]) or (count and not count.isdigit()):
        known = " ".join([*FLAGS, *(f"{each}+{flag}" for each, flags in FLAGS.items() for flag in flags)])
        raise ConfigError(f"{name!r} is no contender: use {known}, each also with @1 or another number of threads.")
    return who, flags, int(count or threads)


def start(name: str, threads: int) -> Contender:
    who, flags, count = parse(name, threads)
    if who in PEERS:
        environment, script = PEERS[who]
        words = [environment / "bin/python", ROOT / "bench/peers" / script]
    else:
        words = [sys.executable, __file__, "--serve"]
    return Contender([[*words, "--threads", count, *(f"--{flag}" for flag in flags)]])


def compare(names: Sequence[str], threads: int, rounds: int, seconds: float) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    steps, notes = dict.fromkeys(names, 0), dict.fromkeys(names, "")
    try:
        for name in names:
            contenders[name] = start(name, threads)
        for turn in range(rounds + 1):
            for name, each in contenders.items():
                (found,), used = each.slice(seconds)
                if found["updates"] != found["steps"]:
                    raise TrainingError(f"{name} made {found['updates']} updates in {found['steps']} steps.")
                notes[name] = found["note"]
                if turn:  # the first turn is a warm-up
                    rates[name].append(found["steps"] / found["seconds"])
                    cpu[name].append(used / found["steps"])
                    steps[name] += found["steps"]
    finally:
        for each in contenders.values():
            each.close()
    return {
        "env": common.ENV,
        "threads": threads,
        "rounds": rounds,
        "seconds": seconds,
        "contenders": {
            name: {
                "steps_per_second": statistics.median(rates[name]),
                "cpu_seconds_per_step": statistics.median(cpu[name]),
                "steps": steps[name],
                "updates": steps[name],  # checked to be equal to the number of steps
                "note": notes[name],
                "slices": rates[name],
            }
            for name in names
        },
        "ratios": ratios(rates),
    }


def ratios(rates: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Return the ratios of rates of each Remuda contender to each peer, and to the best peer of each round."""
    peers = {name: found for name, found in rates.items() if not name.startswith("remuda")}
    against = {**peers, "best": [max(found) for found in zip(*peers.values(), strict=True)]} if peers else {}
    return {
        f"{mine} / {other}": median_and_interval([a / b for a, b in zip(rates[mine], found, strict=True)])
        for mine in rates
        if mine.startswith("remuda")
        for other, found in against.items()
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'':24} steps/s  CPU ms per step")
    for name, each in found["contenders"].items():
        print(f"{name:24} {each['steps_per_second']:7.1f}  {1000 * each['cpu_seconds_per_step']:.1f}  {each['note']}")
    for name, (middle, low, high) in found["ratios"].items():
        print(f"{name:40} {middle:.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a slice")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of contenders that are named without @")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"of {', '.join(FLAGS)}; +FLAG and @THREADS vary it"
    )
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--journal", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_ours(given.threads, given.journal)
        return
    try:
        names = list(dict.fromkeys(given.only or FLAGS))
        missing = {who for who, (place, _) in PEERS.items() if not (place / ".installed").exists()}
        absent = [name for name in names if parse(name, given.threads)[0] in missing]
        if absent:
            print(f"left out, because `make peers` has not been run: {', '.join(absent)}", file=sys.stderr)
        names = [name for name in names if name not in absent]
        found = compare(names, given.threads, given.rounds, given.seconds)
    except RemudaError as error:
        raise SystemExit(f"{error}") from None
    show(found)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
