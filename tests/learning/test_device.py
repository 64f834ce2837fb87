"""Tests of a learner whose networks are on another device than those of the samplers.

These tests need no GPU. The lazy device of torch runs on the CPU but counts as another device: its tensors cannot be
mixed with CPU tensors or converted to numpy arrays directly. It supports neither parameters that are views of one
vector nor fused optimizers, chunk and split. The tests therefore cover gradients and published weights of algorithms
that do not need these, but not updates, memory, noisy nets or SAC. The device stays initialized, so each test uses a
process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import prestarted
import pytest

from remuda.build.recipe import make_recipe
from remuda.config.resolve import resolve_config
from remuda.errors import ConfigError
from remuda.registry import find_algorithm

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "impala": ("impala", "CartPole-v1", {"agent": {"normalize_obs": True}, "algo": {"normalize_reward": True}}),
    "appo, continuous": ("appo", "Pendulum-v1", {}),
    "dqn": ("dqn", "CartPole-v1", {"algo": {"dueling": True}, "replay": {"prioritized": True}}),
    "td3": ("td3", "Pendulum-v1", {}),
}


def parts(case: str) -> tuple[Any, Any, Any, Any]:
    """Return a learner, a rollout, a batch, and the recipe that creates the same learner again."""
    from remuda.learning.weights import LocalWeights

    algo, env, groups = CASES[case]
    groups = {name: dict(values) for name, values in groups.items()}
    groups.setdefault("algo", {})["optimizer"] = "rmsprop"
    groups.setdefault("sampler", {})["envs"] = 4
    groups.setdefault("agent", {})["hidden"] = (8,)
    if find_algorithm(algo).data == "replay":
        groups["algo"] |= {"learning_starts": 0, "batch_size": 4}
        groups.setdefault("replay", {})["capacity"] = 1000
    config, spec, info = resolve_config({"algo": algo, "env": env, "scheme": "serial", "steps": 1000}, groups)
    recipe = make_recipe(config, spec, info)
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    sampler = recipe.make_sampler(agent, LocalWeights(), 0, 0, lambda: False)
    replay = recipe.make_replay(agent, 0)
    sampler.reset(1)
    for _ in range(20):
        rollout = sampler.collect()
        replay.add(learner.prepare(rollout))
    batch = next(iter(replay.batches()))
    return learner, rollout, batch, recipe


def main(case: str) -> None:
    import torch._lazy.ts_backend

    import remuda.learning.learner as module
    from remuda.learning.weights import SharedWeights

    torch._lazy.ts_backend.init()
    learner, rollout, batch, recipe = parts(case)
    one_vector = module.as_one_vector
    module.as_one_vector = lambda group: torch.cat([parameter.detach().reshape(-1) for parameter in group])
    options = recipe.make_learner()
    elsewhere = module.Learner(
        options.algorithm,
        module.OptimizerOptions("rmsprop"),
        options.learning_rate,
        options.max_grad_norm,
        own_rates=options.own_rates,
        device="lazy",
    )
    module.as_one_vector = one_vector
    agent = elsewhere.algorithm.agent
    assert {parameter.device.type for parameter in agent.parameters()} == {"lazy"}
    mine, theirs = learner.gradients(batch), elsewhere.gradients(batch)
    for name, vector in mine.groups.items():
        torch.testing.assert_close(theirs.groups[name].cpu(), vector, rtol=2e-3, atol=1e-5)
    if batch.weight is not None:
        torch.testing.assert_close(theirs.priority, mine.priority, rtol=2e-3, atol=1e-5)
    for each in (learner, elsewhere):
        each.finish(rollout)
    copy = elsewhere.agent_on_cpu()
    assert {tensor.device.type for tensor in copy.state_dict().values()} == {"cpu"}
    weights = SharedWeights(agent, 3)
    acting = recipe.make_learner().algorithm.agent
    assert SharedWeights(acting, fd=weights.fd).pull(-1) == 3
    for name, tensor in learner.algorithm.agent.state_dict().items():
        torch.testing.assert_close(acting.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(copy.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long if c == "td3" else ()) for c in CASES])
def test_gradients_equal_those_of_the_cpu_and_agents_act_on_the_cpu(case: str) -> None:
    done = prestarted.run([sys.executable, __file__, case], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("scheme", "device", "words"), [
    ("serial", "cuda", "device=cuda is not on this machine: use cpu"),
    ("async", "cuda:63", "is not on this machine: use cpu"),
    ("async", "abacus", "is not on this machine: use cpu"),
    ("async", "meta", "is not on this machine: use cpu"),
    ("async", "hpu", "is not on this machine: use cpu"),
])  # fmt: skip
def test_unsupported_devices_are_refused(scheme: str, device: str, words: str) -> None:
    def build() -> Any:
        short = {"algo": "impala", "env": "CartPole-v1", "scheme": scheme, "device": device}
        return make_recipe(*resolve_config(short, {}))

    with pytest.raises(ConfigError, match=words):
        build()


if __name__ == "__main__":
    main(sys.argv[1])
