"""Measure env steps per second of actor-learner training on Pong, against SB3, Sample Factory and RLlib.

    .venv/bin/python bench/actor_learner.py                                 # twenty minutes, after `make peers`
    .venv/bin/python bench/actor_learner.py --rounds 15 --out docs/speed/actor-learner.json
    .venv/bin/python bench/actor_learner.py --only sb3@1 sb3@2 sb3@3 sb3@4  # compare ways to run SB3

The env is ALE/Pong-v5 with 84x84 gray frames, frame skip 4, frame stack 4 and no sticky actions. The net is the
Nature net, whose 512 features policy and value share. Every step is used once for learning. `remuda` is IMPALA under
`async`; `remuda, batch-1 actors` is the same with one env in each worker, as in MonoBeast. The others are A2C of
Stable-Baselines3 (20 steps of 16 envs), APPO of Sample Factory and IMPALA of RLlib (`bench/peers/impala_*.py`), with
their own wrappers around single games. WAYS lists ways to run each of them; the first one is the default. All
contenders may use every core.

Each contender is a process with children that trains continuously. Between its turns all its processes are stopped
(SIGSTOP), so that it cannot work ahead. It learns from 1,000 steps before its first slice, and the first round is not
counted. A slice ends with the first update after its time limit, and counts the steps of its updates. Ratios are
computed in each round; results are medians with 95 % bootstrap intervals. CPU seconds include all descendants of a
contender.

`limit` is the cost of the parts alone: the CPU seconds per step, on one core, of stepping the games in C++, of the
forward pass for sampling, and of the forward and backward passes for learning. It also reports the steps per second
that all cores would allow if they did nothing else. `limit, all cores` runs one such process on each core at the same
time, so that they share caches and memory. Both are estimates and no bounds: the net learns from 640 rows at once,
and a learner that splits these among threads may need less time per row.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from peers.common import ATARI, WARM_UP, Turns

from remuda.bench.turns import Contender, median_and_interval, serve
from remuda.errors import ConfigError, RemudaError
from remuda.machine import usable_cores

ROOT = Path(__file__).parents[1]
# Arguments of `remuda train`. Time-outs are long, because contenders are stopped between their turns.
COMMON = f"impala --env {ATARI} --scheme async --sampler.inference workers --envs.sticky 0 --agent.net nature"
COMMON += (
    " --agent.shared true --steps 1_000_000_000 --eval.episodes 0 --checkpoint.every 0 --envs.step_timeout 86400"
)
OURS = {
    "remuda": [*COMMON.split(), "--sampler.envs", "32", "--algo.n_steps", "40", "--algo.batch_size", "16"],
    "remuda, batch-1 actors": [*COMMON.split(), "--sampler.envs", "8", "--sampler.workers", "8"],
}
# Virtual environment and script of each peer.
PEERS = {
    "sb3": (ROOT / ".venv-sb3", "impala_sb3.py"),
    "sample-factory": (ROOT / ".venv-sample-factory", "impala_sample_factory.py"),
    "rllib": (ROOT / ".venv-rllib", "impala_rllib.py"),
}
# Ways to run each peer, named NAME@1, NAME@2 and so on. NAME alone means the first.
WAYS = {
    "sb3": (
        ["--envs-in", "this process", "--threads", 1],
        ["--envs-in", "this process", "--threads", 2],
        ["--envs-in", "subprocesses", "--threads", 1],
        ["--envs-in", "subprocesses", "--threads", 2],
    ),
    "sample-factory": (
        ["--workers", 2, "--envs", 8, "--splits", 2],
        ["--workers", 2, "--envs", 8],
        ["--workers", 1, "--envs", 16, "--splits", 2],
        ["--workers", 1, "--envs", 16],
        ["--workers", 2, "--envs", 16, "--splits", 2],
        ["--workers", 4, "--envs", 4, "--splits", 2],
        ["--workers", 2, "--envs", 8, "--batched"],
        ["--workers", 2, "--envs", 8, "--splits", 2, "--batch", 1024],
    ),
    "rllib": (
        ["--stack", "old", "--runners", 2, "--envs", 8],
        ["--stack", "old", "--runners", 1, "--envs", 16],
        ["--stack", "old", "--runners", 2, "--envs", 16],
        ["--stack", "new", "--runners", 2, "--envs", 8],
        ["--stack", "new", "--runners", 1, "--envs", 16],
        ["--stack", "new", "--runners", 2, "--envs", 8, "--learners", 1],
        ["--stack", "new", "--runners", 2, "--envs", 16],
    ),
}
LIMITS = ("limit", "limit, all cores")
ACTING, LEARNING = 16, 640  # batch sizes in `limit`: one row per env to act, 640 rows to learn from


class Stoppable(Contender):
    """A contender that does not wait for its turn by itself: between slices all its processes are stopped."""

    def __init__(self, commands: Sequence[Sequence[object]]) -> None:
        self._known: set[psutil.Process] = set()  # includes orphans, which are no longer in the process tree
        super().__init__(commands)
        self._send(signal.SIGSTOP)

    def slice(self, amount: float) -> tuple[list[dict[str, Any]], float]:
        before = self._cpu()
        self._send(signal.SIGCONT)
        (process,) = self._processes
        with suppress(BrokenPipeError):  # the process has died; reading its answer will raise
            process.stdin.write(f"{amount}\n")
            process.stdin.flush()
        found = json.loads(self._read(process))
        self._send(signal.SIGSTOP)
        return [found], self._cpu() - before

    def close(self) -> None:
        self._send(signal.SIGCONT)
        super().close()
        self._send(signal.SIGKILL)  # ends processes that still run
        for process in self._known:  # torch does not remove the shared memory of killed processes
            for file in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
                file.unlink(missing_ok=True)

    def _send(self, what: signal.Signals) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                self._known |= {root, *root.children(recursive=True)}
        for each in self._known:
            with suppress(psutil.NoSuchProcess):  # also raised if the process id was reused
                each.send_signal(what)


def serve_ours(words: Sequence[str]) -> None:
    """Run `remuda train` with these arguments and a callback that waits between slices."""
    import torch

    import remuda
    from remuda.cli.options import given
    from remuda.cli.train import make_parser
    from remuda.config.resolve import resolve_config
    from remuda.config.run_config import KINDS
    from remuda.runs.train import exhaust, train

    found = make_parser("train", words).parse(words)
    settings = {name: getattr(found, name) for name in ("algo", "env", "steps", "scheme")}
    setup = resolve_config(
        settings, {name: values for name, values in given(found, ("algo", *KINDS)).items() if values}
    )
    sampler = setup[0].sampler
    note = f"remuda {remuda.__version__}, torch {torch.__version__}, {sampler.envs} envs"
    turns = Turns(WARM_UP, {"counts": "learned", "note": note})
    remuda.keep_memory()  # as `remuda train` does
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        ended = [lambda round: turns.round_ended(round.progress.steps)]
        exhaust(train(*setup, out=out, callbacks=ended, quiet=True))


def serve_limit() -> None:
    """Serve measurements of the CPU seconds that one step of each part takes on one thread."""
    import torch

    torch.set_num_threads(1)
    parts = {"games": bare_games(), "acting": bare_net(ACTING, False), "learning": bare_net(LEARNING, True)}
    for turn in parts.values():
        turn()

    def take(seconds: float) -> dict[str, float]:
        return {name: cost(turn, seconds / len(parts)) for name, turn in parts.items()}

    serve(take)


def cost(turn: Callable[[], int], seconds: float) -> float:
    """Call `turn` for some seconds, and return the CPU seconds per step."""
    end, before, steps = time.perf_counter() + seconds, time.process_time(), 0
    while time.perf_counter() < end or not steps:
        steps += turn()
    return (time.process_time() - before) / steps


def bare_games() -> Callable[[], int]:
    from ale_py.vector_env import AtariVectorEnv

    games, generator = AtariVectorEnv("pong", ACTING, num_threads=1), np.random.default_rng(0)
    games.reset(seed=0)

    def turn() -> int:
        games.step(generator.integers(0, games.single_action_space.n, ACTING))
        return ACTING

    return turn


def bare_net(rows: int, learns: bool) -> Callable[[], int]:
    import torch
    from torch import nn

    from remuda.nets.conv import NatureCNN

    net = nn.Sequential(NatureCNN((4, 84, 84)), nn.Linear(512, 6 + 1))  # policy head and value head
    images = torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)

    def turn() -> int:
        with torch.set_grad_enabled(learns):
            found = net(images.float() / 255)
        if learns:
            net.zero_grad()
            found.mean().backward()
        return rows

    return turn


def parse(name: str) -> tuple[str, int]:
    """Parse NAME or NAME@WAY into a name and the number of a way."""
    who, _, way = name.partition("@")
    known = [*OURS, *(f"{peer}@{index}" for peer, ways in WAYS.items() for index in range(1, len(ways) + 1))]
    if name not in (*known, *PEERS):
        raise ConfigError(f"{name!r} is no contender: use {', '.join(known)}.")
    return who, int(way or 1)


def start(name: str) -> Contender:
    if name in LIMITS:
        count = usable_cores() if name == LIMITS[1] else 1
        return Contender([[sys.executable, __file__, "--serve", "limit"]] * count)
    who, way = parse(name)
    if who in OURS:
        return Stoppable([[sys.executable, __file__, "--serve", who]])
    environment, script = PEERS[who]
    return Stoppable([[environment / "bin/python", ROOT / "bench/peers" / script, *WAYS[who][way - 1]]])


def compare(names: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    slices: dict[str, list[tuple[list[dict[str, Any]], float]]] = {name: [] for name in (*names, *LIMITS)}
    try:
        for name in slices:
            contenders[name] = start(name)
        for turn in range(rounds + 1):
            for name, each in contenders.items():
                found = each.slice(seconds)
                if turn:  # the first turn is a warm-up
                    slices[name].append(found)
    finally:
        for each in contenders.values():
            each.close()
    reports = {name: report([(found[0], cpu) for found, cpu in slices[name]]) for name in names}
    rates = {name: found["slices"] for name, found in reports.items()}
    limits = {name: [found for found, _ in slices[name]] for name in LIMITS}
    return {
        "env": ATARI,
        "cores": usable_cores(),
        "rounds": rounds,
        "seconds": seconds,
        "contenders": reports,
        "ratios": ratios(rates),
        "limit": {name: limit(found, rates) for name, found in limits.items()},
    }


def report(slices: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    rates = [found["steps"] / found["seconds"] for found, _ in slices]
    cpu = [used / found["steps"] for found, used in slices]
    return {
        "steps_per_second": statistics.median(rates),
        "cpu_seconds_per_step": statistics.median(cpu),
        "steps": sum(found["steps"] for found, _ in slices),
        "counts": slices[0][0]["counts"],
        "note": slices[0][0]["note"],
        "slices": rates,
        "cpu_slices": cpu,
    }


def ratios(rates: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Return the ratios of rates of each Remuda contender to all others, and to the best peer of each round."""
    peers = [found for name, found in rates.items() if name not in OURS]
    best = {"best": [max(found) for found in zip(*peers, strict=True)]} if peers else {}
    return {
        f"{mine} / {other}": compared(rates[mine], found)
        for mine in rates
        if mine in OURS
        for other, found in {**rates, **best}.items()
        if other != mine
    }


def compared(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    return median_and_interval([a / b for a, b in zip(mine, other, strict=True)])


def limit(slices: Sequence[Sequence[dict[str, float]]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return the CPU cost of a step, the rate that it allows, and the fraction of that rate that Remuda reached."""
    costs = [{part: statistics.mean(each[part] for each in found) for part in found[0]} for found in slices]
    allowed = [usable_cores() / sum(each.values()) for each in costs]
    return {
        "cpu_seconds_per_step": {part: statistics.median(each[part] for each in costs) for part in costs[0]},
        "steps_per_second": statistics.median(allowed),
        "slices": allowed,
        "shares": {name: compared(found, allowed) for name, found in rates.items() if name in OURS},
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'':24} steps/s  CPU ms per step")
    for name, each in found["contenders"].items():
        print(f"{name:24} {each['steps_per_second']:7.1f}  {1000 * each['cpu_seconds_per_step']:.2f}  {each['note']}")
    for name, each in found["limit"].items():
        parts = ", ".join(f"{part} {1000 * cost:.2f}" for part, cost in each["cpu_seconds_per_step"].items())
        total = 1000 * sum(each["cpu_seconds_per_step"].values())
        print(f"{name:24} {each['steps_per_second']:7.1f}  {total:.2f}  {parts}")
    shares = {
        f"{mine} / {name}": share for name, each in found["limit"].items() for mine, share in each["shares"].items()
    }
    for name, (middle, low, high) in {**found["ratios"], **shares}.items():
        print(f"{name:48} {middle:.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a slice")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"of {'; '.join([*OURS, *PEERS])}; a peer also @WAY"
    )
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve == "limit":
        serve_limit()
        return
    if given.serve:
        serve_ours(OURS[given.serve])
        return
    # Stopped processes must not be left behind when this process is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        names = list(dict.fromkeys(given.only or [*OURS, *PEERS]))
        missing = {who for who, (place, _) in PEERS.items() if not (place / ".installed").exists()}
        absent = [name for name in names if parse(name)[0] in missing]
        if absent:
            print(f"left out, because `make peers` has not been run: {', '.join(absent)}", file=sys.stderr)
        found = compare([name for name in names if name not in absent], given.rounds, given.seconds)
    except RemudaError as error:
        raise SystemExit(f"{error}") from None
    show(found)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
