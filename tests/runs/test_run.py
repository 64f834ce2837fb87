"""Test the policy of a finished run, for different spaces, and its evaluation."""

import json
import re

import gymnasium
import numpy as np
import pytest
import torch
from test_api import one_thread, train  # noqa: F401  (the fixture works by being here)

import remuda
from remuda.core import derive_seed
from remuda.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return remuda.load(train(tmp_path_factory.mktemp("policy") / "run").path)


class TestPolicy:
    def test_a_batch_of_observations_equals_single_ones(self, policy):
        batch = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
        actions, state = policy.act(batch)
        assert actions.shape == (5,)
        assert state is None
        singles = [policy.act(obs)[0] for obs in batch]
        assert singles == actions.tolist()
        assert all(gymnasium.spaces.Discrete(2).contains(action) for action in singles)

    def test_lists_tensors_and_other_dtypes_are_accepted(self, policy):
        expected = policy.act(np.array([0.1, 0.2, 0.3, 0.4], np.float32))[0]
        for obs in ([0.1, 0.2, 0.3, 0.4], torch.tensor([0.1, 0.2, 0.3, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])):
            assert policy.act(obs)[0] == expected

    def test_actions_are_greedy_or_sampled(self, policy):
        obs = np.zeros((400, 4), np.float32)
        best, _ = policy.act(obs)
        assert len(set(best.tolist())) == 1
        sampled, _ = policy.act(obs, deterministic=False)
        assert set(sampled.tolist()) == {0, 1}, "an untrained policy samples both actions"

    def test_sampled_actions_depend_only_on_the_seed(self, policy, tmp_path):
        agent = policy.agent
        one, two, other = remuda.Policy(agent, seed=3), remuda.Policy(agent, seed=3), remuda.Policy(agent, seed=4)
        obs = np.zeros((50, 4), np.float32)
        drawn = [p.act(obs, deterministic=False)[0].tolist() for p in (one, two, other)]
        assert drawn[0] == drawn[1] != drawn[2]

    @pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 2, 4), (5,), ()])
    def test_wrong_shapes_are_refused(self, policy, shape):
        with pytest.raises(ConfigError, match=re.escape(f"shape {shape} does not fit (4,)")):
            policy.act(np.zeros(shape))


class TestSpaces:
    def test_discrete_observations_that_do_not_start_at_0(self, tmp_path):
        run = train(tmp_path / "run", "counting:make", envs={"kwargs": {"observation": "discrete"}})
        policy = remuda.load(run.path)
        assert policy.act(5)[0] in range(4)
        assert policy.act(np.int64(1004))[0] in range(4)
        batch, _ = policy.act(np.arange(5, 12))
        assert batch.tolist() == [policy.act(k)[0] for k in range(5, 12)]

    @pytest.mark.parametrize("scheme", ["serial", "parallel"])
    def test_actions_that_do_not_start_at_0(self, tmp_path, scheme):
        """CountingEnv raises on an action outside its space, so a run without restarts had none."""
        run = train(tmp_path / "run", "counting:make", scheme=scheme, envs={"kwargs": {"action": "shifted"}})
        policy = remuda.load(run.path)
        actions, _ = policy.act(np.zeros((500, 3), np.float32), deterministic=False)
        assert set(actions.tolist()) == {-1, 0, 1, 2}
        assert run.evaluate(episodes=2)["episodes"] == 2
        assert run.result.get("episodes", 0) > 0
        last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["rollout/restarts"] == 0

    @pytest.mark.parametrize("scheme", ["serial", "parallel"])
    def test_box_actions_stay_inside_their_bounds(self, tmp_path, scheme):
        kwargs = {"action": "box", "lengths": [4]}
        run = train(
            tmp_path / "run",
            "counting:make",
            scheme=scheme,
            envs={"kwargs": kwargs},
            agent={"log_std_init": 2.0},
            sampler={"envs": 4, "decorrelate": 0},
        )
        last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["rollout/restarts"] == 0
        policy = remuda.load(run.path)
        actions, _ = policy.act(np.zeros((300, 3), np.float32), deterministic=False)
        assert actions.shape == (300, 2)
        assert actions.dtype == np.float32
        assert [actions.min(), actions.max()] == [-1.0, 1.0], "a policy this wide reaches both bounds"
        single, _ = policy.act(np.zeros(3, np.float32))
        assert single.shape == (2,)

    def test_the_policy_acts_in_pendulum(self, tmp_path):
        run = train(tmp_path / "run", "Pendulum-v1", sampler={"envs": 4, "decorrelate": 0})
        env, policy, rewards = gymnasium.make("Pendulum-v1"), remuda.load(run.path), []
        obs, _ = env.reset(seed=1)
        for _ in range(20):
            action, _ = policy.act(obs, deterministic=False)
            assert env.action_space.contains(action)
            obs, reward, *_ = env.step(action)
            rewards.append(reward)
        env.close()
        assert len(set(rewards)) == 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation") / "run"
    return train(path, rounds=6, eval={"episodes": 11, "seed": 4}, agent={"normalize_obs": True})


class TestEvaluation:
    def test_evaluate_equals_the_evaluation_of_the_run(self, run):
        assert run.result["eval"] == run.evaluate(episodes=11)
        assert run.result["eval"]["episodes"] == 11
        assert len(set(run.result["eval"]["returns"])) > 1

    def test_evaluate_is_repeatable_and_a_prefix_of_longer_ones(self, run):
        first = run.evaluate(episodes=3)
        assert first == run.evaluate(episodes=3)
        assert run.evaluate(episodes=5)["returns"][:3] == first["returns"]

    def test_evaluate_depends_on_its_own_seed(self, run):
        assert run.evaluate(episodes=11, seed=4) == run.result["eval"]
        assert run.evaluate(episodes=11, seed=5)["returns"] != run.result["eval"]["returns"]

    def test_evaluate_can_sample_actions(self, run):
        sampled = run.evaluate(episodes=11, deterministic=False)
        assert sampled == run.evaluate(episodes=11, deterministic=False)
        assert sampled["returns"] != run.result["eval"]["returns"]

    def test_evaluation_equals_episodes_played_with_gymnasium(self, run):
        """The first three episodes of the evaluation are repeated with Gymnasium and the policy alone."""
        policy, returns = remuda.load(run.path), []
        env = gymnasium.make("CartPole-v1")
        for k in range(3):
            obs, _ = env.reset(seed=derive_seed(4, k))
            total, over = 0.0, False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(policy.act(obs)[0])
                total, over = total + reward, terminated or truncated
            returns.append(total)
        env.close()
        assert returns == run.result["eval"]["returns"][:3]

    def test_evaluating_no_episodes_is_refused(self, run):
        with pytest.raises(ConfigError, match="at least 1"):
            run.evaluate(episodes=0)

    def test_an_unfinished_run_has_no_result(self, run, tmp_path):
        (tmp_path / "config.yaml").write_text((run.path / "config.yaml").read_text())
        with pytest.raises(CheckpointError, match="has no result yet"):
            _ = remuda.Run(tmp_path).result


@pytest.mark.long
def test_a_video_shows_whole_games_if_lives_end_episodes(tmp_path):
    options = {"episodic_life": True, "frame_skip": 8, "noop_max": 0}
    run = remuda.train(
        "a2c", "ALE/SpaceInvaders-v5", steps=40, seed=1, out=tmp_path / "run", quiet=True, envs=options,
        sampler={"envs": 4}, agent={"net": "a3c"}, log={"tensorboard": False}, eval={"episodes": 1},
    )  # fmt: skip
    _, returns = remuda.Run(run.path).record(episodes=1)
    assert returns == run.result["eval"]["returns"]
    assert returns[0] > 0, "returns of 0 would make the comparison meaningless"
