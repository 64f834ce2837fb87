"""Tests of learning with nested spaces and with memory, in tasks with a known optimum."""

import pytest

import remuda

PPO = {"n_steps": 64, "batch_size": 128, "n_epochs": 4, "learning_rate": "linear(3e-3, 0)", "gamma": 0.5}


def learn(tmp_path, env, steps, scheme="serial", seed=1, algorithm="ppo", **settings):
    options = {"algo": {**PPO, **settings.pop("algo", {})}, "sampler": {"envs": 8, **settings.pop("sampler", {})}}
    options |= {"eval": {"episodes": 20}, "log": {"tensorboard": False}, **settings}
    return remuda.train(
        algorithm, env, steps=steps, seed=seed, scheme=scheme, out=tmp_path / "run", quiet=True, **options
    )


def test_nested_observations_and_multidiscrete_actions(tmp_path):
    run = learn(tmp_path, "puzzles:nested", 16_000, agent={"shared": True})
    assert run.result["eval"]["mean_reward"] >= 9.5


@pytest.mark.parametrize("kind", ["tuple", pytest.param("dict", marks=pytest.mark.long)])
def test_nested_actions_of_several_kinds(tmp_path, kind):
    agent, kwargs = {"log_std_init": -0.5, "shared": True}, {"kwargs": {"kind": kind}}
    run = learn(tmp_path, "puzzles:mixed", 30_000, agent=agent, envs=kwargs)
    assert run.result["eval"]["mean_reward"] >= 9.5
    policy = remuda.load(run.path)
    env = __import__("puzzles").mixed(kind=kind)
    obs, _ = env.reset(seed=3)
    action, state = policy.act(obs)
    assert env.action_space.contains(action)
    assert state is None


RECALL = {"cues": 2, "delay": 3}


@pytest.mark.parametrize("core", ["lstm", pytest.param("gru", marks=pytest.mark.long), None])
def test_cue_is_recalled_only_with_a_recurrent_core(tmp_path, core):
    algo = {"gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01, "batch_size": 256}
    run = learn(
        tmp_path, "Remuda/Recall-v0", 40_000, algo=algo, agent={"core": core, "core_size": 32, "shared": True},
        sampler={"envs": 16}, envs={"kwargs": RECALL}, eval={"episodes": 100},
    )  # fmt: skip
    right = run.result["eval"]["mean_reward"]
    assert right >= 0.95 if core else 0.3 <= right <= 0.7


@pytest.mark.long
def test_a2c_with_a_recurrent_core_recalls_the_cue(tmp_path):
    algo = {"n_steps": 16, "learning_rate": "linear(5e-3, 0)", "optimizer": "adam", "gamma": 0.99, "ent_coef": 0.01}
    run = remuda.train(
        "a2c", "Remuda/Recall-v0", steps=80_000, seed=1, out=tmp_path / "run", quiet=True, algo=algo,
        agent={"core": "gru", "core_size": 32}, sampler={"envs": 16}, envs={"kwargs": RECALL}, eval={"episodes": 100},
    )  # fmt: skip
    assert run.result["eval"]["mean_reward"] >= 0.95
