"""Tests of learning with a known optimum: identity envs, Box actions, and values at both kinds of episode end."""

import numpy as np
import pytest
import torch

import remuda

PPO = {"n_steps": 64, "batch_size": 128, "n_epochs": 4, "learning_rate": "linear(3e-3, 0)", "ent_coef": 0.01}
PPO |= {"normalize_reward": False}  # values must be those of unscaled rewards
A2C = {"n_steps": 16, "learning_rate": "linear(1e-2, 0)", "optimizer": "adam", "normalize_advantage": True}
VTRACE = {"n_steps": 16, "learning_rate": "linear(1e-2, 0)"}
OPTIONS = {"ppo": PPO, "a2c": A2C, "impala": VTRACE, "appo": VTRACE}


def learn(tmp_path, algorithm, env, steps, scheme="serial", seed=1, gamma=0.5, **settings):
    options = {"algo": {**OPTIONS[algorithm], "gamma": gamma, **settings.pop("algo", {})}}
    options |= {"sampler": {"envs": 8}, "eval": {"episodes": 20}, "log": {"tensorboard": False}, **settings}
    return remuda.train(
        algorithm, env, steps=steps, seed=seed, scheme=scheme, out=tmp_path / "run", quiet=True, **options
    )


@pytest.mark.parametrize("kind", ["discrete", "float", "float64", "uint8", "image", "bool", "int"])
def test_ppo_learns_identity_with_every_kind_of_observation(tmp_path, kind):
    run = learn(tmp_path, "ppo", "puzzles:identity", 15_000, envs={"kwargs": {"kind": kind}})
    assert run.result["eval"]["mean_reward"] >= 9.9


LEARNERS = ("ppo", "a2c", "impala", "appo")
ENDS = ("truncate", "terminate")


@pytest.mark.parametrize(
    ("algo", "ends", "seed"),
    [
        pytest.param(algo, ends, seed, marks=() if seed == 1 and index % 2 == ENDS.index(ends) else pytest.mark.long)
        for index, algo in enumerate(LEARNERS)
        for ends in ENDS
        for seed in (1, 2)
    ],
)
def test_identity_is_learned_with_truncation_and_termination(tmp_path, algo, ends, seed):
    kwargs = {"ends": ends, "n": 3, "start": 2}  # actions do not start at 0
    run = learn(tmp_path, algo, "puzzles:identity", 15_000, seed=seed, envs={"kwargs": kwargs})
    assert run.result["eval"]["mean_reward"] >= 9.9


@pytest.mark.parametrize("scheme", ["serial", "parallel"])
def test_box_actions_with_truncation_only(tmp_path, scheme):
    run = learn(
        tmp_path, "ppo", "puzzles:follow", 30_000, scheme, agent={"log_std_init": -0.5}, algo={"ent_coef": 0.0}
    )
    # The optimum is 0; uniformly random actions score about -10.
    assert run.result["eval"]["mean_reward"] >= -0.25


def test_a2c_learns_box_actions(tmp_path):
    run = learn(tmp_path, "a2c", "puzzles:follow", 40_000, agent={"log_std_init": -0.5})
    assert run.result["eval"]["mean_reward"] >= -0.5


@pytest.mark.parametrize(("gamma", "walks"), [(0.99, True), (0.5, False)])
def test_patience_depends_on_the_discount(tmp_path, gamma, walks):
    """A reward of 1 after 5 steps competes with 0.2 now: 0.99^4 > 0.2 > 0.5^4."""
    run = learn(tmp_path, "ppo", "puzzles:corridor", 12_000, gamma=gamma, algo={"gae_lambda": 1.0})
    assert run.result["eval"]["mean_reward"] == pytest.approx(1.0 if walks else 0.2)


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
@pytest.mark.parametrize("ends", ["truncate", "terminate"])
def test_values_distinguish_truncation_from_termination(tmp_path, algo, ends):
    """The value is 1 / (1 - gamma) if episodes are truncated, and the finite sum if they terminate."""
    gamma = 0.8
    settings = {"gae_lambda": 0.9, "ent_coef": 0.0, "max_grad_norm": 0.0, "vf_coef": 1.0}
    kwargs = {"kwargs": {"ends": ends}}
    run = learn(tmp_path, algo, "puzzles:clockwork", 25_000, gamma=gamma, envs=kwargs, algo=settings)
    agent = run.agent()
    with torch.no_grad():
        values = agent.value(torch.eye(11)[: 5 if ends == "truncate" else 10], None).numpy()
    if ends == "truncate":
        expected = np.full(5, 1 / (1 - gamma))
    else:
        expected = np.array([(1 - gamma**left) / (1 - gamma) for left in range(10, 0, -1)])
    np.testing.assert_allclose(values, expected, atol=0.25)


def test_normalization_does_not_change_the_optimum(tmp_path):
    run = learn(tmp_path, "ppo", "puzzles:follow", 30_000, agent={"normalize_obs": True, "log_std_init": -0.5},
                algo={"normalize_reward": True, "ent_coef": 0.0})  # fmt: skip
    assert run.result["eval"]["mean_reward"] >= -0.25


def test_identity_is_not_learned_with_a_learning_rate_of_zero(tmp_path):
    """The tests above can fail: with a learning rate of 0, returns stay at those of random actions."""
    run = learn(tmp_path, "ppo", "puzzles:identity", 2_000, algo={"learning_rate": "0"})
    assert run.result["eval"]["mean_reward"] < 6
