"""Contenders of `remuda bench envs|sampler|update`: processes that step envs, sample or learn for a given time.

    python -m remuda.bench.contenders '{"bench": "envs", "name": "pool", "env": "Hopper-v5", "envs": 8, "workers": 2}'

A contender that cannot run prints the reason and exits. Otherwise, it prints "ready" and then reads lines from
standard input. Each line is a number of seconds: the contender works for that time and then prints one line,
{"count": env steps or updates, "seconds": time taken}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from remuda.bench.job import complete, options, settings_for
from remuda.bench.turns import REFUSAL, serve
from remuda.core import Array, Space
from remuda.envs import make_envs, resolve
from remuda.errors import RemudaError
from remuda.machine import usable_cores

DRAWN = 1000  # random actions per env, drawn in advance and then used in rotation
Turn = Callable[[], int]  # function that does a little work and returns the number of env steps or updates made


def envs_turn(job: Mapping[str, Any]) -> Turn:
    """Return a function that steps envs with random actions and returns the number of env steps made.

    `job["name"]` decides whether the envs are in this process, in a pool of workers, or in a Gymnasium vector env.
    """
    count = job["envs"]
    if job["name"].startswith("gymnasium"):
        return gymnasium_turn(job)
    slots = 2 if "slots" in job["name"] else 1
    workers = 0 if job["name"] == "local" else job["workers"] or min(usable_cores(), count // slots)
    envs = make_envs(resolve(job["env"]), count, workers, slots, backend="python")
    drawn = draw_actions(envs.action, count // slots)
    envs.reset(0)
    for _ in range(slots):
        slot, _ = envs.recv()
        envs.send(slot, drawn[0])

    def step(action: Any) -> int:
        slot, answer = envs.recv()
        real = int(answer.mask.sum())
        envs.send(slot, action)
        return real

    return turn_over(drawn, step)


def gymnasium_turn(job: Mapping[str, Any]) -> Turn:
    """Return a function that steps a Gymnasium vector env and returns the number of env steps made.

    As in Remuda, a call of `step` that resets an env does not count as a step of that env.
    """
    import gymnasium

    kind = gymnasium.vector.SyncVectorEnv if job["name"] == "gymnasium sync" else gymnasium.vector.AsyncVectorEnv
    theirs = kind([lambda: resolve(job["env"]).build()] * job["envs"])
    theirs.reset(seed=0)
    theirs.action_space.seed(0)
    has_ended = np.zeros(job["envs"], bool)

    def step(action: Any) -> int:
        nonlocal has_ended
        real = int((~has_ended).sum())
        _, _, terminated, truncated, _ = theirs.step(action)
        has_ended = terminated | truncated
        return real

    return turn_over([theirs.action_space.sample() for _ in range(DRAWN)], step)


def turn_over(drawn: Sequence[Any], step: Callable[[Any], int]) -> Turn:
    row = 0

    def turn() -> int:
        nonlocal row
        row += 1
        return step(drawn[row % DRAWN])

    return turn


def draw_actions(space: Space, count: int) -> list[Any]:
    rng = np.random.default_rng(0)

    def leaf(_: str, of: Space) -> Array:
        if of.kind == "box":
            assert of.low is not None
            assert of.high is not None
            low, high = np.maximum(of.low, -1e3), np.minimum(of.high, 1e3)
            return rng.uniform(low, high, (count, *of.shape)).astype(of.dtype)
        most = of.n if of.kind == "discrete" else 2 if of.kind == "multibinary" else of.sizes
        return rng.integers(0, most, (count, *of.shape)).astype(of.dtype)

    return [space.tree(leaf) for _ in range(DRAWN)]


def sampler_turn(job: Mapping[str, Any]) -> Turn:
    """Return a function that collects one rollout and returns the number of env steps made.

    `job["name"]` decides whether envs and policy run in this process or in workers.
    """
    import torch

    from remuda.build.envs import num_workers
    from remuda.build.recipe import make_recipe
    from remuda.config.resolve import resolve_config

    name = job["name"]
    scheme = "serial" if name == "serial" else "parallel"
    samplers: dict[str, dict[str, Any]] = {"alternating": {"slots": 2}, "workers act": {"inference": "workers"}}
    own = {"envs": job["envs"], "workers": job["workers"], "scheme": scheme, "sampler": samplers.get(name, {})}
    settings = {"algo": "ppo", "env": job["env"], "scheme": scheme}
    setup = resolve_config(settings, any_net(options(complete(job["env"], own)), job["env"]))
    recipe = make_recipe(*setup)
    torch.set_num_threads(recipe.num_threads or 1)  # as many threads as a training run would use
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    weights = recipe.make_weights(agent, 0)
    workers = 0 if name == "serial" else num_workers(setup[0])
    sampler = recipe.make_sampler(agent, weights, workers, 0, lambda: False)
    sampler.reset(0)
    return lambda: int(sampler.collect().steps.mask.sum())


def update_turn(job: Mapping[str, Any]) -> Turn:
    """Return a function that makes all updates of one round and returns their number.

    Every call learns from the same rollout.
    """
    import torch

    from remuda.build.recipe import make_recipe
    from remuda.config.resolve import resolve_config

    name = job["name"]
    groups = any_net(options(complete(job["env"], {"envs": job["envs"]})), job["env"])
    groups["agent"] |= {"fast_path": name != "autograd", "compile": name == "compiled"}
    setup = resolve_config({"algo": "ppo", "env": job["env"]}, groups)
    torch.set_num_threads(2 if name == "two threads" else 1)
    recipe = make_recipe(*setup)
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    sampler = recipe.make_sampler(agent, recipe.make_weights(agent, 0), 0, 0, lambda: False)
    sampler.reset(0)
    rollout, replay = sampler.collect(), recipe.make_replay(agent, 0)
    learner.learning_rate = lambda progress: 1e-6  # hardly changes the agent, so that all updates do the same work

    def turn() -> int:
        replay.add(learner.prepare(rollout))
        return len([learner.step(minibatch) for minibatch in replay.batches()])

    return turn


def any_net(groups: dict[str, Any], env: str) -> dict[str, Any]:
    """Set the option `agent.net` in `groups` to auto if bench/job.py has no settings for the env; return `groups`."""
    if settings_for(env) is None:
        groups["agent"] |= {"net": "auto"}
    return groups


TURNS = {"envs": envs_turn, "sampler": sampler_turn, "update": update_turn}
NAMES = {
    "envs": ("local", "pool", "pool of two slots", "gymnasium sync", "gymnasium async"),
    "sampler": ("serial", "central", "alternating", "workers act"),
    "update": ("hand-written", "autograd", "compiled", "two threads"),
}
UNITS = {"envs": "env steps", "sampler": "env steps", "update": "updates"}


def main() -> None:
    job = json.loads(sys.argv[1])
    try:
        turn = TURNS[job["bench"]](job)
        turn()  # the first call is not measured, because it includes one-time work
    except RemudaError as error:
        print(f"{REFUSAL}{job['name']}: {error}", flush=True)
        return

    def take(seconds: float) -> dict[str, Any]:
        start, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            count += turn()
        return {"count": count, "seconds": taken}

    serve(take)


if __name__ == "__main__":
    main()
