"""Tests of policy heads for every action space: the outputs and the noise of each part of an action."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import box, discrete
from torch import Tensor, nn

from remuda.agents import PolicyHead
from remuda.agents.heads import noise_of, num_outputs
from remuda.core import Space
from remuda.data import leaves, map_tree
from remuda.maths import Bernoulli, Categorical, Gaussian, Joint, MultiCategorical

WIDTH = 6


def multi(*sizes: int, shape: tuple[int, ...] | None = None) -> Space:
    numbers = np.array(sizes).reshape(shape or (len(sizes),))
    return Space("multidiscrete", numbers.shape, "int64", sizes=numbers, starts=np.zeros_like(numbers))


def binary(n: int) -> Space:
    return Space("multibinary", (n,), "int8")


def tuple_of(*entries: Space) -> Space:
    return Space("tuple", entries={f"item{index}": entry for index, entry in enumerate(entries)})


def dict_of(**entries: Space) -> Space:
    return Space("dict", entries=entries, keys=tuple(entries))


# Each space has its number of outputs, its number of standard deviations, and its noise.
SPACES = {
    "discrete": (discrete(4), 4, 0, (("uniform", 1),)),
    "box": (box((3,)), 3, 3, (("normal", 3),)),
    "matrix": (box((2, 2)), 4, 4, (("normal", 4),)),
    "scalar": (box(()), 1, 1, (("normal", 1),)),
    "multidiscrete": (multi(2, 5, 3), 10, 0, (("uniform", 3),)),
    "even multidiscrete": (multi(3, 3), 6, 0, (("uniform", 2),)),
    "table": (multi(2, 3, 4, 2, shape=(2, 2)), 11, 0, (("uniform", 4),)),
    "multibinary": (binary(3), 3, 0, (("uniform", 3),)),
    "tuple": (tuple_of(discrete(3), box((2,))), 5, 2, (("uniform", 1), ("normal", 2))),
    "two boxes": (dict_of(a=box((2,)), b=box((3,))), 5, 5, (("normal", 2), ("normal", 3))),
    "nested": (
        dict_of(
            grip=box((1,)),
            move=tuple_of(discrete(3), dict_of(speed=box((2, 2)), mode=multi(2, 4))),
            lights=binary(2),
            aim=box((2,)),
        ),
        *(1 + 3 + 4 + 6 + 2 + 2, 1 + 4 + 2),
        (("normal", 1), ("uniform", 1), ("normal", 4), ("uniform", 2), ("uniform", 2), ("normal", 2)),
    ),
}
EVERY = pytest.mark.parametrize("name", SPACES)


def make_head(name: str, seed: int = 0) -> PolicyHead:
    """Return a head whose outputs differ between rows and whose standard deviations differ."""
    torch.manual_seed(seed)
    head = PolicyHead(SPACES[name][0], WIDTH)
    nn.init.normal_(head.linear.weight)
    if head.log_std is not None:
        nn.init.normal_(head.log_std, std=0.3)
    return head


def draw(head: PolicyHead, *leading: int) -> Tensor:
    kinds = {"uniform": torch.rand, "normal": torch.randn}
    return torch.cat([kinds[kind](*leading, width) for kind, width in head.noise], -1)


def by_hand(space: Space, outputs: Tensor, log_std: Tensor | None, action: Any) -> Tensor:
    """Return the log_prob of one action from one row of outputs, computed component by component."""
    total, start, first_std = torch.zeros(()), 0, 0
    for (_, leaf), (_, value) in zip(space.leaves(), leaves(action), strict=True):
        if leaf.kind == "discrete":
            total = total + torch.log_softmax(outputs[start : start + leaf.n], 0)[int(value)]
            start += leaf.n
        elif leaf.kind == "multidiscrete":
            for size, number in zip(leaf.sizes.reshape(-1).tolist(), value.tolist(), strict=True):
                total = total + torch.log_softmax(outputs[start : start + size], 0)[number]
                start += size
        elif leaf.kind == "multibinary":
            for number in value.tolist():
                total = total + torch.nn.functional.logsigmoid(outputs[start] if number else -outputs[start])
                start += 1
        else:
            assert log_std is not None
            for number in value.flatten():
                normal = torch.distributions.Normal(outputs[start], log_std[first_std].exp())
                total = total + normal.log_prob(number)
                start, first_std = start + 1, first_std + 1
    assert start == len(outputs)
    return total


@EVERY
def test_numbers_of_outputs_and_deviations_and_kinds_of_noise(name: str) -> None:
    space, outputs, deviations, noise = SPACES[name]
    head = PolicyHead(space, WIDTH, log_std_init=-0.5)
    assert head.linear.out_features == outputs == sum(num_outputs(leaf) for _, leaf in space.leaves())
    assert (0 if head.log_std is None else len(head.log_std)) == deviations
    assert head.log_std is None or head.log_std.tolist() == [-0.5] * deviations
    assert head.noise == noise == tuple(noise_of(leaf) for _, leaf in space.leaves())


@EVERY
@pytest.mark.parametrize("leading", [(5,), (3, 2)], ids=["rows", "sequences"])
def test_actions_have_the_tree_and_the_bounds_of_their_space(name: str, leading: tuple[int, ...]) -> None:
    space, head = SPACES[name][0], make_head(name)
    policy = head(torch.randn(*leading, WIDTH))
    for action in (policy.sample(draw(head, *leading)), policy.mode()):
        found = dict(leaves(action))
        assert list(found) == [path for path, _ in space.leaves()]
        for path, leaf in space.leaves():
            value = found[path]
            if leaf.kind == "discrete":
                assert value.shape == leading
                assert 0 <= int(value.min()) <= int(value.max()) < leaf.n
                continue
            assert value.shape == (*leading, math.prod(leaf.shape)), "the value is flat"
            if leaf.kind == "multidiscrete":
                assert (value < torch.as_tensor(leaf.sizes.reshape(-1))).all()
            if leaf.kind == "multibinary":
                assert value.dtype == torch.int8
        assert policy.log_prob(action).shape == leading
    assert policy.entropy().shape == leading


@EVERY
def test_log_prob_against_a_slow_reference(name: str) -> None:
    space, head = SPACES[name][0], make_head(name)
    features = torch.randn(8, WIDTH)
    policy = head(features)
    action = policy.choose(draw(head, 8), torch.tensor([1.0, 0.0] * 4))
    found, outputs = policy.log_prob(action), head.linear(features)
    for row in range(8):
        own = map_tree(lambda x, row=row: x[row], action)
        torch.testing.assert_close(found[row], by_hand(space, outputs[row], head.log_std, own), atol=1e-5, rtol=1e-5)


@EVERY
def test_every_output_belongs_to_one_part_of_the_action(name: str) -> None:
    """Perturbing one output changes the probability of exactly one leaf, and all outputs are used."""
    space, head = SPACES[name][0], make_head(name)
    features = torch.randn(1, WIDTH)
    action = [value for _, value in leaves(head(features).sample(draw(head, 1)))]

    def log_probs() -> list[Tensor]:
        return [part.log_prob(value) for part, value in zip(flat_parts(head(features)), action, strict=True)]

    before, owners, bias = log_probs(), [], head.linear.bias.detach().clone()
    for output in range(head.linear.out_features):
        with torch.no_grad():
            head.linear.bias[output] += 0.5
            after = log_probs()
            head.linear.bias.copy_(bias)
        changed = [k for k, (old, new) in enumerate(zip(before, after, strict=True)) if not torch.equal(old, new)]
        assert len(changed) == 1, f"output {output} moved {changed}"
        owners += changed
    widths = [num_outputs(leaf) for _, leaf in space.leaves()]
    assert owners == [k for k, width in enumerate(widths) for _ in range(width)], (
        "outputs belong to the leaves in order and without gaps"
    )


@EVERY
def test_every_deviation_belongs_to_one_box(name: str) -> None:
    space, head = SPACES[name][0], make_head(name)
    if head.log_std is None:
        assert not any(leaf.kind == "box" for _, leaf in space.leaves())
        return
    features, owners = torch.randn(1, WIDTH), []
    before, deviations = [part.entropy() for part in flat_parts(head(features))], head.log_std.detach().clone()
    for number in range(len(head.log_std)):
        with torch.no_grad():
            head.log_std[number] += 0.5
            after = [part.entropy() for part in flat_parts(head(features))]
            head.log_std.copy_(deviations)
        owners += [k for k, (old, new) in enumerate(zip(before, after, strict=True)) if not torch.equal(old, new)]
    boxes = [(k, leaf) for k, (_, leaf) in enumerate(space.leaves()) if leaf.kind == "box"]
    assert owners == [k for k, leaf in boxes for _ in range(math.prod(leaf.shape))]


@EVERY
def test_every_component_of_noise_affects_one_part_of_the_action(name: str) -> None:
    space, head = SPACES[name][0], make_head(name)
    policy = head(torch.zeros(1, WIDTH))  # near uniform, so that noise affects every part
    widths = [noise_of(leaf)[1] for _, leaf in space.leaves()]
    owners = [k for k, width in enumerate(widths) for _ in range(width)]
    for number, owner in enumerate(owners):
        low, high = torch.full((1, sum(widths)), 0.5), torch.full((1, sum(widths)), 0.5)
        low[0, number], high[0, number] = 0.001, 0.999
        pairs = zip(leaves(policy.sample(low)), leaves(policy.sample(high)), strict=True)
        moved = [k for k, ((_, a), (_, b)) in enumerate(pairs) if not torch.equal(a, b)]
        assert moved == [owner]


def flat_parts(policy: Any) -> list[Any]:
    """Return the distributions of the leaves, in order."""
    if not isinstance(policy, Joint):
        return [policy]
    return [leaf for part in policy.parts for leaf in flat_parts(part)]


def test_every_part_has_the_right_distribution() -> None:
    kinds = {
        "discrete": [Categorical],
        "box": [Gaussian],
        "table": [MultiCategorical],
        "multibinary": [Bernoulli],
        "nested": [Gaussian, Categorical, Gaussian, MultiCategorical, Bernoulli, Gaussian],
    }
    for name, expected in kinds.items():
        assert [type(part) for part in flat_parts(make_head(name)(torch.randn(2, WIDTH)))] == expected


@EVERY
def test_rows_of_a_policy_equal_the_policy_of_rows(name: str) -> None:
    head = make_head(name)
    features, mask = torch.randn(4, 3, WIDTH), torch.rand(4, 3) < 0.6
    policy = head(features)
    action = policy.sample(draw(head, 4, 3))
    some = map_tree(lambda x: x[mask], action)
    torch.testing.assert_close(policy.rows(mask).log_prob(some), policy.log_prob(action)[mask])
    torch.testing.assert_close(head(features[mask]).log_prob(some), policy.log_prob(action)[mask])
    torch.testing.assert_close(policy.rows(mask).entropy(), policy.entropy()[mask])


@EVERY
def test_gradients_reach_every_parameter(name: str) -> None:
    head = make_head(name)
    policy = head(torch.randn(16, WIDTH))
    action = map_tree(lambda x: x.detach(), policy.sample(draw(head, 16)))
    policy.log_prob(action).sum().backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert (parameter.grad != 0).any(-1).all() if parameter.dim() > 1 else (parameter.grad != 0).all()
