"""Every algorithm acts, computes losses and updates with networks on a device that is not the CPU.

FakeTensorMode raises on tensors of different devices. The tests also count the operations for which the CPU would
wait for the device; docs/devices.md lists these counts.
"""

from __future__ import annotations

from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import DEVICE, fake, fake_batch, fake_device, make_learner

from remuda.build.recipe import make_recipe
from remuda.config.resolve import resolve_config
from remuda.core import Clock
from remuda.devices import means_on_cpu
from remuda.envs import resolve
from remuda.learning import side_by_side
from remuda.learning.gradients import Gradients
from remuda.learning.weights import LocalWeights, SharedWeights
from remuda.nets import Standardize
from remuda.parts.learner import write_weighted
from remuda.registry import find_algorithm
from remuda.replay import RolloutBuffer
from remuda.sampling.device_agent import as_on_cpu
from remuda.schemes.learning_round import learn_due

MEMORY = {"agent": {"core": "lstm", "core_size": 8}}
SEQUENCE = {**MEMORY, "replay": {"sequence": 4, "burn_in": 2}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("ppo", "CartPole-v1", {}),
    "ppo with memory": ("ppo", "CartPole-v1", MEMORY),
    "a2c": ("a2c", "Pendulum-v1", {}),
    "a2c with memory": ("a2c", "CartPole-v1", MEMORY),
    "impala": ("impala", "CartPole-v1", {}),
    "impala with memory": ("impala", "CartPole-v1", {"agent": {"core": "gru", "core_size": 8}}),
    "appo": ("appo", "Pendulum-v1", {}),
    "appo with memory": ("appo", "CartPole-v1", MEMORY),
    "dqn": ("dqn", "CartPole-v1", {}),
    "dqn with memory": ("dqn", "CartPole-v1", SEQUENCE),
    "rainbow": ("rainbow", "CartPole-v1", {}),
    "rainbow with memory": ("rainbow", "CartPole-v1", SEQUENCE),
    "r2d1": ("r2d1", "CartPole-v1", {"agent": {"core_size": 8}, "replay": {"sequence": 4, "burn_in": 2}}),
    "ddpg": ("ddpg", "Pendulum-v1", {}),
    "ddpg with memory": ("ddpg", "Pendulum-v1", SEQUENCE),
    "td3": ("td3", "Pendulum-v1", {}),
    "td3 with memory": ("td3", "Pendulum-v1", SEQUENCE),
    "sac": ("sac", "Pendulum-v1", {}),
    "sac with memory": ("sac", "Pendulum-v1", SEQUENCE),
}


def real_run(case: str, precision: str = "fp32") -> tuple[Any, Any, Any, Any]:
    """Return configuration, properties of the env, a rollout and a batch of a run on the CPU."""
    algo, env, given = CASES[case]
    groups = {name: dict(values) for name, values in given.items()}
    groups["agent"] = {"hidden": (8,), "normalize_obs": True, "precision": precision, **groups.get("agent", {})}
    groups["sampler"] = {"envs": 4}
    if find_algorithm(algo).data == "replay":
        groups["algo"] = {"learning_starts": 0, "batch_size": 4}
        groups["replay"] = {"capacity": 400, **groups.get("replay", {})}
    else:
        groups["algo"] = {"n_steps": 8, "normalize_reward": True}
    if algo in ("ppo", "appo"):
        groups["algo"]["batch_size"] = 16
    config, spec, info = resolve_config({"algo": algo, "env": env, "steps": 1000}, groups)
    recipe = make_recipe(config, spec, info)
    learner = recipe.make_learner()
    agent = learner.algorithm.agent
    sampler = recipe.make_sampler(agent, LocalWeights(), 0, 0, lambda: False)
    replay = recipe.make_replay(agent, 0)
    sampler.reset(1)
    while True:
        rollout = sampler.collect()
        replay.add(learner.prepare(rollout))
        for batch in replay.batches():
            return config, info, rollout, batch


@pytest.mark.parametrize("case", CASES)
def test_agents_act_on_a_device_with_one_wait(case: str) -> None:
    config, info, rollout, _ = real_run(case)
    with fake_device() as waits:
        agent = as_on_cpu(make_learner(config, info).algorithm.agent)
        obs, width = fake(rollout.next_obs), sum(width for _, width in agent.noise)
        state = agent.initial_state(4)
        waits.counts.clear()
        action, output, following = agent.act(obs, state, torch.ones(4), torch.empty(4, width))
        assert waits.counts == {"wait": 1}
        if rollout.last_value is not None:
            assert agent.value(obs, state).device.type == "cpu"
            assert waits.counts == {"wait": 2}
        found = [action, *(output or ()), *(following or ())]
        tensors = [x for each in found if each is not None for x in (each if isinstance(each, tuple) else (each,))]
        assert {x.device.type for x in tensors if x is not None} == {"cpu"}


# Operations of one update for which the CPU waits: computing the gradients and applying them. docs/devices.md shows
# the same numbers. Selecting the real rows of sequences takes most of them, one for each tensor.
WAITS = {
    "ppo": 1,
    "ppo with memory": 14,
    "a2c": 1,
    "a2c with memory": 14,
    "impala": 14,
    "impala with memory": 16,
    "appo": 14,
    "appo with memory": 16,
    "dqn": 1,
    "dqn with memory": 11,
    "rainbow": 2,
    "rainbow with memory": 13,
    "r2d1": 13,
    "ddpg": 1,
    "ddpg with memory": 16,
    "td3": 1,
    "td3 with memory": 19,
    "sac": 1,
    "sac with memory": 20,
}


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_updates_on_a_device(case: str) -> None:
    config, info, _, batch = real_run(case)
    is_rollout = not config.algo_options.uses_replay
    with fake_device(batch.steps.mask.numel() if is_rollout else None) as waits:
        learner = make_learner(config, info)
        assert {p.device for group in learner.parameters.values() for p in group} == {DEVICE}
        waits.counts.clear()
        gradients = learner.gradients(fake_batch(batch))
        assert {piece.device for pieces in gradients.pieces.values() for piece in pieces} == {DEVICE}
        learner.apply(gradients)
        assert learner.version == 1
        assert waits.counts.total() == WAITS[case], waits.counts
        assert not waits.counts["copy from the CPU"]


def test_the_documentation_lists_the_waits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    listed = {}
    for name, plain, memory in ((cell.strip() for cell in row) for row in rows if len(row) == 3):
        listed |= {name.strip("`"): plain, f"{name.strip('`')} with memory": memory}
    for case, count in WAITS.items():
        assert listed["r2d1 with memory" if case == "r2d1" else case] == str(count), case


def test_a_round_waits_once_per_update_and_once_for_its_metrics() -> None:
    config, info, _, batch = real_run("ppo")
    with fake_device() as waits:
        learner = make_learner(config, info)
        replay = RolloutBuffer(num_epochs=3, batch_size=16, seed=0)
        batches = [fake_batch(each) for each in repeat(batch, 3)]
        replay.batches = lambda: iter(batches)  # type: ignore[method-assign]
        waits.counts.clear()
        metrics = learn_due(learner, replay, 0.0, 0, lambda: False)
        assert learner.version == 3
        assert waits.counts == {"scalar": 3, "wait": 1}
        assert {"train/loss", "train/grad_norm", "lag/gradient_to_update"} <= set(metrics)


@pytest.mark.parametrize("case", ["sac", "td3", "ddpg"])
def test_actor_and_critics_update_on_two_devices(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, info, _, batch = real_run(case)
    with fake_device() as waits:
        there = make_learner(config, info, torch.device("cpu")).algorithm
        monkeypatch.setattr(side_by_side, "deepcopy", lambda algorithm: there)
        monkeypatch.setattr(side_by_side, "ThreadPoolExecutor", OneThread)
        learner = make_learner(config, info, actor_device="cpu")
        learner.clock = Clock(version=1)  # TD3 updates its actor in every second update
        before = waits.counts["copy from the CPU"]
        gradients = learner.gradients(fake_batch(batch))
        assert set(gradients.pieces) == set(learner.parameters)
        assert {piece.device for pieces in gradients.pieces.values() for piece in pieces} == {DEVICE}
        learner.apply(gradients)
        assert waits.counts["copy from the CPU"] == before


class OneThread:
    """Replaces ThreadPoolExecutor, whose threads do not inherit the modes of torch."""

    def __init__(self, count: int, thread_name_prefix: str) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Any:
        return SimpleNamespace(result=lambda: function(*arguments))


def test_weights_are_published_from_a_device_with_one_wait() -> None:
    config, info, _, _ = real_run("sac")
    agent = make_recipe(config, resolve(config.env), info).make_learner().algorithm.agent
    weights = SharedWeights(agent)
    with fake_device() as waits:
        theirs = make_learner(config, info).algorithm.agent
        weights._module, weights._is_elsewhere = theirs, True
        waits.counts.clear()
        weights.publish(1)
        assert waits.counts == {"wait": 1}
    weights.close()


def test_gradients_on_a_device_are_written_to_the_vector_of_a_part_by_one_copy() -> None:
    with fake_device() as waits:
        pieces = (torch.empty(3, device=DEVICE), torch.empty(2, device=DEVICE))
        write_weighted(
            torch.empty(7), Gradients({"policy": pieces}, 0, {}, None, False), {"policy": 5, "value": 2}, 4.0
        )
        assert waits.counts.total() <= 1


def test_statistics_stay_on_the_cpu() -> None:
    standardize = Standardize((3,)).to("meta")
    assert {x.device.type for x in standardize.moments.state_dict().values()} == {"cpu"}
    assert standardize.shift.device == DEVICE


def test_means_are_over_tensors_and_floats() -> None:
    values: dict[str, list[torch.Tensor | float]] = {
        "mixed": [torch.tensor(2.0), 5.0, torch.tensor(4.0), 9.0],
        "tensors": [torch.tensor(1.0), torch.tensor(2.0)],
        "floats": [1.0, 2.0],
    }
    found = means_on_cpu(values)
    assert found == {"mixed": [5.0], "tensors": [1.5], "floats": [1.0, 2.0]}
