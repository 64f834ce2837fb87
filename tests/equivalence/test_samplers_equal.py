"""Tests that all samplers give the same run, whichever process runs inference and for however many envs at a time.

With small mlps, matrix products with 8 rows and with 4 rows round alike on every machine that these tests ran on, so
alternating slots and workers that run inference on half a batch give bit-equal parameters. With 2 or 3 rows another
kernel is used, which adds in another order: there the first rollout agrees to 1e-6 (docs/samplers.md). Convolutions
of 4 and of 8 images round alike on some machines only, so the test of nested observations checks this first.
"""

import contextlib

import numpy as np
import pytest
import torch
from test_bit_equal import train, weights

from remuda.build.algorithm import make_algorithm
from remuda.build.envs import make_some_envs
from remuda.build.nets import find_net
from remuda.build.workers import make_worker_sampler
from remuda.config.algo_options import PPOOptions
from remuda.config.run_config import RunConfig
from remuda.config.run_options import SamplerOptions
from remuda.data import leaves, map_tree
from remuda.envs import probe, resolve
from remuda.learning.weights import LocalWeights, SharedWeights
from remuda.sampling.sampler import EnvSampler

ALTERNATING = {"slots": 2, "workers": 2}
ACTING = {"inference": "workers", "workers": 2}


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("sampler", [ALTERNATING, ACTING], ids=["alternating", "acting workers"])
def test_same_parameters_after_20_rounds(tmp_path, env, sampler):
    serial = train(tmp_path, "serial", env=env)
    other = train(tmp_path, "other", env=env, scheme="parallel", sampler=sampler)
    assert weights(serial) == weights(other)
    assert serial.result["episodes"] == other.result["episodes"]


@pytest.mark.parametrize("core", ["lstm", pytest.param("gru", marks=pytest.mark.long)])
def test_with_memory_and_previous_actions(tmp_path, core):
    agent = {"core": core, "core_size": 16, "prev_action": True, "prev_reward": True}
    serial = train(tmp_path, "serial", agent=agent)
    for name, sampler in (("alternating", ALTERNATING), ("acting", ACTING)):
        other = train(tmp_path, name, agent=agent, scheme="parallel", sampler=sampler)
        assert weights(serial) == weights(other), name


@pytest.mark.parametrize(
    "sampler", [pytest.param(ALTERNATING, marks=pytest.mark.long), ACTING], ids=["alternating", "acting workers"]
)
def test_nested_spaces_and_padding(tmp_path, sampler):
    env, padded = "puzzles:nested", {"wait_reset": True}
    if halves_round_alike(env):
        serial = train(tmp_path, "serial", env=env, sampler=padded)
        other = train(tmp_path, "other", env=env, scheme="parallel", sampler={**sampler, **padded})
        assert weights(serial) == weights(other)
    else:
        whole = first_rollout(0, 1, "central", env, wait_reset=True)
        place = sampler["workers"], sampler.get("slots", 1), sampler.get("inference", "central")
        assert_nearly_equal(whole, first_rollout(*place, env, wait_reset=True))


def halves_round_alike(env: str) -> bool:
    """Return whether the nets for this env give the same bits for 8 observations as for two batches of 4."""
    torch.set_num_threads(1)
    agent, obs = make_agent(env), map_tree(lambda x: x[5], first_rollout(0, 1, "central", env)["obs"])
    outputs = []
    with torch.inference_mode():
        for rows in (slice(0, 8), slice(0, 4), slice(4, 8)):
            (policy, value), _ = agent.unroll(map_tree(lambda x: x[rows], obs), None, None)  # noqa: B023
            outputs.append([value, policy.entropy()])
    whole, *halves = outputs
    return all(torch.equal(a, torch.cat(parts)) for a, *parts in zip(whole, *halves, strict=True))


def make_config(env: str, **sampler) -> RunConfig:
    options = PPOOptions(n_steps=32, batch_size=64)
    return RunConfig("ppo", env, 1000, 3, "parallel", options, sampler=SamplerOptions(envs=8, **sampler))


def make_agent(env: str):
    config = make_config(env)
    return make_algorithm(config, probe(resolve(env)), find_net(config.agent)).agent


def first_rollout(workers, slots, act, env="CartPole-v1", wait_reset=False):
    """Return a copy of the first rollout of a sampler built as a run builds it."""
    config, spec = make_config(env, slots=slots, inference=act, wait_reset=wait_reset), resolve(env)
    agent = make_agent(env)
    if act == "workers":
        shared = SharedWeights(agent)
        sampler = make_worker_sampler(config, spec, probe(spec), workers, agent, shared, 0, lambda: False)
    else:
        envs = make_some_envs(config, spec, 8, slots, workers, lambda: False)
        sampler = EnvSampler(envs, agent, LocalWeights(), 32, 3, wait_reset=wait_reset)
    with contextlib.closing(sampler):
        sampler.reset(3)
        steps = sampler.collect().steps
        found = {"action": steps.action, "obs": steps.obs, "value": steps.policy.value}
        return {name: map_tree(torch.clone, value) for name, value in found.items()}


def assert_nearly_equal(one, other):
    """Assert that two rollouts have equal discrete actions, and observations and values that agree to 1e-6."""
    for (path, a), (_, b) in zip(leaves(one["action"]), leaves(other["action"]), strict=True):
        assert a.is_floating_point() or torch.equal(a, b), path
    for name in ("obs", "value", "action"):
        for (_, a), (_, b) in zip(leaves(one[name]), leaves(other[name]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_small_batches_agree_to_rounding_in_the_first_rollout():
    torch.set_num_threads(1)
    serial = first_rollout(0, 1, "central")
    for workers, slots, act in ((0, 4, "central"), (3, 1, "workers")):
        assert_nearly_equal(serial, first_rollout(workers, slots, act))
