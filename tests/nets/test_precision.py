"""Networks in bfloat16: features are float32 and close to those of float32 networks, and agents learn with them."""

import pytest
import torch
from torch import nn

import remuda
from remuda.build.recipe import make_recipe
from remuda.config.resolve import resolve_config
from remuda.nets import MLP, Bfloat16


def test_features_are_float32_and_close_to_those_of_float32() -> None:
    torch.manual_seed(0)
    net = MLP((8,), (64, 64), "tanh")
    x = torch.randn(32, 8)
    found, expected = Bfloat16(net)(x), net(x)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_gradients_reach_float32_parameters() -> None:
    net = Bfloat16(nn.Linear(8, 4))
    net(torch.randn(16, 8)).square().mean().backward()
    assert net.net.weight.grad is not None
    assert net.net.weight.grad.dtype == torch.float32


def test_nets_without_parameters_are_supported() -> None:
    assert Bfloat16(nn.Flatten())(torch.zeros(3, 2, 2)).shape == (3, 4)


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("dqn", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_all_networks_of_an_agent_compute_in_bfloat16(algo: str, env: str) -> None:
    groups = {"agent": {"precision": "bf16"}}
    config, spec, info = resolve_config({"algo": algo, "env": env, "steps": 1000}, groups)
    algorithm = make_recipe(config, spec, info).make_learner().algorithm
    inside = {id(module) for net in algorithm.modules() if isinstance(net, Bfloat16) for module in net.modules()}
    outside = [
        name for name, module in algorithm.named_modules() if isinstance(module, MLP) and id(module) not in inside
    ]
    assert inside
    assert not outside


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_runs_train_resume_and_evaluate(tmp_path, algo: str, env: str) -> None:
    options = {"learning_starts": 100} if algo == "sac" else {"n_steps": 32, "batch_size": 64, "n_epochs": 2}
    run = remuda.train(
        algo,
        env=env,
        steps=150,
        out=tmp_path,
        quiet=True,
        algo=options,
        agent={"precision": "bf16", "hidden": (32, 32)},
        eval={"episodes": 1},
    )
    again = remuda.resume(run.path, steps=300, quiet=True)
    assert again.evaluate(episodes=1)["episodes"] == 1


def test_learning_computes_the_log_probabilities_that_acting_stored() -> None:
    config, spec, info = resolve_config({"algo": "ppo", "env": "CartPole-v1"}, {"agent": {"precision": "bf16"}})
    agent = make_recipe(config, spec, info).make_learner().algorithm.agent
    obs = torch.randn(64, 4)
    with torch.no_grad():
        action, stored, _ = agent.act(obs, None, None, torch.rand(64, 1))
    outputs, _ = agent.unroll(obs, None, None)
    torch.testing.assert_close(outputs.distribution.log_prob(action), stored.log_prob)
