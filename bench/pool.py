"""Measure env steps per second of the process pool, against one process, AsyncVectorEnv and SB3's SubprocVecEnv.

    .venv/bin/python bench/pool.py --env HalfCheetah-v5          # 32 envs, 2 workers, random actions drawn beforehand
    .venv/bin/python bench/pool.py --env CartPole-v1 --rounds 9 --out runs/pool-cartpole.json
    .venv/bin/python bench/pool.py --overlap busy                # EnvPool: two batches in flight against one

Each contender is a separate process that waits for its turn; slices alternate, because the speed of a machine drifts.
The contender `loop` is one process that makes its envs with gymnasium.make and only calls env.step and env.reset.
`share` is a contender's rate as a fraction of `workers` times the rate of `loop`. It is computed in each round; the
result is the median with the 95 % bootstrap interval. `bare loop` steps envs as Remuda makes them, without
Gymnasium's checks of the order of calls. `bare loops` runs one such process per worker, each with its part of the
envs and without communication, which gives an upper bound for this machine. Rows on which an env is reset are counted
as steps for peers, but not for Remuda. CPU seconds include all descendants of a contender. SB3 is included after
`make peers`.
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

from remuda.bench.turns import Contender, median_and_interval, serve

ROOT = Path(__file__).parents[1]
SB3 = ROOT / ".venv-sb3"
OURS = ("loop", "bare loop", "bare loops", "local", "pool", "pool, 2 slots")
ALL = (*OURS, "AsyncVectorEnv", "SubprocVecEnv")
DRAWN = 1000  # rows of random actions, which are used in rotation
Round = Callable[[np.ndarray], int]


def draw_actions(space: Any, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if hasattr(space, "n"):
        return rng.integers(0, space.n, (DRAWN, count))
    return rng.uniform(space.low, space.high, (DRAWN, count, *space.shape)).astype(np.float32)


def contender(name: str, env: str, count: int, workers: int) -> tuple[Round, Any]:
    """Return a function that steps every env once and returns the number of steps; also return the action space."""
    if name == "AsyncVectorEnv":
        import gymnasium

        vector = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make(env)] * count)
        vector.reset(seed=0)
        return lambda actions: len(vector.step(actions)[1]), vector.single_action_space
    if name == "SubprocVecEnv":
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv

        peer = make_vec_env(env, count, seed=0, vec_env_cls=SubprocVecEnv)
        peer.reset()
        return lambda actions: len(peer.step(actions)[1]), peer.action_space
    from remuda.envs import LocalEnvs, PooledEnvs, resolve

    spec = resolve(env)
    if "loop" in name:
        import gymnasium

        singles = [gymnasium.make(env) if name == "loop" else spec.build() for _ in range(count)]
        for index, single in enumerate(singles):
            single.reset(seed=index)

        def step_all(actions: np.ndarray) -> int:
            for single, action in zip(singles, actions, strict=True):
                _, _, terminated, truncated, _ = single.step(action)
                if terminated or truncated:
                    single.reset()
            return count

        return step_all, singles[0].action_space
    slots = 2 if name == "pool, 2 slots" else 1
    envs: Any = LocalEnvs(spec, count) if name == "local" else PooledEnvs(spec, count, workers, slots)
    envs.reset(seed=0)
    width = count // slots
    for slot in range(slots):
        envs.recv()
        envs.send(slot, np.zeros((width, *envs.action.shape), envs.action.dtype))

    def step_slots(actions: np.ndarray) -> int:
        steps = 0
        for _ in range(slots):
            slot, step = envs.recv()
            steps += np.count_nonzero(step.mask)
            envs.send(slot, actions[slot * width : (slot + 1) * width])
        return steps

    return step_slots, spec.build().action_space


def serve_one(name: str, env: str, count: int, workers: int) -> None:
    """Serve slices of one contender; a slice lasts a given number of seconds."""
    step, space = contender(name, env, count, workers)
    actions = draw_actions(space, count)
    rounds = 0

    def take(seconds: float) -> dict[str, float]:
        nonlocal rounds
        begin = now = time.perf_counter()
        steps = 0
        while now < begin + seconds:
            for _ in range(8):
                steps += step(actions[rounds % DRAWN])
                rounds += 1
            now = time.perf_counter()
        return {"steps": int(steps), "seconds": now - begin}

    serve(take)


def start(name: str, env: str, count: int, workers: int) -> Contender:
    python = SB3 / "bin/python" if name == "SubprocVecEnv" else sys.executable
    shares = [count // workers] * workers if name == "bare loops" else [count]
    served = "bare loop" if name == "bare loops" else name
    arguments = ["--serve", served, "--env", env, "--workers", workers]
    return Contender(
        [
            # Remuda is not installed in the virtual environments of peers.
            ["env", f"PYTHONPATH={ROOT / 'src'}", python, __file__, *arguments, "--envs", n]
            for n in shares
        ]
    )


def compare(names: list[str], env: str, count: int, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    contenders = {name: start(name, env, count, workers) for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    try:
        for each in contenders.values():
            each.slice(min(0.5, seconds))
        for _ in range(rounds):
            for name, each in contenders.items():
                found, used = each.slice(seconds)
                rates[name].append(sum(one["steps"] / one["seconds"] for one in found))
                cpu[name].append(1000 * used / sum(one["steps"] for one in found))
    finally:
        for each in contenders.values():
            each.close()
    best = [workers * rate for rate in rates["loop"]]
    shares = {name: median_and_interval(_ratios(rates[name], best)) for name in names}
    result = {
        name: {
            "steps_per_second": statistics.median(rates[name]),
            "share": shares[name][0],
            "interval": shares[name][1:],
            "cpu_seconds_per_1000_steps": statistics.median(cpu[name]),
            "slices": rates[name],
        }
        for name in names
    }
    peers = {
        f"{mine} / {peer}": statistics.median(_ratios(rates[mine], rates[peer]))
        for mine in names
        if mine.startswith("pool")
        for peer in ALL[len(OURS) :]
        if peer in names
    }
    return {"env": env, "envs": count, "workers": workers, "rounds": rounds, "contenders": result, "ratios": peers}


def _ratios(mine: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def overlap(rounds: int, seconds: float, kind: str) -> dict[str, Any]:
    """Measure EnvPool with an env and a model of 1 ms each: two batches in flight against one."""
    from remuda.envs.pool_futures import EnvPool

    cost = {"seconds": 0.001, "wait": kind, "length": 1_000_000}
    pools = [EnvPool("Remuda/Mock-v0", 1, 1, batches, kwargs=cost) for batches in (1, 2)]
    rates: list[list[float]] = [[], []]
    try:
        for turn in range(rounds + 1):
            for pool, found in zip(pools, rates, strict=True):
                pool.reset()
                rate = _rate_with_model(pool, seconds, kind)
                if turn:  # the first turn is a warm-up
                    found.append(rate)
    finally:
        for pool in pools:
            pool.close()
    one, two = (statistics.median(found) for found in rates)
    ratio = statistics.median(_ratios(rates[1], rates[0]))
    return {"kind": kind, "one batch": one, "two batches": two, "ratio": ratio, "slices": rates}


def _rate_with_model(pool: Any, seconds: float, kind: str) -> float:
    action = np.zeros(1, np.int64)
    batches = range(pool.num_batches)
    futures = [pool.step(batch, action) for batch in batches]
    begin, steps = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + seconds:
        for batch in batches:
            futures[batch].result()
            if kind == "sleep":
                time.sleep(0.001)
            else:
                end = time.perf_counter() + 0.001
                while time.perf_counter() < end:
                    pass
            futures[batch] = pool.step(batch, action)
            steps += 1
    return steps / (now - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a slice")
    parser.add_argument("--only", nargs="+", choices=ALL[1:], help="contenders in addition to loop (default: all)")
    parser.add_argument(
        "--overlap",
        choices=["busy", "sleep"],
        help="measure EnvPool instead, with a model and env that compute or sleep",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=ALL, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_one(given.serve, given.env, given.envs, given.workers)
        return
    if given.overlap:
        show(overlap(given.rounds, given.seconds, given.overlap), given.out)
        return
    names = ["loop", *(given.only or ALL[1:])]
    if not (SB3 / ".installed").exists():
        names = [name for name in names if name != "SubprocVecEnv"]
    show(compare(names, given.env, given.envs, given.workers, given.rounds, given.seconds), given.out)


def show(found: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
