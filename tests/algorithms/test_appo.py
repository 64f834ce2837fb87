"""Tests of APPO, the surrogate of PPO with targets of V-trace, against loops and worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent, make_rollout, move, worked_batch

from remuda.algorithms import APPO, IMPALA, PPO
from remuda.config.algo_options import APPOOptions
from remuda.core import Clock, Space
from remuda.data import Batch
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.replay import RolloutBuffer
from remuda.schemes.learning_round import learn

SPACES = [discrete(4), box((2,))]


def make_appo(agent: Any = None, clip: float = 0.2, **options: Any) -> APPO:
    settings: dict[str, Any] = {"gamma": 0.9, "normalize_advantage": False, "clip_range": lambda p: clip, **options}
    return APPO(agent or make_agent(), 4, **settings)


def make_impala(agent: Any, **options: Any) -> IMPALA:
    return IMPALA(agent, 4, **{"gamma": 0.9, "reduction": "mean", **options})


def fresh_batch(algorithm: IMPALA, seed: int = 1) -> Batch:
    with torch.no_grad():
        return algorithm.prepare(make_rollout(algorithm.agent, seed=seed))


def stale_batch(algorithm: IMPALA, seed: int = 1, by: float = 0.3) -> Batch:
    batch = fresh_batch(algorithm, seed)
    move(algorithm.agent, by, seed)
    return batch


def gradient(algorithm: Any, batch: Batch) -> torch.Tensor:
    return Learner(algorithm, OptimizerOptions(), lambda progress: 0.0, None).gradients(batch).groups["policy"]


def test_appo_loss_by_worked_numbers() -> None:
    """The targets of V-trace are 2.75 and 3.5 (maths/test_vtrace.py), and the ratios are 2 and 1/2.

    Advantages without ratios are 1 + 0.5 * 3.5 - 1 and 3 + 0.5 * 4 - 2. Only the ratio of 2 is clipped, to 1.2.
    """
    agent, batch = worked_batch()
    appo = APPO(
        agent,
        1,
        gamma=0.5,
        clip_range=lambda p: 0.2,
        normalize_advantage=False,
        ent_coef=0.1,
        vf_coef=0.25,
    )
    metrics = appo.losses(batch, Clock()).metrics
    policy, value = -(1.2 * 1.75 + 0.5 * 3.0) / 2, (1.75**2 + 1.5**2) / 2
    assert metrics["policy_gradient_loss"] == pytest.approx(policy)
    assert metrics["value_loss"] == pytest.approx(value)
    assert metrics["entropy_loss"] == pytest.approx(-math.log(2))
    assert metrics["loss"] == pytest.approx(policy + 0.25 * value - 0.1 * math.log(2))
    assert metrics["clip_fraction"] == 1
    assert metrics["approx_kl"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)
    assert metrics["rho"] == pytest.approx(1.25)
    assert metrics["rho_clipped"] == pytest.approx(0.5)


def test_targets_without_correction_assume_ratios_of_one() -> None:
    agent, batch = worked_batch()
    appo = APPO(
        agent, 1, gamma=0.5, clip_range=lambda p: 0.2, normalize_advantage=False, correction="none", vf_coef=0.25
    )
    metrics = appo.losses(batch, Clock()).metrics
    assert metrics["policy_gradient_loss"] == pytest.approx(-(1.2 * 2.5 + 0.5 * 3.0) / 2)
    assert metrics["value_loss"] == pytest.approx((2.5**2 + 3.0**2) / 2)
    assert metrics["rho"] == pytest.approx(1.25), "the reported ratio is not replaced by 1"


@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
def test_gradient_at_ratios_of_one_is_the_vtrace_policy_gradient(action: Space) -> None:
    agent = make_agent(action=action)
    appo, impala = make_appo(agent, vf_coef=0.25, ent_coef=0.02), make_impala(agent, vf_coef=0.5, ent_coef=0.02)
    batch = fresh_batch(appo)
    found = gradient(appo, batch)
    assert found.any()
    torch.testing.assert_close(found, gradient(impala, batch), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
def test_the_ratio_weighs_each_row_once(action: Space) -> None:
    """Without clipping, the gradient is that of V-trace weighted by rho, and not by 1 or by rho squared."""
    agent = make_agent(action=action)
    appo = make_appo(agent, clip=1e9, vf_coef=0.25)
    batch = stale_batch(appo)
    found = gradient(appo, batch)
    assert appo.losses(batch, Clock()).metrics["rho_clipped"] > 0.1
    torch.testing.assert_close(found, gradient(make_impala(agent, pg_rho_clip=None), batch), atol=1e-5, rtol=1e-3)
    once_less = gradient(make_impala(agent, correction="none"), batch)
    assert (found - once_less).norm() > 0.1 * found.norm()


@pytest.mark.parametrize("action", SPACES, ids=["discrete", "box"])
@pytest.mark.parametrize("normalize", [False, True])
def test_on_fresh_data_appo_equals_ppo_with_returns(action: Space, normalize: bool) -> None:
    agent = make_agent(action=action)
    options = {"gamma": 0.9, "normalize_advantage": normalize, "clip_range": lambda p: 0.2, "ent_coef": 0.02}
    rollout, found = make_rollout(agent, seed=1), []
    for algorithm in (APPO(agent, 4, **options), PPO(agent, 4, gae_lambda=1.0, **options)):
        replay = RolloutBuffer(1, None, seed=0, whole=isinstance(algorithm, APPO))
        with torch.no_grad():
            replay.add(algorithm.prepare(rollout))
        (batch,) = replay.batches()
        found.append(gradient(algorithm, batch))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


def test_the_surrogate_is_clipped_row_by_row() -> None:
    appo = make_appo()
    batch = stale_batch(appo)
    rows = appo.corrected_rows(batch)
    pairs = list(zip(rows.log_rho.exp().tolist(), rows.advantage.tolist(), strict=True))
    gains = [min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) for ratio, advantage in pairs]
    metrics = appo.losses(batch, Clock()).metrics
    assert metrics["policy_gradient_loss"] == pytest.approx(-sum(gains) / len(gains), rel=1e-4, abs=1e-5)
    share = sum(abs(ratio - 1) > 0.2 for ratio, _ in pairs) / len(pairs)
    assert metrics["clip_fraction"] == pytest.approx(share)
    assert 0 < share < 1


def test_values_are_clipped_around_those_stored_while_acting() -> None:
    appo = make_appo(clip_range_vf=parse_schedule("linear(0.2, 0.1)"))
    batch = stale_batch(appo)
    rows = appo.corrected_rows(batch)
    value, old, target = rows.value, batch.steps.policy.value[batch.steps.mask], rows.target
    for progress, clip in ((0.0, 0.2), (1.0, 0.1)):
        near = torch.minimum(torch.maximum(value, old - clip), old + clip)
        expected = torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
        found = appo.losses(batch, Clock(progress=progress)).metrics["value_loss"]
        assert found == pytest.approx(expected.item(), rel=1e-5)


def test_advantages_are_normalized_over_the_real_rows_of_a_batch() -> None:
    plain = make_appo()
    normal = make_appo(plain.agent, normalize_advantage=True)
    batch = stale_batch(plain)
    rows = plain.corrected_rows(batch)
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    ratio = rows.log_rho.exp()
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    found = normal.losses(batch, Clock()).metrics["policy_gradient_loss"]
    assert found == pytest.approx(expected.item(), abs=1e-5)


def test_contents_of_reset_rows_enter_no_loss() -> None:
    for normalize in (False, True):
        appo = make_appo(normalize_advantage=normalize)
        batch = stale_batch(appo)
        is_reset = ~batch.steps.mask
        assert is_reset.any()
        before = gradient(appo, batch)
        batch.steps.action[is_reset] = 10**6
        for array in (batch.steps.reward, batch.steps.policy.log_prob, batch.steps.policy.value):
            array[is_reset] = math.nan
        assert torch.equal(gradient(appo, batch), before)


def test_gradients_of_columns_add_up_without_normalization() -> None:
    appo = make_appo(ent_coef=0.02, clip_range_vf=lambda p: 0.1)
    assert appo.gradient_reduction == "mean"
    batch = stale_batch(appo)
    parts = [batch.columns(torch.tensor(b)) for b in ([0, 3], [1], [2])]
    rows = [int(part.steps.mask.sum()) for part in parts]
    added = sum(n / sum(rows) * gradient(appo, part) for n, part in zip(rows, parts, strict=True))
    torch.testing.assert_close(added, gradient(appo, batch), atol=1e-5, rtol=1e-4)


def test_statistics_of_the_whole_batch_prevent_learning_in_parts() -> None:
    assert make_appo(normalize_advantage=True).gradient_reduction is None
    assert make_appo(target_kl=0.1).gradient_reduction is None


@pytest.mark.parametrize(("share", "stops"), [(0.9, True), (1.1, False)])
def test_target_kl_stops_before_a_stale_batch_is_applied(share: float, stops: bool) -> None:
    appo = make_appo()
    batch = stale_batch(appo)
    appo.target_kl = float(appo.losses(batch, Clock()).metrics["approx_kl"]) / 1.5 * share
    learner = Learner(appo, OptimizerOptions(), lambda progress: 1e-2, 0.5)
    assert learner.step(batch).stop is stops
    assert learner.version == (0 if stops else 1)


def test_ratios_differ_from_one_after_several_epochs_of_columns() -> None:
    """Ratios are 1 in the first minibatch of a rollout and differ from 1 after several epochs."""
    appo = make_appo(normalize_advantage=True)
    learner, rollout = Learner(appo, OptimizerOptions(), lambda progress: 1e-2, 0.5), make_rollout(appo.agent, seed=1)
    metrics, _ = learn(learner, RolloutBuffer(3, 2, seed=0, whole=True), rollout)
    assert learner.version == 6
    assert metrics["train/approx_kl"] > 1e-4
    batch = appo.prepare(rollout)
    first = appo.losses(batch, Clock()).metrics
    assert first["clip_fraction"] > 0
    assert first["rho"] != pytest.approx(1, abs=1e-4)


def test_schedules_reach_the_loss() -> None:
    appo = APPO(make_agent(), 4, gamma=0.9, clip_range=parse_schedule("linear(0.5, 0.01)"), normalize_advantage=False)
    batch = stale_batch(appo)
    found = [appo.losses(batch, Clock(progress=p)).metrics for p in (0.0, 0.5, 1.0)]
    assert [metrics["clip_range"] for metrics in found] == pytest.approx([0.5, 0.255, 0.01])
    shares = [float(metrics["clip_fraction"]) for metrics in found]
    assert shares[0] < shares[1] < shares[2]


def test_defaults_of_appo() -> None:
    options = APPOOptions()
    assert (options.n_steps, options.batch_size, options.n_epochs, options.clip_range) == (20, 8, 1, "0.2")
    assert (options.normalize_advantage, options.correction, options.max_grad_norm) == (True, "vtrace", 0.5)
    assert options.columns_per_round(32) == 8
