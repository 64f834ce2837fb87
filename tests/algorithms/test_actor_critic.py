"""Tests of the base class of A2C and PPO: targets of a rollout, reward scaling, and observation statistics."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import pytest
import torch
from rollouts import make_agent, make_rollout, random_stream

from remuda.algorithms import A2C, APPO, IMPALA, PPO, ActorCritic, RewardScale
from remuda.data import Rollout
from remuda.envs import make_envs, resolve
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.weights import LocalWeights
from remuda.maths import ExplainedVariance, gae
from remuda.replay import RolloutBuffer
from remuda.sampling.sampler import EnvSampler

GAMMA, LAMBDA = 0.9, 0.8


def make_ppo(agent: Any = None, num_envs: int = 4, **options: Any) -> PPO:
    options = {"clip_range": lambda progress: 0.2, **options}
    return PPO(agent or make_agent(), num_envs, gamma=GAMMA, gae_lambda=LAMBDA, **options)


def test_advantages_are_gae_of_the_values_stored_while_acting() -> None:
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent, seed=1)
    with torch.no_grad():
        ppo.agent.value_head.bias.add_(5)  # current values must not matter
    batch = ppo.prepare(rollout)
    steps = rollout.steps
    v = torch.cat([steps.policy.value, rollout.last_value.unsqueeze(0)])
    expected = gae(steps.reward, steps.discount, steps.mask, v, GAMMA, LAMBDA)
    assert torch.equal(batch.targets.advantage, expected)
    assert not batch.targets.advantage[~steps.mask].any()


def test_value_target_is_advantage_plus_old_value() -> None:
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent, seed=1)
    targets = ppo.prepare(rollout).targets
    assert torch.equal(targets.value, targets.advantage + rollout.steps.policy.value)


def test_explained_variance_is_of_the_old_values_over_real_rows() -> None:
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent, seed=1)
    batch = ppo.prepare(rollout)
    mask = rollout.steps.mask
    assert not mask.all()
    expected = ExplainedVariance.of(rollout.steps.policy.value[mask], batch.targets.value[mask])
    assert float(batch.metrics["explained_variance"]) == float(expected)
    every_row = ExplainedVariance.of(rollout.steps.policy.value.flatten(), batch.targets.value.flatten())
    assert float(every_row) != float(expected)


def test_rollout_with_only_reset_rows_can_be_prepared() -> None:
    ppo = make_ppo(num_envs=2)
    rollout = make_rollout(ppo.agent, T=1, B=2)
    steps = rollout.steps.replace(mask=torch.zeros(1, 2, dtype=torch.bool))
    batch = ppo.prepare(Rollout(steps, rollout.next_obs, rollout.last_value))
    assert math.isnan(batch.metrics["explained_variance"])
    assert not batch.targets.advantage.any()


def scaled(scale: RewardScale, *rollout: Any) -> torch.Tensor:
    """Absorb the statistics of a rollout (rewards, masks, envs, begins), and return its scaled rewards."""
    scale.absorb(scale.statistics(*rollout))
    return scale(rollout[0])


def slow_reward_scale(
    rollouts: list[tuple[torch.Tensor, torch.Tensor]], gamma: float, begins: Any = None
) -> list[torch.Tensor]:
    """Divide rewards by the standard deviation of all running returns so far; they restart at 0 in each episode."""
    running, seen, out = [0.0] * rollouts[0][0].shape[1], [], []
    for number, (reward, mask) in enumerate(rollouts):
        if begins is not None:
            running = [0.0 if new else value for new, value in zip(begins[number].tolist(), running, strict=True)]
        for t in range(len(reward)):
            for b in range(len(running)):
                if mask[t, b]:
                    running[b] = gamma * running[b] + float(reward[t, b])
                    seen.append(running[b])
                else:
                    running[b] = 0.0
        mean = sum(seen) / len(seen)
        variance = sum((x - mean) ** 2 for x in seen) / len(seen)
        out.append((reward / math.sqrt(variance + 1e-8)).clamp(-10, 10))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_reward_scale_equals_a_slow_reference_over_several_rollouts(seed: int) -> None:
    streams = [random_stream(100 * seed + k, 9, 3) for k in range(6)]
    rollouts = [(stream.r_t.float() * 7, stream.mask_t) for stream in streams]
    scale = RewardScale(3, GAMMA)
    for (reward, mask), expected in zip(rollouts, slow_reward_scale(rollouts, GAMMA), strict=True):
        torch.testing.assert_close(scaled(scale, reward, mask), expected)


def test_reward_scale_restarts_where_an_episode_begins_without_a_masked_row() -> None:
    streams = [random_stream(k, 5, 3) for k in range(6)]
    rollouts = [(stream.r_t.float() + 2, stream.mask_t) for stream in streams]
    begins = [torch.rand(3, generator=torch.Generator().manual_seed(k)) < 0.5 for k in range(6)]
    scale = RewardScale(3, GAMMA)
    slow = slow_reward_scale(rollouts, GAMMA, begins)
    for (reward, mask), begin, expected in zip(rollouts, begins, slow, strict=True):
        torch.testing.assert_close(scaled(scale, reward, mask, None, begin), expected)


def returns_seen(is_padded: bool, then: str) -> tuple[float, float]:
    """Return count and mean of the running returns of three rollouts [4, 1] of CountingEnv.

    After each rollout the sampler is reset, has its state restored, or continues, according to `then`.
    """
    length = 4 if is_padded else 100
    envs = make_envs(resolve("counting:make", {"lengths": [length], "action": "discrete"}), 1)
    ppo = make_ppo(num_envs=1, normalize_reward=True)
    assert ppo.reward_scale is not None
    with closing(EnvSampler(envs, make_agent(), LocalWeights(0), 4, 0, wait_reset=is_padded)) as sampler:
        sampler.reset(0)
        for _ in range(3):
            rollout = sampler.collect()
            rollout.steps.reward.fill_(1.0)
            assert rollout.steps.mask.all()
            ppo.absorb(ppo.reward_statistics(rollout))
            if then == "reset":
                sampler.reset(0)
            elif then == "restore":
                sampler.set_state(sampler.get_state())
    return float(ppo.reward_scale.moments.count), float(ppo.reward_scale.moments.mean)


def test_running_returns_end_with_their_episode() -> None:
    """Running returns restart after a cut, and after an episode that wait_reset ends with its rollout."""
    returns = [sum(GAMMA**k for k in range(t + 1)) for t in range(12)]
    anew, carried = (12, pytest.approx(sum(returns[:4]) / 4)), (12, pytest.approx(sum(returns) / 12))
    assert returns_seen(False, "reset") == anew
    assert returns_seen(True, "nothing") == anew
    assert returns_seen(False, "nothing") == carried
    assert returns_seen(False, "restore") == carried, "a restored state continues its episode"


def test_reward_scale_divides_and_clips_without_shifting() -> None:
    scale = RewardScale(1, 0.0)
    rewards = torch.tensor([[3.0], [0.0], [0.0], [3.0]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    torch.testing.assert_close(scaled(scale, rewards, mask), rewards / 1.5)
    assert scaled(scale, torch.tensor([[-500.0]]), mask[:1]).item() > -10.01
    assert scaled(RewardScale(1, 0.0), torch.tensor([[0.0], [0.0]]), mask[:2]).tolist() == [[0.0], [0.0]]


def test_scaled_rewards_reach_the_advantages() -> None:
    plain, scaled = make_ppo(), make_ppo(normalize_reward=True)
    rollout = make_rollout(plain.agent, seed=2)
    scaled.agent.load_state_dict(plain.agent.state_dict())
    slow = slow_reward_scale([(rollout.steps.reward, rollout.steps.mask)], GAMMA)[0]
    scaled.absorb(scaled.reward_statistics(rollout))
    by_hand = Rollout(rollout.steps.replace(reward=slow), rollout.next_obs, rollout.last_value)
    torch.testing.assert_close(scaled.prepare(rollout).targets.advantage, plain.prepare(by_hand).targets.advantage)


def test_reward_statistics_are_part_of_the_state() -> None:
    first, second = make_ppo(normalize_reward=True), make_ppo(normalize_reward=True)
    rollouts = [make_rollout(first.agent, seed=seed) for seed in range(3)]
    first.prepare(rollouts[0])
    second.load_state_dict(first.state_dict())
    for rollout in rollouts[1:]:
        assert torch.equal(first.prepare(rollout).targets.advantage, second.prepare(rollout).targets.advantage)


@pytest.mark.parametrize("kind", [PPO, A2C, IMPALA, APPO])
def test_observation_statistics_are_frozen_until_the_rollout_is_finished(kind: type[ActorCritic]) -> None:
    agent = make_agent(normalize_obs=True)
    options: dict[str, Any] = {"clip_range": lambda progress: 0.2} if kind in (PPO, APPO) else {}
    options |= {"gae_lambda": LAMBDA} if kind in (PPO, A2C) else {}
    algorithm = kind(agent, 4, gamma=GAMMA, **options)
    learner = Learner(algorithm, OptimizerOptions(), lambda progress: 1e-3, 0.5)
    rollout = make_rollout(agent, seed=1)

    def statistics() -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in agent.state_dict().items() if "standardize" in name}

    before, replay = statistics(), RolloutBuffer(2, 8, 0, whole=kind in (IMPALA, APPO))
    replay.add(learner.prepare(rollout))
    for batch in replay.batches():
        learner.step(batch)
    assert all(torch.equal(before[name], x) for name, x in statistics().items())
    learner.finish(rollout)
    assert not rollout.steps.mask.all()
    obs = rollout.steps.obs[rollout.steps.mask].double()  # masked rows never enter a mean
    torch.testing.assert_close(agent.inputs.leaf_inputs[0].standardize.moments.mean, obs.mean(0))
    torch.testing.assert_close(agent.inputs.leaf_inputs[0].standardize.moments.var, obs.var(0, unbiased=False))
    torch.testing.assert_close(
        agent.inputs.leaf_inputs[0].standardize(obs.float()).std(0, unbiased=False), torch.ones(3)
    )


def test_padding_rows_never_enter_the_observation_statistics() -> None:
    """With episodes of three steps in rollouts of ten, all seven padding rows hold the final observation."""
    agent = make_agent(normalize_obs=True)
    ppo = make_ppo(agent, num_envs=2)
    envs = make_envs(resolve("counting:make", {"lengths": [3]}), 2)
    with closing(EnvSampler(envs, agent, LocalWeights(0), 10, 0, wait_reset=True)) as sampler:
        sampler.reset(0)
        for _ in range(2):
            rollout = sampler.collect()
            assert rollout.steps.mask.sum() == 6
            ppo.absorb(ppo.obs_statistics(rollout))
    moments = agent.inputs.leaf_inputs[0].standardize.moments
    assert moments.count == 12
    assert moments.mean[1:].tolist() == pytest.approx([1.5, 1.0]), "episodes 1 and 2, steps 0 to 2"
    assert moments.var[1:].tolist() == pytest.approx([0.25, 2 / 3])


def test_state_holds_only_parameters_without_normalization() -> None:
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent)
    assert not ppo.obs_statistics(rollout)
    assert not ppo.reward_statistics(rollout)
    ppo.absorb({})
    assert set(ppo.state_dict()) == {name for name, _ in ppo.named_parameters()}
    assert {id(p) for p in ppo.groups()["policy"]} == {id(p) for p in ppo.parameters()}
