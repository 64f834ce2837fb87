"""Tests of distributions against those of torch, and of sample frequencies against probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, Normal, kl_divergence

from remuda.data import ArrayTuple, namedarraytuple
from remuda.maths import Bernoulli, Categorical, Distribution, Gaussian, Joint, MultiCategorical

INF = math.inf
LARGEST = 1 - 2**-24  # the largest uniform number in float32


def logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5,), (7, 3), (4, 2, 6), (3, 1)])
def test_categorical_agrees_with_torch(shape: tuple[int, ...]) -> None:
    mine, theirs = Categorical(logits(*shape)), TorchCategorical(logits=logits(*shape))
    other, their_other = Categorical(logits(*shape, seed=1)), TorchCategorical(logits=logits(*shape, seed=1))
    action = theirs.sample()
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    torch.testing.assert_close(mine.perplexity(), theirs.perplexity())
    torch.testing.assert_close(mine.kl(other), kl_divergence(theirs, their_other))
    assert torch.equal(mine.mode(), theirs.mode)


def test_categorical_draws_each_action_as_often_as_its_probability() -> None:
    """With noise on a regular grid, each action's share is its probability within 1.5 grid points."""
    count, distribution = 10_000, Categorical(logits(6))
    grid = ((torch.arange(count) + 0.5) / count).unsqueeze(-1)
    shares = distribution.sample(grid).bincount(minlength=6) / count
    assert (shares - distribution.logits.exp()).abs().max() < 1.5 / count


def test_categorical_frequencies_from_random_noise() -> None:
    count, distribution = 20_000, Categorical(logits(6))
    noise = torch.from_numpy(np.random.default_rng(0).random((count, 1), dtype=np.float32))
    expected = count * distribution.logits.exp()
    found = distribution.sample(noise).bincount(minlength=6)
    chi_square = ((found - expected).square() / expected).sum()
    assert chi_square < 20.5  # 99.9 % of draws with 5 degrees of freedom


def test_each_row_uses_its_own_noise() -> None:
    rows = Categorical(torch.zeros(2, 3, 4))
    noise = torch.tensor([[0.1, 0.3, 0.6], [0.9, 0.0, 0.5]]).unsqueeze(-1)
    assert rows.sample(noise).tolist() == [[0, 1, 2], [3, 0, 2]]


def test_zero_noise_draws_the_first_possible_action() -> None:
    assert Categorical(torch.tensor([-INF, -INF, 0.0, 1.0])).sample(torch.zeros(1)) == 2


@pytest.mark.parametrize("noise", [0.0, 2.0**-24, 0.5, LARGEST])
def test_impossible_action_is_never_drawn(noise: float) -> None:
    """In many of 20,000 rows, rounding leaves the cumulative sum below the largest noise."""
    rows = logits(20_000, 5)
    rows[:, [0, 2, 4]] = -INF
    drawn = Categorical(rows).sample(torch.full((20_000, 1), noise))
    assert set(drawn.tolist()) <= {1, 3}


def test_values_and_gradients_are_finite_with_impossible_actions() -> None:
    raw = torch.tensor([[0.0, -INF, math.log(3.0)]], requires_grad=True)
    distribution = Categorical(raw)
    assert distribution.log_prob(torch.tensor([1])) == -INF
    assert distribution.entropy().item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert distribution.kl(distribution).item() == 0
    loss = distribution.entropy() + distribution.log_prob(torch.tensor([0]))
    loss = loss + distribution.kl(Categorical(torch.zeros(1, 3)))
    (gradient,) = torch.autograd.grad(loss.sum(), raw)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


def test_kl_is_infinite_if_the_other_excludes_a_possible_action() -> None:
    both, one = Categorical(torch.zeros(2)), Categorical(torch.tensor([0.0, -INF]))
    assert both.kl(one) == INF
    assert one.kl(both).item() == pytest.approx(math.log(2))


def test_single_action_is_certain() -> None:
    only = Categorical(torch.tensor([[3.0], [-7.0]]))
    for noise in (0.0, LARGEST):
        assert only.sample(torch.full((2, 1), noise)).tolist() == [0, 0]
    assert only.log_prob(torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]
    assert only.entropy().tolist() == [0, 0]


def test_large_logits_do_not_overflow() -> None:
    distribution = Categorical(torch.tensor([1e4, 0.0, -1e4]))
    assert distribution.log_prob(torch.tensor(0)) == 0
    assert distribution.entropy() == 0
    assert distribution.sample(torch.tensor([LARGEST])) == 0


@pytest.mark.parametrize("rows", [(), (5,), (4, 3)])
def test_gaussian_agrees_with_torch(rows: tuple[int, ...]) -> None:
    mean, log_std, other_mean, other_log_std = (
        logits(*shape, seed=seed) for seed, shape in enumerate([(*rows, 2), (2,), (*rows, 2), (2,)])
    )
    mine, other = Gaussian(mean, log_std), Gaussian(other_mean, other_log_std)
    theirs = Independent(Normal(mean, log_std.exp()), 1)
    their_other = Independent(Normal(other_mean, other_log_std.exp()), 1)
    action = theirs.sample()
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    torch.testing.assert_close(mine.perplexity(), theirs.entropy().exp())
    torch.testing.assert_close(mine.kl(other), kl_divergence(theirs, their_other))
    assert torch.equal(mine.mode(), mean)


def test_gaussian_gradients_agree_with_torch() -> None:
    mean, log_std = logits(6, 2).requires_grad_(), logits(2, seed=1).requires_grad_()
    action = logits(6, 2, seed=2)
    mine = Gaussian(mean, log_std).log_prob(action).sum() + Gaussian(mean, log_std).entropy().sum()
    normal = Independent(Normal(mean, log_std.exp()), 1)
    theirs = normal.log_prob(action).sum() + normal.entropy().sum()
    for a, b in zip(
        torch.autograd.grad(mine, [mean, log_std]), torch.autograd.grad(theirs, [mean, log_std]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gaussian_shifts_and_scales_its_noise() -> None:
    distribution = Gaussian(torch.tensor([[1.0, -2.0]]), torch.tensor([0.0, math.log(3.0)]))
    torch.testing.assert_close(distribution.sample(torch.tensor([[0.5, -1.0]])), torch.tensor([[1.5, -5.0]]))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((20_000, 2), dtype=np.float32))
    drawn = distribution.sample(noise)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.08, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.tensor([1.0, 3.0]), atol=0.06, rtol=0)


SIZES = (3, 1, 4)


def split(values: Tensor) -> list[Tensor]:
    return list(torch.split(values, list(SIZES), -1))


@pytest.mark.parametrize("rows", [(), (5,), (4, 3)])
def test_multicategorical_is_the_sum_of_its_choices(rows: tuple[int, ...]) -> None:
    raw, other_raw = logits(*rows, 8), logits(*rows, 8, seed=1)
    mine, other = MultiCategorical(raw, SIZES), MultiCategorical(other_raw, SIZES)
    theirs = [TorchCategorical(logits=part) for part in split(raw)]
    their_others = [TorchCategorical(logits=part) for part in split(other_raw)]
    action = torch.stack([part.sample() for part in theirs], -1)
    expected = sum(part.log_prob(own) for part, own in zip(theirs, action.unbind(-1), strict=True))
    torch.testing.assert_close(mine.log_prob(action), expected)
    torch.testing.assert_close(mine.entropy(), sum(part.entropy() for part in theirs))
    torch.testing.assert_close(mine.perplexity(), mine.entropy().exp())
    divergence = sum(kl_divergence(a, b) for a, b in zip(theirs, their_others, strict=True))
    torch.testing.assert_close(mine.kl(other), divergence)
    assert mine.kl(other).shape == rows
    assert torch.equal(mine.mode(), torch.stack([part.mode for part in theirs], -1))


@pytest.mark.parametrize("sizes", [SIZES, (4, 4)])
def test_multicategorical_draws_each_choice_with_its_own_noise(sizes: tuple[int, ...]) -> None:
    raw = logits(50, sum(sizes))
    noise = torch.from_numpy(np.random.default_rng(0).random((50, len(sizes)), dtype=np.float32))
    noise[0], noise[1] = 0.0, LARGEST
    drawn = MultiCategorical(raw, sizes).sample(noise)
    assert drawn.dtype == torch.int64
    parts = torch.split(raw, list(sizes), -1)
    expected = [Categorical(part).sample(noise[:, i : i + 1]) for i, part in enumerate(parts)]
    assert torch.equal(drawn, torch.stack(expected, -1))
    assert (drawn < torch.tensor(sizes)).all()


def test_multicategorical_by_worked_numbers() -> None:
    """The probabilities are 1/4 and 3/4 for two choices, 1 for one choice, and 1/2, 0 and 1/2 for three."""
    raw = torch.tensor([[0.0, math.log(3.0), 5.0, 1.0, -INF, 1.0]], requires_grad=True)
    distribution = MultiCategorical(raw, (2, 1, 3))
    assert distribution.log_prob(torch.tensor([[1, 0, 2]])).item() == pytest.approx(math.log(3 / 8))
    assert distribution.log_prob(torch.tensor([[1, 0, 1]])) == -INF
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75) + math.log(2)
    assert distribution.entropy().item() == pytest.approx(entropy)
    assert distribution.sample(torch.tensor([[0.24, 0.99, 0.49]])).tolist() == [[0, 0, 0]]
    assert distribution.sample(torch.tensor([[0.26, 0.0, 0.51]])).tolist() == [[1, 0, 2]]
    assert distribution.kl(distribution).item() == 0
    loss = distribution.entropy() + distribution.log_prob(torch.tensor([[0, 0, 0]]))
    loss = loss + distribution.kl(MultiCategorical(torch.zeros(1, 6), (2, 1, 3)))
    (gradient,) = torch.autograd.grad(loss.sum(), raw)
    assert gradient.isfinite().all()
    assert gradient[0, 4] == 0


def test_multicategorical_gradients_agree_with_torch() -> None:
    raw = logits(6, 8).requires_grad_()
    action = torch.tensor([[2, 0, 1]]).expand(6, 3)
    mine = MultiCategorical(raw, SIZES)
    theirs = [TorchCategorical(logits=part) for part in split(raw)]
    losses = [mine.log_prob(action).sum() + 0.3 * mine.entropy().sum()]
    losses.append(sum(p.log_prob(action[:, i]).sum() + 0.3 * p.entropy().sum() for i, p in enumerate(theirs)))
    a, b = (torch.autograd.grad(loss, raw)[0] for loss in losses)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [(), (5,), (4, 3)])
def test_bernoulli_agrees_with_torch(rows: tuple[int, ...]) -> None:
    raw, other_raw = logits(*rows, 3), logits(*rows, 3, seed=1)
    mine, other = Bernoulli(raw), Bernoulli(other_raw)
    theirs = Independent(TorchBernoulli(logits=raw), 1)
    their_other = Independent(TorchBernoulli(logits=other_raw), 1)
    action = theirs.sample()
    torch.testing.assert_close(mine.log_prob(action.to(torch.int8)), theirs.log_prob(action))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    torch.testing.assert_close(mine.kl(other), kl_divergence(theirs, their_other))
    assert torch.equal(mine.mode(), (raw > 0).to(torch.int8))
    assert mine.mode().dtype == torch.int8


def test_bernoulli_draws_ones_as_often_as_their_probability() -> None:
    count, raw = 10_000, torch.tensor([-1.0, 0.0, 2.0, -INF])
    grid = ((torch.arange(count) + 0.5) / count).unsqueeze(-1).expand(count, 4)
    drawn = Bernoulli(raw).sample(grid)
    assert drawn.dtype == torch.int8
    assert (drawn.float().mean(0) - raw.sigmoid()).abs().max() < 1.5 / count
    assert not drawn[:, 3].any()


def test_values_and_gradients_are_finite_with_a_bit_that_is_never_1() -> None:
    raw = torch.tensor([[-INF, math.log(3.0)]], requires_grad=True)
    distribution = Bernoulli(raw)
    assert distribution.log_prob(torch.tensor([[0, 1]], dtype=torch.int8)).item() == pytest.approx(math.log(0.75))
    assert distribution.log_prob(torch.tensor([[1, 1]], dtype=torch.int8)) == -INF
    loss = distribution.entropy() + distribution.log_prob(torch.tensor([[0, 0]], dtype=torch.int8))
    (gradient,) = torch.autograd.grad((loss + distribution.kl(Bernoulli(torch.zeros(1, 2)))).sum(), raw)
    assert gradient.isfinite().all()
    assert gradient[0, 0] == 0


Arm = namedarraytuple("Entries", ("grip", "pull"))
Move = namedarraytuple("Entries", ("turn", "arm"))


def joint(*rows: int, seed: int = 0) -> tuple[Joint, list[Any]]:
    """Return a Joint for Move(turn: one of 3, arm: Arm(grip: 2 bits, pull: 2 floats)), and its leaves."""
    turn = Categorical(logits(*rows, 3, seed=seed))
    grip = Bernoulli(logits(*rows, 2, seed=seed + 10))
    pull = Gaussian(logits(*rows, 2, seed=seed + 20), logits(2, seed=seed + 30))
    return Joint(Move, [turn, Joint(Arm, [grip, pull], (2, 2))], (1, 4)), [turn, grip, pull]


def test_joint_splits_its_noise_in_order() -> None:
    distribution, (turn, grip, pull) = joint(6)
    noise = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    action = distribution.sample(noise)
    assert type(action) is Move
    assert type(action.arm) is Arm
    assert torch.equal(action.turn, turn.sample(noise[:, :1]))
    assert torch.equal(action.arm.grip, grip.sample(noise[:, 1:3]))
    assert torch.equal(action.arm.pull, pull.sample(noise[:, 3:]))
    mode = distribution.mode()
    assert torch.equal(mode.turn, turn.mode())
    assert torch.equal(mode.arm.grip, grip.mode())
    assert torch.equal(mode.arm.pull, pull.mode())


@pytest.mark.parametrize("rows", [(6,), (4, 3)])
def test_joint_is_the_sum_of_its_parts(rows: tuple[int, ...]) -> None:
    (distribution, parts), (other, others) = joint(*rows), joint(*rows, seed=5)
    action = distribution.sample(torch.rand(*rows, 5, generator=torch.Generator().manual_seed(0)))
    own = [action.turn, action.arm.grip, action.arm.pull]
    expected = sum(part.log_prob(value) for part, value in zip(parts, own, strict=True))
    torch.testing.assert_close(distribution.log_prob(action), expected)
    torch.testing.assert_close(distribution.entropy(), sum(part.entropy() for part in parts))
    torch.testing.assert_close(distribution.perplexity(), distribution.entropy().exp())
    torch.testing.assert_close(distribution.kl(other), sum(a.kl(b) for a, b in zip(parts, others, strict=True)))
    assert distribution.log_prob(action).shape == rows


def test_joint_refuses_noise_of_another_width() -> None:
    with pytest.raises(RuntimeError, match="split"):
        joint(6)[0].sample(torch.rand(6, 4))


def every_kind(*rows: int) -> dict[str, tuple[Distribution, int]]:
    """Return one distribution of each kind with the width of its noise."""
    return {
        "categorical": (Categorical(logits(*rows, 4)), 1),
        "multicategorical": (MultiCategorical(logits(*rows, 8), SIZES), 3),
        "bernoulli": (Bernoulli(logits(*rows, 3)), 3),
        "gaussian": (Gaussian(logits(*rows, 2), logits(2, seed=1)), 2),
        "gaussian with rows of log_std": (Gaussian(logits(*rows, 2), logits(*rows, 2, seed=1)), 2),
        "gaussian with columns of log_std": (Gaussian(logits(*rows, 2), logits(rows[-1], 2, seed=1)), 2),
        "joint": (joint(*rows)[0], 5),
    }


KINDS = list(every_kind(2))


def at(action: Any, index: Any) -> Any:
    return action[index]  # of a tensor or a named array tuple


def same(a: Any, b: Any) -> bool:
    if isinstance(a, ArrayTuple):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["mask", "index"])
def test_rows_are_bit_equal_to_the_whole_distribution(kind: str, which: str) -> None:
    if which == "mask":
        leading, index = (4, 3), torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    else:
        leading, index = (12,), torch.tensor([7, 0, 0, 11, 3])
    distribution, width = every_kind(*leading)[kind]
    noise = torch.rand(*leading, width, generator=torch.Generator().manual_seed(1))
    action = distribution.sample(noise)
    part = distribution.rows(index)
    assert type(part) is type(distribution)
    assert same(part.sample(noise[index]), at(action, index))
    assert same(part.mode(), at(distribution.mode(), index))
    assert torch.equal(part.log_prob(at(action, index)), distribution.log_prob(action)[index])
    torch.testing.assert_close(part.entropy(), distribution.entropy()[index])
    assert torch.equal(part.kl(part), distribution.kl(distribution)[index])
    assert distribution.entropy().shape == leading  # the whole distribution is unchanged


def test_rows_do_not_normalize_again() -> None:
    distribution = Categorical(logits(1000, 7))
    index = torch.arange(1000)
    assert torch.equal(distribution.rows(index).logits, distribution.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leading", [(6,), (2, 6)])
def test_choose_samples_where_explore_is_positive_and_takes_the_mode_elsewhere(
    kind: str, leading: tuple[int, ...]
) -> None:
    distribution, width = every_kind(*leading)[kind]
    noise = torch.rand(*leading, width, generator=torch.Generator().manual_seed(1))
    sample, mode = distribution.sample(noise), distribution.mode()
    assert not same(sample, mode)
    assert same(distribution.choose(noise), sample)
    assert same(distribution.choose(noise, torch.ones(leading)), sample)
    assert same(distribution.choose(noise, torch.zeros(leading)), mode)
    explore = torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0, 0.0]).expand(leading)
    mixed = distribution.choose(noise, explore)
    assert same(at(mixed, explore != 0), at(sample, explore != 0))
    assert same(at(mixed, explore == 0), at(mode, explore == 0))
