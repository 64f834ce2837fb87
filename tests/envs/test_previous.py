"""Previous action and reward in the observation, compared with known values across ends, resets, holds and slots."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from counting import CountingEnv

from remuda.core import Envs, Space, Step
from remuda.data import leaves
from remuda.envs import AsyncPooledEnvs, LocalEnvs, PooledEnvs, resolve
from remuda.envs.previous import AsyncWithPrevious, WithPrevious, action_width, encode_action, with_previous
from remuda.envs.spaces import action_space
from remuda.errors import ConfigError, Interrupted


def local(env: str = "counting:make", num_envs: int = 2, slots: int = 1, **kwargs: Any) -> LocalEnvs:
    return LocalEnvs(resolve(env, kwargs), num_envs, slots)


def seen(step: Step) -> tuple[list[Any], list[Any], list[bool]]:
    return step.obs.prev_action.tolist(), step.obs.prev_reward[:, 0].tolist(), step.mask.tolist()


def one_hot(*actions: int | None, n: int = 4) -> list[list[float]]:
    return [[float(action == k) for k in range(n)] for action in actions]


def test_entries_across_ends_and_resets() -> None:
    """Two envs, episodes of 2 and 3 steps; the reward of a step is 100 * episode + step + action / 4."""
    envs = WithPrevious(local(lengths=[2, 3]), action=True, reward=True)
    envs.reset(seed=1)
    slot, step = envs.recv()
    assert (slot, *seen(step)) == (0, one_hot(None, None), [0, 0], [False, False])
    expected = [  # actions, and the entries after them
        ([1, 0], one_hot(1, 0), [101.25, 101.0], True),
        ([3, 2], one_hot(3, 2), [102.75, 102.5], True),  # the final observation of episode 1
        ([2, 2], one_hot(None, None), [0, 0], False),  # ignored; the first observation of episode 2
        ([0, 1], one_hot(0, 1), [201.0, 201.25], True),
        ([0, 0], one_hot(0, 0), [202.0, 202.0], True),
        ([1, 3], one_hot(1, 3), [203.25, 203.75], True),
        ([1, 3], one_hot(None, None), [0, 0], False),
    ]
    for actions, shown, rewards, is_taken in expected:
        envs.send(0, np.array(actions))
        _, step = envs.recv()
        assert seen(step) == (shown, rewards, [is_taken] * 2)
        assert step.reward.tolist() == rewards, "the reward itself must be unchanged"
    assert step.obs.obs[:, 1:].tolist() == [[3, 0], [3, 0]]
    envs.close()


def test_reset_of_all_envs_clears_both_entries() -> None:
    envs = WithPrevious(local(lengths=[50]), action=True, reward=True)
    for episode in (1, 2):
        envs.reset(seed=1)
        _, step = envs.recv()
        assert seen(step) == (one_hot(None, None), [0, 0], [False, False])
        envs.send(0, np.array([1, 2]))
        _, step = envs.recv()
        assert seen(step) == (one_hot(1, 2), [100 * episode + 1.25, 100 * episode + 1.5], [True, True])
    envs.close()


def test_reset_cancels_a_renewal_that_was_not_received() -> None:
    envs = WithPrevious(local(lengths=[50]), action=True, reward=True)
    envs.reset(seed=1)
    envs.recv()
    envs.send(0, np.array([1, 2]))
    envs.recv()
    envs.renew(0)
    envs.reset(seed=1)
    assert seen(envs.recv()[1]) == (one_hot(None, None), [0, 0], [False, False])
    envs.close()


def test_envs_that_end_at_different_times_are_independent() -> None:
    envs = WithPrevious(LocalEnvs(resolve("counting:make", {"lengths": [3]}), 3, seeds=[[1], [2, 3], []]), True, True)
    envs.reset(seed=0)
    envs.recv()
    shown = []
    for _ in range(6):
        envs.send(0, np.array([1, 2, 3]))
        shown.append(seen(envs.recv()[1]))
    once, twice = [101.25, 102.25, 103.25, 0, 0, 0], [101.5, 102.5, 103.5, 0, 201.5, 202.5]
    assert [rewards for _, rewards, _ in shown] == [[a, b, 0] for a, b in zip(once, twice, strict=True)]
    for actions, _, mask in shown:
        played = zip((1, 2, 3), mask, strict=True)
        assert actions == one_hot(*(action if is_taken else None for action, is_taken in played))
    envs.close()


def test_entries_with_hold_and_renew() -> None:
    """Episodes have 2 steps, then 5. Env 0 is held at its end; renewing does not change envs that have not ended."""
    spec = resolve("counting:make", {"lengths": [2, 5]})
    envs = WithPrevious(LocalEnvs(spec, 2), action=True, reward=True)
    envs.reset(seed=1)
    envs.recv()

    def send(*actions: int) -> Any:
        envs.send(0, np.array(actions), hold=True)
        return seen(envs.recv()[1])

    assert send(1, 1) == (one_hot(1, 1), [101.25, 101.25], [True, True])
    assert send(2, 3) == (one_hot(2, 3), [102.5, 102.75], [True, True])
    assert send(2, 3) == (one_hot(None, None), [0, 0], [False, False]), "padding"
    envs.renew(0)
    assert seen(envs.recv()[1]) == (one_hot(None, None), [0, 0], [False, False])
    for step in (1, 2):
        assert send(1, 2) == (one_hot(1, 2), [200 + step + 0.25, 200 + step + 0.5], [True, True])
    envs.renew(0)  # neither has ended, so that both keep their last action
    assert seen(envs.recv()[1]) == (one_hot(1, 2), [202.25, 202.5], [False, False])
    assert send(3, 0) == (one_hot(3, 0), [203.75, 203.0], [True, True])
    envs.close()


class Uneven(CountingEnv):
    """Episodes have 2 steps if the marker is even and 4 if it is odd."""

    def reset(self, **kwargs: Any) -> Any:
        answer = super().reset(**kwargs)
        self.lengths = [2 + 2 * (self.marker % 2)]
        return answer


def test_renewing_one_of_two_envs() -> None:
    envs = WithPrevious(LocalEnvs(resolve(Uneven), 2, seeds=[[2, 4], [3, 5]]), action=True, reward=True)
    envs.reset(seed=1)
    envs.recv()
    for _ in range(3):
        envs.send(0, np.array([1, 2]), hold=True)
        step = envs.recv()[1]
    assert seen(step) == (one_hot(None, 2), [0, 103.5], [False, True])
    envs.renew(0)
    step = envs.recv()[1]
    assert seen(step) == (one_hot(None, 2), [0, 103.5], [False, False])
    assert step.obs.obs.tolist() == [[4, 2, 0], [3, 1, 3]]
    envs.send(0, np.array([3, 0]), hold=True)
    assert seen(envs.recv()[1]) == (one_hot(3, 0), [201.75, 104.0], [True, True])
    envs.close()


@pytest.mark.parametrize("kind", ["local", "pooled"])
def test_slots_are_independent(kind: str) -> None:
    spec = resolve("counting:make", {"lengths": [2, 3]})
    inner: Envs = LocalEnvs(spec, 4, 2) if kind == "local" else PooledEnvs(spec, 4, 1, 2)
    envs = WithPrevious(inner, action=True, reward=True)
    envs.reset(seed=1)
    shown: list[list[Any]] = [[], []]
    for turn in range(10):
        slot, step = envs.recv()
        assert slot == turn % 2
        shown[slot].append(seen(step))
        envs.send(slot, np.array([slot, 2 + slot]))
    for slot in range(2):
        none, both = one_hot(None, None), one_hot(slot, 2 + slot)
        assert [actions for actions, _, _ in shown[slot]] == [none, both, both, none, both]
        rewards = [0.0, 101 + slot / 4, 102 + slot / 4, 0.0, 201 + slot / 4]
        assert [found[0] for _, found, _ in shown[slot]] == rewards
    envs.close()


def test_asynchronous_slots_are_received_in_any_order() -> None:
    inner = AsyncPooledEnvs(resolve("counting:make", {"lengths": [2, 3]}), 4, 2, 2)
    envs = AsyncWithPrevious(inner, action=True, reward=True)
    envs.reset(seed=1)
    assert envs.ready(seconds=60.0) == [0, 1]
    for slot in (1, 0):
        received, step = envs.recv(slot)
        assert (received, seen(step)) == (slot, (one_hot(None, None), [0.0, 0.0], [False, False]))
    envs.send(1, np.array([1, 3]))
    assert envs.ready(seconds=60.0) == [1]
    assert seen(envs.recv(1)[1]) == (one_hot(1, 3), [101.25, 101.75], [True, True])
    envs.close()


@pytest.mark.parametrize(("action", "reward"), [(True, False), (False, True)])
def test_either_action_or_reward_can_be_added_alone(action: bool, reward: bool) -> None:
    envs = WithPrevious(local(lengths=[9]), action, reward)
    assert list(envs.observation.entries) == ["obs", "prev_action" if action else "prev_reward"]
    envs.reset(seed=1)
    envs.recv()
    envs.send(0, np.array([1, 3]))
    _, step = envs.recv()
    assert step.obs._fields == tuple(envs.observation.entries)
    assert step.obs[1:] is not None
    shown = step.obs.prev_action if action else step.obs.prev_reward
    assert shown.tolist() == (one_hot(1, 3) if action else [[101.25], [101.75]])
    envs.close()


def test_returned_values_are_not_overwritten() -> None:
    envs = WithPrevious(local(lengths=[9]), action=True, reward=True)
    envs.reset(seed=1)
    kept = []
    for _ in range(3):
        step = envs.recv()[1]
        kept.append((step.obs.prev_action, step.obs.prev_reward))
        envs.send(0, np.array([len(kept), 0]))
    assert [actions[0].tolist() for actions, _ in kept] == one_hot(None, 1, 2)
    assert [float(rewards[0, 0]) for _, rewards in kept] == [0.0, 101.25, 102.5]
    envs.recv()
    envs.close()


SPACES = {
    "discrete": (gymnasium.spaces.Discrete(3, start=-1), [[2], [0]], [[0, 0, 1], [1, 0, 0]]),
    "box": (gymnasium.spaces.Box(-1, 1, (2,), np.float32), [[0.5, -1], [0, 0.25]], [[0.5, -1], [0, 0.25]]),
    "matrix": (gymnasium.spaces.Box(-1, 1, (2, 2), np.float64), [[[1, 2], [3, 4]]], [[1, 2, 3, 4]]),
    "scalar": (gymnasium.spaces.Box(-1, 1, (), np.float32), [0.5, -0.5], [[0.5], [-0.5]]),
    "multidiscrete": (
        gymnasium.spaces.MultiDiscrete([2, 3], start=[5, -1]),
        [[1, 0], [0, 2]],
        [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
    ),
    "table": (gymnasium.spaces.MultiDiscrete([[2, 1], [1, 2]]), [[[1, 0], [0, 0]]], [[0, 1, 1, 1, 1, 0]]),
    "multibinary": (gymnasium.spaces.MultiBinary(3), [[1, 0, 1]], [[1, 0, 1]]),
}


@pytest.mark.parametrize("name", SPACES)
def test_encode_action_returns_numbers_for_every_space(name: str) -> None:
    raw, given, expected = SPACES[name]
    space = action_space(raw, name)
    rows = np.array(given, space.dtype)
    rows = rows[:, 0] if name == "discrete" else rows
    found = encode_action(space, rows)
    assert found.dtype == np.float32
    assert found.tolist() == expected
    assert action_width(space) == found.shape[1]


NESTED_ACTION = {  # in the order of Gymnasium's keys
    "buttons": np.array([[1, 0], [0, 1]], np.int8),
    "modes": np.array([[1, 2], [0, 0]]),
    "move": (np.array([2, 0]), np.array([[0.5, -0.5], [0.0, 1.0]], np.float32)),
}
NESTED_NUMBERS = [[1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0.5, -0.5], [0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0.0, 1.0]]


def test_nested_action_is_encoded_as_its_leaves_concatenated() -> None:
    """The numbers are 2 bits of buttons, 2 + 3 of modes, and 3 + 2 of move (a choice of 3 and a box of 2)."""
    envs = WithPrevious(local("counting:make_nested"), action=True, reward=True)
    assert envs.observation.entries["prev_action"].shape == (12,)
    own = ("camera", "dials", "gear", "pair", "switches")
    assert tuple(envs.observation.entries) == (*own, "prev_action", "prev_reward")
    envs.reset(seed=1)
    _, step = envs.recv()
    assert not step.obs.prev_action.any()
    envs.send(0, NESTED_ACTION)
    _, step = envs.recv()
    assert step.obs.prev_action.tolist() == NESTED_NUMBERS
    assert step.obs.prev_reward[:, 0].tolist() == step.reward.tolist()
    assert step.obs.camera.left.tolist() == [[[1, 1], [1, 1]]] * 2, "the env's own entries must be unchanged"
    assert [path for path, _ in leaves(step.obs)] == [path for path, _ in envs.observation.leaves()]
    envs.close()


def test_dict_of_actions_may_be_in_any_order() -> None:
    envs = WithPrevious(local("counting:make_nested"), action=True, reward=True)
    envs.reset(seed=1)
    envs.recv()
    envs.send(0, {name: NESTED_ACTION[name] for name in ("modes", "buttons", "move")})
    _, step = envs.recv()
    envs.close()
    assert step.obs.prev_action.tolist() == NESTED_NUMBERS


def test_observation_space_describes_the_entries() -> None:
    envs = WithPrevious(local(action="multi"), action=True, reward=True)
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in envs.observation.leaves()}
    assert shapes == {
        "obs": ((3,), "float32"),
        "prev_action": ((5,), "float32"),
        "prev_reward": ((1,), "float32"),
    }
    envs.reset(seed=1)
    _, step = envs.recv()
    assert {path: (leaf.shape[1:], str(leaf.dtype)) for path, leaf in leaves(step.obs)} == shapes
    envs.close()


@pytest.mark.parametrize("name", ["prev_action", "prev_reward"])
def test_existing_entry_of_the_same_name_is_refused(name: str) -> None:
    number = Space("box", (1,), "float32")
    observation = Space("dict", entries={name: number, "other": number}, keys=(name, "other"))
    with pytest.raises(ConfigError, match=rf"has an entry {name} of its own: leave agent\.{name} out\.$"):
        with_previous(observation, Space("discrete", (), "int64", n=2), True, True)
    other = "prev_reward" if name == "prev_action" else "prev_action"
    wanted = (other == "prev_action", other == "prev_reward")
    assert list(with_previous(observation, Space("discrete", (), "int64", n=2), *wanted).entries) == [
        *(name, "other", other)
    ]


def test_other_members_are_forwarded() -> None:
    inner = local(lengths=[2], num_envs=4, slots=2)
    envs = WithPrevious(inner, action=True, reward=True)
    assert (envs.num_envs, envs.num_slots, envs.action.n) == (4, 2, 4)
    envs.reset(seed=1, warm_up=0)
    for _ in range(6):
        slot, _ = envs.recv()
        envs.send(slot, np.zeros(2, np.int64))
    assert [episode.env for episode in envs.episodes()] == [0, 1, 2, 3]
    assert (envs.restarts(), envs.waited()) == (0, 0.0)
    envs.should_stop = lambda: True
    assert inner.should_stop is envs.should_stop
    with pytest.raises(Interrupted):
        envs.recv()
    envs.close()
    assert not inner._is_open
