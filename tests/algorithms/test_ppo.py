"""Tests of the implementation details of PPO; docs/algorithms/ppo.md refers to them by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import box, discrete, make_agent, make_rollout

from remuda import fast
from remuda.algorithms import PPO, Targets
from remuda.config.algo_options import PPOOptions
from remuda.core import Clock, Episode, Space, Step
from remuda.data import Batch, Rollout
from remuda.fast.policy_losses import ppo_gradients
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import LocalWeights
from remuda.replay import RolloutBuffer
from remuda.sampling.sampler import EnvSampler, ToEnv
from remuda.schemes.learning_round import learn

SPACES = [discrete(4), box((2,))]


def make_ppo(agent: Any = None, **options: Any) -> PPO:
    options = {"clip_range": lambda progress: 0.2, "gae_lambda": 0.95, **options}
    return PPO(agent or make_agent(), 4, gamma=0.99, **options)


def make_learner(ppo: PPO, rate: str = "1e-2", max_grad_norm: float | None = 0.5) -> Learner:
    return Learner(ppo, OptimizerOptions(), parse_schedule(rate), max_grad_norm, fast_path=fast.find(ppo))


def moved(ppo: PPO, seed: int = 1, **options: Any) -> Batch:
    """Return a flat batch of real rows of an agent that has changed since, so that ratios differ from 1."""
    rollout = make_rollout(ppo.agent, seed=seed, **options)
    with torch.no_grad():
        for parameter in ppo.agent.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    (batch,) = batches(ppo, rollout, None)
    return batch


def batches(ppo: PPO, rollout: Rollout, batch_size: int | None, num_epochs: int = 1) -> list[Batch]:
    replay = RolloutBuffer(num_epochs, batch_size, seed=0)
    with torch.no_grad():
        replay.add(ppo.prepare(rollout))
    return list(replay.batches())


def log_ratio(ppo: PPO, batch: Batch) -> torch.Tensor:
    outputs, _ = ppo.agent.unroll(batch.steps.obs, None, None)
    return (outputs.distribution.log_prob(batch.steps.action) - batch.steps.policy.log_prob).detach()


@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
def test_ratios_of_the_first_minibatch_are_one(action: Space) -> None:
    ppo = make_ppo(make_agent(action=action))
    first, *_ = batches(ppo, make_rollout(ppo.agent), 8)
    assert log_ratio(ppo, first).abs().max() < 1e-6
    losses = ppo.losses(first, Clock())
    assert losses.metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert losses.metrics["clip_fraction"] == 0


def test_reset_rows_enter_no_loss() -> None:
    """The contents of reset rows do not change the loss of any minibatch."""
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent, seed=1)
    mask = rollout.steps.mask
    assert (~mask).sum() > 2
    before = [ppo.losses(batch, Clock()).groups["policy"].item() for batch in batches(ppo, rollout, 8)]
    rollout.steps.action[~mask] = 0
    rollout.steps.policy.log_prob[~mask] = -50.0
    rollout.steps.reward[~mask] = 1e6
    assert [ppo.losses(batch, Clock()).groups["policy"].item() for batch in batches(ppo, rollout, 8)] == before


def test_loss_is_policy_plus_value_minus_entropy() -> None:
    ppo = make_ppo(ent_coef=0.03, vf_coef=0.7)
    batch = moved(ppo)
    metrics = ppo.losses(batch, Clock()).metrics
    distribution = ppo.agent.unroll(batch.steps.obs, None, None)[0].distribution
    assert metrics["entropy_loss"] == pytest.approx(-distribution.entropy().mean().item())
    expected = metrics["policy_gradient_loss"] + 0.7 * metrics["value_loss"] + 0.03 * metrics["entropy_loss"]
    assert metrics["loss"] == pytest.approx(float(expected))


@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
def test_the_entropy_bonus_raises_entropy(action: Space) -> None:
    ppo = make_ppo(make_agent(action=action), ent_coef=100.0, vf_coef=0.0)
    batch = moved(ppo)
    learner = make_learner(ppo)
    before = ppo.agent.unroll(batch.steps.obs, None, None)[0].distribution.entropy().mean()
    learner.step(batch)
    assert ppo.agent.unroll(batch.steps.obs, None, None)[0].distribution.entropy().mean() > before


def test_the_surrogate_is_clipped_at_the_range() -> None:
    ppo = make_ppo(normalize_advantage=False)
    batch = moved(ppo)
    rows = list(zip(log_ratio(ppo, batch).exp().tolist(), batch.targets.advantage.tolist(), strict=True))
    gains = [min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) for ratio, advantage in rows]
    loss = ppo.losses(batch, Clock()).metrics["policy_gradient_loss"]
    assert loss == pytest.approx(-sum(gains) / len(gains), rel=1e-4)


def with_large_ratio(ppo: PPO, advantage: float, log_ratio_of_row: float) -> Batch:
    """Return a batch whose row 0 has the given advantage and log-ratio."""
    batch = moved(ppo)
    advantages, log_prob = batch.targets.advantage.clone(), batch.steps.policy.log_prob.clone()
    advantages[0] = advantage
    log_prob[0] += log_ratio(ppo, batch)[0] - log_ratio_of_row
    policy = batch.steps.policy.replace(log_prob=log_prob)
    return replace(
        batch,
        steps=batch.steps.replace(policy=policy),
        targets=batch.targets.replace(advantage=advantages),
    )


def both_gradients(ppo: PPO, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient from autograd and the one from the fast path."""
    compute = ppo_gradients(ppo)
    assert compute is not None
    found = compute(batch, Clock())
    assert found is not None
    (loss,) = ppo.losses(batch, Clock()).groups.values()
    pieces = torch.autograd.grad(loss, ppo.groups()["policy"])
    return torch.cat([piece.reshape(-1) for piece in pieces]), found.groups["policy"]


@pytest.mark.parametrize("advantage", [1.5, 0.0])
@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
def test_clipped_row_whose_ratio_overflows_has_no_gradient_on_either_path(action: Space, advantage: float) -> None:
    found = []
    for size in (2.0, 300.0):  # both are far beyond the clip range, but exp(300) is infinite in float32
        ppo = make_ppo(make_agent(action=action), normalize_advantage=False, vf_coef=0.5, ent_coef=0.01)
        found += both_gradients(ppo, with_large_ratio(ppo, advantage, size))
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    assert found[0].norm() > 0.1
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_fast", [False, True], ids=["autograd", "fast path"])
def test_unclipped_ratio_that_overflows_skips_the_update_without_warnings(is_fast: bool) -> None:
    """With a negative advantage the loss is unbounded. Warnings of numpy are errors in this test suite."""
    ppo = make_ppo(normalize_advantage=False)
    batch = with_large_ratio(ppo, -1.5, 300.0)
    learner = Learner(
        ppo, OptimizerOptions(), parse_schedule("1e-2"), 0.5, fast_path=fast.find(ppo) if is_fast else None
    )
    before = learner.vectors["policy"].clone()
    learner.step(batch)
    assert learner.skipped == 1
    assert torch.equal(learner.vectors["policy"], before)


def test_advantages_are_normalized_in_each_minibatch() -> None:
    ppo = make_ppo()
    rollout = make_rollout(ppo.agent, seed=1)
    parts = batches(ppo, rollout, 8)
    assert len(parts) > 1
    for batch in parts:
        advantage = batch.targets.advantage
        expected = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        found = ppo.losses(batch, Clock()).metrics["policy_gradient_loss"]
        assert found == pytest.approx(-expected.mean().item(), abs=1e-5)  # ratios are 1 here
    batch = moved(ppo)
    stretched = Batch(batch.steps, Targets(batch.targets.advantage * 50 - 7, batch.targets.value))
    losses = [ppo.losses(each, Clock()).metrics["policy_gradient_loss"] for each in (batch, stretched)]
    assert losses[0] == pytest.approx(float(losses[1]), abs=1e-5)
    plain = make_ppo(ppo.agent, normalize_advantage=False)
    assert plain.losses(batch, Clock()).metrics["policy_gradient_loss"] != pytest.approx(float(losses[0]), abs=1e-3)


def test_values_are_clipped_around_the_old_ones() -> None:
    ppo = make_ppo(clip_range_vf=parse_schedule("linear(0.2, 0.1)"))
    batch = moved(ppo)
    value, old, target = (
        ppo.agent.unroll(batch.steps.obs, None, None)[0].value,
        batch.steps.policy.value,
        batch.targets.value,
    )
    assert ((value - old).abs() > 0.2).any()
    for progress, clip in ((0.0, 0.2), (1.0, 0.1)):
        near = torch.minimum(torch.maximum(value, old - clip), old + clip)
        expected = torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
        found = ppo.losses(batch, Clock(progress=progress)).metrics["value_loss"]
        assert found == pytest.approx(expected.item(), rel=1e-5)
    unclipped = make_ppo(ppo.agent).losses(batch, Clock()).metrics["value_loss"]
    assert unclipped == pytest.approx((value - target).square().mean().item(), rel=1e-5)


def known_ratios(ppo: PPO, ratios: list[float]) -> Batch:
    """Return real rows whose stored log_prob yields the given ratios."""
    rows = moved(ppo).rows(slice(0, len(ratios)))
    now = ppo.agent.unroll(rows.steps.obs, None, None)[0].distribution.log_prob(rows.steps.action).detach()
    said = rows.steps.policy.replace(log_prob=now - torch.tensor(ratios).log())
    return Batch(rows.steps.replace(policy=said), rows.targets)


def test_approx_kl_and_clip_fraction_by_worked_numbers() -> None:
    ppo = make_ppo()
    ratios = [1.0, 1.1, 0.9, 1.3, 0.5]
    metrics = ppo.losses(known_ratios(ppo, ratios), Clock()).metrics
    assert metrics["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5, rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(0.4)


@pytest.mark.parametrize(("share", "stops"), [(0.9, True), (1.1, False)])
def test_target_kl_stops_before_the_batch_is_applied(share: float, stops: bool) -> None:
    """The limit is 1.5 times the target, and a batch that exceeds it changes no parameter."""
    ppo = make_ppo()
    batch = moved(ppo)
    kl = float(ppo.losses(batch, Clock()).metrics["approx_kl"])
    ppo.target_kl = kl / 1.5 * share
    learner = make_learner(ppo)
    before = [parameter.detach().clone() for parameter in ppo.parameters()]
    result = learner.step(batch)
    same = all(torch.equal(a, b) for a, b in zip(before, ppo.parameters(), strict=True))
    assert (result.stop, learner.version, same) == (stops, 0 if stops else 1, stops)


def test_target_kl_skips_the_remaining_batches_of_the_round() -> None:
    ppo = make_ppo(target_kl=1e-4)
    rollout, learner = make_rollout(ppo.agent), make_learner(ppo, rate="0.1")
    learn(learner, RolloutBuffer(10, 8, seed=0), rollout)
    assert 1 <= learner.version < 10
    again = make_learner(make_ppo())
    learn(again, RolloutBuffer(10, 8, seed=0), make_rollout(again.algorithm.agent))
    assert again.version == 40


def test_learning_rate_and_clip_range_follow_their_schedules() -> None:
    ppo = make_ppo(clip_range=parse_schedule("piecewise(0:0.4, 0.5:0.2, 1:0.1)"))
    learner = make_learner(ppo, rate="linear(1e-2, 0)")
    rates, clips = [], []
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        learner.set_progress(progress)
        metrics, _ = learn(learner, RolloutBuffer(1, 16, seed=0), make_rollout(ppo.agent))
        rates.append(metrics["train/learning_rate"])
        clips.append(metrics["train/clip_range"])
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0])
    assert clips == pytest.approx([0.4, 0.3, 0.2, 0.15, 0.1])


def test_smaller_clip_range_clips_more() -> None:
    ppo = make_ppo(clip_range=parse_schedule("linear(0.5, 0.01)"))
    batch = moved(ppo)
    fractions = [ppo.losses(batch, Clock(progress=p)).metrics["clip_fraction"] for p in (0.0, 0.5, 1.0)]
    assert fractions[0] < fractions[1] < fractions[2]


def test_defaults_of_the_optimizer() -> None:
    options = PPOOptions()
    assert (options.optimizer, options.optimizer_eps, options.max_grad_norm) == ("adam", 1e-5, 0.5)
    assert (OptimizerOptions().epsilon, OptimizerOptions().betas) == (1e-5, (0.9, 0.999))


class ConstantEnvs:
    """Four envs that always return the same observations and record the actions sent to them."""

    observation, num_envs, num_slots = box((3,)), 4, 1

    def __init__(self, action: Space) -> None:
        self.action = action
        self.sent: list[np.ndarray] = []
        self.obs = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def reset(self, seed: int, warm_up: int = 0) -> int:
        return 0

    def send(self, slot: int, action: np.ndarray) -> None:
        self.sent.append(action.copy())

    def waited(self):
        return 0.0

    def recv(self) -> tuple[int, Step]:
        no = np.zeros(4, dtype=bool)
        return 0, Step(self.obs, np.zeros(4, dtype=np.float32), no, no, ~no)

    def episodes(self) -> list[Episode]:
        return []

    def restarts(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_actions_are_clipped_only_on_their_way_to_the_env(shape: tuple[int, ...]) -> None:
    envs = ConstantEnvs(box(shape, bound=0.5))
    ppo = make_ppo(make_agent(action=envs.action))
    sampler = EnvSampler(envs, ppo.agent, LocalWeights(), 16, seed=0)
    sampler.reset(0)
    rollout = sampler.collect()
    sent = torch.from_numpy(np.stack(envs.sent))
    assert sent.shape == (16, 4, *shape)
    assert sent.abs().max() == 0.5
    stored = rollout.steps.action
    assert (stored.abs() > 0.5).float().mean() > 0.3
    torch.testing.assert_close(stored.clamp(-0.5, 0.5).reshape(sent.shape), sent)
    expected = ppo.agent.unroll(rollout.steps.obs, None, None)[0].distribution.log_prob(stored)
    torch.testing.assert_close(rollout.steps.policy.log_prob, expected.detach())
    (batch,) = batches(ppo, rollout, None)
    assert log_ratio(ppo, batch).abs().max() < 1e-5


def test_to_env_does_not_change_discrete_actions_and_unbounded_boxes() -> None:
    assert ToEnv(discrete(3, start=-1))(np.array([0, 2])).tolist() == [0, 2]  # Envs add the start
    assert ToEnv(box((1,), bound=np.inf))(np.array([[1e9]], np.float32)).tolist() == [[1e9]]
    half = Space("box", (2,), "float32", np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32))
    assert ToEnv(half)(np.array([[-5, -5], [5, 5]], np.float32)).tolist() == [[0, -5], [5, 1]]


def test_training_on_a_fixed_batch_reaches_the_known_optimum() -> None:
    """There is one observation and four equally likely actions, one of which is good.

    The clipped objective is maximal, and stays so, once the good action is at least 1.2 times as likely as before and
    every other one at most 0.8 times.
    """
    agent = make_agent(discrete(1), discrete(4))
    ppo = make_ppo(agent, normalize_advantage=False)
    rollout = make_rollout(agent, T=16, B=4)
    steps = rollout.steps.replace(
        mask=torch.ones(16, 4, dtype=torch.bool), action=torch.arange(64).reshape(16, 4) % 4
    )
    said = agent.unroll(steps.obs, None, None)[0]
    log_prob = said.distribution.log_prob(steps.action).detach()
    steps = steps.replace(policy=steps.policy.replace(log_prob=log_prob))
    advantage = torch.where(steps.action == 2, 1.0, -1.0)
    batch = Batch(steps, Targets(advantage, torch.full((16, 4), 3.0))).flatten()
    learner = make_learner(ppo, "3e-3", None)
    for _ in range(150):
        metrics = learner.step(batch).metrics
    assert metrics["policy_gradient_loss"] == pytest.approx(-(0.25 * 1.2 - 0.75 * 0.8), abs=1e-5)
    assert metrics["value_loss"] < 1e-3
    with torch.no_grad():
        ratio = (
            agent.unroll(batch.steps.obs, None, None)[0].distribution.log_prob(batch.steps.action)
            - log_prob.flatten()
        ).exp()
    assert ratio[2] >= 1.2
    assert (ratio[[0, 1, 3]] <= 0.8).all()
