"""Tests that default presets reach the goals of docs/results.md on classic control; each takes minutes."""

import pytest

import remuda

pytestmark = pytest.mark.long


def final_returns(tmp_path, algo, env, steps, seeds, scheme="serial"):
    means = []
    for seed in seeds:
        out = tmp_path / f"{algo}-{env}-{seed}"
        run = remuda.train(
            algo, env, steps=steps, seed=seed, scheme=scheme, out=out, quiet=True, eval={"episodes": 100}
        )
        means.append(run.result["eval"]["mean_reward"])
    return means


def test_ppo_cartpole(tmp_path):
    assert min(final_returns(tmp_path, "ppo", "CartPole-v1", 200_000, (1, 2, 3, 4, 5))) >= 475


def test_a2c_cartpole(tmp_path):
    assert min(final_returns(tmp_path, "a2c", "CartPole-v1", 500_000, (1, 2, 3))) >= 475


def test_ppo_acrobot(tmp_path):
    means = final_returns(tmp_path, "ppo", "Acrobot-v1", 500_000, (1, 2, 3), "parallel")
    assert sum(means) / len(means) >= -90


def test_ppo_pendulum(tmp_path):
    means = final_returns(tmp_path, "ppo", "Pendulum-v1", 500_000, (1, 2, 3), "parallel")
    assert sum(means) / len(means) >= -250
