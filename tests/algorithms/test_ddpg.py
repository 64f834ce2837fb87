"""Tests of DDPG and TD3 against networks written in numpy and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box
from test_off_policy import copies, drawn_rows, drawn_sequences, is_same, make_learner, numbers, shaken
from torch import Tensor, nn

from remuda.agents import ActorAgent, Critic
from remuda.algorithms import DDPG, TD3
from remuda.config.continuous_options import DDPGOptions, TD3Options
from remuda.core import Clock, Space
from remuda.data import Batch, Steps, map_tree
from remuda.learning.schedules import parse_schedule
from remuda.nets import MLP
from remuda.replay.transitions import Returns

Floats = NDArray[np.float64]
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32)
ACTION = Space("box", (2,), "float32", LOW, HIGH)
BATCHES = [drawn_rows(ACTION, seed=seed, has_weight=True) for seed in range(3)]


def make_agent(stochastic: bool = False, seed: int = 0, core: Any = None, **options: Any) -> ActorAgent:
    torch.manual_seed(seed)
    return ActorAgent(
        box((3,)), ACTION, lambda shape: MLP(shape, (4,)), stochastic=stochastic, core=core, core_size=4, **options
    )


def make_critics(agent: ActorAgent, count: int, seed: int = 1, core: Any = None) -> list[Critic]:
    torch.manual_seed(seed)
    observation, action = agent.observation, agent.action
    return [Critic(agent.inputs, observation, action, None, (5,), "tanh", core, 4) for _ in range(count)]


def make(kind: Any = DDPG, critics: int = 1, seed: int = 0, core: Any = None, **options: Any) -> Any:
    """Return a DDPG or TD3 whose target networks differ from the networks they were copied from."""
    agent = make_agent(core=core)
    algorithm = kind(agent, make_critics(agent, critics, core=core), seed, **options)
    for index, net in enumerate((agent, algorithm.critics, algorithm.target, algorithm.target_critics)):
        shaken(net, seed=10 + index, size=0.5)
    return algorithm


# --- slow references in float64: each net is one vector of weights, in the order of its parameters ---


def vector_of(module: nn.Module) -> Floats:
    return np.concatenate([numbers(parameter).reshape(-1) for parameter in module.parameters()])


def layers_of(vector: Floats, module: nn.Module) -> list[Floats]:
    out, start = [], 0
    for parameter in module.parameters():
        out.append(vector[start : start + parameter.numel()].reshape(tuple(parameter.shape)))
        start += parameter.numel()
    return out


def act(vector: Floats, agent: nn.Module, obs: Floats) -> Floats:
    w1, b1, w2, b2 = layers_of(vector, agent)
    return np.tanh(np.tanh(obs @ w1.T + b1) @ w2.T + b2)


def judge(vector: Floats, critic: nn.Module, obs: Floats, action: Floats) -> Floats:
    w1, b1, w2, b2 = layers_of(vector, critic)
    return (np.tanh(np.concatenate([obs, action], -1) @ w1.T + b1) @ w2.T + b2)[:, 0]


def normalized(action: Tensor) -> Floats:
    """Return actions scaled from the bounds of the space to -1..1."""
    return (numbers(action) - LOW) / (HIGH - LOW).astype(np.float64) * 2 - 1


def slopes(function: Callable[[Floats], float], at: Floats, h: float = 1e-6) -> Floats:
    out = np.zeros(len(at))
    for k in range(len(at)):
        up, down = at.copy(), at.copy()
        up[k] += h
        down[k] -= h
        out[k] = (function(up) - function(down)) / (2 * h)
    return out


def goals(algorithm: Any, batch: Batch, noise: Floats | float = 0.0) -> Floats:
    """r + discount * min_j Q'_j(s', clip(mu'(s') + noise))."""
    later = numbers(batch.next_obs)
    action = np.clip(act(vector_of(algorithm.target), algorithm.target, later) + noise, -1, 1)
    values = [judge(vector_of(critic), critic, later, action) for critic in algorithm.target_critics]
    worst = np.array([min(of_row) for of_row in zip(*values, strict=True)])
    return numbers(batch.targets.reward) + numbers(batch.targets.discount) * worst


def critic_loss(algorithm: Any, vectors: list[Floats], batch: Batch, goal: Floats, beta: float = 0.4) -> float:
    """Return the sum over critics of the mean of weight ** beta times the squared error."""
    total, action = 0.0, normalized(batch.steps.action)
    for critic, vector in zip(algorithm.critics, vectors, strict=True):
        q = judge(vector, critic, numbers(batch.steps.obs), action)
        for i in range(len(q)):
            weight = 1.0 if batch.weight is None else float(batch.weight[i]) ** beta
            total += weight * (goal[i] - q[i]) ** 2 / len(q)
    return total


# --- critics ---


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("critics", [1, 2, 3])
def test_critic_loss_and_priority_against_numpy(batch: Batch, critics: int) -> None:
    ddpg = make(critics=critics)
    losses, goal = ddpg.losses(batch, Clock()), goals(ddpg, batch)
    vectors = [vector_of(critic) for critic in ddpg.critics]
    expected = critic_loss(ddpg, vectors, batch, goal)
    assert losses.groups["critic"].item() == pytest.approx(expected, rel=1e-4)
    assert losses.metrics["critic_loss"] == pytest.approx(expected, rel=1e-4)
    q = judge(vectors[0], ddpg.critics[0], numbers(batch.steps.obs), normalized(batch.steps.action))
    np.testing.assert_allclose(losses.priority, np.abs(goal - q), rtol=1e-3, atol=1e-4)
    assert losses.metrics["q_mean"] == pytest.approx(q.mean(), rel=1e-4, abs=1e-5)


def test_targets_use_the_smaller_of_two_critics_per_row() -> None:
    """In this batch each of the two critics is the smaller one in some rows."""
    td3, batch = make(TD3, 2, target_noise=0.0), BATCHES[0]
    later = numbers(batch.next_obs)
    action = act(vector_of(td3.target), td3.target, later)
    first, second = (judge(vector_of(critic), critic, later, action) for critic in td3.target_critics)
    assert 0 < (first < second).sum() < len(first)
    goal = goals(td3, batch)
    worst = numbers(batch.targets.reward) + numbers(batch.targets.discount) * np.minimum(first, second)
    np.testing.assert_allclose(goal, worst)
    expected = critic_loss(td3, [vector_of(critic) for critic in td3.critics], batch, goal)
    assert td3.losses(batch, Clock()).groups["critic"].item() == pytest.approx(expected, rel=1e-4)


def test_target_of_a_terminal_row_is_its_reward() -> None:
    ddpg, batch = make(), BATCHES[0]
    is_over = batch.targets.discount == 0
    before = ddpg.losses(batch, Clock()).priority
    after = ddpg.losses(replace(batch, next_obs=batch.next_obs + 2.0), Clock()).priority
    assert torch.equal(before[is_over], after[is_over])
    assert (before[~is_over] != after[~is_over]).all()


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_weights_follow_their_schedule(progress: float) -> None:
    ddpg, batch = make(beta=parse_schedule("linear(0.4, 1)")), BATCHES[1]
    vectors = [vector_of(critic) for critic in ddpg.critics]
    expected = critic_loss(ddpg, vectors, batch, goals(ddpg, batch), 0.4 + 0.6 * progress)
    losses = ddpg.losses(batch, Clock(progress=progress))
    assert losses.groups["critic"].item() == pytest.approx(expected, rel=1e-4)
    plain = ddpg.losses(replace(batch, weight=None), Clock(progress=progress))
    unweighted = critic_loss(ddpg, vectors, replace(batch, weight=None), goals(ddpg, batch))
    assert plain.groups["critic"].item() == pytest.approx(unweighted, rel=1e-4)
    assert torch.equal(plain.priority, losses.priority)


# --- smoothed targets ---


def test_target_actions_without_noise_are_those_of_the_target_actor() -> None:
    action = torch.rand(20, 2) * 2 - 1
    assert torch.equal(make().smoothed(action, Clock()), action)


def test_target_actions_and_their_noise_are_clipped() -> None:
    """Noise has the given standard deviation where it is not clipped, and never exceeds its bound."""
    td3 = make(TD3, 2)
    action = torch.zeros(20_000, 2)
    noise = td3.smoothed(action, Clock(3)) - action
    assert noise.abs().max() == 0.5
    share = (noise.abs() == 0.5).float().mean()
    assert share.item() == pytest.approx(0.01242, abs=0.003)  # probability beyond 2.5 standard deviations
    assert noise[noise.abs() < 0.5].std().item() == pytest.approx(0.2, rel=0.06)
    assert abs(noise.mean().item()) < 0.005
    wide = make(TD3, 2, target_noise=5.0, target_noise_clip=0.1)
    noise = wide.smoothed(action, Clock(3)) - action
    torch.testing.assert_close(noise.abs().amax(), torch.tensor(0.1))
    edge = td3.smoothed(torch.full((2000, 2), 0.9), Clock())
    assert edge.max() == 1.0
    assert edge.min() >= 0.4 - 1e-6
    assert td3.smoothed(torch.full((2000, 2), -0.9), Clock()).min() == -1.0


def test_noise_of_target_actions_is_a_function_of_seed_and_update() -> None:
    action = torch.zeros(50, 2)
    td3, again, other = make(TD3, 2), make(TD3, 2), make(TD3, 2, seed=7)
    found = [td3.smoothed(action, Clock(version)) for version in range(4)]
    torch.manual_seed(55)
    for version in range(4):
        assert torch.equal(again.smoothed(action, Clock(version, progress=0.3)), found[version])
        assert not torch.equal(other.smoothed(action, Clock(version)), found[version])
    assert all(not torch.equal(found[0], each) for each in found[1:])
    assert len(found[0].unique()) > 90, "all noise values are distinct, except those that are clipped"
    losses = [td3.losses(BATCHES[0], Clock(version)).groups["critic"].item() for version in (0, 1, 0, 1)]
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("batch", BATCHES)
def test_target_critics_evaluate_the_smoothed_actions(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    td3 = make(TD3, 2)
    noise = torch.rand(12, 2, generator=torch.Generator().manual_seed(2)) - 0.5
    monkeypatch.setattr(td3, "smoothed", lambda action, clock: (action + noise).clamp(-1, 1))
    goal = goals(td3, batch, numbers(noise))
    expected = critic_loss(td3, [vector_of(critic) for critic in td3.critics], batch, goal)
    assert td3.losses(batch, Clock()).groups["critic"].item() == pytest.approx(expected, rel=1e-4)


# --- gradients ---


def test_actor_loss_and_gradient_maximize_the_first_critic() -> None:
    """The actor's loss is the unweighted mean of -Q1, differentiated with respect to the actor's weights only."""
    ddpg, batch = make(critics=2), BATCHES[0]
    obs, critic = numbers(batch.steps.obs), ddpg.critics[0]
    fixed = vector_of(critic)

    def loss(vector: Floats) -> float:
        return -float(judge(fixed, critic, obs, act(vector, ddpg.agent, obs)).mean())

    learner = make_learner(ddpg)
    found = learner.gradients(batch)
    assert found.metrics["actor_loss"] == pytest.approx(loss(vector_of(ddpg.agent)), rel=1e-4)
    np.testing.assert_allclose(found.groups["actor"], slopes(loss, vector_of(ddpg.agent)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("critics", [1, 2])
def test_critic_gradient_comes_only_from_the_critic_errors(critics: int) -> None:
    """No gradient flows through the target or from the actor's loss."""
    ddpg, batch = make(critics=critics), BATCHES[0]
    goal, sizes = goals(ddpg, batch), [len(vector_of(critic)) for critic in ddpg.critics]

    def loss(vector: Floats) -> float:
        return critic_loss(ddpg, np.split(vector, np.cumsum(sizes)[:-1]), batch, goal)

    found = make_learner(ddpg).gradients(batch).groups["critic"]
    np.testing.assert_allclose(found, slopes(loss, vector_of(ddpg.critics)), rtol=1e-3, atol=1e-4)


def test_target_networks_have_no_gradients_and_no_parameter_group() -> None:
    td3 = make(TD3, 2)
    losses = td3.losses(BATCHES[0], Clock(1))
    sum(losses.groups.values()).backward()
    for net in (td3.target, td3.target_critics):
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in net.parameters())
    groups = td3.groups()
    assert list(groups) == ["critic", "actor"]
    assert [id(p) for p in groups["critic"]] == [id(p) for p in td3.critics.parameters()]
    assert [id(p) for p in groups["actor"]] == [id(p) for p in td3.agent.parameters()]


# --- delayed updates ---


@pytest.mark.parametrize(
    ("kind", "options", "actor_at", "targets_at"),
    [
        (DDPG, {}, {1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5, 6, 7, 8}),
        (DDPG, {"target_interval": 4}, {1, 2, 3, 4, 5, 6, 7, 8}, {4, 8}),
        (TD3, {}, {2, 4, 6, 8}, {2, 4, 6, 8}),
        (TD3, {"policy_delay": 3}, {3, 6}, {3, 6}),
        (TD3, {"target_interval": 2}, {2, 4, 6, 8}, {4, 8}),
    ],
    ids=["ddpg", "ddpg, targets every 4th", "td3", "td3, delay 3", "td3, targets every 2nd"],
)
def test_only_networks_that_are_due_are_updated(
    kind: Any, options: dict[str, Any], actor_at: set[int], targets_at: set[int]
) -> None:
    algorithm = make(kind, 2, tau=0.1, **options)
    learner = make_learner(algorithm)
    targets = [*algorithm.target.parameters(), *algorithm.target_critics.parameters()]
    expected = [numbers(target) for target in targets]
    for update in range(1, 9):
        nets = {"critic": algorithm.critics, "actor": algorithm.agent}
        before = {name: copies(net) for name, net in nets.items()}
        steps = learner.optimizers["actor"].state_dict()["steps"].item()
        done = learner.step(BATCHES[update % 3])
        due = {"critic", "actor"} if update in actor_at else {"critic"}
        assert set(done.groups) == due
        assert {name for name, net in nets.items() if not is_same(before[name], net)} == due
        assert ("actor_loss" in done.metrics) == (update in actor_at)
        assert learner.optimizers["actor"].state_dict()["steps"].item() - steps == (update in actor_at)
        online = [*algorithm.agent.parameters(), *algorithm.critics.parameters()]
        if update in targets_at:
            expected = [0.9 * old + 0.1 * numbers(p) for old, p in zip(expected, online, strict=True)]
        for target, wanted in zip(targets, expected, strict=True):
            np.testing.assert_allclose(target, wanted, rtol=1e-4, atol=1e-5)


def test_losses_of_an_update_come_from_the_same_parameters() -> None:
    """One step applies both gradients as computed before the step."""
    a, b = make(), make()
    first, second = make_learner(a), make_learner(b)
    first.step(BATCHES[0])
    both = second.gradients(BATCHES[0]).pieces
    for name in ("actor", "critic"):  # in the opposite order
        second.optimizers[name].step(both[name], 1e-2)
    assert is_same(copies(a.agent), b.agent)
    assert is_same(copies(a.critics), b.critics)


# --- sequences ---


def slow_features(trunk: Any, inputs: Any, batch: Batch, state: Any) -> Tensor:
    """Return features [R, S, F] computed row by row, with the memory reset after every reset row."""
    out = []
    for r in range(len(batch.steps.mask)):
        if r > 0:
            state = map_tree(lambda x, r=r: x.masked_fill(~batch.steps.mask[r - 1].unsqueeze(-1), 0.0), state)
        features, state = trunk.step(inputs(batch.steps.obs[r]), state)
        out.append(features)
    return torch.stack(out)


@pytest.mark.parametrize(("kind", "critics"), [(DDPG, 1), (TD3, 2)], ids=["ddpg", "td3"])
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_of_sequences_row_by_row(
    kind: Any, critics: int, core: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors start from their stored state; critics, which do not act, start from zeros. Both have a burn-in."""
    algorithm = make(kind, critics, core=core, burn_in=3, policy_delay=1)
    monkeypatch.setattr(algorithm, "smoothed", lambda action, clock: action)
    agent, generator = algorithm.agent, torch.Generator().manual_seed(seed)
    state = map_tree(lambda x: torch.randn(x.shape, generator=generator), agent.initial_state(4))
    batch = drawn_sequences(ACTION, state, seed=seed, has_weight=True)
    losses = algorithm.losses(batch, Clock())

    def said(net: Any, start: Any) -> Tensor:
        return slow_features(net.trunk, agent.inputs, batch, start)

    with torch.no_grad():
        chosen = agent.head(said(agent, state.memory)).tanh()
        later = algorithm.target.head(said(algorithm.target, state.memory)).tanh()
        blank = agent.trunk.core.initial_state(4)
        seen = [said(critic, blank) for critic in algorithm.critics]
        target_seen = [said(critic, blank) for critic in algorithm.target_critics]
        critic_total, actor_total, count = 0.0, 0.0, 0
        errors: list[list[float]] = [[] for _ in range(4)]
        for t in range(6):
            for s in range(4):
                if not batch.steps.mask[3 + t, s]:
                    continue
                at, count = (int(batch.targets.row[t, s]), s), count + 1
                judges = zip(algorithm.target_critics, target_seen, strict=True)
                values = [critic(own[at], later[at]) for critic, own in judges]
                goal = batch.targets.reward[t, s] + batch.targets.discount[t, s] * min(values)
                action = torch.from_numpy(normalized(batch.steps.action[3 + t, s])).float()
                for k, critic in enumerate(algorithm.critics):
                    error = float(goal - critic(seen[k][3 + t, s], action))
                    critic_total += float(batch.weight[s]) ** 0.4 * error**2
                    errors[s] += [abs(error)] if k == 0 else []
                actor_total -= float(algorithm.critics[0](seen[0][3 + t, s], chosen[3 + t, s]))
    assert losses.groups["critic"].item() == pytest.approx(critic_total / count, rel=1e-4)
    assert losses.groups["actor"].item() == pytest.approx(actor_total / count, rel=1e-4, abs=1e-5)
    expected = [0.9 * max(own) + 0.1 * sum(own) / len(own) for own in errors]
    np.testing.assert_allclose(losses.priority, expected, rtol=1e-3, atol=1e-4)
    learner = make_learner(algorithm)
    before = copies(agent), copies(algorithm.critics)
    learner.step(batch)
    assert not is_same(before[0], agent)
    assert not is_same(before[1], algorithm.critics)


# --- the rest ---


def test_defaults_of_td3() -> None:
    td3, ddpg = make(TD3, 2), make()
    assert (td3.policy_delay, td3.target_noise, td3.target_noise_clip, td3.target_interval) == (2, 0.2, 0.5, 2)
    assert (ddpg.policy_delay, ddpg.target_noise, ddpg.target_interval, ddpg.tau) == (1, 0.0, 1, 0.005)
    first, second = DDPGOptions(), TD3Options()
    assert (first.critics, first.policy_delay, first.target_noise) == (1, 1, 0.0)
    assert (second.critics, second.policy_delay, second.target_noise, second.target_noise_clip) == (2, 2, 0.2, 0.5)


def test_target_networks_are_saved_and_loaded() -> None:
    td3 = make(TD3, 2)
    learner = make_learner(td3)
    for batch in BATCHES:
        learner.step(batch)
    names = set(td3.state_dict())
    assert {"target.head.weight", "target_critics.1.head.weight", "critics.1.head.weight"} <= names
    agent = make_agent(seed=8)
    other = TD3(agent, make_critics(agent, 2, seed=9), 0)
    twin = make_learner(other)
    twin.load_state_dict(learner.state_dict())
    for batch in BATCHES:
        learner.step(batch)
        twin.step(batch)
    assert is_same(copies(td3), other)


class Quadratic(nn.Module):
    """A critic that can represent the quadratic rewards below exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def features(self, obs: Tensor, state: Any = None, reset: Any = None) -> tuple[Tensor, None]:
        return obs, None

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        values: Tensor = self.linear(torch.cat([action, action.square()], -1)).squeeze(-1)
        return values


@pytest.mark.parametrize(("kind", "critics"), [(DDPG, 1), (TD3, 2)], ids=["ddpg", "td3"])
def test_one_step_with_a_known_best_action(kind: Any, critics: int) -> None:
    """The reward is -(a - best)^2 for actions between -1 and 1, and every episode has one step."""
    agent = make_agent()
    algorithm, best = kind(agent, [Quadratic() for _ in range(critics)], 0), torch.tensor([0.3, -0.5])
    learner, generator = make_learner(algorithm, "3e-2"), torch.Generator().manual_seed(0)
    obs = torch.zeros(64, 3)
    for _ in range(250):
        action = torch.rand(64, 2, generator=generator) * 2 - 1
        taken = torch.from_numpy(LOW + (action.numpy() + 1) / 2 * (HIGH - LOW))
        targets = Returns(-(action - best).square().sum(-1), torch.zeros(64))
        learner.step(Batch(Steps(obs, taken, None, None, None, None, None), targets, next_obs=obs))
    found, _ = agent.choose(agent.features(obs[:1])[0])
    np.testing.assert_allclose(found.detach()[0], best, atol=0.05)
