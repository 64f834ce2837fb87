"""Tests of deep Q-learning against networks and losses written in numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from references import slow_projection
from rollouts import box, discrete
from test_off_policy import copies, drawn_rows, is_same, make_learner, numbers, shaken
from torch import Tensor, nn

from remuda.agents import QAgent
from remuda.algorithms import DQN
from remuda.core import Clock
from remuda.data import Batch, Rollout, Steps
from remuda.learning.schedules import parse_schedule
from remuda.nets import MLP
from remuda.replay.ring import Ring, Row
from remuda.replay.transitions import Returns, TransitionReplay

Floats = NDArray[np.float64]
ACTIONS = 4


def make_agent(seed: int = 0, **options: Any) -> QAgent:
    torch.manual_seed(seed)
    agent = QAgent(box((3,)), discrete(ACTIONS), lambda shape: MLP(shape, (5,)), **options)
    for parameter in agent.head.parameters():
        nn.init.normal_(parameter)
    return agent


def make_dqn(agent: QAgent | None = None, seed: int = 0, **options: Any) -> DQN:
    """Return a DQN whose target network differs from its online network."""
    dqn = DQN(agent or make_agent(), seed, **options)
    shaken(dqn.target, size=0.5)
    return dqn


BATCHES = [drawn_rows(discrete(ACTIONS), N=24, seed=seed, has_weight=True) for seed in range(4)]


# --- slow references, in float64 ---


def weights_of(agent: QAgent) -> list[Floats]:
    """Return weight and bias of the hidden layer and of the head."""
    net, head = agent.trunk.net.layers[0], agent.head.advantage.layers[0]
    return [numbers(parameter) for parameter in (net.weight, net.bias, head.weight, head.bias)]


def forward(weights: list[Floats], obs: Floats, atoms: int = 1) -> Floats:
    """Return values [N, A], or logits [N, A, atoms]."""
    w1, b1, w2, b2 = weights
    out = np.tanh(obs @ w1.T + b1) @ w2.T + b2
    return out if atoms == 1 else out.reshape(len(obs), ACTIONS, atoms)


def softmax(logits: Floats) -> Floats:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def huber(error: float, delta: float | None) -> float:
    if delta is None or abs(error) <= delta:
        return 0.5 * error * error
    return delta * (abs(error) - 0.5 * delta)


def goals(dqn: DQN, batch: Batch) -> list[float]:
    """r + discount * Q'(s', a*), with a* the best action of the target net, or of the online net if it is double."""
    later = forward(weights_of(dqn.target), numbers(batch.next_obs))
    chooser = forward(weights_of(dqn.agent), numbers(batch.next_obs)) if dqn.is_double else later
    out = []
    for i, (r, discount) in enumerate(
        zip(batch.targets.reward.tolist(), batch.targets.discount.tolist(), strict=True)
    ):
        best = max(range(ACTIONS), key=lambda a, i=i: chooser[i, a])
        out.append(r + discount * later[i, best])
    return out


def slow_loss(weights: list[Floats], batch: Batch, goal: list[float], delta: float | None, beta: float) -> float:
    """Return the loss of these weights for constant targets."""
    q, total = forward(weights, numbers(batch.steps.obs)), 0.0
    for i, action in enumerate(batch.steps.action.tolist()):
        weight = 1.0 if batch.weight is None else float(batch.weight[i]) ** beta
        total += weight * huber(goal[i] - q[i, action], delta)
    return total / len(goal)


# --- scalar values ---


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("delta", [1.0, 0.3, None], ids=["huber", "huber 0.3", "squared"])
def test_loss_and_priority_against_loops(batch: Batch, double: bool, delta: float | None) -> None:
    dqn = make_dqn(double=double, delta=delta)
    losses, goal = dqn.losses(batch, Clock()), goals(dqn, batch)
    expected = slow_loss(weights_of(dqn.agent), batch, goal, delta, 0.4)
    assert set(losses.groups) == {"q"}
    assert losses.groups["q"].item() == pytest.approx(expected, rel=1e-4)
    assert losses.metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert losses.priority is not None
    q = forward(weights_of(dqn.agent), numbers(batch.steps.obs))
    errors = [abs(y - q[i, a]) for i, (y, a) in enumerate(zip(goal, batch.steps.action.tolist(), strict=True))]
    np.testing.assert_allclose(losses.priority, errors, rtol=1e-3, atol=1e-4)
    assert not losses.priority.requires_grad
    assert losses.metrics["td_error"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert losses.metrics["q_mean"] == pytest.approx(q.max(1).mean(), rel=1e-4, abs=1e-5)
    assert min(errors) < 1 < max(errors), "the errors cover both parts of the Huber loss"


def test_double_and_plain_targets_differ() -> None:
    """Otherwise the test above could not distinguish them. The plain target is never the smaller of the two."""
    for batch in BATCHES:
        plain, double = (goals(make_dqn(double=double), batch) for double in (False, True))
        assert sum(a != b for a, b in zip(plain, double, strict=True)) >= 2
        assert all(a >= b for a, b in zip(plain, double, strict=True))


def constant(dqn: DQN, online: list[float], target: list[float]) -> None:
    """Make both nets return the given values for every observation."""
    for agent, values in ((dqn.agent, online), (dqn.target, target)):
        layer = agent.head.advantage.layers[0]
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor(values))


def one_row(action: int, reward: float, discount: float, weight: float | None = None) -> Batch:
    obs = torch.zeros(1, 3)
    steps = Steps(obs, torch.tensor([action]), None, None, torch.ones(1, dtype=torch.bool), None, None)
    targets = Returns(torch.tensor([reward]), torch.tensor([discount]))
    return Batch(steps, targets, next_obs=obs, weight=None if weight is None else torch.tensor([weight]))


@pytest.mark.parametrize(
    ("double", "delta", "loss", "error"),
    [
        (False, 1.0, 6.0, 6.5),  # target 1 + 0.5 * 20 = 11, error 11 - 4.5 = 6.5, loss 6.5 - 0.5
        (False, None, 21.125, 6.5),
        (True, 1.0, 0.125, 0.5),  # online net prefers action 3, target net values it 6: target 4, error -0.5
        (True, 0.2, 0.08, 0.5),  # 0.2 * (0.5 - 0.1)
    ],
)
def test_worked_numbers(double: bool, delta: float | None, loss: float, error: float) -> None:
    dqn = make_dqn(double=double, delta=delta)
    constant(dqn, [4.5, 1.0, 2.0, 5.0], [0.0, 20.0, 3.0, 6.0])
    found = dqn.losses(one_row(0, 1.0, 0.5), Clock())
    assert found.groups["q"].item() == pytest.approx(loss)
    assert found.priority is not None
    assert found.priority.tolist() == pytest.approx([error])


@pytest.mark.parametrize("double", [False, True])
def test_target_of_a_terminal_row_is_its_reward(double: bool) -> None:
    """The next observation changes the target of every row except the terminal ones."""
    dqn, batch = make_dqn(double=double, delta=None), BATCHES[0]
    is_over = batch.targets.discount == 0
    assert 0 < is_over.sum() < len(is_over)
    before = dqn.losses(batch, Clock()).priority
    elsewhere = replace(batch, next_obs=batch.next_obs + 3.0)
    after = dqn.losses(elsewhere, Clock()).priority
    assert before is not None
    assert after is not None
    assert torch.equal(before[is_over], after[is_over])
    assert (before[~is_over] != after[~is_over]).all()


def test_losses_use_the_returns_and_discounts_of_the_replay() -> None:
    """Rewards and discounts of the rows themselves, NaN in this batch, are not used."""
    dqn, batch = make_dqn(), BATCHES[0]
    assert batch.steps.reward.isnan().all()
    assert batch.steps.discount.isnan().all()
    assert dqn.losses(batch, Clock()).groups["q"].isfinite()


@pytest.mark.parametrize("n", [1, 3])
def test_n_steps_through_the_replay(n: int) -> None:
    """The replay holds a truncated episode of five rows and a terminated one of three."""
    rng, gamma, T = np.random.default_rng(0), 0.8, 10
    mask, discount = np.ones((T, 1), bool), np.ones((T, 1), np.float32)
    mask[5], mask[9], discount[8] = False, False, 0.0
    obs, reward = rng.normal(size=(T + 1, 1, 3)).astype(np.float32), rng.normal(size=(T, 1)).astype(np.float32)
    reward[~mask] = 0
    action = rng.integers(0, ACTIONS, (T, 1))
    example = Row(obs[0, 0], action[0, 0], reward[0, 0], discount[0, 0], mask[0, 0])
    ring = Ring(example, 20, 1)
    replay = TransitionReplay(ring, batch_size=64, ratio=64, warm_up=0, n_step=n, gamma=gamma, seed=0)
    rows = [torch.from_numpy(x) for x in (obs[:-1], action, reward, discount, mask)]
    replay.add(Batch(Steps(*rows, None, None), next_obs=torch.from_numpy(obs[-1])))
    batch = replay.draw()
    ring.close()
    dqn = make_dqn(double=False)
    later, q = (forward(weights_of(agent), obs[:, 0].astype(np.float64)) for agent in (dqn.target, dqn.agent))
    errors = []
    for row in batch.key[:, 0].tolist():
        goal, factor, at = 0.0, 1.0, row
        for _ in range(n):
            if at == T or not mask[at, 0] or factor == 0:
                break
            goal += factor * float(reward[at, 0])
            factor *= gamma * float(discount[at, 0])
            at += 1
        goal += factor * later[at].max()
        errors.append(abs(goal - q[row, action[row, 0]]))
    found = dqn.losses(batch, Clock()).priority
    assert found is not None
    np.testing.assert_allclose(found, errors, rtol=1e-3, atol=1e-4)
    assert len(set(batch.key[:, 0].tolist())) == 8, "all real rows were drawn"


# --- importance weights of prioritized draws ---


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_importance_weights_are_raised_to_the_scheduled_beta(progress: float) -> None:
    dqn, batch = make_dqn(beta=parse_schedule("linear(0.4, 1)")), BATCHES[1]
    expected = slow_loss(weights_of(dqn.agent), batch, goals(dqn, batch), 1.0, 0.4 + 0.6 * progress)
    losses = dqn.losses(batch, Clock(progress=progress))
    assert losses.groups["q"].item() == pytest.approx(expected, rel=1e-4)


def test_weights_do_not_enter_priorities() -> None:
    dqn, batch = make_dqn(), BATCHES[1]
    weighted, plain = dqn.losses(batch, Clock()), dqn.losses(replace(batch, weight=None), Clock())
    assert weighted.priority is not None
    assert plain.priority is not None
    assert torch.equal(weighted.priority, plain.priority)
    assert weighted.groups["q"].item() < plain.groups["q"].item()


def test_importance_weight_by_worked_numbers() -> None:
    dqn = make_dqn(double=False, delta=None, beta=0.5)
    constant(dqn, [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert dqn.losses(one_row(0, 0.0, 0.0, weight=0.25), Clock()).groups["q"].item() == pytest.approx(0.5 * 8.0)


# --- gradients ---


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_gradient_comes_only_from_the_values_of_the_actions_taken(double: bool) -> None:
    """Finite differences in float64 with constant targets: no gradient flows through the target or its argmax."""
    dqn, batch, h = make_dqn(double=double), BATCHES[2], 1e-6
    loss = dqn.losses(batch, Clock()).groups["q"]
    order = list(dqn.agent.parameters())
    found = torch.autograd.grad(loss, order)
    weights, goal = weights_of(dqn.agent), goals(dqn, batch)
    by_name = dict(zip((id(p) for p in order), found, strict=True))
    net, head = dqn.agent.trunk.net.layers[0], dqn.agent.head.advantage.layers[0]
    for k, parameter in enumerate((net.weight, net.bias, head.weight, head.bias)):
        slope = np.zeros(weights[k].shape)
        for place in np.ndindex(slope.shape):
            both = []
            for step in (h, -h):
                moved = [w.copy() for w in weights]
                moved[k][place] += step
                both.append(slow_loss(moved, batch, goal, 1.0, 0.4))
            slope[place] = (both[0] - both[1]) / (2 * h)
        np.testing.assert_allclose(by_name[id(parameter)], slope, rtol=1e-3, atol=1e-4)


def test_target_network_has_no_gradient_and_no_optimizer() -> None:
    dqn = make_dqn()
    dqn.losses(BATCHES[0], Clock()).groups["q"].backward()
    assert all(parameter.grad is not None for parameter in dqn.agent.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in dqn.target.parameters())
    (group,) = dqn.groups().values()
    assert {id(parameter) for parameter in group} == {id(parameter) for parameter in dqn.agent.parameters()}


@pytest.mark.parametrize(("tau", "interval"), [(1.0, 3), (0.1, 1), (0.5, 2)])
def test_target_network_follows_while_learning(tau: float, interval: int) -> None:
    dqn = make_dqn(tau=tau, target_interval=interval)
    learner = make_learner(dqn)
    expected = [numbers(parameter) for parameter in dqn.target.parameters()]
    for version in range(1, 8):
        before = copies(dqn.agent)
        learner.step(BATCHES[version % 4])
        assert not is_same(before, dqn.agent)
        if version % interval == 0:
            expected = [
                old + tau * (numbers(parameter) - old)
                for old, parameter in zip(expected, dqn.agent.parameters(), strict=True)
            ]
        for found, wanted in zip(dqn.target.parameters(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# --- distributions over returns ---


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_cross_entropy_and_divergence_against_loops(batch: Batch, double: bool) -> None:
    dqn = make_dqn(make_agent(atoms=11, v_min=-3.0, v_max=4.0), double=double)
    support = np.linspace(-3, 4, 11)
    later = softmax(forward(weights_of(dqn.target), numbers(batch.next_obs), 11))
    own = softmax(forward(weights_of(dqn.agent), numbers(batch.next_obs), 11))
    now = softmax(forward(weights_of(dqn.agent), numbers(batch.steps.obs), 11))
    entropies, divergences, total = [], [], 0.0
    for i, action in enumerate(batch.steps.action.tolist()):
        chooser = own if double else later
        best = max(range(ACTIONS), key=lambda a, i=i, chooser=chooser: float((chooser[i, a] * support).sum()))
        goal = slow_projection(
            later[i, best], float(batch.targets.reward[i]), float(batch.targets.discount[i]), support
        )
        assert sum(goal) == pytest.approx(1.0)
        entropies.append(-sum(m * math.log(p) for m, p in zip(goal, now[i, action], strict=True)))
        divergences.append(sum(m * math.log(m / p) for m, p in zip(goal, now[i, action], strict=True) if m > 0))
        total += float(batch.weight[i]) ** 0.4 * entropies[-1]
    losses = dqn.losses(batch, Clock())
    assert losses.groups["q"].item() == pytest.approx(total / len(entropies), rel=1e-4)
    assert losses.priority is not None
    np.testing.assert_allclose(losses.priority, divergences, rtol=1e-3, atol=1e-4)
    assert losses.metrics["q_mean"] == pytest.approx(
        np.mean([max((now[i] * support).sum(-1)) for i in range(len(now))]), rel=1e-4, abs=1e-4
    )


def test_distribution_that_equals_its_target_has_no_divergence() -> None:
    """With reward 0, discount 1 and the same net the loss is the entropy and the priority is 0."""
    agent = make_agent(atoms=11)
    dqn = DQN(agent, 0, double=False)
    obs = torch.randn(6, 3)
    best = agent.expected(agent.unroll(obs, None, None)[0]).argmax(-1)
    steps = Steps(obs, best, None, None, None, None, None)
    losses = dqn.losses(Batch(steps, Returns(torch.zeros(6), torch.ones(6)), next_obs=obs), Clock())
    p = agent.unroll(obs, None, None)[0][torch.arange(6), best].softmax(-1)
    assert losses.groups["q"].item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
    assert losses.priority is not None
    assert (losses.priority >= 0).all()
    assert losses.priority.max() < 1e-5


def test_target_distribution_of_a_terminal_row_is_one_atom() -> None:
    """All mass is at the reward, so loss and divergence are the log loss of that atom."""
    dqn = make_dqn(make_agent(atoms=5, v_min=-2.0, v_max=2.0))
    batch = one_row(1, 1.0, 0.0)
    logits = dqn.agent.unroll(batch.steps.obs, None, None)[0][0, 1]
    losses = dqn.losses(batch, Clock())
    assert losses.groups["q"].item() == pytest.approx(-logits.log_softmax(-1)[3].item(), rel=1e-5)
    assert losses.priority is not None
    assert losses.priority.item() == pytest.approx(-logits.log_softmax(-1)[3].item(), rel=1e-5)


# --- noisy nets ---


def loss_at(dqn: DQN, version: int, progress: float = 0.0) -> float:
    return dqn.losses(BATCHES[0], Clock(version, progress)).groups["q"].item()


@pytest.mark.parametrize("atoms", [1, 5])
def test_noise_is_a_function_of_seed_and_update(atoms: int) -> None:
    agent = make_agent(noisy=True, atoms=atoms)
    dqn, again, other = make_dqn(agent), make_dqn(agent), make_dqn(agent, seed=1)
    found = [loss_at(dqn, version) for version in range(5)]
    torch.manual_seed(123)
    assert [loss_at(dqn, version) for version in range(5)] == found
    assert [loss_at(again, version, progress=0.7) for version in range(5)] == found
    assert len(set(found)) == 5
    assert not set(found) & {loss_at(other, version) for version in range(5)}


def test_loss_without_noise_is_the_same_in_every_update() -> None:
    dqn = make_dqn()
    assert len({loss_at(dqn, version) for version in range(3)}) == 1


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_each_net_has_its_own_noise_shared_by_all_rows(double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of both nets is fixed here and added to the weights explicitly."""
    dqn, batch = make_dqn(make_agent(noisy=True, head_hidden=0), double=double), BATCHES[0]
    mine, theirs = torch.randn(2, 9, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(dqn, "_noises", lambda clock, like: (mine, theirs))

    def written_out(agent: Any, noise: Tensor) -> list[Floats]:
        layer, e = agent.head.advantage.layers[0], np.sign(numbers(noise)) * np.sqrt(np.abs(numbers(noise)))
        w1, b1, w2, b2 = weights_of(agent)
        w2 = w2 + numbers(layer.weight_sigma) * np.outer(e[5:], e[:5])
        return [w1, b1, w2, b2 + numbers(layer.bias_sigma) * e[5:]]

    online, target = written_out(dqn.agent, mine), written_out(dqn.target, theirs)
    later = forward(target, numbers(batch.next_obs))
    chooser = forward(online, numbers(batch.next_obs)) if double else later
    goal = [
        float(batch.targets.reward[i]) + float(batch.targets.discount[i]) * later[i, chooser[i].argmax()]
        for i in range(len(later))
    ]
    expected = slow_loss(online, batch, goal, 1.0, 0.4)
    assert dqn.losses(batch, Clock()).groups["q"].item() == pytest.approx(expected, rel=1e-4)


def test_noise_of_both_nets_differs_and_reaches_deviations() -> None:
    dqn = make_dqn(make_agent(noisy=True))
    mine, theirs = dqn._noises(Clock(3), torch.zeros(1))
    assert mine is not None
    assert theirs is not None
    assert mine.shape == theirs.shape == (dqn.agent.noise_width,)
    assert not torch.equal(mine, theirs)
    dqn.losses(BATCHES[0], Clock()).groups["q"].backward()
    layer = dqn.agent.head.advantage.layers[0]
    assert (layer.weight_sigma.grad != 0).any()
    assert (layer.bias_sigma.grad != 0).any()


# --- the rest ---


def test_rewards_are_clipped_when_prepared() -> None:
    reward = torch.tensor([[3.0, -0.5], [-7.0, 1.0]])
    steps = Steps(torch.zeros(2, 2, 3), torch.zeros(2, 2), reward, torch.ones(2, 2), torch.ones(2, 2), None, None)
    rollout = Rollout(steps, torch.zeros(2, 3))
    assert make_dqn(clip_reward=True).prepare(rollout).steps.reward.tolist() == [[1.0, -0.5], [-1.0, 1.0]]
    assert make_dqn().prepare(rollout).steps.reward.tolist() == [[3.0, -0.5], [-7.0, 1.0]]
    assert rollout.steps.reward.tolist() == [[3.0, -0.5], [-7.0, 1.0]], (
        "rewards of the rollout, which are logged, are unchanged"
    )


def test_target_network_is_saved_and_loaded() -> None:
    dqn = make_dqn(make_agent(noisy=True, dueling=True, normalize_obs=True))
    learner = make_learner(dqn)
    for batch in BATCHES:
        learner.step(batch)
    saved = {name: tensor.clone() for name, tensor in learner.state_dict()["algorithm"].items()}
    assert {name for name in saved if name.startswith("target.head")}
    other = make_dqn(make_agent(seed=5, noisy=True, dueling=True, normalize_obs=True))
    assert loss_at(other, 4) != loss_at(dqn, 4)
    twin = make_learner(other)
    twin.load_state_dict(learner.state_dict())
    assert is_same(copies(dqn.target), other.target)
    assert loss_at(other, 4) == loss_at(dqn, 4)
    for batch in BATCHES:
        learner.step(batch)
        twin.step(batch)
    assert is_same(copies(dqn), other)


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        pytest.param({}, {"target_interval": 10}, id="double"),
        pytest.param(
            {"dueling": True, "head_hidden": 16},
            {"double": False, "tau": 0.05, "target_interval": 1},
            id="dueling, soft",
        ),
        pytest.param({"atoms": 21, "v_min": 0.0, "v_max": 4.0}, {"target_interval": 10}, id="distributional"),
    ],
)
def test_values_of_a_chain_reach_their_known_optimum(agent: dict[str, Any], options: dict[str, Any]) -> None:
    """The chain has two states, two actions, and discount 0.5; its values are Q = (1, 1.5), (3, 0.25 + 0.75).

    In state 0, action 0 ends the episode with reward 1, and action 1 leads to state 1 with reward 0. In state 1,
    action 0 ends the episode with reward 3, and action 1 leads back to state 0 with reward 0.25.
    """
    torch.manual_seed(0)
    net = QAgent(discrete(2), discrete(2), lambda shape: nn.Identity(), **agent)
    dqn = DQN(net, 0, delta=None, **options)
    state, action, follows = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 0, 0])
    steps = Steps(state, action, None, None, None, None, None)
    targets = Returns(torch.tensor([1.0, 0.0, 3.0, 0.25]), torch.tensor([0.0, 0.5, 0.0, 0.5]))
    learner = make_learner(dqn, "0.1")
    for _ in range(250):
        learner.step(Batch(steps, targets, next_obs=follows))
    values = net.expected(net.unroll(torch.tensor([0, 1]), None, None)[0]).detach()
    np.testing.assert_allclose(values, [[1.0, 1.5], [3.0, 1.0]], atol=0.06)


@pytest.mark.parametrize("options", [{}, {"atoms": 5}, {"noisy": True}], ids=["scalar", "distribution", "noisy"])
def test_priorities_without_a_target_network_equal_those_with_a_new_copy(options: dict[str, Any]) -> None:
    """A sampler, which computes initial priorities, builds the agent without a target network."""
    with_target, without = (DQN(make_agent(**options), 3, has_target=has_target) for has_target in (True, False))
    assert without.target is without.agent
    for batch in BATCHES:
        assert torch.equal(with_target.td_error(batch), without.td_error(batch))
