"""Tests of exploration: its amount for each env and row, initial random actions, and independent noise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from counting_agents import CountingRNN
from rollouts import box, discrete
from torch import Tensor, nn

from remuda.agents import ActorAgent, QAgent
from remuda.build.exploration import HARDLY, epsilons, make_exploration
from remuda.config.algo_options import A2COptions, DQNOptions, R2D1Options, RainbowOptions
from remuda.config.continuous_options import SACOptions, TD3Options
from remuda.config.run_config import RunConfig
from remuda.config.run_options import AgentOptions, ReplayOptions, SamplerOptions
from remuda.core import Space
from remuda.data import Rollout, leaves
from remuda.envs import LocalEnvs, make_envs, resolve
from remuda.learning.weights import LocalWeights
from remuda.nets import MLP
from remuda.registry import find_algorithm
from remuda.sampling.exploration import Exploration, RandomActions
from remuda.sampling.noise import Noise
from remuda.sampling.sampler import EnvSampler

SEED, NUM_ENVS, T = 11, 4, 6
LOW, HIGH = np.array([[-2, 0], [1, -1]], np.float32), np.array([[3, 0.5], [10, 1]], np.float32)
LOPSIDED = Space("box", (2, 2), "float32", LOW, HIGH)


# --- amount of exploration ---


def by_row_and_env(row: int) -> Tensor:
    """Return 100 * row + env, which identifies both."""
    return 100.0 * row + torch.arange(NUM_ENVS)


def test_amounts_of_some_of_the_envs() -> None:
    explore = Exploration(by_row_and_env, random_rows=7)
    amount = explore.at(3)
    assert amount is not None
    assert amount.tolist() == [300.0, 301.0, 302.0, 303.0]
    part = explore.columns(1, 3)
    amount = part.at(3)
    assert amount is not None
    assert amount.tolist() == [301.0, 302.0]
    assert part.random_rows == 7
    amount = part.columns(1, 2).at(5)
    assert amount is not None
    assert amount.tolist() == [502.0]


def test_exploration_without_amounts_returns_none() -> None:
    assert Exploration().at(5) is None
    part = Exploration(None, 3).columns(0, 2)
    assert part.at(5) is None
    assert part.random_rows == 3
    assert Exploration().random_rows == 0


@pytest.mark.parametrize("envs", [2, 5, 8])
@pytest.mark.parametrize("power", [7.0, 2.5])
def test_epsilons_are_log_spaced_over_all_envs(envs: int, power: float) -> None:
    """Env i of N has epsilon ** (1 + power * i / (N - 1)) (arXiv:1803.00933), so ratios of neighbors are equal."""
    chances = epsilons(DQNOptions(epsilon="0.4", epsilon_power=power), envs, 1000)(0).tolist()
    assert chances == pytest.approx([0.4 ** (1 + power * i / (envs - 1)) for i in range(envs)], rel=1e-5)
    assert chances[0] == pytest.approx(0.4)
    assert chances[-1] == pytest.approx(0.4 ** (1 + power), rel=1e-5)
    steps = [math.log(a) - math.log(b) for a, b in pairwise(chances)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-4)


def test_epsilons_of_apex_by_worked_numbers() -> None:
    """With power 7, the epsilons of 8 envs range from 0.4 to 0.4 ** 8."""
    chances = epsilons(DQNOptions(epsilon="0.4", epsilon_power=7.0), 8, 1000)(0)
    assert chances.tolist() == pytest.approx([0.4**k for k in range(1, 9)], rel=1e-5)


def test_all_envs_have_the_same_epsilon_without_a_power() -> None:
    chance = epsilons(DQNOptions(epsilon="linear(1, 0.1)"), 5, 1000)
    for row, expected in ((0, 1.0), (100, 0.55), (200, 0.1), (5000, 0.1)):
        assert chance(row).tolist() == pytest.approx([expected] * 5)
    assert epsilons(DQNOptions(epsilon="0.3", epsilon_power=7.0), 1, 10)(0).tolist() == pytest.approx([0.3])
    assert epsilons(DQNOptions(epsilon="0"), 3, 10)(0).tolist() == pytest.approx([HARDLY] * 3)


def test_epsilons_follow_their_schedule_by_row() -> None:
    """A row is a step of every env: with 4 envs and 800 steps, row 20 is at a tenth of the run."""
    chance = epsilons(DQNOptions(epsilon="piecewise(0:1, 0.1:0.2)", epsilon_power=1.0), 4, 800)
    assert chance(0).tolist() == pytest.approx([1.0] * 4)
    assert chance(10).tolist() == pytest.approx([0.6 ** (1 + i / 3) for i in range(4)], rel=1e-5)
    for row in (20, 100, 200, 10**6):
        assert chance(row).tolist() == pytest.approx([0.2 ** (1 + i / 3) for i in range(4)], rel=1e-5)


def config_of(algo: str, **options: Any) -> RunConfig:
    sequences = {"sequence": 8} if algo == "r2d1" else {}
    return RunConfig(
        algo,
        "CartPole-v1",
        1000,
        0,
        "serial",
        find_algorithm(algo).options(**options),
        ReplayOptions(**sequences),
        SamplerOptions(envs=NUM_ENVS),
        agent=AgentOptions(core="lstm" if algo == "r2d1" else None),
    )


def test_exploration_of_every_algorithm() -> None:
    assert make_exploration(config_of("a2c")) == Exploration()
    for algo, options in (("sac", SACOptions), ("td3", TD3Options)):
        found = make_exploration(config_of(algo, learning_starts=10))
        assert isinstance(config_of(algo).algo_options, options)
        assert found == Exploration(None, 3), "10 steps with 4 envs need 3 rows"
    for algo, kind in (("dqn", DQNOptions), ("r2d1", R2D1Options)):
        found = make_exploration(config_of(algo, learning_starts=8, epsilon="0.5", epsilon_power=1.0))
        assert isinstance(config_of(algo).algo_options, kind)
        assert found.random_rows == 2
        amount = found.at(0)
        assert amount is not None
        assert amount.tolist() == pytest.approx([0.5 ** (1 + i / 3) for i in range(4)], rel=1e-5)
    assert isinstance(config_of("a2c").algo_options, A2COptions)
    assert make_exploration(config_of("dqn", learning_starts=0)).random_rows == 0


def test_noisy_nets_explore_with_an_epsilon_of_zero() -> None:
    """Rainbow has epsilon 0, so noise on the weights alone must lead to several actions for one observation."""
    config = config_of("rainbow", learning_starts=0)
    assert isinstance(config.algo_options, RainbowOptions)
    torch.manual_seed(0)
    agent = QAgent(box((3,)), discrete(4), lambda shape: MLP(shape, (8,)), noisy=True)
    for parameter in agent.head.parameters():
        nn.init.normal_(parameter)
    explore, actions = make_exploration(config), []
    for row in range(20):
        noise = torch.cat(
            [torch.tensor([[0.5, 0.0]]).expand(NUM_ENVS, 2), torch.randn(NUM_ENVS, agent.noise_width)], 1
        )
        actions += agent.act(torch.ones(NUM_ENVS, 3), None, explore.at(row), noise)[0].tolist()
    assert len(set(actions)) > 1


# --- random actions ---


def test_random_discrete_actions_are_uniform() -> None:
    actions = RandomActions(discrete(6), SEED, range(8)).rows(0, 2000)
    assert actions.shape == (2000, 8)
    assert actions.dtype == np.int64
    expected = actions.size / 6
    chi_square = float(((np.bincount(actions.reshape(-1), minlength=6) - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 99.9 % of draws with 5 degrees of freedom
    for n in (1, 3, 7):  # actions count from 0, whatever the start of the space
        assert set(RandomActions(discrete(n, start=5), SEED, [0]).rows(0, 300).reshape(-1)) == set(range(n))


def test_random_box_actions_are_uniform_between_the_bounds() -> None:
    actions = RandomActions(LOPSIDED, SEED, range(8)).rows(0, 2000)
    assert actions.shape == (2000, 8, 4), "actions are flat, as agents return them"
    assert actions.dtype == np.float32
    for k, (low, high) in enumerate(zip(LOW.reshape(-1), HIGH.reshape(-1), strict=True)):
        numbers = actions[..., k].reshape(-1)
        assert low <= numbers.min() < low + 0.001 * (high - low)
        assert high >= numbers.max() > high - 0.001 * (high - low)
        shares = np.histogram(numbers, 10, (low, high))[0] / len(numbers)
        assert np.abs(shares - 0.1).max() < 0.01
    columns = actions.reshape(2000, 32)
    assert np.abs(np.corrcoef(columns.T) - np.eye(32)).max() < 0.12, "envs and components are uncorrelated"
    assert RandomActions(box(()), SEED, range(2)).rows(0, 3).shape == (3, 2, 1)


def test_random_actions_of_an_env_do_not_depend_on_other_envs() -> None:
    for space in (discrete(1000), LOPSIDED):
        together = RandomActions(space, SEED, range(6)).rows(12, 10)
        for env in range(6):
            np.testing.assert_array_equal(RandomActions(space, SEED, [env]).rows(12, 10)[:, 0], together[:, env])
        np.testing.assert_array_equal(RandomActions(space, SEED, range(6)).rows(12, 4), together[:4])
        assert not np.array_equal(RandomActions(space, SEED + 1, range(6)).rows(12, 10), together)
        assert not np.array_equal(RandomActions(space, SEED, range(6)).rows(22, 10), together)


def test_random_actions_and_agent_noise_are_independent() -> None:
    """Both have the same seed, envs and rows."""
    wide = Space("box", (2,), "float32", np.zeros(2, np.float32), np.ones(2, np.float32))
    random = RandomActions(wide, SEED, range(50)).rows(0, 400)
    noise = Noise(SEED, range(50), (("uniform", 2),)).rows(0, 400).numpy()
    assert (
        len(np.intersect1d(random, noise)) < 0.01 * random.size
    )  # some coincide randomly: 40,000 of 2^24 numbers each
    for env in (0, 7, 49):
        own = np.concatenate([random[:, env], noise[:, env]], -1)
        assert np.abs(np.corrcoef(own.T) - np.eye(4)).max() < 0.2


# --- through the sampler ---


class Listener(nn.Module):
    """An agent whose actions depend only on its noise and that records the amounts of exploration it receives."""

    exploration = 1.0

    def __init__(self, action: str = "discrete") -> None:
        super().__init__()
        self.kind, self.told = action, []
        self.noise = (("uniform", 1),) if action == "discrete" else (("normal", 2),)

    def initial_state(self, batch: int) -> None:
        return None

    def act(self, obs: Tensor, state: Any, explore: Tensor | None, noise: Tensor) -> tuple[Tensor, None, None]:
        self.told.append(None if explore is None else explore.tolist())
        return ((4 * noise[:, 0]).long() if self.kind == "discrete" else noise), None, None


@contextlib.contextmanager
def sampling(
    agent: Any, explore: Exploration, slots: int = 1, first_row: int = 0, action: str = "discrete", rows: int = T
) -> Iterator[EnvSampler]:
    spec = resolve("counting:make", {"lengths": [3, 5, 2], "action": action})
    envs = make_envs(spec, NUM_ENVS, slots=slots, gamma=0.9)
    with contextlib.closing(
        EnvSampler(envs, agent, LocalWeights(), rows, SEED, first_row, explore=explore)
    ) as sampler:
        agent.told = []
        sampler.reset(SEED)
        yield sampler


def kept(rollout: Rollout) -> dict[str, np.ndarray]:
    return {path: tensor.clone().numpy() for path, tensor in leaves((rollout.steps, rollout.next_obs, rollout.state))}


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_agents_receive_the_amount_for_every_row_and_env(slots: int) -> None:
    agent = Listener()
    with sampling(agent, Exploration(by_row_and_env), slots) as sampler:
        sampler.collect()
        sampler.collect()
    width = NUM_ENVS // slots
    expected = [
        [100.0 * row + env for env in range(slot * width, (slot + 1) * width)]
        for row in range(2 * T)
        for slot in range(slots)
    ]
    assert agent.told == expected


def test_agents_receive_no_amount_without_a_schedule() -> None:
    agent = Listener()
    with sampling(agent, Exploration()) as sampler:
        sampler.collect()
    assert agent.told == [None] * T


@pytest.mark.parametrize("action", ["discrete", "box"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("random_rows", [0, 1, 6, 10, 12])
def test_first_rows_are_random_and_then_the_agent_acts(action: str, slots: int, random_rows: int) -> None:
    """Stored actions are those that the envs executed, except that boxes are stored before clipping."""
    agent = Listener(action)
    with sampling(agent, Exploration(by_row_and_env, random_rows), slots, action=action) as sampler:
        random = RandomActions(sampler.envs.action, SEED, range(NUM_ENVS))
        for round in range(3):
            first = round * T
            steps = sampler.collect().steps
            noise = Noise(SEED, range(NUM_ENVS), agent.noise).rows(first, T).numpy()
            own = np.clip(noise, -1, 1) if action == "box" else (4 * noise[..., 0]).astype(np.int64)
            drawn = random.rows(first, T)
            sent = np.stack([drawn[t] if first + t < random_rows else own[t] for t in range(T)])
            stored = steps.action.numpy()
            if action == "box":  # the agent's actions are stored unclipped and sent clipped
                is_own = np.arange(first, first + T) >= random_rows
                np.testing.assert_array_equal(stored[is_own], noise[is_own])
                stored = np.clip(stored, -1, 1)
            np.testing.assert_array_equal(stored, sent)
            total = sent.sum(-1) if action == "box" else sent
            # An observation is [marker, episode, step]; the reward 100 * episode + step after it + action / 4.
            answer = 100 * steps.obs[..., 1].numpy() + steps.obs[..., 2].numpy() + 1 + total / 4
            mask = steps.mask.numpy()
            np.testing.assert_allclose(steps.reward.numpy()[mask], answer[mask], rtol=1e-5)
    assert len(agent.told) == max(0, 3 * T - random_rows) * slots, "the agent does not act in random rows"
    assert agent.told[:1] == ([[100.0 * random_rows + env for env in range(NUM_ENVS // slots)]])


def test_sampler_that_starts_within_the_random_rows_draws_the_same_actions() -> None:
    """A sampler that begins with the second rollout draws the actions that the first sampler draws there."""
    explore = Exploration(by_row_and_env, 9)
    with sampling(Listener(), explore) as sampler:
        sampler.collect()
        whole = kept(sampler.collect())
    with sampling(Listener(), explore, first_row=T) as sampler:
        later = kept(sampler.collect())
    action = next(name for name in whole if name.endswith("action"))
    np.testing.assert_array_equal(later[action], whole[action])


def test_memory_advances_while_actions_are_random() -> None:
    """The counting RNN's action is the number of rows that it has seen, modulo 4."""
    spec = resolve("counting:make", {"lengths": [100]})
    for slots in (1, 2):
        envs = make_envs(spec, NUM_ENVS, slots=slots)
        explore = Exploration(None, 5)
        with contextlib.closing(EnvSampler(envs, CountingRNN(), LocalWeights(), T, SEED, explore=explore)) as sampler:
            sampler.reset(SEED)
            steps = sampler.collect().steps
            drawn = RandomActions(envs.action, SEED, range(NUM_ENVS)).rows(0, 5)
            np.testing.assert_array_equal(steps.action[:5], drawn)
            assert steps.action[5].tolist() == [5 % 4] * NUM_ENVS
            again = sampler.collect()
            assert again.state.rows.tolist() == [float(T)] * NUM_ENVS
            assert again.steps.action[:, 0].tolist() == [(T + t) % 4 for t in range(T)]


def q_agent(**options: Any) -> QAgent:
    torch.manual_seed(0)
    agent = QAgent(box((3,), bound=np.inf), discrete(4), lambda shape: MLP(shape, (8,)), **options)
    nn.init.normal_(agent.head.advantage.layers[0].weight)
    return agent


def actor_agent(**options: Any) -> ActorAgent:
    torch.manual_seed(0)
    return ActorAgent(box((3,), bound=np.inf), box((2,)), lambda shape: MLP(shape, (8,)), **options)


AGENTS = {
    "epsilon": (lambda: q_agent(), "discrete"),
    "noisy": (lambda: q_agent(noisy=True), "discrete"),
    "with memory": (lambda: q_agent(core="gru", core_size=4), "discrete"),
    "gaussian": (lambda: actor_agent(stochastic=False), "box"),
    "drifting": (lambda: actor_agent(stochastic=False, noise="ou", noise_std=0.3), "box"),
    "stochastic": (lambda: actor_agent(stochastic=True, core="lstm", core_size=4), "box"),
}


def spread(row: int) -> Tensor:
    """Return amounts that increase with the row and differ between envs."""
    return torch.linspace(0.2, 0.8, NUM_ENVS) * min(1.0, 0.2 + row / 20)


@pytest.mark.parametrize("name", AGENTS)
def test_rollouts_do_not_depend_on_the_number_of_slots(name: str) -> None:
    make, action = AGENTS[name]
    explore, found = Exploration(spread, 4), []
    for slots in (1, 2):
        with sampling(make(), explore, slots, action=action) as sampler:
            found.append([kept(sampler.collect()) for _ in range(3)])
    for one, two in zip(*found, strict=True):
        assert one.keys() == two.keys()
        for path in one:
            np.testing.assert_allclose(one[path], two[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert len(np.unique(np.concatenate([part["0.action"].reshape(-1) for part in found[0]]))) > 1


@pytest.mark.parametrize("name", AGENTS)
def test_rollouts_of_some_envs_equal_those_among_all(name: str) -> None:
    """Sampler workers step some of the envs: their numbers begin at `first_env`, their amounts are columns."""
    make, action = AGENTS[name]
    explore = Exploration(spread, 4)
    with sampling(make(), explore, action=action) as sampler:
        whole = [kept(sampler.collect()) for _ in range(2)]
    spec = resolve("counting:make", {"lengths": [3, 5, 2], "action": action})
    for first, last in ((0, 1), (1, 4)):
        envs = LocalEnvs(spec, last - first, gamma=0.9, first_env=first)
        part = EnvSampler(
            envs, make(), LocalWeights(), T, SEED, first_env=first, explore=explore.columns(first, last)
        )
        with contextlib.closing(part):
            part.reset(SEED)
            for rollout in whole:
                for path, array in kept(part.collect()).items():
                    expected = rollout[path][:, first:last] if path.startswith("0.") else rollout[path][first:last]
                    np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6, err_msg=path)


def test_epsilon_of_zero_is_greedy_and_of_one_is_random_through_the_sampler() -> None:
    agent = q_agent()
    for chance in (0.0, 1.0):
        with sampling(
            agent, Exploration(lambda row, chance=chance: torch.full((NUM_ENVS,), chance)), rows=40
        ) as sampler:
            steps = sampler.collect().steps
        greedy = agent.unroll(steps.obs, None, None)[0].argmax(-1)
        noise = Noise(SEED, range(NUM_ENVS), agent.noise).rows(0, 40)
        expected = greedy if chance == 0 else (4 * noise[..., 1]).long()
        assert torch.equal(steps.action, expected)
    assert not torch.equal(greedy, (4 * noise[..., 1]).long())
