"""Tests of Q-learning agents: outputs against networks written in numpy, and actions for every noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box, discrete, observations, somewhere
from torch import Tensor, nn

from remuda.agents import QAgent
from remuda.core import Space
from remuda.data import map_tree
from remuda.nets import make_net

Floats = NDArray[np.float64]
LARGEST = 1 - 2**-24  # the largest uniform number in float32
NESTED = Space("dict", entries={"gear": discrete(5), "place": box((2, 2))}, keys=("gear", "place"))


def make_agent(n: int = 4, observation: Space | None = None, seed: int = 0, **options: Any) -> QAgent:
    """Return an agent with a head whose outputs differ between actions."""
    torch.manual_seed(seed)
    agent = QAgent(observation or box((3,)), discrete(n), lambda shape: make_net(shape, hidden=(8,)), **options)
    for parameter in agent.head.parameters():
        nn.init.normal_(parameter)
    return agent


def noise_of(agent: QAgent, rows: int, seed: int = 0) -> Tensor:
    """Draw noise as samplers do."""
    rng = np.random.default_rng(seed)
    parts = [
        rng.random((rows, width), np.float32) if kind == "uniform" else rng.standard_normal((rows, width), np.float32)
        for kind, width in agent.noise
    ]
    return torch.from_numpy(np.concatenate(parts, -1))


# --- slow references, in float64 ---


def numbers(parameter: Tensor) -> Floats:
    return parameter.detach().numpy().astype(np.float64)


def slow_stream(stream: Any, x: Floats, noise: Floats | None) -> Floats:
    """Compute one row with explicit noisy weights."""
    for index, layer in enumerate(stream.layers):
        if index:
            x = np.maximum(x, 0)
        weight, bias = numbers(layer.weight), numbers(layer.bias)
        if noise is not None:
            own, noise = noise[: sum(weight.shape)], noise[sum(weight.shape) :]
            e = np.sign(own) * np.sqrt(np.abs(own))
            e_in, e_out = e[: weight.shape[1]], e[weight.shape[1] :]
            weight = weight + numbers(layer.weight_sigma) * np.outer(e_out, e_in)
            bias = bias + numbers(layer.bias_sigma) * e_out
        x = weight @ x + bias
    assert noise is None or len(noise) == 0, "the layers use all of the noise"
    return x


def slow_outputs(agent: QAgent, features: Floats, noise: Floats | None = None) -> Floats:
    """Return outputs [A, atoms] of one row, with the state stream if there is one (arXiv:1511.06581, Eq. 9)."""
    A, atoms = agent.action.n, len(agent.support)
    first = None if noise is None else noise[: agent.head.noise_widths[0]]
    out = slow_stream(agent.head.advantage, features, first).reshape(A, atoms)
    if agent.head.state is None:
        return out
    second = None if noise is None else noise[agent.head.noise_widths[0] :]
    state = slow_stream(agent.head.state, features, second)
    mean = [sum(out[a, z] for a in range(A)) / A for z in range(atoms)]
    return np.array([[state[z] + out[a, z] - mean[z] for z in range(atoms)] for a in range(A)])


def slow_expected(agent: QAgent, outputs: Floats) -> Floats:
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    weights = np.exp(outputs - outputs.max(1, keepdims=True))
    support = numbers(agent.support)
    return np.array([sum(w * z for w, z in zip(row, support, strict=True)) / sum(row) for row in weights])


def features_of(agent: QAgent, obs: Tensor) -> Floats:
    return numbers(agent.trunk.net(agent.inputs(obs)))


# --- outputs ---

KINDS = {
    "plain": {},
    "hidden": {"head_hidden": 6},
    "dueling": {"dueling": True},
    "dueling, hidden": {"dueling": True, "head_hidden": 6},
    "C51": {"atoms": 7},
    "dueling C51": {"atoms": 7, "dueling": True, "head_hidden": 6},
    "noisy": {"noisy": True},
    "noisy, hidden": {"noisy": True, "head_hidden": 6},
    "rainbow": {"noisy": True, "head_hidden": 6, "dueling": True, "atoms": 7},
}
EVERY = pytest.mark.parametrize("kind", KINDS)


@EVERY
def test_outputs_and_values_against_slow_references(kind: str) -> None:
    agent, obs = make_agent(**KINDS[kind]), torch.randn(6, 3)
    outputs, state = agent.unroll(obs, None, None)
    assert state is None
    atoms = len(agent.support)
    assert outputs.shape == ((6, 4) if atoms == 1 else (6, 4, atoms))
    values = agent.expected(outputs).detach()
    assert values.shape == (6, 4)
    features = features_of(agent, obs)
    for row in range(6):
        slow = slow_outputs(agent, features[row])
        np.testing.assert_allclose(outputs[row].detach().reshape(4, atoms), slow, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(values[row], slow_expected(agent, slow), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if "noisy" in options])
def test_unroll_uses_one_noise_for_all_rows(kind: str) -> None:
    agent, obs = make_agent(**KINDS[kind]), torch.randn(6, 3)
    noise = torch.randn(agent.noise_width)
    outputs = agent.unroll(obs, None, None, noise)[0].detach()
    features = features_of(agent, obs)
    for row in range(6):
        slow = slow_outputs(agent, features[row], numbers(noise))
        np.testing.assert_allclose(outputs[row].reshape(slow.shape), slow, rtol=1e-4, atol=1e-4)
    quiet = agent.unroll(obs, None, None, torch.zeros(agent.noise_width))[0]
    torch.testing.assert_close(quiet, agent.unroll(obs, None, None)[0])
    assert (quiet - outputs).abs().max() > 0.1


@pytest.mark.parametrize("hidden", [0, 6])
def test_mean_of_dueling_values_is_the_state_value(hidden: int) -> None:
    agent, obs = make_agent(dueling=True, head_hidden=hidden), torch.randn(6, 3)
    values = agent.unroll(obs, None, None)[0]
    state = agent.head.state(agent.trunk.net(agent.inputs(obs)), None).squeeze(-1)
    torch.testing.assert_close(values.mean(-1), state)
    with torch.no_grad():  # a constant added to all advantages has no effect
        agent.head.advantage.layers[-1].bias.add_(100.0)
    torch.testing.assert_close(agent.unroll(obs, None, None)[0], values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dueling", "noisy"])
def test_each_stream_has_a_hidden_layer(kind: str) -> None:
    """Without hidden layers, dueling would be equivalent to a linear head."""
    streams = [make_agent(**KINDS[kind]).head.advantage, make_agent(**KINDS["dueling"]).head.state]
    assert [len(stream.layers) for stream in streams] == [2, 2]
    assert [len(make_agent(**KINDS[name]).head.advantage.layers) for name in ("plain", "C51")] == [1, 1]
    assert len(make_agent(**KINDS[kind], head_hidden=0).head.advantage.layers) == 1


def test_mean_of_dueling_logits_is_the_state_logits() -> None:
    agent, obs = make_agent(dueling=True, atoms=7), torch.randn(6, 3)
    logits = agent.unroll(obs, None, None)[0]
    state = agent.head.state(agent.trunk.net(agent.inputs(obs)), None)
    torch.testing.assert_close(logits.mean(1), state)


def test_values_of_distributions_by_worked_numbers() -> None:
    agent = make_agent(atoms=3, v_min=-2.0, v_max=4.0)
    assert agent.support.tolist() == [-2.0, 1.0, 4.0]
    p = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]])
    logits = p.clamp(min=1e-30).log() + torch.tensor([[3.0], [-50.0], [0.0]])  # softmax ignores added constants
    torch.testing.assert_close(agent.expected(logits), torch.tensor([0.25, 4.0, 1.0]))
    scalar = make_agent(v_min=-2.0, v_max=4.0)
    assert torch.equal(scalar.expected(p), p), "scalar outputs are the values"


def test_gradients_reach_every_parameter() -> None:
    agent = make_agent(**KINDS["rainbow"])
    agent.unroll(torch.randn(16, 3), None, None, torch.randn(agent.noise_width))[0].square().sum().backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).any(), name


# --- actions ---


def grid(count: int, n: int) -> Tensor:
    """Return all pairs of `count` and n midpoints of equal intervals between 0 and 1."""
    first, second = ((torch.arange(k) + 0.5) / k for k in (count, n))
    return torch.cartesian_prod(first, second)


@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 1.0])
def test_action_probabilities_by_enumerating_the_noise(n: int, chance: float) -> None:
    """The best action has probability 1 - epsilon + epsilon / n, and every other one epsilon / n."""
    agent, noise = make_agent(n), grid(100, n)
    obs = torch.randn(1, 3).expand(len(noise), 3)
    best = int(agent.unroll(obs[:1], None, None)[0].argmax())
    action, said, state = agent.act(obs, None, torch.full((len(noise),), chance), noise)
    assert (said, state) == (None, None)
    expected = [100 * chance + (100 * n * (1 - chance) if a == best else 0) for a in range(n)]
    assert action.bincount(minlength=n).tolist() == pytest.approx(expected)


def test_frequencies_of_actions_from_random_noise() -> None:
    agent, count = make_agent(5), 20_000
    obs = torch.randn(1, 3).expand(count, 3)
    best = int(agent.unroll(obs[:1], None, None)[0].argmax())
    action, _, _ = agent.act(obs, None, torch.full((count,), 0.25), noise_of(agent, count))
    expected = torch.full((5,), 0.05 * count)
    expected[best] += 0.75 * count
    chi_square = ((action.bincount(minlength=5) - expected).square() / expected).sum()
    assert chi_square < 18.5  # 99.9 % of draws with 4 degrees of freedom


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 9, 17, 18, 33, 1000])
def test_largest_noise_gives_the_last_action(n: int) -> None:
    agent = make_agent(n)
    action, _, _ = agent.act(torch.randn(2, 3), None, torch.ones(2), torch.tensor([[LARGEST, LARGEST], [0.0, 0.0]]))
    assert action.tolist() == [n - 1, 0]
    assert action.dtype == torch.int64


@EVERY
def test_actions_without_exploration_are_deterministic(kind: str) -> None:
    """Greedy actions do not depend on the noise, and noisy layers use only their means."""
    agent, obs = make_agent(**KINDS[kind]), torch.randn(50, 3)
    best = agent.expected(agent.unroll(obs, None, None)[0]).argmax(-1)
    noises = [noise_of(agent, 50, seed) for seed in range(3)]
    for noise in [*noises, torch.zeros_like(noises[0]), noises[0].abs() * 100]:
        assert torch.equal(agent.act(obs, None, torch.zeros(50), noise)[0], best)


@EVERY
@pytest.mark.parametrize("exploration", [0.0, 0.3, 1.0])
def test_explore_none_uses_the_exploration_of_the_agent(kind: str, exploration: float) -> None:
    agent = make_agent(**KINDS[kind], exploration=exploration)
    obs, noise = torch.randn(400, 3), noise_of(agent, 400)
    action, _, _ = agent.act(obs, None, None, noise)
    assert torch.equal(action, agent.act(obs, None, torch.full((400,), exploration), noise)[0])
    is_random = noise[:, 0] < exploration
    assert action[is_random].tolist() == [int(4 * number) for number in noise[is_random, 1].tolist()]
    assert int(is_random.sum()) == pytest.approx(400 * exploration, abs=60)


def test_every_row_has_its_own_epsilon() -> None:
    agent, obs = make_agent(), torch.randn(6, 3)
    best = agent.unroll(obs, None, None)[0].argmax(-1).tolist()
    other = [(a + 1) % 4 for a in best]
    noise = torch.tensor([[0.5, (a + 0.5) / 4] for a in other])
    action, _, _ = agent.act(obs, None, torch.tensor([0.0, 0.4, 0.5, 0.6, 1.0, 0.499]), noise)
    assert action.tolist() == [best[0], best[1], best[2], other[3], other[4], best[5]]


def test_best_action_has_the_largest_mean_not_the_largest_logit() -> None:
    agent = make_agent(2, atoms=3, v_min=0.0, v_max=2.0)
    with torch.no_grad():
        agent.head.advantage.layers[0].weight.zero_()
        agent.head.advantage.layers[0].bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, 1.0]))
    assert agent.act(torch.randn(1, 3), None, torch.zeros(1), torch.zeros(1, 2))[0].tolist() == [1]


@pytest.mark.parametrize("kind", ["noisy", "noisy, hidden", "rainbow"])
def test_every_exploring_row_has_its_own_noisy_weights(kind: str) -> None:
    agent, count = make_agent(**KINDS[kind]), 60
    obs = torch.randn(1, 3).expand(count, 3)
    noise = noise_of(agent, count)
    noise[:, 0] = 0.9  # above every epsilon here: no random actions
    explore = torch.tensor([0.0, 1e-6, 0.5]).repeat(count // 3)
    action, _, _ = agent.act(obs, None, explore, noise)
    features = features_of(agent, obs[:1])[0]
    for row in range(count):
        own = numbers(noise[row, 2:]) if explore[row] > 0 else None
        assert int(action[row]) == slow_expected(agent, slow_outputs(agent, features, own)).argmax()
    assert len(action[explore > 0].unique()) > 1, "noise leads to several actions for the same observation"


@EVERY
def test_kinds_and_widths_of_noise(kind: str) -> None:
    agent, options = make_agent(**KINDS[kind]), KINDS[kind]
    if "noisy" not in options:
        assert agent.noise == (("uniform", 2),)
        return
    hidden = options.get("head_hidden", 8)  # default: as wide as the features
    layers = [(8, hidden), (hidden, 4 * len(agent.support))]
    if "dueling" in options:
        layers += [(8, 6), (6, len(agent.support))]
    assert agent.noise == (("uniform", 2), ("normal", sum(a + b for a, b in layers)))


# --- memory and other observations ---


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("kind", ["plain", "rainbow"])
@pytest.mark.parametrize("space", [box((3,)), NESTED], ids=["vector", "nested"])
def test_acting_row_by_row_equals_unrolling(core: Any, kind: str, space: Space) -> None:
    """This includes resets, which clear the memory."""
    T, B = 7, 3
    agent = make_agent(observation=space, core=core, core_size=5, **KINDS[kind])
    assert agent.is_recurrent
    obs, state = observations(space, T, B), somewhere(agent, B)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[3, 0] = reset[5, 0] = reset[1, 2] = True
    on_weights = torch.randn(agent.noise_width) if agent.noise_width else None
    outputs, last = agent.unroll(obs, state, reset, on_weights)
    assert outputs.shape[:3] == (T, B, 4)
    noise = torch.full((B, 2), 0.999)
    if on_weights is not None:
        noise = torch.cat([noise, on_weights.expand(B, -1)], -1)
    for t in range(T):
        state = map_tree(lambda x, t=t: x.masked_fill(reset[t].unsqueeze(-1), 0.0), state)
        seen = map_tree(lambda x, t=t: x[t], obs)
        features, _ = agent.trunk.step(agent.inputs(seen), state)
        torch.testing.assert_close(agent.head(features, on_weights), outputs[t], rtol=1e-4, atol=1e-5)
        action, _, state = agent.act(seen, state, torch.full((B,), 0.5), noise)
        assert torch.equal(action, agent.expected(outputs[t]).argmax(-1))
    torch.testing.assert_close(tuple(state), tuple(last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize(
    "space", [box((1, 10, 10), "uint8"), NESTED, discrete(6)], ids=["image", "nested", "discrete"]
)
def test_other_observations(space: Space, core: Any) -> None:
    """Outputs for rows of a sequence equal those for single rows, and acting works on all kinds of observations."""
    agent = make_agent(observation=space, core=core, core_size=5, dueling=True)
    obs = observations(space, 2, 3)
    outputs, _ = agent.unroll(obs, agent.initial_state(3), None)
    assert outputs.shape == (2, 3, 4)
    seen = map_tree(lambda x: x[0], obs)
    action, _, _ = agent.act(seen, agent.initial_state(3), torch.zeros(3), noise_of(agent, 3))
    assert torch.equal(action, outputs[0].argmax(-1))
    assert len(outputs[0].unique(dim=0)) == 3, "outputs depend on the observation"
    if core is None:
        assert agent.initial_state(3) is None
        flat = agent.unroll(map_tree(lambda x: x.flatten(0, 1), obs), None, None)[0]
        torch.testing.assert_close(flat.reshape(2, 3, 4), outputs, rtol=1e-4, atol=1e-5)
