"""Tests of the inference server: rows, states and versions of each group against a reference and EnvSampler."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from counting_agents import CountingRNN
from test_counting import CountingAgent
from test_counting_rnn import GAMMA, LENGTHS, SEED, HandCount

from remuda.agents import PolicyAgent
from remuda.build.algorithm import make_algorithm
from remuda.build.exploration import make_exploration
from remuda.config.resolve import resolve_config
from remuda.core import derive_seed
from remuda.data import leaves, map_tree
from remuda.envs import AsyncPooledEnvs, LocalEnvs, resolve
from remuda.envs.previous import AsyncWithPrevious, WithPrevious
from remuda.learning.weights import LocalWeights
from remuda.nets import make_net
from remuda.sampling.buffers import Buffers, allocate
from remuda.sampling.exploration import Exploration
from remuda.sampling.inference_server import Filled, InferenceServer
from remuda.sampling.sampler import EnvSampler

NUM_ENVS, T = 6, 6
COUNTING = ("counting:make", {"lengths": list(LENGTHS)})
torch.set_num_threads(1)  # more threads are many times slower on arrays this small when the machine is busy


class Lockstep:
    """Envs whose groups are always ready together, so that every inference batch holds all groups."""

    def __init__(self, envs: Any) -> None:
        self._envs, self._is_sent = envs, [True] * envs.num_slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)

    def ready(self, seconds: float) -> list[int]:
        return [slot for slot, is_sent in enumerate(self._is_sent) if is_sent]

    def recv(self, slot: int) -> Any:
        self._is_sent[slot] = False
        return self._envs.recv(slot)

    def send(self, slot: int, action: Any) -> None:
        self._is_sent[slot] = True
        self._envs.send(slot, action)


class NewAtEveryLook:
    """Weights whose version rises with every pull and is visible in the agent's values."""

    def __init__(self, agent: CountingRNN) -> None:
        self._agent, self.version = agent, 0

    def pull(self, have: int) -> int:
        assert have == (self.version or -1), "`have` is the version that was pulled last"
        self.version += 1
        self._agent.offset.data.fill_(1e5 * self.version)
        return self.version


class Filling:
    """An inference server with slots in ordinary memory, and the rollouts of each group in order."""

    def __init__(self, sampler: InferenceServer, slots: list[Buffers]) -> None:
        self.sampler, self.slots = sampler, slots
        self.width = sampler.envs.num_envs // sampler.envs.num_slots
        self.rollouts: list[list[Buffers]] = [[] for _ in range(sampler.envs.num_slots)]
        self.filled: list[Filled] = []

    def work(self, give_back: bool = True) -> None:
        for filled in self.sampler.receive(0.02):
            self.filled.append(filled)
            self.rollouts[filled.first_env // self.width].append(copied(self.slots[filled.slot]))
            if give_back:
                self.sampler.give(filled.slot)
        self.sampler.act()

    def work_until(self, is_enough: Callable[[], bool], give_back: bool = True, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_enough():
            assert time.monotonic() < deadline, [len(rollouts) for rollouts in self.rollouts]
            self.work(give_back)

    def fill(self, count: int) -> None:
        """Work until every group has filled at least `count` rollouts."""
        self.work_until(lambda: min(map(len, self.rollouts)) >= count)


def copied(tree: Any) -> Any:
    return map_tree(lambda x: x.clone(), tree)


@contextlib.contextmanager
def filling(
    agent: Any = None,
    env: tuple[str, dict[str, Any]] = COUNTING,
    groups: int = 3,
    workers: int | None = None,
    num_slots: int = 6,
    weights: Any = None,
    wrap: Callable[[Any], Any] = lambda envs: envs,
    num_envs: int = NUM_ENVS,
    first_row: int = 0,
    explore: Exploration = Exploration(),  # noqa: B008  (it never changes)
) -> Iterator[Filling]:
    apart = AsyncPooledEnvs(resolve(*env), num_envs, workers or groups, groups, GAMMA, max_worker_restarts=1000)
    with apart:
        envs, agent = wrap(apart), agent or CountingRNN()
        slots = [allocate(agent, envs.observation, T, num_envs // groups) for _ in range(num_slots)]
        sampler = InferenceServer(envs, agent, weights or LocalWeights(7), T, SEED, slots, first_row, explore)
        assert sampler.reset(SEED) == 0
        for slot in range(num_slots):
            sampler.give(slot)
        yield Filling(sampler, slots)


def check_by_hand(rollout: Buffers, hands: list[HandCount]) -> None:
    """Assert that rows and states of the rollout continue the reference simulations of its envs."""
    steps = rollout.steps
    for b, hand in enumerate(hands):
        assert (rollout.state.rows[b], rollout.state.total[b]) == (hand.rows, hand.total)
        assert bool(rollout.begins[b]) == (hand.step == 0)
        rows = [hand.row(False) for _ in range(T)]
        assert steps.obs[:, b].tolist() == [list(map(float, row.obs)) for row in rows]
        assert steps.action[:, b].tolist() == [row.action for row in rows]
        assert steps.reward[:, b].tolist() == [row.reward for row in rows]
        assert steps.discount[:, b].tolist() == [row.discount for row in rows]
        assert steps.mask[:, b].tolist() == [row.mask for row in rows]
        assert rollout.next_obs[b].tolist() == list(map(float, hand.obs))
        offset = steps.policy.value[:, b] - torch.tensor([float(row.value) for row in rows])
        is_constant = steps.version.unique().numel() == 1
        assert offset.tolist() == ([0.0] * T if is_constant else (1e5 * steps.version[:, b]).tolist())


def hands_of(number: int, width: int) -> list[HandCount]:
    return [HandCount(index) for index in range(number * width, (number + 1) * width)]


@pytest.mark.parametrize(("groups", "workers", "num_slots"), [(3, 3, 6), (6, 6, 7), (3, 2, 3)])
def test_every_row_and_state_matches_the_reference(groups: int, workers: int, num_slots: int) -> None:
    with filling(groups=groups, workers=workers, num_slots=num_slots) as found:
        found.fill(6)
    for number, rollouts in enumerate(found.rollouts):
        hands = hands_of(number, found.width)
        for rollout in rollouts:
            check_by_hand(rollout, hands)
            values = [100 * hand.rows + hand.total / 2 + hand.step for hand in hands]
            assert rollout.last_value.tolist() == values, "computing the last value does not advance the memory"
    assert {filled.version for filled in found.filled} == {7}


def test_next_obs_and_last_value_equal_the_first_row_of_the_next_rollout() -> None:
    with filling(CountingAgent()) as found:
        found.fill(5)
    for rollouts in found.rollouts:
        for before, after in pairwise(rollouts):
            assert torch.equal(before.next_obs, after.steps.obs[0])
            assert torch.equal(before.last_value, after.steps.policy.value[0])


def test_rows_record_the_version_of_the_weights_that_acted() -> None:
    agent = CountingRNN()
    with filling(agent, weights=NewAtEveryLook(agent)) as found:
        found.fill(5)
    for number, rollouts in enumerate(found.rollouts):
        hands = hands_of(number, found.width)
        for rollout in rollouts:
            check_by_hand(rollout, hands)  # the values contain the version too
            version = rollout.steps.version
            assert bool((version[1:] > version[:-1]).all())
            assert bool((version == version[:, :1]).all())
            known = [100 * hand.rows + hand.total / 2 + hand.step for hand in hands]
            offset = rollout.last_value - torch.tensor(known)
            assert bool((offset >= 1e5 * version[-1]).all()), (
                "last values come from weights no older than the last row"
            )
    oldest = [[int(rollout.steps.version.min()) for rollout in rollouts] for rollouts in found.rollouts]
    told = [[f.version for f in found.filled if f.first_env // found.width == group] for group in range(3)]
    assert told == oldest


def test_group_without_a_slot_waits_and_loses_no_row() -> None:
    with filling(num_slots=3) as found:
        for count in range(1, 5):
            found.work_until(lambda count=count: len(found.filled) == 3 * count, give_back=False)
            found.work_until(lambda: found.sampler.is_idle)
            for _ in range(3):
                found.work()
            assert len(found.filled) == 3 * count, "no group has a slot for its rows"
            for filled in found.filled[-3:]:
                found.sampler.give(filled.slot)
    for number, rollouts in enumerate(found.rollouts):
        hands = hands_of(number, found.width)
        for rollout in rollouts:
            check_by_hand(rollout, hands)


def test_all_groups_take_turns_with_fewer_slots_than_groups() -> None:
    with filling(num_slots=1) as found:
        found.work_until(lambda: len(found.filled) == 9)
    assert {filled.first_env for filled in found.filled} == {0, 2, 4}


def test_slow_group_does_not_block_the_others() -> None:
    """Each step of the slow group takes 2 s, so its rollout would take 12 s."""
    slow = ("own_things:slow", {"seconds": 2.0, "only_seed": derive_seed(SEED, 0, 0)})
    with filling(CountingAgent(), slow, num_slots=9) as found:
        found.work_until(lambda: min(map(len, found.rollouts[1:])) >= 5)
        assert found.rollouts[0] == []


def test_killed_worker_costs_its_group_one_row_and_the_others_none() -> None:
    with filling(num_slots=9) as found:
        found.fill(2)
        envs: Any = found.sampler.envs
        os.kill(envs._worker_pool.workers[1].pid, signal.SIGKILL)
        # work() gives filled slots back, so that the other groups can continue while a new worker is built.
        before = len(found.rollouts[1])
        deadline = time.monotonic() + 60
        while len(found.rollouts[1]) < before + 4:
            assert time.monotonic() < deadline, "the group of the killed worker continues"
            found.work()
        assert envs.restarts() == 2
    for number in (0, 2):
        hands = hands_of(number, 2)
        for rollout in found.rollouts[number]:
            check_by_hand(rollout, hands)
    steps = [rollout.steps for rollout in found.rollouts[1]]
    obs, mask = torch.cat([s.obs for s in steps]), torch.cat([s.mask for s in steps])
    action, discount = torch.cat([s.action for s in steps]), torch.cat([s.discount for s in steps])
    for b in range(2):
        new_marker = derive_seed(SEED, 2 + b, 1) % 1000
        (at,) = torch.nonzero(obs[1:, b, 0] != obs[:-1, b, 0]).flatten().tolist()
        assert obs[at + 1, b].tolist() == [new_marker, 1, 0]
        assert not mask[at, b]
        assert discount[at, b] == 1.0
        assert action[at + 1, b] == 0, "the memory was reset"


def lockstep_pair(
    agent: Any,
    env: str,
    wrap: Callable[[Any], Any],
    explore: Exploration = Exploration(),  # noqa: B008  (it never changes)
) -> tuple[list[Any], list[Any]]:
    """Return rollouts of groups in lockstep, concatenated over groups, and those of EnvSampler."""
    in_step = {"wrap": lambda envs: Lockstep(wrap(envs)), "first_row": T, "explore": explore}
    with filling(agent, (env, {}), **in_step) as found:
        found.fill(4)
    ours = []
    for parts in zip(*(rollouts[:4] for rollouts in found.rollouts), strict=True):
        steps = map_tree(lambda *x: torch.cat(x, 1), *(part.steps for part in parts))
        ours.append((steps, *(map_tree(lambda *x: torch.cat(x), *(p[k] for p in parts)) for k in (1, 2, 3))))
    envs = wrap(LocalEnvs(resolve(env), NUM_ENVS))
    sampler = EnvSampler(envs, agent, LocalWeights(7), T, SEED, T, explore=explore)
    with contextlib.closing(sampler):
        sampler.reset(SEED)
        theirs = []
        for _ in range(4):
            rollout = sampler.collect()
            parts = (rollout.steps, rollout.next_obs, rollout.last_value, rollout.state)
            theirs.append(tuple(map_tree(lambda x: x.clone(), part) for part in parts))
    return ours, theirs


def with_all(envs: Any) -> Any:
    return (AsyncWithPrevious if isinstance(envs, AsyncPooledEnvs) else WithPrevious)(envs, True, True)


AGENTS = {  # env, wrapper that adds the previous action and reward, memory
    "discrete": ("CartPole-v1", lambda envs: envs, None),
    "continuous, memory": ("Pendulum-v1", lambda envs: envs, "gru"),
    "previous, memory": ("CartPole-v1", with_all, "lstm"),
    "previous, continuous": ("Pendulum-v1", with_all, None),
    "nested": ("puzzles:nested", lambda envs: envs, None),
    "nested, previous, memory": ("puzzles:nested", with_all, "lstm"),
}


@pytest.mark.parametrize("kind", AGENTS)
def test_rollouts_in_lockstep_equal_those_of_env_sampler(kind: str) -> None:
    env, wrap, core = AGENTS[kind]
    with contextlib.closing(wrap(LocalEnvs(resolve(env), 1))) as envs:
        spaces = (envs.observation, envs.action)
    torch.manual_seed(5)
    agent = PolicyAgent(*spaces, make_net, core=core, core_size=8, shared=core is not None)
    ours, theirs = lockstep_pair(agent, env, wrap)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("obs", "action", "reward", "discount", "mask", "version"):
            pairs = zip(leaves(getattr(mine[0], name)), leaves(getattr(other[0], name)), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs), name
        # Batch sizes of inference may differ, and with them the rounding of policy outputs and last values.
        said = zip(leaves((mine[0].policy, *mine[1:])), leaves((other[0].policy, *other[1:])), strict=True)
        for (path, a), (_, b) in said:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)


EXPLORING = {  # algorithm, env, groups of settings
    "epsilon": ("dqn", "CartPole-v1", {"algo": {"epsilon": "0.5", "epsilon_power": 2.0, "learning_starts": 0}}),
    "noisy": ("rainbow", "CartPole-v1", {"algo": {"learning_starts": 0}}),
    "memory": ("r2d1", "CartPole-v1", {"agent": {"core_size": 8}, "algo": {"learning_starts": 0}}),
    "random at first": ("sac", "Pendulum-v1", {"algo": {"learning_starts": 60}}),
    "random at first, noise that drifts": ("ddpg", "Pendulum-v1", {"algo": {"noise": "ou", "learning_starts": 60}}),
}


@pytest.mark.parametrize("kind", EXPLORING)
def test_exploration_in_lockstep_equals_that_of_env_sampler(kind: str) -> None:
    """With 60 random steps every env takes 10; sampling starts at row 6, so the first four rows are random."""
    algo, env, settings = EXPLORING[kind]
    groups = {**settings, "sampler": {"envs": NUM_ENVS}}
    config, _, info = resolve_config({"algo": algo, "env": env, "scheme": "async", "seed": SEED}, groups)
    torch.manual_seed(5)
    agent = make_algorithm(config, info, make_net).agent
    explore = make_exploration(config)
    if "random" in kind:
        assert explore.random_rows == 10
    ours, theirs = lockstep_pair(agent, env, lambda envs: envs, explore)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("obs", "action", "reward", "discount", "mask"):
            torch.testing.assert_close(getattr(mine[0], name), getattr(other[0], name), rtol=1e-5, atol=1e-5)
        for (_, a), (_, b) in zip(leaves(mine[3]), leaves(other[3]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_previous_action_and_reward_are_those_of_the_previous_row(action: str) -> None:
    env = (COUNTING[0], {**COUNTING[1], "action": action})
    with contextlib.closing(with_all(LocalEnvs(resolve(*env), 1))) as envs:
        agent = PolicyAgent(envs.observation, envs.action, make_net, core="gru", core_size=4, shared=True)
    with filling(agent, env, wrap=with_all) as found:
        found.fill(4)
    for rollouts in found.rollouts:
        steps = [rollout.steps for rollout in rollouts]
        mask = torch.cat([each.mask for each in steps])
        taken, reward = torch.cat([each.action for each in steps]), torch.cat([each.reward for each in steps])
        seen_action = torch.cat([each.obs.prev_action for each in steps])
        seen_reward = torch.cat([each.obs.prev_reward for each in steps])[..., 0]
        shown = torch.nn.functional.one_hot(taken, 4) if action == "discrete" else taken.clamp(-1.0, 1.0)
        assert torch.equal(seen_action[1:], shown[:-1] * mask[:-1, :, None])
        assert torch.equal(seen_reward[1:], reward[:-1] * mask[:-1])
        assert not seen_action[0].any()
        assert not seen_reward[0].any()
        assert bool((~mask).any())


def test_seconds_are_reported_once() -> None:
    with filling() as found:
        found.fill(1)
        assert set(found.sampler.take_seconds()) == {"env", "inference"}
        assert set(found.sampler.take_seconds().values()) == {0.0}
