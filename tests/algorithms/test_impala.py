"""Tests of IMPALA: losses against loops and worked numbers, and gradients of parts of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from references import slow_vtrace
from rollouts import box, discrete, make_agent, make_rollout, move, observations, somewhere, worked_batch
from torch import nn

from remuda import fast
from remuda.algorithms import A2C, IMPALA, RewardScale
from remuda.config.algo_options import A2COptions, ImpalaOptions, PPOOptions
from remuda.core import Clock, Space
from remuda.data import Batch, Rollout, Steps, map_tree
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.maths import vtrace
from remuda.replay import RolloutBuffer

PAIR = Space("multidiscrete", (2,), "int64", sizes=np.array([3, 2]), starts=np.array([0, 0]))
SPACES = {"discrete": discrete(4), "box": box((2,)), "multidiscrete": PAIR}
LOG2 = math.log(2)


def make_impala(agent: Any = None, **options: Any) -> IMPALA:
    return IMPALA(agent or make_agent(), 4, **{"gamma": 0.9, **options})


def stale_batch(impala: IMPALA, T: int = 8, B: int = 4, seed: int = 1) -> Batch:
    """Return a prepared rollout of a policy whose parameters have changed since it acted."""
    rollout = make_rollout(impala.agent, T, B, seed)
    move(impala.agent, seed=seed)
    with torch.no_grad():
        return impala.prepare(rollout)


def gradient(impala: IMPALA, batch: Batch) -> torch.Tensor:
    learner = Learner(impala, OptimizerOptions(), lambda progress: 0.0, None)
    return learner.gradients(batch).groups["policy"]


def slow_losses(impala: IMPALA, batch: Batch, lambda_: float, clips: Any, corrected: bool) -> dict[str, Any]:
    """Compute losses env by env and row by row; return lists with the contribution of every real row."""
    steps, (T, B) = batch.steps, batch.steps.mask.shape
    found: dict[str, Any] = {"policy": [], "value": [], "entropy": [], "rho": []}
    for b in range(B):
        column, said, v = [], [], []
        for t in range(T):
            (policy, value), _ = impala.agent.unroll(steps.obs[t, b : b + 1], None, None)
            log_prob = policy.log_prob(steps.action[t, b : b + 1]).item()
            rho = math.exp(log_prob - steps.policy.log_prob[t, b].item())
            fields = (steps.reward[t, b].item(), steps.discount[t, b].item(), bool(steps.mask[t, b]))
            column.append((rho if corrected else 1.0, *fields))
            said.append((log_prob, policy.entropy().item(), rho))
            v.append(value.item())
        v.append(impala.agent.unroll(batch.next_obs[b : b + 1], None, None)[0].value.item())
        vs, advantage = slow_vtrace(column, v, impala.gamma, lambda_, clips)
        for t in range(T):
            if steps.mask[t, b]:
                log_prob, entropy, rho = said[t]
                found["policy"].append(-advantage[t] * log_prob)
                found["value"].append(0.5 * (vs[t] - v[t]) ** 2)
                found["entropy"].append(entropy)
                found["rho"].append(rho)
    return found


@pytest.mark.parametrize("action", SPACES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("correction", ["vtrace", "none"])
def test_losses_against_loops(action: str, reduction: Any, correction: Any) -> None:
    options = {"vtrace_lambda": 0.9, "rho_clip": 1.1, "c_clip": 0.8, "pg_rho_clip": None, "ent_coef": 0.03}
    impala = make_impala(
        make_agent(action=SPACES[action]), reduction=reduction, correction=correction, vf_coef=0.7, **options
    )
    batch = stale_batch(impala)
    assert (~batch.steps.mask).sum() > 2
    metrics = impala.losses(batch, Clock()).metrics
    slow = slow_losses(impala, batch, 0.9, (1.1, 0.8, None), correction == "vtrace")
    count = len(slow["rho"])
    policy, value, entropy = (
        sum(slow[name]) / (count if reduction == "mean" else 1) for name in ("policy", "value", "entropy")
    )
    assert metrics["policy_loss"] == pytest.approx(policy, rel=1e-4, abs=1e-5)
    assert metrics["value_loss"] == pytest.approx(value, rel=1e-4)
    assert metrics["entropy_loss"] == pytest.approx(-entropy, rel=1e-4)
    assert metrics["loss"] == pytest.approx(policy + 0.7 * value - 0.03 * entropy, rel=1e-4, abs=1e-5)
    assert metrics["rho"] == pytest.approx(sum(slow["rho"]) / count, rel=1e-4)
    share = sum(rho > 1.1 for rho in slow["rho"]) / count
    assert metrics["rho_clipped"] == pytest.approx(share, abs=1e-6)
    assert 0 < share < 1


@pytest.mark.parametrize(
    ("options", "policy", "value"),
    [
        # maths/test_vtrace.py works out targets and advantages; log_prob is -log 2 in both rows.
        ({}, 1.75 + 1.5, 1.75**2 + 1.5**2),
        ({"rho_clip": None, "c_clip": None, "pg_rho_clip": None}, 3.5 + 1.5, 3.5**2 + 1.5**2),
        # Ratios of 1: targets are 1 + 0.5 * 5 and 3 + 0.5 * 4.
        ({"correction": "none"}, 2.5 + 3.0, 2.5**2 + 3.0**2),
    ],
)
def test_loss_by_worked_vtrace_numbers(options: Any, policy: float, value: float) -> None:
    agent, batch = worked_batch()
    impala = IMPALA(agent, 1, gamma=0.5, reduction="sum", ent_coef=0.1, vf_coef=0.25, **options)
    metrics = impala.losses(batch, Clock()).metrics
    assert metrics["policy_loss"] == pytest.approx(policy * LOG2)
    assert metrics["value_loss"] == pytest.approx(0.5 * value)
    assert metrics["entropy_loss"] == pytest.approx(-2 * LOG2)
    assert metrics["loss"] == pytest.approx(policy * LOG2 + 0.25 * 0.5 * value - 0.1 * 2 * LOG2)
    assert metrics["rho"] == pytest.approx((2 + 0.5) / 2)
    assert metrics["rho_clipped"] == pytest.approx(0.0 if "rho_clip" in options else 0.5)
    means = IMPALA(agent, 1, gamma=0.5, reduction="mean", ent_coef=0.1, vf_coef=0.25, **options)
    assert means.losses(batch, Clock()).metrics["loss"] == pytest.approx(metrics["loss"] / 2)


def test_gradients_by_worked_numbers() -> None:
    """Gradients are -vf_coef * error for a value, and -advantage * (1{taken} - p) for a logit."""
    agent, batch = worked_batch()
    impala = IMPALA(agent, 1, gamma=0.5, reduction="sum", vf_coef=0.25)
    found = gradient(impala, batch)
    logits, values = found[:8].reshape(4, 2), found[8:]
    torch.testing.assert_close(values, torch.tensor([-0.25 * 1.75, -0.25 * 1.5, 0.0, 0.0]))
    expected = [[-1.75 / 2, 1.75 / 2], [1.5 / 2, -1.5 / 2], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_truncated_episode_bootstraps_from_its_final_observation() -> None:
    agent, batch = worked_batch()
    impala = IMPALA(agent, 1, gamma=0.5)

    def targets() -> list[float]:
        return list(impala.corrected_rows(batch).target.tolist())

    assert targets() == pytest.approx([2.75, 3.5])
    with torch.no_grad():
        agent.values[3] += 100  # the first observation of the next episode
    assert targets() == pytest.approx([2.75, 3.5])
    with torch.no_grad():
        agent.values[2] += 4  # the final observation: adds 0.5 * 0.5 * 4, half of which reaches the previous row
    assert targets() == pytest.approx([3.25, 4.5])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_contents_of_reset_rows_change_neither_loss_nor_gradient(reduction: Any) -> None:
    for seed in range(5):
        impala = make_impala(reduction=reduction, ent_coef=0.1)
        batch = stale_batch(impala, seed=seed)
        is_reset = ~batch.steps.mask
        assert is_reset.any()
        loss, before = impala.losses(batch, Clock()).groups["policy"].item(), gradient(impala, batch)
        batch.steps.action[is_reset] = 10**6  # no such action
        for array in (batch.steps.reward, batch.steps.discount, batch.steps.policy.log_prob):
            array[is_reset] = math.nan
        batch.steps.policy.value[is_reset] = math.nan
        assert impala.losses(batch, Clock()).groups["policy"].item() == loss
        assert torch.equal(gradient(impala, batch), before)


@pytest.mark.parametrize("core", [None, "lstm"])
def test_gradients_of_columns_add_up_to_that_of_the_batch(core: Any) -> None:
    agent = make_agent(core=core, core_size=8) if core else make_agent()
    for reduction in ("sum", "mean"):
        impala = make_impala(agent, reduction=reduction, ent_coef=0.02)
        batch = recurrent_batch(agent)[0] if core else stale_batch(impala, B=5)
        assert impala.gradient_reduction == reduction
        parts = [batch.columns(torch.tensor(b)) for b in ([0, 3], [1], [2, 4])]
        rows = [int(part.steps.mask.sum()) for part in parts]
        assert len(set(rows)) > 1
        weights = [1.0] * 3 if reduction == "sum" else [count / sum(rows) for count in rows]
        added = sum(weight * gradient(impala, part) for weight, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(added, gradient(impala, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_part_without_real_rows_has_zero_gradient(reduction: Any) -> None:
    impala = make_impala(reduction=reduction, ent_coef=0.1)
    batch = stale_batch(impala)
    batch.steps.mask[:, 2] = False
    losses = impala.losses(batch.columns(torch.tensor([2])), Clock())
    assert losses.groups["policy"].item() == 0
    assert all(math.isfinite(float(value)) for value in losses.metrics.values())
    assert not gradient(impala, batch.columns(torch.tensor([2]))).any()


def recurrent_batch(agent: Any, T: int = 9, B: int = 5) -> tuple[Batch, torch.Tensor]:
    """Return a batch sampled row by row, with memory reset after reset rows, and the values of all T + 1 rows."""
    rollout = make_rollout(make_agent(), T, B, seed=5)
    mask = rollout.steps.mask
    mask[T - 1, 0], mask[T - 2, 0], mask[3, 1] = False, True, False
    obs, noise = observations(agent.observation, T + 1, B), torch.rand(T, B, 1)
    state = start = somewhere(agent, B)
    actions, said, v = [], [], []
    with torch.no_grad():
        for t in range(T):
            action, words, state = agent.act(obs[t], state, None, noise[t])
            actions.append(action)
            said.append(words)
            over = ~mask[t].unsqueeze(-1)
            blank = agent.initial_state(B)
            state = map_tree(lambda new, old, over=over: torch.where(over, old, new), state, blank)
        v = torch.stack([*(words.value for words in said), agent.value(obs[T], state)])
    policy = type(said[0])(*(torch.stack(field) for field in zip(*said, strict=True)))
    steps = rollout.steps.replace(obs=obs[:T], action=torch.stack(actions), policy=policy)
    return Batch(steps, state=start, next_obs=obs[T]), v


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [False, True], ids=["two trunks", "one trunk"])
def test_unroll_with_memory_equals_the_policy_outputs_row_by_row(
    core: Any, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent(core=core, core_size=8, shared=shared)
    for head in (agent.policy_head.linear, agent.value_head):
        nn.init.normal_(head.weight)  # so that every difference in memory changes the outputs
    batch, v = recurrent_batch(agent)
    steps, mask = batch.steps, batch.steps.mask
    assert not mask[-1].all(), "the observation after the last row begins an episode in some env"
    unrolled, unroll = [], agent.unroll
    monkeypatch.setattr(agent, "unroll", lambda *rows: unrolled.append(unroll(*rows)) or unrolled[-1])
    rows = make_impala(agent).corrected_rows(batch)
    ((outputs, _),) = unrolled
    torch.testing.assert_close(outputs.value, v, atol=1e-5, rtol=1e-5)
    assert rows.log_rho.abs().max() < 1e-5
    torch.testing.assert_close(rows.value, v[:-1][mask], atol=1e-5, rtol=1e-5)
    fields = (steps.reward, steps.discount, mask, v)
    vs, advantage = vtrace(torch.zeros_like(steps.reward), *fields, 0.9)
    torch.testing.assert_close(rows.target, vs[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows.pg_advantage, advantage[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("action", SPACES)
def test_on_fresh_data_impala_equals_a2c_with_returns(action: str) -> None:
    agent = make_agent(action=SPACES[action])
    rollout = make_rollout(agent, seed=1)
    impala = make_impala(agent, ent_coef=0.02, vf_coef=0.5)
    a2c = A2C(
        agent, 4, gamma=0.9, gae_lambda=1.0, ent_coef=0.02, vf_coef=0.25
    )  # A2C does not halve the squared errors
    found = []
    for algorithm in (impala, a2c):
        replay = RolloutBuffer(1, None, seed=0, whole=algorithm is impala)
        with torch.no_grad():
            replay.add(algorithm.prepare(rollout))
        (batch,) = replay.batches()
        found.append(gradient(algorithm, batch))  # type: ignore[arg-type]
    assert found[0].any()
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)
    metrics = impala.losses(impala.prepare(rollout), Clock()).metrics
    assert metrics["rho"] == pytest.approx(1, abs=1e-5)
    assert metrics["rho_clipped"] == 0


def test_targets_follow_the_parameters_and_not_the_stored_values() -> None:
    impala = make_impala()
    batch = stale_batch(impala)
    before = impala.corrected_rows(batch).target
    batch.steps.policy.value.add_(50)
    assert torch.equal(impala.corrected_rows(batch).target, before)
    with torch.no_grad():
        impala.agent.value_head.bias.add_(5)
    assert not torch.allclose(impala.corrected_rows(batch).target, before, atol=1.0)


def test_targets_are_constants_of_the_gradient() -> None:
    """The gradient equals that of a loss in which targets and advantages are constants."""
    impala = make_impala(reduction="sum", vf_coef=1.0)
    batch = stale_batch(impala)
    rows = impala.corrected_rows(batch)
    assert not any(x.requires_grad for x in (rows.target, rows.pg_advantage, rows.advantage))
    loss = -(rows.pg_advantage * rows.log_prob).sum() + 0.5 * (rows.target - rows.value).square().sum()
    by_hand = torch.autograd.grad(loss, impala.groups()["policy"], allow_unused=True)
    flat = torch.cat([(torch.zeros(1) if g is None else g).reshape(-1) for g in by_hand])
    torch.testing.assert_close(gradient(impala, batch), flat)


def test_rewards_are_clipped_and_scaled_only_for_learning() -> None:
    rollout = make_rollout(make_agent(), seed=1)
    raw = rollout.steps.reward.clone() * 3
    rollout = Rollout(rollout.steps.replace(reward=raw.clone()), rollout.next_obs, rollout.last_value)
    clipped = make_impala(clip_reward=True).prepare(rollout)
    assert torch.equal(clipped.steps.reward, raw.clamp(-1, 1))
    scaled = make_impala(normalize_reward=True)
    scale = RewardScale(4, 0.9)
    scale.absorb(scale.statistics(raw, rollout.steps.mask))
    expected = scale(raw)
    scaled.absorb(scaled.reward_statistics(rollout))
    assert torch.equal(scaled.prepare(rollout).steps.reward, expected)
    assert torch.equal(rollout.steps.reward, raw)
    part = Rollout(rollout.steps[:, [2, 0]], rollout.next_obs[[2, 0]], envs=torch.tensor([2, 0]))
    scaled.prepare(part)
    assert scaled.reward_scale is not None
    assert scaled.reward_scale.carry.shape == (4,)


def test_batch_holds_the_inputs_of_one_unroll() -> None:
    agent = make_agent(core="gru", core_size=8)
    rollout, state = make_rollout(make_agent()), somewhere(agent, 4)
    batch = make_impala(agent).prepare(Rollout(rollout.steps, rollout.next_obs, rollout.last_value, state))
    assert batch.state is state
    assert batch.next_obs is rollout.next_obs
    assert batch.targets is None


def test_impala_has_no_fast_path_for_gradients() -> None:
    impala = make_impala()
    assert fast.find_policy(impala.agent) is not None
    assert fast.find(impala) is None


def test_the_entropy_bonus_follows_its_schedule() -> None:
    impala = make_impala(ent_coef=lambda progress: 1 - progress)
    batch = stale_batch(impala)
    losses = [impala.losses(batch, Clock(progress=p)).metrics for p in (0.0, 0.5, 1.0)]
    entropy = -float(losses[0]["entropy_loss"])
    differences = [float(a["loss"]) - float(b["loss"]) for a, b in zip(losses[1:], losses[:-1], strict=True)]
    assert differences == pytest.approx([0.5 * entropy] * 2, abs=1e-5)


def test_off_policy_training_on_a_fixed_batch_reaches_the_known_optimum() -> None:
    """There are two observations with one good action each, and the behavior policy was uniform over three actions.

    Episodes have one row, so every target is the learning policy's own expected reward, which reaches 1.
    """
    agent = make_agent(discrete(2), discrete(3))
    obs, action = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    good = torch.tensor([2, 0])
    said = make_rollout(agent).steps.policy[:1, :1]
    uniform = type(said)(torch.full((1, 6), 1 / 3).log(), torch.zeros(1, 6))
    reward, zero = torch.where(action == good[obs], 1.0, 0.0), torch.zeros(1, 6)
    steps = Steps(obs, action, reward, zero, torch.ones(1, 6, dtype=torch.bool), uniform, None)
    impala = IMPALA(agent, 6, gamma=0.9, rho_clip=None, pg_rho_clip=None)
    learner = Learner(impala, OptimizerOptions(), lambda progress: 1e-2, None)
    for _ in range(300):
        learner.step(Batch(steps, next_obs=obs[0]))
    distribution, values = agent.unroll(torch.tensor([0, 1]), None, None)[0]
    assert distribution.log_prob(good).exp().min() > 0.95
    torch.testing.assert_close(values, torch.ones(2), atol=0.1, rtol=0)


def test_defaults_and_columns_per_round() -> None:
    options = ImpalaOptions()
    assert (options.n_steps, options.batch_size, options.reduction, options.correction) == (20, 8, "mean", "vtrace")
    assert (options.rho_clip, options.c_clip, options.pg_rho_clip, options.vtrace_lambda) == (1.0, 1.0, 1.0, 1.0)
    assert (options.columns_per_round(32), options.rows_per_round) == (8, 20)
    for other in (A2COptions(), PPOOptions()):
        assert other.columns_per_round(32) == 32
        assert other.correction == "on-policy"


def test_overridden_losses_are_not_computed_in_parts() -> None:
    """Overridden losses may need the whole batch; a subclass that does not sets `gradient_reduction` again."""

    class OverAll(IMPALA):
        def losses(self, batch: Batch, clock: Clock) -> Any:
            return super().losses(batch, clock)

    class OtherRows(IMPALA):
        def corrected_rows(self, batch: Batch) -> Any:
            return super().corrected_rows(batch)

    class Known(OverAll):
        gradient_reduction = "mean"

    options: Any = {"gamma": 0.9}
    assert IMPALA(make_agent(), 2, **options).gradient_reduction == "mean"
    assert OverAll(make_agent(), 2, **options).gradient_reduction is None
    assert OtherRows(make_agent(), 2, **options).gradient_reduction is None
    assert Known(make_agent(), 2, **options).gradient_reduction == "mean"
