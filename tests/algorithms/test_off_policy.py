"""Tests of the base class of algorithms with a replay: rows of sequences, priorities, and target networks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rollouts import box, discrete
from torch import Tensor, nn

from remuda import fast
from remuda.agents import QAgent
from remuda.algorithms import DQN
from remuda.algorithms.critics import smallest
from remuda.algorithms.off_policy import OffPolicy
from remuda.core import Clock, Space
from remuda.data import ArrayTuple, Batch, Rollout, Steps
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.nets import MLP
from remuda.replay import Ring, Row, TransitionReplay

Floats = NDArray[np.float64]
GAMMA = 0.9


class RowTargets(ArrayTuple):
    """Targets as a transition replay makes them."""

    reward: Any
    discount: Any


class SequenceTargets(ArrayTuple):
    """Targets as a sequence replay makes them."""

    reward: Any
    discount: Any
    row: Any


# --- helpers that other tests of algorithms use too ---


def numbers(tensor: Tensor) -> Floats:
    return tensor.detach().numpy().astype(np.float64)


def random_action(space: Space, *leading: int, generator: torch.Generator) -> Tensor:
    if space.kind == "discrete":
        return torch.randint(space.n, leading, generator=generator)
    assert space.low is not None
    assert space.high is not None
    low, high = (torch.as_tensor(bound).float().reshape(-1) for bound in (space.low, space.high))
    return low + torch.rand(*leading, len(low), generator=generator) * (high - low)


def drawn_rows(action: Space, N: int = 12, seed: int = 0, width: int = 3, has_weight: bool = False) -> Batch:
    """Return rows as drawn from a replay, some of them terminal. Fields that must not be read are NaN."""
    generator = torch.Generator().manual_seed(seed)
    nothing = torch.full((N,), torch.nan)
    steps = Steps(
        obs=torch.randn(N, width, generator=generator),
        action=random_action(action, N, generator=generator),
        reward=nothing,
        discount=nothing,
        mask=torch.ones(N, dtype=torch.bool),
        policy=None,
        version=None,
    )
    discount = GAMMA ** torch.randint(1, 4, (N,), generator=generator)
    discount[::4] = 0.0
    targets = RowTargets(2 * torch.randn(N, generator=generator), discount)
    next_obs = torch.randn(N, width, generator=generator)
    weight = torch.rand(N, generator=generator) * 0.9 + 0.1 if has_weight else None
    return Batch(steps, targets, next_obs=next_obs, weight=weight, key=np.zeros((N, 2), np.int64))


def drawn_sequences(
    action: Space,
    state: Any,
    S: int = 4,
    burn_in: int = 3,
    length: int = 6,
    n: int = 2,
    seed: int = 0,
    width: int = 3,
    has_weight: bool = False,
) -> Batch:
    """Return sequences of short episodes that terminate or are truncated, with targets computed by loops.

    The last sequence consists of a single episode.
    """
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    R = burn_in + length + n
    reward, discount, mask = np.zeros((R, S)), np.ones((R, S)), np.ones((R, S), bool)
    for s in range(S - 1):
        over = rng.random() < 0.3  # whether the previous row ended an episode
        for r in range(R):
            mask[r, s] = not over
            over = bool(mask[r, s]) and rng.random() < 0.3
            reward[r, s] = rng.normal() if mask[r, s] else 0.0
            discount[r, s] = 0.0 if over and rng.random() < 0.5 else 1.0
    reward[:, S - 1] = rng.normal(size=R)
    mask[burn_in - 1, 0], mask[burn_in + 1, 1] = False, False  # a reset at the end of the burn-in, and one after it
    goals, factors, rows = np.zeros((length, S)), np.ones((length, S)), np.zeros((length, S), np.int64)
    for s in range(S):
        for t in range(length):
            at, total, factor = burn_in + t, 0.0, 1.0
            for _ in range(n):
                if not mask[at, s] or factor == 0:
                    break
                total += factor * reward[at, s]
                factor *= GAMMA * discount[at, s]
                at += 1
            goals[t, s], factors[t, s], rows[t, s] = total, factor, at
    steps = Steps(
        obs=torch.randn(R, S, width, generator=generator),
        action=random_action(action, R, S, generator=generator),
        reward=torch.from_numpy(reward).float(),
        discount=torch.from_numpy(discount).float(),
        mask=torch.from_numpy(mask),
        policy=None,
        version=None,
    )
    targets = SequenceTargets(
        torch.from_numpy(goals).float(), torch.from_numpy(factors).float(), torch.from_numpy(rows)
    )
    weight = torch.rand(S, generator=generator) * 0.9 + 0.1 if has_weight else None
    return Batch(steps, targets, state, weight=weight, key=np.zeros((S, 2), np.int64))


def shaken(module: nn.Module, seed: int = 1, size: float = 0.3) -> None:
    """Move all parameters, so that nets with equal initial weights differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def make_learner(algorithm: Any, rate: str = "1e-2") -> Learner:
    return Learner(algorithm, OptimizerOptions(), parse_schedule(rate), None, fast_path=fast.find(algorithm))


def copies(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def is_same(before: list[Tensor], module: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


# --- rows of sequences ---


class Leaky(nn.Module):
    """A recurrent net whose state is one number: the previous state times `a`, plus the observation."""

    def __init__(self, a: float = 0.7) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))
        self.inputs = nn.Identity()

    def unroll(self, obs: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        assert reset is not None
        state = torch.zeros(obs.shape[1], dtype=torch.float64) if state is None else state
        said = []
        for t in range(len(obs)):
            state = self.a * torch.where(reset[t], 0.0, state) + obs[t, :, 0]
            said.append(state)
        return torch.stack(said), state


def by_loops(batch: Batch, burn_in: int, a: float, state: list[float]) -> tuple[Floats, Floats]:
    """Return the outputs of all R rows of each sequence and their derivatives by `a`; the burn-in is constant."""
    x, mask = batch.steps.obs[..., 0].tolist(), batch.steps.mask.tolist()
    R, S = len(mask), len(mask[0])
    said, slope = np.zeros((R, S)), np.zeros((R, S))
    for s in range(S):
        memory, derivative = state[s], 0.0
        for r in range(R):
            if r > 0 and not mask[r - 1][s]:  # the row before was a reset row
                memory, derivative = 0.0, 0.0
            if r == burn_in:
                derivative = 0.0
            memory, derivative = a * memory + x[r][s], memory + a * derivative
            said[r, s], slope[r, s] = memory, derivative
    return said, slope


def leaky_case(burn_in: int, seed: int = 0, **options: Any) -> tuple[OffPolicy, Batch]:
    algorithm = OffPolicy(Leaky(), 0, 1.0, 1, burn_in=burn_in)
    S = options.get("S", 4)
    state = torch.randn(S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    batch = drawn_sequences(discrete(5), state, burn_in=max(burn_in, 1), seed=seed, **options)
    if burn_in == 0:  # the batch was made with one row of burn-in: remove it
        targets = batch.targets.replace(row=batch.targets.row - 1)
        batch = replace(batch, steps=batch.steps[1:], targets=targets)
    return algorithm, replace(batch, steps=batch.steps.replace(obs=batch.steps.obs.double()))


CASES = pytest.mark.parametrize("seed", range(6))
BURN_INS = pytest.mark.parametrize("burn_in", [0, 1, 4])


@CASES
@BURN_INS
def test_rows_of_sequences_are_the_real_ones_after_the_burn_in(burn_in: int, seed: int) -> None:
    algorithm, batch = leaky_case(burn_in, seed, has_weight=True)
    rows = algorithm.rows(batch)
    expected: list[tuple[float, ...]] = []
    steps, targets = batch.steps, batch.targets
    for t in range(len(targets.reward)):
        for s in range(4):
            if steps.mask[burn_in + t, s]:
                numbers = (
                    steps.action[burn_in + t, s],
                    targets.reward[t, s],
                    targets.discount[t, s],
                    batch.weight[s],
                )
                expected.append(tuple(map(float, numbers)))
    assert isinstance(rows.weight, Tensor)
    found = zip(rows.action.tolist(), rows.reward.tolist(), rows.discount.tolist(), rows.weight.tolist(), strict=True)
    assert list(found) == expected
    assert algorithm.rows(replace(batch, weight=None)).weight == 1.0


@CASES
@BURN_INS
@pytest.mark.parametrize("n", [1, 3])
def test_now_and_after_equal_loops(burn_in: int, seed: int, n: int) -> None:
    """The stored state enters row 0 and is reset where an episode ends, also at the end of the burn-in."""
    algorithm, batch = leaky_case(burn_in, seed, n=n)
    agent, targets = algorithm.agent, batch.targets
    said, _ = by_loops(batch, burn_in, 0.7, batch.state.tolist())
    real = [(t, s) for t in range(len(targets.row)) for s in range(4) if batch.steps.mask[burn_in + t, s]]
    now = [said[burn_in + t, s] for t, s in real]
    after = [said[int(targets.row[t, s]), s] for t, s in real]
    both = algorithm.now_and_after(batch, agent.unroll, batch.state)
    for found in (both[0], algorithm.now(batch, agent.unroll, batch.state)):
        np.testing.assert_allclose(found.detach(), now, rtol=1e-9)
    for found in (both[1], algorithm.after(batch, agent.unroll, batch.state)):
        np.testing.assert_allclose(found.detach(), after, rtol=1e-9)
    assert both[0].requires_grad
    assert not both[1].requires_grad


@BURN_INS
def test_sequences_without_a_stored_state_start_from_zeros(burn_in: int) -> None:
    """Critics do so, because samplers store no state for them."""
    algorithm, batch = leaky_case(burn_in)
    said, _ = by_loops(batch, burn_in, 0.7, [0.0] * 4)
    real = [(t, s) for t in range(6) for s in range(4) if batch.steps.mask[burn_in + t, s]]
    found = algorithm.now(batch, algorithm.agent.unroll)
    np.testing.assert_allclose(found.detach(), [said[burn_in + t, s] for t, s in real], rtol=1e-9)
    assert not np.allclose(found.detach(), algorithm.now(batch, algorithm.agent.unroll, batch.state).detach())


@CASES
@BURN_INS
def test_no_gradient_comes_from_the_burn_in(burn_in: int, seed: int) -> None:
    algorithm, batch = leaky_case(burn_in, seed)
    _, slope = by_loops(batch, burn_in, 0.7, batch.state.tolist())
    real = [(t, s) for t in range(6) for s in range(4) if batch.steps.mask[burn_in + t, s]]
    c = torch.randn(len(real), dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    expected = sum(float(c[k]) * slope[burn_in + t, s] for k, (t, s) in enumerate(real))
    for now in (algorithm.now, lambda *args: algorithm.now_and_after(*args)[0]):
        (found,) = torch.autograd.grad((c * now(batch, algorithm.agent.unroll, batch.state)).sum(), algorithm.agent.a)
        assert float(found) == pytest.approx(expected)


def test_worked_numbers_of_one_sequence() -> None:
    """The memory doubles in each row, the burn-in is 2, an episode ends with row 3, and n is 1."""
    algorithm = OffPolicy(Leaky(2.0), 0, 1.0, 1, burn_in=2)
    x = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0], dtype=torch.float64).reshape(7, 1, 1)
    mask = torch.tensor([True, True, True, True, False, True, True]).reshape(7, 1)
    blank = torch.zeros(7, 1)
    steps = Steps(x, torch.arange(7).reshape(7, 1), blank, blank, mask, None, None)
    column = lambda *values: torch.tensor(values).reshape(-1, 1)  # noqa: E731
    targets = SequenceTargets(column(3.0, 4.0, 0.0, 6.0), column(0.9, 0.9, 1.0, 0.9), column(3, 4, 4, 6))
    batch = Batch(steps, targets, torch.ones(1, dtype=torch.float64))
    # Outputs of rows: 3 7 | 15 31 67 (final observation) | next episode: 1 3
    assert algorithm.now(batch, algorithm.agent.unroll, batch.state).tolist() == [15.0, 31.0, 1.0]
    assert algorithm.after(batch, algorithm.agent.unroll, batch.state).tolist() == [31.0, 67.0, 3.0]
    rows = algorithm.rows(batch)
    assert rows.action.tolist() == [2, 3, 5]
    assert rows.reward.tolist() == [3.0, 4.0, 6.0]


def test_rows_of_transitions_are_unchanged() -> None:
    algorithm = OffPolicy(Leaky(), 0, 1.0, 1)
    batch = drawn_rows(discrete(4), has_weight=True)

    def unroll(obs: Tensor, state: Any, reset: Any) -> tuple[Tensor, None]:
        assert (state, reset) == (None, None)
        return obs.sum(-1) * algorithm.agent.a, None

    rows = algorithm.rows(batch)
    assert rows == (batch.steps.action, batch.targets.reward, batch.targets.discount, batch.weight)
    now, after = algorithm.now_and_after(batch, unroll)
    torch.testing.assert_close(now, batch.steps.obs.sum(-1) * algorithm.agent.a)
    torch.testing.assert_close(after, (batch.next_obs.sum(-1) * algorithm.agent.a).detach())
    assert now.requires_grad
    assert not after.requires_grad
    assert torch.equal(algorithm.now(batch, unroll), now)
    assert torch.equal(algorithm.after(batch, unroll), after)


# --- priorities ---


def test_priority_of_a_row_is_its_error() -> None:
    size = torch.rand(12)
    assert torch.equal(OffPolicy(Leaky(), 0, 1.0, 1).priority(size, drawn_rows(discrete(4))), size)


@pytest.mark.parametrize("eta", [0.0, 0.9, 1.0])
def test_priority_of_a_sequence_by_worked_numbers(eta: float) -> None:
    """Largest error and mean over the real rows are 4 and 2, then 1 and 1; without real rows the priority is 0."""
    algorithm = OffPolicy(Leaky(), 0, 1.0, 1, burn_in=1)
    algorithm.eta = eta
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    steps = Steps(torch.zeros(5, 3, 1), None, None, None, mask, None, None)
    targets = SequenceTargets(torch.zeros(3, 3), torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int64))
    batch = Batch(steps, targets, torch.zeros(3))
    found = algorithm.priority(torch.tensor([0.5, 1.0, 4.0, 1.5]), batch)  # the real rows among rows 1 to 3
    expected = [eta * 4 + (1 - eta) * 2, 1.0, 0.0]
    assert found.tolist() == pytest.approx(expected)


@CASES
def test_priority_of_sequences_by_loops(seed: int) -> None:
    algorithm, batch = leaky_case(3, seed)
    real = [(t, s) for t in range(6) for s in range(4) if batch.steps.mask[3 + t, s]]
    size = torch.rand(len(real), generator=torch.Generator().manual_seed(seed))
    expected = []
    for s in range(4):
        own = [float(size[k]) for k, (_, column) in enumerate(real) if column == s]
        expected.append(0.9 * max(own) + 0.1 * sum(own) / len(own))
    assert algorithm.priority(size, batch).tolist() == pytest.approx(expected)


# --- targets ---


def make_agent(**options: Any) -> QAgent:
    torch.manual_seed(0)
    return QAgent(box((3,)), discrete(4), lambda shape: MLP(shape, (5,)), **options)


def test_target_network_is_a_copy_without_gradients() -> None:
    agent = make_agent(normalize_obs=True)
    algorithm = OffPolicy(agent, 0, 1.0, 1)
    target = algorithm.make_target(agent)
    pairs = list(zip(agent.parameters(), target.parameters(), strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)
    assert all(a.requires_grad and not b.requires_grad for a, b in pairs)
    shaken(agent)
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_agent_and_target_share_the_statistics_of_observations() -> None:
    agent = make_agent(normalize_obs=True)
    algorithm = OffPolicy(agent, 0, 1.0, 1)
    target = algorithm.make_target(agent)
    obs = 50 + 10 * torch.randn(32, 3)
    before = target.unroll(obs, None, None)[0]
    steps = Steps(obs.reshape(8, 4, 3), None, None, None, torch.ones(8, 4, dtype=torch.bool), None, None)
    algorithm.absorb(algorithm.obs_statistics(Rollout(steps, None)))
    after = target.unroll(obs, None, None)[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, agent.unroll(obs, None, None)[0].detach())
    seen = numbers(agent.inputs(obs))
    np.testing.assert_allclose(seen.mean(0), np.zeros(3), atol=1e-2)
    np.testing.assert_allclose(seen.std(0), np.ones(3), atol=0.05)


@pytest.mark.parametrize("is_shared", [False, True], ids=["rollout", "replay written by samplers"])
def test_masked_rows_never_enter_the_observation_statistics(is_shared: bool) -> None:
    """Real rows are +-1, so their standard deviation is 1; the masked rows after them are all 10."""
    agent = make_agent(normalize_obs=True)
    obs, mask = torch.full((10, 2, 3), 10.0), torch.zeros(10, 2, dtype=torch.bool)
    obs[:4:2], obs[1:4:2], mask[:4] = 1.0, -1.0, True
    rollouts = [Rollout(Steps(obs, None, None, None, mask, None, None), None)]
    if is_shared:
        zeros = np.zeros((10, 2), np.float32)
        example = Row(np.zeros(3, np.float32), np.float32(0), np.float32(0), np.float32(0), np.False_)
        ring = Ring(example, 12, 2)
        replay = TransitionReplay(ring, batch_size=4, ratio=1, warm_up=0, n_step=1, gamma=0.9, seed=0, is_shared=True)
        ring.append(Row(obs.numpy(), zeros, zeros, zeros, mask.numpy()), obs[-1].numpy())
        rollouts = list(replay.new_observations())
    learner = make_learner(DQN(agent, 0))
    for rollout in rollouts:
        learner.finish(rollout)
    moments = agent.inputs.leaf_inputs[0].standardize.moments
    assert (moments.count, moments.mean.tolist(), moments.var.tolist()) == (8, [0.0] * 3, [1.0] * 3)
    if is_shared:
        replay.close()


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_target_networks_move_by_tau_every_target_interval_updates(interval: int, tau: float) -> None:
    agent = make_agent()
    algorithm = OffPolicy(agent, 0, tau, interval)
    target = algorithm.make_target(agent)
    expected = [numbers(parameter) for parameter in target.parameters()]
    for version in range(1, 8):
        shaken(agent, seed=version)
        algorithm.after_update(Clock(version))
        if version % interval == 0:
            expected = [
                (1 - tau) * old + tau * numbers(parameter)
                for old, parameter in zip(expected, agent.parameters(), strict=True)
            ]
        for found, wanted in zip(target.parameters(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_target_networks_follow_parameters_owned_by_a_learner() -> None:
    """A learner moves parameters into one vector, and target networks must follow that vector."""

    class Mean(OffPolicy):
        def __init__(self) -> None:
            super().__init__(make_agent(), 0, 1.0, 2)
            self.target = self.make_target(self.agent)

        def groups(self) -> Any:
            return {"q": list(self.agent.parameters())}

    algorithm = Mean()
    learner = make_learner(algorithm)
    for version in (1, 2):
        learner.vectors["q"].add_(1.0)
        algorithm.after_update(Clock(version))
        assert is_same(copies(algorithm.target), algorithm.agent) == (version == 2)


# --- the rest ---


def test_random_numbers_are_a_function_of_seed_and_update() -> None:
    def draw(seed: int, version: int, progress: float = 0.0) -> list[float]:
        return torch.randn(8, generator=OffPolicy(Leaky(), seed, 1.0, 1).generator(Clock(version, progress))).tolist()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = {(seed, version): draw(seed, version) for seed in (0, 1, 10**9) for version in (0, 1, 2, 10**6)}
    assert torch.equal(torch.get_rng_state(), before), "the global generator is unchanged"
    assert len({tuple(values) for values in drawn.values()}) == len(drawn)
    torch.manual_seed(5)
    assert all(draw(*key, progress=0.5) == values for key, values in drawn.items())


def test_rewards_are_clipped_only_by_prepare() -> None:
    reward = torch.tensor([[-5.0, 0.3], [2.0, -0.7]])
    steps = Steps(torch.zeros(2, 2, 3), torch.zeros(2, 2), reward, torch.ones(2, 2), torch.ones(2, 2), None, None)
    rollout = Rollout(steps, torch.ones(2, 3), state=torch.full((2,), 7.0))
    for clips, expected in ((False, reward.tolist()), (True, [[-1.0, 0.3], [1.0, -0.7]])):
        batch = OffPolicy(Leaky(), 0, 1.0, 1, clip_reward=clips).prepare(rollout)
        np.testing.assert_allclose(batch.steps.reward, np.array(expected, np.float32))
        assert (batch.state is rollout.state, batch.next_obs is rollout.next_obs) == (True, True)
        assert batch.steps.obs is steps.obs
    assert rollout.steps.reward.tolist() == torch.tensor([[-5.0, 0.3], [2.0, -0.7]]).tolist()


def test_rewards_are_scaled_after_they_are_clipped() -> None:
    reward = torch.tensor([[-5.0, 0.5]])
    steps = Steps(torch.zeros(1, 2, 3), torch.zeros(1, 2), reward, torch.ones(1, 2), torch.ones(1, 2), None, None)
    prepare = OffPolicy(Leaky(), 0, 1.0, 1, clip_reward=True, reward_scale=4.0).prepare
    assert prepare(Rollout(steps, torch.ones(2, 3))).steps.reward.tolist() == [[-4.0, 2.0]]
    assert reward.tolist() == [[-5.0, 0.5]], "rewards of the rollout, which are logged, are unchanged"


def test_smallest_of_several_tensors() -> None:
    values = [torch.tensor([1.0, 5.0, -2.0]), torch.tensor([2.0, 4.0, -3.0]), torch.tensor([0.0, 9.0, -1.0])]
    assert smallest(values).tolist() == [0.0, 4.0, -3.0]
    assert smallest(values[:2]).tolist() == [1.0, 4.0, -3.0]
    assert smallest(values[:1]).tolist() == [1.0, 5.0, -2.0]


def test_copied_algorithm_follows_its_own_parameters() -> None:
    agent = make_agent()
    algorithm = OffPolicy(agent, 0, 1.0, 1)
    algorithm.target = algorithm.make_target(agent)
    other = deepcopy(algorithm)
    shaken(other.agent)
    other.after_update(Clock(1))
    assert is_same(copies(other.target), other.agent)
    assert is_same(copies(algorithm.target), agent)
    assert not is_same(copies(other.target), agent)
