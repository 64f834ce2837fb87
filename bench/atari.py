"""Measure env steps per second of an Atari game: ale-py's AtariVectorEnv, Remuda's native backend and its pool.

    .venv/bin/python bench/atari.py --envs 16 --threads 2 --steps 60 --slices 60

All contenders play the same games with the same seeds and random actions, and the same steps in every slice, because
the cost of a frame depends on its content. Slices alternate, because the speed of a machine drifts, and contenders
take turns in being first. The result is the median of the ratios to `bare`, which is the AtariVectorEnv, with its
95 % bootstrap interval. `bare again` is a second AtariVectorEnv: the distance of its ratio from 1 is the resolution
of the measurement. Each contender is a separate process; CPU time includes its threads and children.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ale_py.vector_env import AtariVectorEnv

from remuda.bench.turns import Contender, median_and_interval, serve
from remuda.core import derive_seed
from remuda.envs import NativeEnvs, make_envs, resolve

ROOT = Path(__file__).parents[1]
NAMES = ("bare", "native", "bare again", "pool")


def bare(spec, envs: int, threads: int, draw: Callable[[], np.ndarray]):
    """Return a function that steps an AtariVectorEnv with the settings of the native backend."""
    game = spec.game
    vector = AtariVectorEnv(
        game.rom,
        envs,
        num_threads=threads,
        repeat_action_probability=game.sticky,
        full_action_space=game.full_action_set,
        frameskip=game.frame_skip,
        max_num_frames_per_episode=game.max_frames,
        noop_max=game.options.noop_max,
        reward_clipping=False,
        use_fire_reset=False,
    )
    vector.reset(seed=np.asarray([derive_seed(1, index, 0) for index in range(envs)]))
    return lambda: vector.step(draw())


def ours(spec, envs: int, threads: int, name: str, draw: Callable[[], np.ndarray]):
    made = make_envs(spec, envs, threads, backend="ale" if name == "native" else "python")
    assert isinstance(made, NativeEnvs) == (name == "native")
    made.reset(seed=1)
    made.recv()

    def step() -> None:
        made.send(0, draw())
        made.recv()

    return step


def serve_one(name: str, env: str, envs: int, threads: int) -> None:
    """Serve slices of one contender; in a slice, every env takes a given number of steps."""
    spec, generator = resolve(env), np.random.default_rng(0)
    actions = spec.build().action_space.n

    def draw() -> np.ndarray:
        return generator.integers(0, actions, envs)

    step = bare(spec, envs, threads, draw) if name.startswith("bare") else ours(spec, envs, threads, name, draw)

    def take(steps: float) -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(int(steps)):
            step()
        return {"seconds": time.perf_counter() - start}

    serve(take)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="steps of each env in one slice")
    parser.add_argument("--slices", type=int, default=60)
    parser.add_argument(
        "--pool", action="store_true", help="measure the process pool as well, with one worker per thread"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "atari.json")
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_one(given.serve, given.env, given.envs, given.threads)
        return
    names = [name for name in NAMES if name != "pool" or given.pool]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    settings = ["--env", given.env, "--envs", given.envs, "--threads", given.threads]
    contenders = {name: Contender([[sys.executable, __file__, "--serve", name, *settings]]) for name in names}
    try:
        for index in range(given.slices + 1):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                found, cpu = contenders[name].slice(given.steps)
                if index:  # the first turn is a warm-up
                    times[name].append((found[0]["seconds"], cpu))
    finally:
        for each in contenders.values():
            each.close()
    rows = {}
    frames = given.steps * given.envs
    for name, found in times.items():
        seconds, cpus = np.transpose(found)
        ratio, *interval = median_and_interval([each for each, _ in times["bare"]] / seconds)
        rows[name] = {
            "steps_per_second": frames / float(np.median(seconds)),
            "ratio_to_bare": ratio,
            "interval": interval,
            "cpu_seconds_per_1000_steps": 1000 * float(np.median(cpus)) / frames,
        }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "serve")}
    given.out.write_text(json.dumps({**settings, "contestants": rows, "times": times}, indent=1))
    print(
        f"| {given.env}, {given.envs} envs, {given.threads} threads | steps/s | ratio to bare | CPU s/1,000 steps |"
    )
    print("|---|---|---|---|")
    for name, row in rows.items():
        low, high = row["interval"]
        ratio = f"{row['ratio_to_bare']:.3f} ({low:.3f} to {high:.3f})"
        print(f"| {name} | {row['steps_per_second']:,.0f} | {ratio} | {row['cpu_seconds_per_1000_steps']:.3f} |")
    print(f"-> {given.out}")


if __name__ == "__main__":
    main()
