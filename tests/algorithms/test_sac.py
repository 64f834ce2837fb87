"""Tests of soft actor-critic against networks written in numpy and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box
from test_ddpg import (
    ACTION,
    BATCHES,
    HIGH,
    LOW,
    Quadratic,
    judge,
    layers_of,
    make_agent,
    make_critics,
    normalized,
    slopes,
    slow_features,
    vector_of,
)
from test_off_policy import copies, drawn_rows, drawn_sequences, is_same, make_learner, numbers, shaken
from torch import Tensor, nn

from remuda import fast
from remuda.agents import ActorAgent, Critic
from remuda.algorithms import SAC
from remuda.config.continuous_options import SACOptions
from remuda.core import Clock
from remuda.data import Batch, Steps, map_tree
from remuda.fast.relu_net import FEW_ROWS, MAX_ROWS
from remuda.fast.sac import sac_gradients
from remuda.learning.gradients import Gradients
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.nets import MLP
from remuda.replay.transitions import Returns

Floats = NDArray[np.float64]


def make_sac(critics: int = 2, seed: int = 0, core: Any = None, **options: Any) -> SAC:
    """Return a SAC whose target critics differ from its critics, with a temperature of 0.4."""
    agent = make_agent(stochastic=True, core=core)
    options = {"ent_coef_init": 0.4, **options}
    sac = SAC(agent, make_critics(agent, critics, core=core), seed, **options)
    for index, net in enumerate((agent, sac.critics, sac.target_critics)):
        shaken(net, seed=10 + index, size=0.5)
    return sac


class Noises:
    """Recorder of the noise that the actor receives: `now` for the rows learned from, `after` for the next ones."""

    now: Tensor
    after: Tensor

    def __init__(self, agent: ActorAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        choose = agent.choose

        def listening(features: Tensor, noise: Tensor | None = None) -> Any:
            assert noise is not None
            setattr(self, "now" if torch.is_grad_enabled() else "after", noise.clone())
            return choose(features, noise)

        monkeypatch.setattr(agent, "choose", listening)


# --- slow references, in float64 ---


def sample(vector: Floats, agent: nn.Module, obs: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return actions tanh(u) and their log-density: the density of u divided by the derivative 1 / cosh(u)^2."""
    w1, b1, w2, b2 = layers_of(vector, agent)
    outputs = np.tanh(obs @ w1.T + b1) @ w2.T + b2
    mean, log_std = outputs[:, :2], np.clip(outputs[:, 2:], -20, 2)
    u = mean + np.exp(log_std) * noise
    each = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) + 2 * np.log(np.cosh(u))
    return np.tanh(u), each.sum(-1)


def goals(sac: SAC, batch: Batch, noise: Floats, alpha: float) -> Floats:
    """r + discount * (min_j Q'_j(s', a') - alpha * log pi(a' | s')), with a' sampled from the actor."""
    later = numbers(batch.next_obs)
    action, log_prob = sample(vector_of(sac.agent), sac.agent, later, noise)
    values = [judge(vector_of(critic), critic, later, action) for critic in sac.target_critics]
    worst = np.array([min(of_row) for of_row in zip(*values, strict=True)])
    return numbers(batch.targets.reward) + numbers(batch.targets.discount) * (worst - alpha * log_prob)


def critic_loss(sac: SAC, vectors: list[Floats], batch: Batch, goal: Floats, beta: float = 0.4) -> float:
    """Return the sum over critics of half the mean of weight ** beta times the squared error."""
    total, action = 0.0, normalized(batch.steps.action)
    for critic, vector in zip(sac.critics, vectors, strict=True):
        q = judge(vector, critic, numbers(batch.steps.obs), action)
        for i in range(len(q)):
            weight = 1.0 if batch.weight is None else float(batch.weight[i]) ** beta
            total += 0.5 * weight * (goal[i] - q[i]) ** 2 / len(q)
    return total


def actor_loss(sac: SAC, vector: Floats, batch: Batch, noise: Floats, alpha: float) -> float:
    """The mean of alpha * log pi(a | s) - min_j Q_j(s, a)."""
    obs = numbers(batch.steps.obs)
    action, log_prob = sample(vector, sac.agent, obs, noise)
    values = [judge(vector_of(critic), critic, obs, action) for critic in sac.critics]
    return float(
        np.mean([alpha * lp - min(row) for lp, row in zip(log_prob, zip(*values, strict=True), strict=True)])
    )


# --- losses ---


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", [{}, {"ent_coef": 0.1}, {"ent_coef": 3.0}, {"critics": 1}], ids=str)
def test_losses_and_priority_against_numpy(
    batch: Batch, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sac = make_sac(**options)
    noises, alpha = Noises(sac.agent, monkeypatch), options.get("ent_coef", 0.4)
    losses = sac.losses(batch, Clock(5))
    goal = goals(sac, batch, numbers(noises.after), alpha)
    vectors = [vector_of(critic) for critic in sac.critics]
    assert losses.groups["critic"].item() == pytest.approx(critic_loss(sac, vectors, batch, goal), rel=1e-4)
    expected = actor_loss(sac, vector_of(sac.agent), batch, numbers(noises.now), alpha)
    assert losses.groups["actor"].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    q = judge(vectors[0], sac.critics[0], numbers(batch.steps.obs), normalized(batch.steps.action))
    assert losses.priority is not None
    np.testing.assert_allclose(losses.priority, np.abs(goal - q), rtol=1e-3, atol=1e-4)
    assert losses.metrics["q_mean"] == pytest.approx(q.mean(), rel=1e-4, abs=1e-5)
    assert float(losses.metrics["ent_coef"]) == pytest.approx(alpha)
    _, log_prob = sample(vector_of(sac.agent), sac.agent, numbers(batch.steps.obs), numbers(noises.now))
    assert losses.metrics["entropy"] == pytest.approx(-log_prob.mean(), rel=1e-4, abs=1e-4)
    assert noises.now.shape == noises.after.shape == (12, 2)
    assert len(torch.cat([noises.now, noises.after]).unique()) == 48, "all noise values are distinct"


def test_target_of_a_terminal_row_is_its_reward() -> None:
    """The target of a terminal row contains no entropy of a next action either."""
    sac, batch = make_sac(), BATCHES[0]
    is_over = batch.targets.discount == 0
    before = sac.losses(batch, Clock()).priority
    after = sac.losses(replace(batch, next_obs=batch.next_obs + 2.0), Clock()).priority
    assert before is not None
    assert after is not None
    assert torch.equal(before[is_over], after[is_over])
    assert (before[~is_over] != after[~is_over]).all()


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_weights_follow_their_schedule(progress: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sac, batch = make_sac(beta=parse_schedule("linear(0.4, 1)")), BATCHES[1]
    noises = Noises(sac.agent, monkeypatch)
    losses = sac.losses(batch, Clock(progress=progress))
    goal, vectors = goals(sac, batch, numbers(noises.after), 0.4), [vector_of(critic) for critic in sac.critics]
    expected = critic_loss(sac, vectors, batch, goal, 0.4 + 0.6 * progress)
    assert losses.groups["critic"].item() == pytest.approx(expected, rel=1e-4)


def test_noise_is_a_function_of_seed_and_update() -> None:
    sac, again, other = make_sac(), make_sac(), make_sac(seed=3)

    def losses(algorithm: SAC, version: int, progress: float = 0.0) -> list[float]:
        return [loss.item() for loss in algorithm.losses(BATCHES[0], Clock(version, progress)).groups.values()]

    found = [losses(sac, version) for version in range(3)]
    torch.manual_seed(77)
    assert [losses(again, version, 0.6) for version in range(3)] == found
    assert all(a != b for a, b in zip(found[0], found[1], strict=True))
    assert all(a != b for a, b in zip(found[0], losses(other, 0), strict=True))


# --- gradients: the loss of each parameter group reaches only that group ---


def test_critic_gradient_comes_only_from_the_critic_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    sac, batch = make_sac(), BATCHES[0]
    noises = Noises(sac.agent, monkeypatch)
    found = make_learner(sac).gradients(batch).groups["critic"]
    goal, size = goals(sac, batch, numbers(noises.after), 0.4), len(vector_of(sac.critics[0]))
    expected = slopes(
        lambda vector: critic_loss(sac, [vector[:size], vector[size:]], batch, goal), vector_of(sac.critics)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_actor_gradient_flows_through_action_and_density(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature and critics are constants, and no gradient flows through the target, which uses the actor too."""
    sac, batch = make_sac(), BATCHES[0]
    noises = Noises(sac.agent, monkeypatch)
    found = make_learner(sac).gradients(batch).groups["actor"]
    now = numbers(noises.now)
    expected = slopes(lambda vector: actor_loss(sac, vector, batch, now, 0.4), vector_of(sac.agent))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target_entropy", [None, -5.0, 1.5])
def test_temperature_gradient(target_entropy: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient with respect to log alpha is the entropy minus the target entropy."""
    sac, batch = make_sac(target_entropy=target_entropy), BATCHES[0]
    assert sac.target_entropy == (-2.0 if target_entropy is None else target_entropy)
    noises = Noises(sac.agent, monkeypatch)
    found = make_learner(sac).gradients(batch)
    _, log_prob = sample(vector_of(sac.agent), sac.agent, numbers(batch.steps.obs), numbers(noises.now))
    gap = -log_prob.mean() - sac.target_entropy
    assert found.groups["alpha"].tolist() == pytest.approx([gap], rel=1e-4)
    assert found.metrics["ent_coef_loss"] == pytest.approx(math.log(0.4) * gap, rel=1e-4)


@pytest.mark.parametrize("rows", [12, FEW_ROWS + 100, 2 * MAX_ROWS + 300])
@pytest.mark.parametrize("options", [{}, {"ent_coef": 0.3}, {"normalize_obs": True}], ids=str)
def test_gradients_of_the_learner_equal_autograd(
    rows: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The nets use relu only, so the fast path computes their gradients."""
    torch.manual_seed(0)
    options = dict(options)
    normalize = options.pop("normalize_obs", False)
    agent = ActorAgent(
        *(box((3,)), ACTION, lambda shape: MLP(shape, (8, 6), "relu")), stochastic=True, normalize_obs=normalize
    )
    critics = [Critic(agent.inputs, agent.observation, ACTION, None, (8, 6), "relu") for _ in range(2)]
    sac = SAC(agent, critics, 0, **options)
    for seed, net in enumerate((agent, sac.critics, sac.target_critics)):
        shaken(net, seed)
    agent.inputs.update(3 + 2 * torch.randn(50, 3))  # has no effect without normalize_obs
    batch = drawn_rows(ACTION, rows, has_weight=True)
    learner = make_learner(sac)
    for version in (0, 1):  # the fast path checks the first update more closely
        learner.clock = Clock(version, 0.5)
        found, losses = learner.gradients(batch), sac.losses(batch, learner.clock)
        assert set(found.groups) == set(losses.groups) == set(sac.groups())
        for name, loss in losses.groups.items():
            exact = torch.autograd.grad(loss, sac.groups()[name], retain_graph=True)
            flat = torch.cat([gradient.reshape(-1) for gradient in exact])
            torch.testing.assert_close(found.groups[name], flat, rtol=1e-3, atol=1e-5)
        assert set(found.metrics) == set(losses.metrics)
        for name, value in losses.metrics.items():
            assert float(found.metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)
        assert found.priority is not None
        torch.testing.assert_close(found.priority, losses.priority, rtol=1e-4, atol=1e-5)
    assert not caplog.records, "a warning would mean that the fast path was dropped"


def test_a_batch_that_is_not_finite_does_not_affect_the_next_one() -> None:
    """The fast path reuses the gradient buffers of the previous batch."""
    torch.manual_seed(0)
    agent = ActorAgent(*(box((3,)), ACTION, lambda shape: MLP(shape, (8, 6), "relu")), stochastic=True)
    critics = [Critic(agent.inputs, agent.observation, ACTION, None, (8, 6), "relu") for _ in range(2)]
    sac, batch = SAC(agent, critics, 0), drawn_rows(ACTION, 12, has_weight=False)
    compute = sac_gradients(sac)
    assert compute is not None
    before = compute(batch, Clock())
    bad = replace(batch, next_obs=torch.full_like(batch.next_obs, math.nan))
    spoiled, after = compute(bad, Clock()), compute(batch, Clock())
    assert before is not None
    assert spoiled is not None
    assert after is not None
    assert not spoiled.groups["critic"].isfinite().all()
    for name, vector in before.groups.items():
        assert torch.equal(after.groups[name], vector)


@pytest.mark.parametrize(("off", "is_kept"), [(2e-5, True), (1e-2, False)])
def test_rounding_of_a_vanishing_alpha_gradient_keeps_the_fast_path(off: float, is_kept: bool) -> None:
    """At the target entropy the temperature's gradient is close to 0, so its relative rounding error is large."""
    torch.manual_seed(0)
    agent = ActorAgent(*(box((3,)), ACTION, lambda shape: MLP(shape, (8, 6), "relu")), stochastic=True)
    critics = [Critic(agent.inputs, agent.observation, ACTION, None, (8, 6), "relu") for _ in range(2)]
    sac, batch = SAC(agent, critics, 0), drawn_rows(ACTION, 12, has_weight=False)
    sac.target_entropy = float(sac.losses(batch, Clock()).metrics["entropy"])
    compute = sac_gradients(sac)
    assert compute is not None

    def rounded(batch: Batch, clock: Clock) -> Gradients | None:
        found = compute(batch, clock)
        assert found is not None
        found.pieces["alpha"][0].add_(off)
        return found

    checked = fast.CheckedGradients("SAC", rounded)
    Learner(sac, OptimizerOptions(), parse_schedule("1e-2"), None, fast_path=checked).gradients(batch)
    assert (checked.compute is not None) == is_kept


@pytest.mark.parametrize(("target_entropy", "rises"), [(50.0, True), (-50.0, False)])
def test_too_little_entropy_raises_the_temperature(target_entropy: float, rises: bool) -> None:
    sac = make_sac(target_entropy=target_entropy)
    learner = make_learner(sac)
    learner.step(BATCHES[0])
    assert (sac.log_alpha.exp().item() > 0.4) == rises
    assert sac.log_alpha.item() == pytest.approx(math.log(0.4) + (0.01 if rises else -0.01), rel=1e-3)


def test_fixed_temperature_has_no_parameter_group_and_stays_fixed() -> None:
    sac = make_sac(ent_coef=0.25)
    assert list(sac.groups()) == ["critic", "actor"]
    learner = make_learner(sac)
    for batch in BATCHES:
        done = learner.step(batch)
        assert set(done.groups) == {"critic", "actor"}
        assert "ent_coef_loss" not in done.metrics
    assert sac.log_alpha.exp().item() == pytest.approx(0.25)


def test_parameter_groups_are_disjoint_and_exclude_target_critics() -> None:
    sac = make_sac()
    groups = sac.groups()
    assert list(groups) == ["critic", "actor", "alpha"]
    named = [id(parameter) for group in groups.values() for parameter in group]
    assert len(named) == len(set(named))
    assert not {id(parameter) for parameter in sac.target_critics.parameters()} & set(named)
    sum(sac.losses(BATCHES[0], Clock()).groups.values()).backward()
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in sac.target_critics.parameters()
    )


def test_losses_of_an_update_come_from_the_same_parameters() -> None:
    """One step applies all gradients as computed before the step, and their order does not matter."""
    a, b = make_sac(), make_sac()
    first, second = make_learner(a), make_learner(b)
    for batch in BATCHES:
        found = second.gradients(batch).pieces
        first.step(batch)
        for name in ("alpha", "actor", "critic"):
            second.optimizers[name].step(found[name], 1e-2)
        second.clock = Clock(second.version + 1)
        b.after_update(second.clock)
        assert is_same(copies(a), b)


@pytest.mark.parametrize(("tau", "interval"), [(0.005, 1), (0.3, 2), (1.0, 3)])
def test_target_critics_follow(tau: float, interval: int) -> None:
    sac = make_sac(tau=tau, target_interval=interval)
    learner = make_learner(sac)
    expected = [numbers(parameter) for parameter in sac.target_critics.parameters()]
    for update in range(1, 7):
        learner.step(BATCHES[update % 3])
        if update % interval == 0:
            online = zip(expected, sac.critics.parameters(), strict=True)
            expected = [(1 - tau) * old + tau * numbers(parameter) for old, parameter in online]
        for found, wanted in zip(sac.target_critics.parameters(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# --- sequences ---


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_of_sequences_row_by_row(core: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sac = make_sac(core=core, burn_in=3)
    agent, generator = sac.agent, torch.Generator().manual_seed(seed)
    state = map_tree(lambda x: torch.randn(x.shape, generator=generator), agent.initial_state(4))
    batch = drawn_sequences(ACTION, state, seed=seed, has_weight=True)
    noises = Noises(agent, monkeypatch)
    losses = sac.losses(batch, Clock())
    with torch.no_grad():
        features = slow_features(agent.trunk, agent.inputs, batch, state.memory)
        blank = agent.trunk.core.initial_state(4)
        seen, target_seen = (
            [slow_features(critic.trunk, agent.inputs, batch, blank) for critic in critics]
            for critics in (sac.critics, sac.target_critics)
        )
        real = [(t, s) for t in range(6) for s in range(4) if batch.steps.mask[3 + t, s]]
        assert len(noises.now) == len(noises.after) == len(real)
        critic_total, actor_total, log_probs = 0.0, 0.0, []
        for k, (t, s) in enumerate(real):
            at = int(batch.targets.row[t, s]), s
            action, log_prob = agent.distribution(features[at]).sample_with_log_prob(noises.after[k])
            worst = min(float(c(own[at], action)) for c, own in zip(sac.target_critics, target_seen, strict=True))
            soft = worst - 0.4 * float(log_prob)
            goal = float(batch.targets.reward[t, s]) + float(batch.targets.discount[t, s]) * soft
            taken = torch.from_numpy(normalized(batch.steps.action[3 + t, s])).float()
            for critic, own in zip(sac.critics, seen, strict=True):
                error = goal - float(critic(own[3 + t, s], taken))
                critic_total += 0.5 * float(batch.weight[s]) ** 0.4 * error**2
            action, log_prob = agent.distribution(features[3 + t, s]).sample_with_log_prob(noises.now[k])
            best = min(float(critic(own[3 + t, s], action)) for critic, own in zip(sac.critics, seen, strict=True))
            actor_total += 0.4 * float(log_prob) - best
            log_probs.append(float(log_prob))
    assert losses.groups["critic"].item() == pytest.approx(critic_total / len(real), rel=1e-4)
    assert losses.groups["actor"].item() == pytest.approx(actor_total / len(real), rel=1e-4, abs=1e-5)
    gap = -sum(log_probs) / len(real) - sac.target_entropy
    assert losses.groups["alpha"].item() == pytest.approx(math.log(0.4) * gap, rel=1e-4, abs=1e-5)
    assert losses.priority is not None
    assert losses.priority.shape == (4,)


# --- the rest ---


def test_temperature_and_target_critics_are_saved_and_loaded() -> None:
    sac = make_sac()
    learner = make_learner(sac)
    for batch in BATCHES:
        learner.step(batch)
    assert {"log_alpha", "target_critics.1.head.weight", "critics.0.head.weight"} <= set(sac.state_dict())
    agent = make_agent(stochastic=True, seed=8)
    other = SAC(agent, make_critics(agent, 2, seed=9), 0)
    twin = make_learner(other)
    twin.load_state_dict(learner.state_dict())
    for batch in BATCHES:
        learner.step(batch)
        twin.step(batch)
    assert is_same(copies(sac), other)


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", (None, 1.0)), ("auto_0.1", (None, 0.1)), ("0.2", (0.2, 1.0))]
)
def test_parsing_of_ent_coef(text: str, expected: tuple[float | None, float]) -> None:
    assert SACOptions(ent_coef=text).entropy_weight() == expected


def test_one_step_with_a_known_best_action_and_target_entropy() -> None:
    """With reward -(a - best)^2 and one-step episodes, the policy gets to entropy -1 around the best action."""
    agent = make_agent(stochastic=True)
    sac = SAC(agent, [Quadratic(), Quadratic()], 0, target_entropy=-1.0)
    best, learner, generator = torch.tensor([0.3, -0.4]), make_learner(sac, "3e-2"), torch.Generator().manual_seed(0)
    obs, entropies = torch.zeros(64, 3), []
    for _ in range(300):
        action = torch.rand(64, 2, generator=generator) * 2 - 1
        taken = torch.from_numpy(LOW + (action.numpy() + 1) / 2 * (HIGH - LOW))
        targets = Returns(-(action - best).square().sum(-1), torch.zeros(64))
        batch = Batch(Steps(obs, taken, None, None, None, None, None), targets, next_obs=obs)
        entropies.append(float(learner.step(batch).metrics["entropy"]))
    assert sum(entropies[-50:]) / 50 == pytest.approx(-1.0, abs=0.15)
    np.testing.assert_allclose(agent.distribution(agent.features(obs[:1])[0]).mode().detach()[0], best, atol=0.1)
