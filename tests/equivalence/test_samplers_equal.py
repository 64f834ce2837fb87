"""Tests that all samplers give the same run, whichever process runs inference and for however many envs at a time.

Matrix products with 8 rows and with 4 rows round alike on every machine that these tests ran on, so alternating slots
and workers that run inference on half a batch give bit-equal parameters. With 2 or 3 rows another kernel is used,
which adds in another order: there the first rollout agrees to 1e-6 (docs/samplers.md).
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
    padded = {"wait_reset": True}
    serial = train(tmp_path, "serial", env="puzzles:nested", sampler=padded)
    other = train(tmp_path, "other", env="puzzles:nested", scheme="parallel", sampler={**sampler, **padded})
    assert weights(serial) == weights(other)


def first_rollout(workers, slots, act):
    """Return a copy of the first rollout of a sampler built as a run builds it."""
    config = RunConfig(
        "ppo", "CartPole-v1", 1000, 3, "parallel", PPOOptions(n_steps=32, batch_size=64),
        sampler=SamplerOptions(envs=8, slots=slots, inference=act),
    )  # fmt: skip
    spec = resolve("CartPole-v1")
    agent = make_algorithm(config, probe(spec), find_net(config.agent)).agent
    if act == "workers":
        shared = SharedWeights(agent)
        sampler = make_worker_sampler(config, spec, probe(spec), workers, agent, shared, 0, lambda: False)
    else:
        envs = make_some_envs(config, spec, 8, slots, workers, lambda: False)
        sampler = EnvSampler(envs, agent, LocalWeights(), 32, 3)
    with contextlib.closing(sampler):
        sampler.reset(3)
        steps = sampler.collect().steps
        return {"action": steps.action.clone(), "obs": steps.obs.clone(), "value": steps.policy.value.clone()}


def test_small_batches_agree_to_rounding_in_the_first_rollout():
    torch.set_num_threads(1)
    serial = first_rollout(0, 1, "central")
    for workers, slots, act in ((0, 4, "central"), (3, 1, "workers")):
        other = first_rollout(workers, slots, act)
        assert torch.equal(serial["action"], other["action"])
        np.testing.assert_allclose(serial["obs"], other["obs"], atol=1e-6)
        np.testing.assert_allclose(serial["value"], other["value"], atol=1e-6)
