"""Tests of the actor of DDPG, TD3 and SAC: bounds of actions, every kind of noise, and critics against numpy."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box, discrete, observations, somewhere
from torch import Tensor, nn

from remuda.agents import ActorAgent, Critic
from remuda.core import Space
from remuda.data import map_tree
from remuda.envs import make_envs, resolve
from remuda.learning.weights import LocalWeights
from remuda.nets import make_net
from remuda.sampling.exploration import Exploration
from remuda.sampling.noise import Noise
from remuda.sampling.sampler import EnvSampler

Floats = NDArray[np.float64]
LOW, HIGH = [-2.0, 0.0, 1.0], [3.0, 0.5, 10.0]
NESTED = Space("dict", entries={"gear": discrete(5), "place": box((2, 2))}, keys=("gear", "place"))


def lopsided(shape: tuple[int, ...] = (3,)) -> Space:
    low, high = (np.resize(np.array(bound, np.float32), shape) for bound in (LOW, HIGH))
    return Space("box", shape, "float32", low, high)


def make_agent(
    stochastic: bool = False,
    observation: Space | None = None,
    action: Space | None = None,
    seed: int = 0,
    **options: Any,
) -> ActorAgent:
    """Return an agent with a head whose outputs are not near 0."""
    torch.manual_seed(seed)
    agent = ActorAgent(
        observation or box((3,)),
        action or lopsided(),
        lambda shape: make_net(shape, hidden=(8,)),
        stochastic=stochastic,
        **options,
    )
    nn.init.normal_(agent.head.weight)
    nn.init.normal_(agent.head.bias)
    return agent


def numbers(tensor: Tensor) -> Floats:
    return tensor.detach().numpy().astype(np.float64)


def slow_head(agent: ActorAgent, obs: Tensor) -> Floats:
    """Return the outputs of an agent with one hidden layer, computed in float64."""
    layer = agent.trunk.net.layers[0]
    hidden = np.tanh(numbers(obs) @ numbers(layer.weight).T + numbers(layer.bias))
    return hidden @ numbers(agent.head.weight).T + numbers(agent.head.bias)


def scaled(action: Floats) -> Floats:
    """Scale actions from -1..1 to the bounds of the space."""
    rows = [list(zip(row, LOW, HIGH, strict=True)) for row in action]
    return np.array([[low + (a + 1) / 2 * (high - low) for a, low, high in row] for row in rows])


# --- deterministic actors ---


def test_greedy_action_is_tanh_scaled_to_the_bounds() -> None:
    agent, obs = make_agent(), torch.randn(20, 3)
    expected = scaled(np.tanh(slow_head(agent, obs)))
    for noise in (torch.randn(20, 3), torch.zeros(20, 3), 1e6 * torch.ones(20, 3)):
        action, said, state = agent.act(obs, None, torch.zeros(20), noise)
        assert (said, state) == (None, None)
        np.testing.assert_allclose(action.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("std", [0.1, 0.6])
def test_gaussian_noise_is_added_before_clipping_to_the_bounds(std: float) -> None:
    """Noise is added to actions between -1 and 1 and multiplied by `explore`, where None stands for 1."""
    agent, obs, noise = make_agent(noise_std=std), torch.randn(200, 3), torch.randn(200, 3)
    amount = torch.rand(200)
    for explore in (None, amount, torch.ones(200)):
        size = np.ones((200, 1)) if explore is None else numbers(explore)[:, None]
        raw = np.tanh(slow_head(agent, obs)) + std * size * numbers(noise)
        expected = scaled(np.array([[min(max(a, -1.0), 1.0) for a in row] for row in raw]))
        action = agent.act(obs, None, explore, noise)[0].detach()
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
        assert (np.abs(raw) > 1).any(), "some actions are clipped to the bounds"


def test_actions_stay_inside_bounds_and_reach_them() -> None:
    for stochastic in (False, True):
        agent = make_agent(stochastic, noise_std=1.0)
        noise = 1e6 * torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
        action, _, _ = agent.act(torch.randn(2, 3), None, None, noise)
        torch.testing.assert_close(action.detach(), torch.tensor([HIGH, LOW]))


def test_normalized_inverts_the_scaling_of_actions() -> None:
    agent = make_agent()
    worked = torch.tensor([[-2.0, 0.5, 5.5], [0.5, 0.25, 1.0], [3.0, 0.0, 10.0]])
    expected = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, -1.0], [1.0, -1.0, 1.0]])
    torch.testing.assert_close(agent.normalized(worked), expected)
    features, _ = agent.features(obs := torch.randn(30, 3))
    action = agent.act(obs, None, torch.zeros(30), torch.randn(30, 3))[0]
    torch.testing.assert_close(agent.normalized(action), agent.choose(features)[0], rtol=1e-4, atol=1e-5)
    assert agent.choose(features)[1] is None


@pytest.mark.parametrize("shape", [(2, 2), (1,), ()])
def test_actions_of_any_shape_are_flat(shape: tuple[int, ...]) -> None:
    width = math.prod(shape)
    for stochastic in (False, True):
        agent = make_agent(stochastic, action=lopsided(shape))
        assert agent.noise == (("normal", width),)
        action, _, _ = agent.act(torch.randn(5, 3), None, None, torch.randn(5, width))
        assert action.shape == (5, width)
        low, high = (np.resize(np.array(bound, np.float32), width) for bound in (LOW, HIGH))
        assert ((action.detach().numpy() >= low - 1e-6) & (action.detach().numpy() <= high + 1e-6)).all()
        assert (agent.normalized(action).abs() <= 1 + 1e-6).all()


# --- Ornstein-Uhlenbeck noise ---

SHARE = math.sqrt(1 - 0.85**2)  # standard deviation of a step's noise if that of the stationary process is 1


def test_ornstein_uhlenbeck_noise_by_a_loop() -> None:
    """x <- x + 0.15 * (0 - x) + e (arXiv:1509.02971), divided by its stationary deviation, times noise_std."""
    agent, T, B = make_agent(noise="ou", noise_std=0.2), 30, 4
    generator = torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(T, B, 3, generator=generator) for _ in range(2))
    amount = torch.tensor([1.0, 0.5, 2.0, 0.0])
    state, x = agent.initial_state(B), np.zeros((B, 3))
    assert state is not None
    assert state.memory is None
    assert not state.drift.any()
    for t in range(T):
        action, _, state = agent.act(obs[t], state, amount, noise[t])
        for b in range(B):
            for k in range(3):
                x[b, k] = x[b, k] + 0.15 * (0 - x[b, k]) + float(noise[t, b, k])
        raw = np.tanh(slow_head(agent, obs[t])) + 0.2 * SHARE * x * numbers(amount)[:, None]
        np.testing.assert_allclose(action.detach(), scaled(np.clip(raw, -1, 1)), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state.drift, x, rtol=1e-4, atol=1e-4)
    greedy, _, _ = agent.act(obs[-1], agent.initial_state(B), torch.zeros(B), noise[-1])
    np.testing.assert_allclose(
        action.detach()[3], greedy.detach()[3], rtol=1e-5
    )  # the greedy action does not depend on the drift


def test_drift_continues_at_the_bounds_by_worked_numbers() -> None:
    agent = make_agent(noise="ou", noise_std=1.0)
    nn.init.zeros_(agent.head.weight)
    nn.init.zeros_(agent.head.bias)
    state, obs = agent.initial_state(1), torch.randn(1, 3)
    found = []
    for e in (2.0, -1.0, 0.0):
        action, _, state = agent.act(obs, state, None, torch.full((1, 3), e))
        found.append(float(agent.normalized(action).detach()[0, 0]))
    # The drifts are 2 (the action is clipped to 1), 0.85 * 2 - 1, and 0.85 * 0.7.
    assert found == pytest.approx([1.0, 0.7 * SHARE, 0.595 * SHARE], abs=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "ou"])
def test_noise_std_is_the_standard_deviation_of_both_kinds_of_noise(kind: Any) -> None:
    agent, B = make_agent(noise=kind, noise_std=0.1), 1000
    nn.init.zeros_(agent.head.weight)
    nn.init.zeros_(agent.head.bias)
    state, obs, generator = agent.initial_state(B), torch.zeros(B, 3), torch.Generator().manual_seed(0)
    for _ in range(60):  # 0.85 ** 60 = 6e-5 of the initial state remains
        action, _, state = agent.act(obs, state, None, torch.randn(B, 3, generator=generator))
    assert float(agent.normalized(action).detach().std()) == pytest.approx(0.1, rel=0.05)


def test_stochastic_actor_has_no_drift() -> None:
    agent = make_agent(stochastic=True, noise="ou")
    assert agent.initial_state(2) is None


@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize("slots", [1, 2])
def test_drift_is_reset_with_every_episode(core: Any, slots: int) -> None:
    """In a sampler, the drift of an env is reset with the env and kept from rollout to rollout."""
    B, T, seed = 4, 6, 3
    spec = resolve("counting:make", {"lengths": [3, 5, 2], "action": "box"})
    envs = make_envs(spec, B, slots=slots, gamma=0.9)
    agent = make_agent(
        observation=envs.observation, action=envs.action, noise="ou", noise_std=0.3, core=core, core_size=4
    )
    amounts = torch.tensor([1.0, 0.5, 0.25, 2.0])
    drift, memory = np.zeros((B, 2)), None if core is None else agent.initial_state(B).memory
    has_reset = 0
    explore = Exploration(lambda row: amounts)
    with contextlib.closing(EnvSampler(envs, agent, LocalWeights(), T, seed, explore=explore)) as sampler:
        sampler.reset(seed)
        for round in range(3):
            rollout = sampler.collect()
            np.testing.assert_allclose(rollout.state.drift, drift, rtol=1e-4, atol=1e-4)
            noise = Noise(seed, range(B), agent.noise).rows(round * T, T)
            for t in range(T):
                with torch.no_grad():
                    features, memory = agent.trunk.step(agent.inputs(rollout.steps.obs[t]), memory)
                    mean = numbers(agent.head(features).tanh())
                drift = 0.85 * drift + numbers(noise[t])
                expected = np.clip(mean + 0.3 * SHARE * drift * numbers(amounts)[:, None], -1, 1)
                np.testing.assert_allclose(rollout.steps.action[t], expected, rtol=1e-3, atol=1e-4)
                for b in np.flatnonzero(~rollout.steps.mask[t].numpy()):
                    drift[b], has_reset = 0, has_reset + 1
                    if memory is not None:
                        memory.h[b] = 0
    assert has_reset >= B


# --- squashed Gaussians ---


def test_greedy_action_of_a_stochastic_actor_is_tanh_of_its_mean() -> None:
    agent, obs = make_agent(stochastic=True), torch.randn(20, 3)
    mean = slow_head(agent, obs)[:, :3]
    action, said, state = agent.act(obs, None, torch.zeros(20), 100 * torch.randn(20, 3))
    assert (said, state) == (None, None)
    np.testing.assert_allclose(action.detach(), scaled(np.tanh(mean)), rtol=1e-5, atol=1e-5)


def test_samples_of_a_stochastic_actor_and_their_density() -> None:
    agent, obs, noise = make_agent(stochastic=True), torch.randn(20, 3), torch.randn(20, 3)
    outputs = slow_head(agent, obs)
    mean, std = outputs[:, :3], np.exp(np.clip(outputs[:, 3:], -20, 2))
    u = mean + std * numbers(noise)
    for explore in (None, torch.ones(20)):
        action = agent.act(obs, None, explore, noise)[0].detach()
        np.testing.assert_allclose(action, scaled(np.tanh(u)), rtol=1e-4, atol=1e-4)
    chosen, log_prob = agent.choose(agent.features(obs)[0], noise)
    np.testing.assert_allclose(chosen.detach(), np.tanh(u), rtol=1e-4, atol=1e-4)
    # The density is that of u divided by the slope 1 / cosh(u)^2 of tanh.
    each = -0.5 * numbers(noise) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi) + 2 * np.log(np.cosh(u))
    assert log_prob is not None
    np.testing.assert_allclose(log_prob.detach(), each.sum(-1), rtol=1e-4, atol=1e-3)


def test_deviations_of_a_stochastic_actor_are_clipped() -> None:
    agent = make_agent(stochastic=True)
    nn.init.zeros_(agent.head.weight)
    with torch.no_grad():
        agent.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -50.0, 50.0, 1.0]))
    policy = agent.distribution(torch.zeros(1, 8))
    assert policy.log_std.tolist() == [[-20.0, 2.0, 1.0]]


# --- memory and other observations ---


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["one action", "distribution"])
@pytest.mark.parametrize("space", [box((3,)), NESTED], ids=["vector", "nested"])
def test_acting_row_by_row_equals_unrolling(core: Any, stochastic: bool, space: Space) -> None:
    T, B = 7, 3
    agent = make_agent(stochastic, space, core=core, core_size=5, noise="ou", noise_std=0.0)
    assert agent.is_recurrent
    obs, state, noise = observations(space, T, B), somewhere(agent, B), torch.randn(T, B, 3)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[3, 0] = reset[5, 0] = reset[1, 2] = True
    features, last = agent.features(obs, state, reset)
    assert features.shape == (T, B, 5)
    chosen, log_prob = agent.choose(features, noise if stochastic else None)
    assert (log_prob is not None) == stochastic
    for t in range(T):
        state = map_tree(lambda x, t=t: x.masked_fill(reset[t].unsqueeze(-1), 0.0), state)
        action, _, state = agent.act(map_tree(lambda x, t=t: x[t], obs), state, None, noise[t])
        torch.testing.assert_close(agent.normalized(action), chosen[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tuple(state.memory), tuple(last.memory), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize(
    "space", [box((1, 10, 10), "uint8"), NESTED, discrete(6)], ids=["image", "nested", "discrete"]
)
def test_other_observations(space: Space, core: Any) -> None:
    """Outputs of actor and critic for rows of a sequence equal those for single rows."""
    agent = make_agent(observation=space, core=core, core_size=5)
    critic = make_critic(agent, make_net_of=lambda shape: make_net(shape, hidden=(8,)), core=core, core_size=5)
    obs, nothing = observations(space, 2, 3), torch.zeros(2, 3, dtype=torch.bool)
    chosen, _ = agent.choose(agent.features(obs, agent.initial_state(3), nothing)[0])
    values = critic(critic.features(obs, None, nothing)[0], chosen)
    assert chosen.shape == (2, 3, 3)
    assert values.shape == (2, 3)
    seen = map_tree(lambda x: x[0], obs)
    action, _, _ = agent.act(seen, agent.initial_state(3), torch.zeros(3), torch.randn(3, 3))
    torch.testing.assert_close(agent.normalized(action), chosen[0], rtol=1e-4, atol=1e-5)
    assert len(values.detach().flatten().unique()) == 6, "outputs depend on the observation"
    if core is None:
        flat, _ = critic.features(map_tree(lambda x: x.flatten(0, 1), obs))
        torch.testing.assert_close(critic(flat, chosen.flatten(0, 1)).reshape(2, 3), values, rtol=1e-4, atol=1e-5)


# --- critics ---


def make_critic(agent: ActorAgent, make_net_of: Any = None, seed: int = 5, **options: Any) -> Critic:
    torch.manual_seed(seed)
    return Critic(agent.inputs, agent.observation, agent.action, make_net_of, (7, 6), "relu", **options)


@pytest.mark.parametrize("has_net", [False, True], ids=["as it is", "net"])
def test_critic_against_numpy(has_net: bool) -> None:
    """A critic concatenates observation and action and has two relu layers and one output."""
    agent = make_agent()
    critic = make_critic(agent, (lambda shape: make_net(shape, hidden=(8,))) if has_net else None)
    obs, action = torch.randn(9, 3), torch.rand(9, 3) * 2 - 1
    x = numbers(obs)
    if has_net:
        layer = critic.trunk.net.layers[0]
        x = np.tanh(x @ numbers(layer.weight).T + numbers(layer.bias))
    x = np.concatenate([x, numbers(action)], -1)
    for layer in [layer for layer in critic.body.layers if isinstance(layer, nn.Linear)] + [critic.head]:
        x = x @ numbers(layer.weight).T + numbers(layer.bias)
        if layer is not critic.head:
            x = np.maximum(x, 0)
    features, state = critic.features(obs)
    assert state is None
    found = critic(features, action)
    assert found.shape == (9,)
    np.testing.assert_allclose(found.detach(), x[:, 0], rtol=1e-4, atol=1e-5)


def test_memory_of_a_critic_starts_at_zero_and_is_reset() -> None:
    agent = make_agent(core="lstm", core_size=4)
    critic = make_critic(agent, core="lstm", core_size=4)
    obs, reset = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.bool)
    reset[4, 1] = True
    whole, _ = critic.features(obs, None, reset)
    first, state = critic.features(obs[:2], None, reset[:2])
    rest, _ = critic.features(obs[2:], state, reset[2:])
    torch.testing.assert_close(torch.cat([first, rest]), whole)
    alone, _ = critic.features(obs[4:, 1:], None, reset[:2, 1:])
    torch.testing.assert_close(alone, whole[4:, 1:])
    blank = critic.trunk.core.initial_state(2)
    torch.testing.assert_close(critic.features(obs, blank, reset)[0], whole)


def test_observation_statistics_belong_to_the_actor_and_not_the_critic() -> None:
    agent = make_agent(normalize_obs=True)
    critic = make_critic(agent)
    obs = 100 + 50 * torch.randn(64, 3)
    before = critic.features(obs)[0].clone()
    agent.inputs.update(obs)
    after = critic.features(obs)[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, agent.inputs(obs))
    assert not list(critic.buffers())
    assert all("inputs" not in name for name in critic.state_dict())
