"""Measure updates per second from a filled replay: SAC on vectors and DQN on images, against Stable-Baselines3.

    .venv/bin/python bench/updates.py sac --batch 256            # HalfCheetah's sizes, nets of 256x256, two threads
    .venv/bin/python bench/updates.py sac --batch 8192 --seconds 4
    .venv/bin/python bench/updates.py dqn --batch 32             # stacks of four 84x84 frames, the Nature net
    .venv/bin/python bench/updates.py sac --out docs/speed/sac-256.json

Each contender is a separate process that waits for its turn; slices alternate. An update comprises drawing a batch,
losses, gradients, the optimizer step and target nets. `products` computes only the matrix products of one SAC update:
a lower bound of its time on this machine. SB3 is included after `make peers`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remuda.bench.turns import Contender, give_out, median_and_interval, serve

ROOT = Path(__file__).parents[1]
SB3 = ROOT / ".venv-sb3"
STORED = 2_000  # transitions in each replay
OBS, ACTION, WIDTH = 17, 6, 256  # sizes of HalfCheetah, and width of the nets

Update = Callable[[], Any]


def ours(algo: str, batch: int, threads: int, fast_path: bool = True, **settings: Any) -> Update:
    from remuda.build.recipe import make_recipe
    from remuda.config.resolve import resolve_config
    from remuda.machine import keep_memory

    keep_memory()  # as `remuda train` does

    groups: dict[str, Any] = {
        "algo": {"batch_size": batch, "learning_starts": STORED, **settings},
        "agent": {"fast_path": fast_path},
        "replay": {"capacity": 10_000},
        "scheme": {"threads": threads},
    }
    env = "HalfCheetah-v5" if algo == "sac" else "ALE/Pong-v5"
    if algo == "dqn":
        groups["algo"] |= {"double": False}  # as in SB3
    recipe = make_recipe(*resolve_config({"algo": algo, "env": env}, groups))
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    sampler, replay = (
        recipe.make_sampler(agent, recipe.make_weights(None, 0), 0, 0, lambda: False),
        recipe.make_replay(agent, 0),
    )
    sampler.reset(0)
    while replay.steps < STORED:
        replay.add(learner.prepare(sampler.collect()))

    def update() -> None:
        drawn = replay.draw()
        replay.feedback(drawn.key, learner.step(drawn).priority)

    return update


def sb3(algo: str, batch: int) -> Update:
    import gymnasium
    import numpy as np
    from stable_baselines3 import DQN, SAC
    from stable_baselines3.common.logger import configure

    if algo == "sac":
        model: Any = SAC("MlpPolicy", "HalfCheetah-v5", batch_size=batch, buffer_size=10_000)
        shape, action = (OBS,), lambda: rng.uniform(-1, 1, (1, ACTION)).astype(np.float32)
    else:

        class Images(gymnasium.Env):  # type: ignore[type-arg]
            """An env that only provides spaces, because the replay is filled directly."""

            observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
            action_space = gymnasium.spaces.Discrete(6)

        model = DQN("CnnPolicy", Images(), batch_size=batch, buffer_size=10_000, target_update_interval=1_000)
        shape, action = (4, 84, 84), lambda: rng.integers(0, 6, (1, 1))
    rng = np.random.default_rng(0)
    for _ in range(STORED):
        seen = [
            rng.integers(0, 256, (1, *shape), np.uint8) if algo == "dqn" else rng.standard_normal((1, *shape))
            for _ in range(2)
        ]
        model.replay_buffer.add(*seen, action(), rng.standard_normal(1), np.zeros(1), [{}])
    model.set_logger(configure(None, []))
    return lambda: model.train(gradient_steps=1, batch_size=batch)


def products(batch: int) -> Update:
    """Compute the forward products of actor and critics, and the backward products that their gradients need."""
    import torch

    def layers(width: int, outputs: int) -> list[tuple[int, int]]:
        return [(width, WIDTH), (WIDTH, WIDTH), (WIDTH, outputs)]

    actor, critic = layers(OBS, 2 * ACTION), layers(OBS + ACTION, 1)
    forward = [*actor * 2, *critic * 2 * 3]
    # Gradients of weights are needed for the actor and both critics. Gradients of inputs are needed back to the first
    # layer of each net and, for the actor's loss, through both critics back to the action.
    by_weights, by_inputs = [*actor, *critic * 2], [*actor[1:], *critic[1:] * 2, *critic * 2]
    x = {n: torch.randn(batch, n) for n in {size for pair in (*actor, *critic) for size in pair}}
    w = {pair: torch.randn(pair) for pair in (*actor, *critic)}

    def update() -> None:
        for a, b in forward:
            torch.mm(x[a], w[a, b])
        for a, b in by_weights:
            torch.mm(x[a].t(), x[b])
        for a, b in by_inputs:
            torch.mm(x[b], w[a, b].t())

    return update


def make(name: str, algo: str, batch: int, threads: int) -> Update:
    import torch

    if name == "remuda":
        update = ours(algo, batch, threads)
    elif name == "products":
        update = products(batch)
    else:
        update = sb3(algo, batch)
    torch.set_num_threads(threads)
    return update


def serve_updates(update: Update) -> None:
    """Warm up, and then measure updates whenever it is this process's turn."""
    for _ in range(3):
        update()

    def take(seconds: float) -> dict[str, float]:
        begin = now = time.perf_counter()
        count = 0
        while now < begin + seconds or count < 2:
            update()
            count += 1
            now = time.perf_counter()
        return {"updates": count, "seconds": now - begin}

    serve(take)


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let each contender update in turn; return updates per second and CPU seconds per update, by name and round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for turn in range(rounds + 1):
            for name, each in contenders.items():
                (found,), used = each.slice(seconds)
                if turn:  # the first turn is a warm-up
                    rates[name].append(found["updates"] / found["seconds"])
                    cpu[name].append(used / found["updates"])
    finally:
        for each in contenders.values():
            each.close()
    return rates, cpu


def compare(names: list[str], algo: str, batch: int, threads: int, rounds: int, seconds: float) -> dict[str, Any]:
    contenders = {
        name: Contender(
            [
                [
                    *("env", f"PYTHONPATH={ROOT / 'src'}"),  # Remuda is not installed for peers
                    SB3 / "bin/python" if name == "sb3" else sys.executable,
                    *(__file__, algo, "--serve", name, "--batch", batch, "--threads", threads),
                ]
            ]
        )
        for name in names
    }
    rates, cpu = take_turns(contenders, rounds, seconds)
    ratios = {
        f"remuda / {other}": median_and_interval([a / b for a, b in zip(rates["remuda"], rates[other], strict=True)])
        for other in names
        if other != "remuda"
    }
    per_second = {name: statistics.median(found) for name, found in rates.items()}
    cpu_each = {name: statistics.median(found) for name, found in cpu.items()}
    settings = {"algo": algo, "batch": batch, "threads": threads, "rounds": rounds, "seconds": seconds}
    return {**settings, "updates_per_second": per_second, "ratios": ratios, "cpu_seconds_per_update": cpu_each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algo", choices=["sac", "dqn"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a slice")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=["remuda", "sb3", "products"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_updates(make(given.serve, given.algo, given.batch, given.threads))
        return
    names = ["remuda", *(["sb3"] if (SB3 / ".installed").exists() else [])]
    names += ["products"] if given.algo == "sac" else []
    give_out(compare(names, given.algo, given.batch, given.threads, given.rounds, given.seconds), given.out)


if __name__ == "__main__":
    main()
