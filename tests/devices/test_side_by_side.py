"""Gradients of actor and critics that are computed at the same time equal those that are computed in turn."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_placement import real_run

import remuda
from remuda.algorithms import SAC
from remuda.build.devices import has_halves
from remuda.build.recipe import make_recipe
from remuda.core import Clock
from remuda.envs import resolve
from remuda.learning.copied_weights import CopiedWeights
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions

CASES = ["sac", "sac with memory", "td3", "td3 with memory", "ddpg", "ddpg with memory"]


def learner_of(config: Any, info: Any, **options: Any) -> Learner:
    algorithm = make_recipe(config, resolve(config.env), info).make_learner().algorithm
    made = make_recipe(config, resolve(config.env), info).make_learner()
    return Learner(algorithm, options.pop("optimizer"), made.learning_rate, made.max_grad_norm, **options)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_computed_in_turn(case: str) -> None:
    config, info, _, batch = real_run(case)
    in_turn = learner_of(config, info, optimizer=OptimizerOptions())
    together = learner_of(config, info, optimizer=OptimizerOptions(), actor_device="cpu")
    for learner in (in_turn, together):
        learner.clock = Clock(version=1)  # TD3 updates its actor in every second update
    expected, found = in_turn.gradients(batch), together.gradients(batch)
    assert list(found.groups) == list(expected.groups)
    for name, vector in expected.groups.items():
        torch.testing.assert_close(found.groups[name], vector, rtol=1e-5, atol=1e-7)
    assert set(found.metrics) == set(expected.metrics)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(torch.as_tensor(found.metrics[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)
    together.close()


def test_actor_and_critics_are_computed_in_two_threads() -> None:
    config, info, _, batch = real_run("sac")
    learner = learner_of(config, info, optimizer=OptimizerOptions(), actor_device="cpu")
    threads = {}
    for name in ("actor_losses", "critic_losses"):
        compute = getattr(learner.algorithm, name)

        def recorded(*arguments: Any, name: str = name, compute: Any = compute) -> Any:
            threads[name] = threading.current_thread()
            return compute(*arguments)

        setattr(learner.algorithm, name, recorded)
    learner.gradients(batch)
    assert threads["critic_losses"] is threading.current_thread()
    assert threads["actor_losses"] is not threading.current_thread()
    learner.close()
    threads["actor_losses"].join(10)
    assert not threads["actor_losses"].is_alive()


def test_an_error_of_the_actor_reaches_the_caller() -> None:
    config, info, _, batch = real_run("sac")
    learner = learner_of(config, info, optimizer=OptimizerOptions(), actor_device="cpu")

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("of the actor")

    learner.algorithm.actor_losses = fail
    with pytest.raises(ZeroDivisionError, match="of the actor"):
        learner.gradients(batch)
    learner.close()


def test_runs_have_the_parameters_of_an_ordinary_run(tmp_path: Any) -> None:
    runs = [
        remuda.train(
            "sac",
            env="Pendulum-v1",
            steps=130,
            out=tmp_path / str(number),
            quiet=True,
            algo={"learning_starts": 100, "batch_size": 32, **algo},
            agent={"fast_path": False, "hidden": (16, 16)},
            eval={"episodes": 0},
        )
        for number, algo in enumerate([{}, {"actor_device": "cpu"}, {"critic_device": "cpu"}])
    ]
    whole, *others = ((run.path / "checkpoints/latest/tensors.safetensors").read_bytes() for run in runs)
    assert others == [whole, whole]


def test_copied_weights_copy_parameters_after_each_publication() -> None:
    module = torch.nn.Linear(2, 2)
    weights = CopiedWeights(module, torch.device("cpu"), version=3)
    assert weights.pull(-1) == 3
    with torch.no_grad():
        module.weight.fill_(5.0)
    assert weights.pull(3) == 3
    assert not torch.equal(weights.copy.weight, module.weight), "nothing was published"
    weights.publish(4)
    assert weights.pull(3) == 4
    assert torch.equal(weights.copy.weight, module.weight)
    for call in (weights.invitation, lambda: CopiedWeights.join(module, {}, [])):
        with pytest.raises(RuntimeError, match="stay in the learner's process"):
            call()


def test_a_subclass_with_losses_of_its_own_must_define_both_halves() -> None:
    class Changed(SAC):
        def losses(self, batch: Any, clock: Any) -> Any:
            return super().losses(batch, clock)

    class Whole(Changed):
        def critic_losses(self, batch: Any, clock: Any) -> Any:
            return super().critic_losses(batch, clock)

        def actor_losses(self, batch: Any, clock: Any) -> Any:
            return super().actor_losses(batch, clock)

    config, info, _, _ = real_run("sac")
    algorithm: Any = make_recipe(config, resolve(config.env), info).make_learner().algorithm
    for kind, expected in ((SAC, True), (Changed, False), (Whole, True)):
        algorithm.__class__ = kind
        assert has_halves(algorithm) is expected
