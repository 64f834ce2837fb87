"""Tests of the actor-critic agent with every kind of space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollouts import box, discrete, make_agent
from torch import Tensor, nn

from remuda.agents import PolicyAgent
from remuda.core import Space
from remuda.maths import Categorical, Gaussian
from remuda.nets import MLP

OBSERVATIONS = {
    "float": box((3,)),
    "matrix": box((2, 3)),
    "scalar": box(()),
    "int32": box((3,), "int32"),
    "bytes": box((6,), "uint8"),
    "image": box((4, 4, 3), "uint8"),
    "discrete": discrete(5),
}


def draw(space: Space, *leading: int) -> Tensor:
    if space.kind == "discrete":
        return torch.randint(space.n, leading)
    if space.dtype == "float32":
        return torch.randn(*leading, *space.shape)
    return torch.randint(255, (*leading, *space.shape)).to(getattr(torch, space.dtype))


def noise(agent: Any, batch: int) -> Tensor:
    ((kind, width),) = agent.noise
    return torch.rand(batch, width) if kind == "uniform" else torch.randn(batch, width)


@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
@pytest.mark.parametrize("action", [discrete(4), box((2,))], ids=["discrete", "box"])
@pytest.mark.parametrize("shared", [False, True], ids=["two nets", "shared"])
def test_acting_and_learning_agree_on_every_space(observation: Space, action: Space, shared: bool) -> None:
    """Policy outputs computed while acting on [B] rows equal those computed for [T, B] and [N] rows when learning."""
    agent = make_agent(observation, action, shared=shared, normalize_obs=True)
    nn.init.normal_(agent.policy_head.linear.weight)  # distributions that differ from row to row
    T, B = 3, 4
    obs = draw(observation, T, B)
    acted = [agent.act(obs[t], None, None, noise(agent, B)) for t in range(T)]
    actions, log_probs, values = (
        torch.stack(x) for x in zip(*[(a, said.log_prob, said.value) for a, said, _ in acted], strict=True)
    )
    sequences, _ = agent.unroll(obs, None, None)
    rows, _ = agent.unroll(obs.flatten(0, 1), None, None)
    assert sequences.value.shape == (T, B)
    assert rows.value.shape == (T * B,)
    torch.testing.assert_close(sequences.value, values)
    torch.testing.assert_close(rows.value, values.flatten())
    torch.testing.assert_close(sequences.distribution.log_prob(actions), log_probs)
    torch.testing.assert_close(rows.distribution.log_prob(actions.flatten(0, 1)), log_probs.flatten())
    torch.testing.assert_close(rows.distribution.entropy(), sequences.distribution.entropy().flatten())
    torch.testing.assert_close(agent.value(obs[0], None), values[0])


class Seen(nn.Module):
    """A net that returns its input, flattened."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, obs: Tensor) -> Tensor:
        assert obs.dtype == torch.float32
        assert obs.shape[1:] == self.shape
        return obs.flatten(1)


def test_discrete_observations_are_one_hot() -> None:
    agent = PolicyAgent(discrete(4), discrete(2), Seen)
    assert agent.inputs(torch.tensor([2, 0])).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


def test_byte_images_are_divided_by_255_and_other_bytes_are_not() -> None:
    agent = PolicyAgent(OBSERVATIONS["image"], discrete(2), Seen)
    image = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(2, 4, 4, 3)
    torch.testing.assert_close(agent.inputs(image)[1, 3, 3], torch.tensor([0.0, 0.2, 1.0]))
    agent = PolicyAgent(OBSERVATIONS["bytes"], discrete(2), Seen)
    assert agent.inputs(torch.full((1, 6), 51, dtype=torch.uint8)).tolist() == [[51.0] * 6]


def test_observations_are_standardized_by_the_agent() -> None:
    agent = PolicyAgent(box((2,)), discrete(2), Seen, normalize_obs=True)
    agent.inputs.update(torch.tensor([[0.0, 10.0], [2.0, 30.0]]))
    torch.testing.assert_close(agent.inputs(torch.tensor([[3.0, 20.0]])), torch.tensor([[2.0, 0.0]]))
    assert make_agent(discrete(3), discrete(2), normalize_obs=True).inputs.has_statistics is False


@pytest.mark.parametrize(("shape", "width"), [((2, 3), 6), ((), 1), ((2,), 2)])
def test_box_actions_are_flat_in_the_agent(shape: tuple[int, ...], width: int) -> None:
    agent = make_agent(action=box(shape))
    assert agent.noise == (("normal", width),)
    action, said, state = agent.act(torch.randn(5, 3), None, None, torch.randn(5, width))
    assert action.shape == (5, width)
    assert said.log_prob.shape == said.value.shape == (5,)
    assert state is None
    assert isinstance(agent.unroll(torch.randn(5, 3), None, None)[0].distribution, Gaussian)


def test_log_std_starts_at_log_std_init_and_is_learned() -> None:
    agent = make_agent(action=box((2,)), log_std_init=-1.5)
    assert agent.policy_head.log_std.tolist() == [-1.5, -1.5]
    assert any(parameter is agent.policy_head.log_std for parameter in agent.parameters())


def test_discrete_actions_are_drawn_with_uniform_noise() -> None:
    agent = make_agent()
    assert agent.noise == (("uniform", 1),)
    obs = torch.randn(6, 3)
    action, said, _ = agent.act(obs, None, None, torch.full((6, 1), 0.99))
    assert action.tolist() == [3] * 6  # near uniform over four at the start
    assert isinstance(agent.unroll(obs, None, None)[0].distribution, Categorical)
    torch.testing.assert_close(said.log_prob, agent.unroll(obs, None, None)[0].distribution.log_prob(action))


@pytest.mark.parametrize("action", [discrete(4), box((2,))], ids=["discrete", "box"])
def test_each_env_explores_or_is_greedy_on_its_own(action: Space) -> None:
    agent = make_agent(action=action)
    obs, explore = torch.randn(6, 3), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    drawn = torch.full((6, agent.noise[0][1]), 0.999)
    everywhere, _, _ = agent.act(obs, None, None, drawn)
    mixed, said, _ = agent.act(obs, None, explore, drawn)
    distribution = agent.unroll(obs, None, None)[0].distribution
    greedy = distribution.mode()
    for env in range(6):
        assert torch.equal(mixed[env], everywhere[env] if explore[env] else greedy[env])
    assert not torch.equal(everywhere, greedy)
    torch.testing.assert_close(said.log_prob, distribution.log_prob(mixed))


def test_heads_start_orthogonal_with_gain_0_01_for_the_policy() -> None:
    agent = make_agent(action=box((4,)))
    for head, gain in ((agent.policy_head.linear, 0.01), (agent.value_head, 1.0)):
        product = head.weight @ head.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), atol=1e-7, rtol=1e-4)
        assert not head.bias.any()


def test_initial_policy_is_nearly_uniform() -> None:
    entropy = make_agent(action=discrete(6)).unroll(torch.randn(50, 3), None, None)[0].distribution.entropy()
    assert (entropy - torch.tensor(6.0).log()).abs().max() < 1e-3


def test_shared_net_is_one_net_and_counted_once() -> None:
    shared, apart = make_agent(shared=True), make_agent()
    assert shared.value_trunk is shared.policy_trunk
    assert apart.value_trunk is not apart.policy_trunk
    sizes = [sum(parameter.numel() for parameter in agent.parameters()) for agent in (shared, apart)]
    assert sizes[1] - sizes[0] == sum(parameter.numel() for parameter in shared.policy_trunk.parameters())


def test_two_nets_share_no_gradient() -> None:
    agent = make_agent()
    outputs = agent.unroll(torch.randn(4, 3), None, None)[0]
    found = torch.autograd.grad(outputs.value.sum(), list(agent.policy_trunk.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in found)


class OwnNet(nn.Module):
    """A custom net in ten lines, as in the documentation."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(shape[-1], 2, kernel_size=2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.convolution(obs.permute(0, 3, 1, 2)).relu().flatten(1)


def test_custom_net_needs_no_width() -> None:
    agent = PolicyAgent(OBSERVATIONS["image"], discrete(3), OwnNet)
    assert agent.policy_head.linear.in_features == 2 * 3 * 3
    outputs, _ = agent.unroll(draw(OBSERVATIONS["image"], 5, 2), None, None)
    assert outputs.value.shape == (5, 2)
    assert any(parameter is agent.policy_trunk.net.convolution.weight for parameter in agent.parameters())


def test_greedy_actions_do_not_depend_on_noise() -> None:
    agent = PolicyAgent(box((3,)), box((2,)), lambda shape: MLP(shape, (8,)))
    obs = torch.randn(4, 3)
    actions = [agent.act(obs, None, torch.zeros(4), torch.randn(4, 2))[0] for _ in range(2)]
    assert torch.equal(*actions)
