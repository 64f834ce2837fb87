"""Env steps per second of an Atari game with random actions: the bare AtariVectorEnv, our native backend, our pool.

    .venv/bin/python bench/atari.py --envs 16 --threads 2 --seconds 3 --slices 7

Slices alternate, because the machine's speed drifts, and their order is reversed every time; the median of the ratios
to `bare` is what counts. `bare again` is a second AtariVectorEnv: how far its ratio is from 1 is the noise of the
others. All play the same games with the same seeds and actions.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ale_py.vector_env import AtariVectorEnv

from remuda.core import env_seed
from remuda.envs import NativeEnvs, make_envs, resolve

ROOT = Path(__file__).parents[1]


def bare(spec, envs: int, threads: int, draw: Callable[[], np.ndarray]):
    """As the native backend makes it."""
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
    vector.reset(seed=np.asarray([env_seed(1, index, 0) for index in range(envs)]))
    return lambda: vector.step(draw())


def ours(spec, envs: int, threads: int, backend: str, draw: Callable[[], np.ndarray]):
    made = make_envs(spec, envs, threads, backend=backend)
    assert isinstance(made, NativeEnvs) == (backend == "ale")
    made.reset(seed=1)
    made.recv()

    def step() -> None:
        made.send(0, draw())
        made.recv()

    return made, step


def rate(step: Callable[[], object], envs: int, seconds: float) -> float:
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        step()
        count += envs
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--slices", type=int, default=7)
    parser.add_argument("--pool", action="store_true", help="also the process pool, with as many workers as threads")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "atari.json")
    given = parser.parse_args()
    spec = resolve(given.env)
    actions = resolve(given.env).build().action_space.n

    def drawing() -> Callable[[], np.ndarray]:
        generator = np.random.default_rng(0)
        return lambda: generator.integers(0, actions, given.envs)

    native, native_step = ours(spec, given.envs, given.threads, "ale", drawing())
    contestants = {"bare": bare(spec, given.envs, given.threads, drawing()), "native": native_step}
    contestants["bare again"] = bare(spec, given.envs, given.threads, drawing())
    closing = [native]
    if given.pool:
        pool, contestants["pool"] = ours(spec, given.envs, given.threads, "python", drawing())
        closing.append(pool)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(given.slices):
        order = list(contestants)
        for name in reversed(order) if index % 2 else order:
            rates[name].append(rate(contestants[name], given.envs, given.seconds))
    for envs in closing:
        envs.close()
    ratios = {
        name: statistics.median(ours / bare for ours, bare in zip(found, rates["bare"], strict=True))
        for name, found in rates.items()
    }
    settings = {"env": given.env, "envs": given.envs, "threads": given.threads, "seconds": given.seconds}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**settings, "steps_per_second": rates, "ratio_to_bare": ratios}, indent=1))
    print(f"| {given.env}, {given.envs} envs, {given.threads} threads | steps/s, median | ratio to bare, median |")
    print("|---|---|---|")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):,.0f} | {ratios[name]:.3f} |")
    print(f"-> {given.out}")


if __name__ == "__main__":
    main()
