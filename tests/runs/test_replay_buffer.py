"""Test ReplayBuffer against a plain list of episodes, and with Gymnasium's vector envs and EnvPool."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import counting
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import remuda
from remuda.errors import ConfigError

BOX, FOUR = gym.Box(-np.inf, np.inf, (3,)), gym.Discrete(4)
GAMMA = 0.5


class Reference:
    """A reference that stores episodes as plain lists. Observations are [env, episode, step]."""

    def __init__(self, num_envs: int) -> None:
        self.episodes: list[list[list[tuple[float, bool]]]] = [[[]] for _ in range(num_envs)]

    def obs(self, env: int) -> list[float]:
        return [env, len(self.episodes[env]) - 1, len(self.episodes[env][-1])]

    def step(self, env: int, reward: float, terminated: bool) -> list[float]:
        """Record a real step and return the observation after it, which is the final one if the episode ends."""
        self.episodes[env][-1].append((reward, terminated))
        return self.obs(env)

    def begin(self, env: int) -> list[float]:
        self.episodes[env].append([])
        return self.obs(env)

    def transition(self, obs: Any, n: int) -> tuple[float, float, list[float]]:
        """Return n-step reward, discount and next observation by their definitions."""
        env, episode, step = (int(x) for x in obs)
        steps, reward, discount = self.episodes[env][episode], 0.0, 1.0
        for number in range(step, min(step + n, len(steps))):
            reward += discount * steps[number][0]
            discount *= 0.0 if steps[number][1] else GAMMA
        return reward, discount, [env, episode, min(step + n, len(steps))]

    def newest(self, env: int, count: int) -> list[tuple[float, ...]]:
        every = [(env, e, s) for e, steps in enumerate(self.episodes[env]) for s in range(len(steps))]
        return every[-count:]


def check(buffer: remuda.ReplayBuffer, reference: Reference, n: int) -> set[tuple[float, ...]]:
    """Compare every drawn row with the reference, and return the observations that were drawn."""
    found, drawn = buffer.sample(64), set()
    for index, obs in enumerate(found.obs.numpy()):
        reward, discount, next_obs = reference.transition(obs, n)
        assert found.reward[index] == reward, obs
        assert found.discount[index] == discount, obs
        assert found.next_obs[index].tolist() == next_obs, obs
        assert found.action[index] == int(obs[2]) % 4
        drawn.add(tuple(obs.tolist()))
    assert found.weight.shape == (64,)
    return drawn


@given(
    st.lists(
        st.lists(st.sampled_from(["", "", "", "terminate", "truncate", "cut"]), min_size=2, max_size=2),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(["next_step", "same_step", "mask"]),
    st.integers(1, 4),
    st.integers(2, 30),
    st.booleans(),
)
def test_any_stream_gives_the_transitions_of_the_reference(
    stream: list[list[str]], mode: str, n: int, capacity: int, prioritized: bool
) -> None:
    reference, added = Reference(2), 0
    with remuda.ReplayBuffer(
        capacity, BOX, FOUR, 2, n_step=n, gamma=GAMMA, prioritized=prioritized,
        autoreset="same_step" if mode == "same_step" else "next_step",
    ) as buffer:  # fmt: skip
        obs = [reference.obs(env) for env in range(2)]
        has_ended = [False, False]
        for ends in stream:
            action = [int(each[2]) % 4 for each in obs]
            reward, terminated, truncated, mask = [0.0, 0.0], [False, False], [False, False], [True, True]
            after, following = [[0.0]] * 2, [[0.0]] * 2
            for env, end in enumerate(ends):
                if has_ended[env] and mode != "same_step":  # the action is ignored, the env is reset
                    mask[env], has_ended[env] = False, False
                    after[env] = following[env] = reference.begin(env)
                    continue
                added += 1
                reward[env], terminated[env], truncated[env] = added, end == "terminate", end == "truncate"
                after[env] = following[env] = reference.step(env, added, end == "terminate")
                has_ended[env] = end in ("terminate", "truncate")
                if end == "cut" or (has_ended[env] and mode == "same_step"):  # reset by the caller or within the step
                    has_ended[env], following[env] = False, reference.begin(env)
            given = [np.array(each) for each in (obs, action, reward, terminated, truncated, after, mask)]
            buffer.add(*(given if mode == "mask" else given[:-1]))
            for array in given:  # overwrite the arrays, as a vector env may do
                array[:] = ~array if array.dtype == bool else -1 - array
            obs = following
        drawn = set[tuple[float, ...]]()
        if len(buffer):  # a reset row may have overwritten the only stored row
            drawn = check(buffer, reference, n) | check(buffer, reference, n)
        kept = -(-capacity // 2)  # rows of each env, including reset rows
        assert drawn <= set(reference.newest(0, kept) + reference.newest(1, kept))
        ring = buffer._replay.ring
        stored = [np.arange(ring.counters.oldest(env), ring.written[env]) for env in range(2)]
        assert len(buffer) == sum(ring.is_real(row, np.full(len(row), env)).sum() for env, row in enumerate(stored))
        assert len(drawn) <= len(buffer) <= added


def test_exactly_the_newest_rows_are_kept_and_drawn() -> None:
    """If no episode ends, exactly `capacity` steps are kept."""
    reference = Reference(2)
    buffer = remuda.ReplayBuffer(10, BOX, FOUR, 2, gamma=GAMMA)
    for step in range(12):
        obs = [reference.obs(env) for env in range(2)]
        after = [reference.step(env, 2 * step + env, False) for env in range(2)]
        buffer.add(obs, [step % 4] * 2, [2 * step, 2 * step + 1], [False] * 2, [False] * 2, after)
        assert len(buffer) == min(10, 2 * step + 2)
    drawn = set.union(*(check(buffer, reference, 1) for _ in range(4)))
    assert drawn == set(reference.newest(0, 5) + reference.newest(1, 5))


def test_final_and_first_observation_may_be_equal() -> None:
    """Under next_step, the row after an end is a reset row. Under same_step, it is a real row."""
    same = np.zeros((1, 3), np.float32)
    for autoreset, count in {"next_step": 2, "same_step": 3}.items():
        buffer = remuda.ReplayBuffer(10, BOX, FOUR, 1, autoreset=autoreset)
        for number in range(3):
            buffer.add(same, [0], [number], [number == 0], [False], same)
        assert len(buffer) == count
        assert set(buffer.sample(64).reward.tolist()) == ({0.0, 2.0} if count == 2 else {0.0, 1.0, 2.0})


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_transitions_of_gymnasium_vector_envs(mode: AutoresetMode) -> None:
    """Observations are [marker, episode, step] and rewards 100 * episode + step + action / 4, so both are known."""
    envs = SyncVectorEnv([counting.make] * 2, autoreset_mode=mode)
    name = "same_step" if mode is AutoresetMode.SAME_STEP else "next_step"
    space = (envs.single_observation_space, envs.single_action_space)
    with remuda.ReplayBuffer(100, *space, 2, n_step=2, gamma=GAMMA, autoreset=name) as buffer:
        obs, _ = envs.reset(seed=3)
        for _ in range(30):
            next_obs, reward, terminated, truncated, info = envs.step(np.array([0, 0]))
            final = next_obs.copy()
            for env in np.flatnonzero(info["_final_obs"]) if "final_obs" in info else ():
                final[env] = info["final_obs"][env]
            buffer.add(obs, [0, 0], reward, terminated, truncated, final)
            obs = next_obs
        found = buffer.sample(500)
    envs.close()
    lengths = (3, 5, 2)
    for obs, reward, discount, after in zip(
        found.obs.tolist(), found.reward.tolist(), found.discount.tolist(), found.next_obs.tolist(), strict=True
    ):
        episode, step = int(obs[1]), int(obs[2])
        length, terminates = lengths[(episode - 1) % 3], episode % 2 == 1
        assert after[1:] == [episode, min(step + 2, length)] or after[2] < length, (
            "the newest row may have no second step"
        )
        steps = int(after[2]) - step
        assert reward == sum(GAMMA**k * (100 * episode + step + k + 1) for k in range(steps))
        assert discount == (0 if terminates and after[2] == length else GAMMA**steps)


def test_env_pool_with_a_lost_worker(tmp_path: Path) -> None:
    """A lost worker gives a masked row without an end, so the episode before it is cut like a truncation."""
    kwargs = {"lengths": [50], "fault": "kill", "at": 5, "once": str(tmp_path / "once")}
    with (
        remuda.EnvPool("counting:make", num_processes=1, batch_size=1, kwargs=kwargs) as pool,
        remuda.ReplayBuffer(100, pool.observation, pool.action, 1, n_step=50, gamma=GAMMA) as buffer,
    ):
        obs, masks = pool.reset(seed=1)[0].obs.copy(), []
        for _ in range(12):
            step = pool.step(0, np.array([0])).result()
            buffer.add(obs, [0], step.reward, step.terminated, step.truncated, step.obs, step.mask)
            obs, masks = step.obs.copy(), [*masks, bool(step.mask[0])]
        found = buffer.sample(200)
    assert masks.count(False) == 1, "exactly one worker was lost"
    lost = masks.index(False)
    ends = {tuple(after[1:]) for after in found.next_obs.tolist()}
    assert ends == {(1.0, float(lost)), (1.0, float(11 - lost))}
    assert (found.discount > 0).all()


def test_rows_are_drawn_in_proportion_to_their_priority() -> None:
    buffer = remuda.ReplayBuffer(8, BOX, FOUR, 1, prioritized=True, alpha=1.0, seed=3)
    for number in range(4):
        one = np.full((1, 3), number, np.float32)
        buffer.add(one, [0], [number], [False], [False], one + 1)
    found = buffer.sample(64)
    assert set(found.reward.tolist()) == {0.0, 1.0, 2.0, 3.0}, "all new rows have the same priority"
    assert found.weight.tolist() == [1.0] * 64
    buffer.update_priorities(found.key, -found.reward)
    counts = np.zeros(4)
    for _ in range(100):
        found = buffer.sample(60, beta=0.5)
        counts += np.bincount(found.reward.long().numpy(), minlength=4)
    np.testing.assert_allclose(counts / counts.sum(), [0, 1 / 6, 2 / 6, 3 / 6], atol=0.01)
    weights = dict(zip(found.reward.tolist(), found.weight.tolist(), strict=True))
    assert weights[1.0] == 1.0
    assert weights[3.0] == pytest.approx((1 / 3) ** 0.5, rel=1e-5)
    late = found.key
    for number in range(10, 30):
        one = np.full((1, 3), number, np.float32)
        buffer.add(one, [0], [number], [False], [False], one + 1)
    buffer.update_priorities(late, torch.full((60,), 1e9))
    assert buffer.sample(64).reward.min() >= 22, "overwritten rows get no priority"


def test_draws_depend_only_on_the_seed() -> None:
    def draws(seed: int) -> list[float]:
        buffer = remuda.ReplayBuffer(100, BOX, FOUR, 2, seed=seed)
        for number in range(20):
            ones = np.full((2, 3), number, np.float32)
            buffer.add(ones, [0, 0], [number, -number], [False] * 2, [False] * 2, ones + 1)
        return [*buffer.sample(8).reward.tolist(), *buffer.sample(5).reward.tolist()]

    assert draws(1) == draws(1) != draws(2)


def test_nested_spaces() -> None:
    observation = gym.Dict({"left arm": gym.Box(0, 255, (2, 2), np.uint8), "mode": gym.Discrete(3, start=5)})
    action = gym.Tuple([gym.Box(-2, 2, (2,)), gym.Discrete(2)])
    with remuda.ReplayBuffer(10, observation, action, 2) as buffer:
        obs = {"left arm": np.full((2, 2, 2), 7, np.uint8), "mode": np.array([5, 6])}
        after = {"left arm": np.full((2, 2, 2), 9, np.uint8), "mode": np.array([7, 7])}
        buffer.add(obs, (np.ones((2, 2)), np.array([0, 1])), [1, 2], [True, False], [False, False], after)
        found = buffer.sample(16)
    assert found.obs.left_arm.dtype == torch.uint8
    assert set(found.obs.mode.tolist()) == {5, 6}, "observations keep the start of their space"
    assert found.next_obs.left_arm.unique().tolist() == [9]
    assert found.action.item0.shape == (16, 2)
    assert (found.action.item1 == found.obs.mode - 5).all()
    assert ((found.discount == 0) == (found.reward == 1)).all()


def test_a_single_env_needs_no_batch_axis() -> None:
    env = gymnasium.make("CartPole-v1")
    with remuda.ReplayBuffer(100, env.observation_space, env.action_space) as buffer:
        for seed in range(3):  # explicit resets, without a step for each reset
            obs, _ = env.reset(seed=seed)
            over, steps = False, 0
            while not over:
                next_obs, reward, terminated, truncated, _ = env.step(0)
                buffer.add(obs, 0, reward, terminated, truncated, next_obs)
                obs, over, steps = next_obs, terminated or truncated, steps + 1
        assert 0 < (buffer.sample(200).discount == 0).sum() < 200
        assert len(buffer) > 3 * 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity": 0}, "capacity=0 is too small"),
        ({"capacity": 1}, "capacity=1 is less than num_envs=2"),
        ({"num_envs": 0}, "num_envs=0 is too small"),
        ({"n_step": 0}, "n_step=0 is too small"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"autoreset": "never"}, "use next_step or same_step or disabled"),
        ({"capacity": 10**15}, "more than 90 % of the .* GB of free memory: use at most"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], words: str) -> None:
    settings = {"capacity": 10, "num_envs": 2, **change}
    with pytest.raises(ConfigError, match=words):
        remuda.ReplayBuffer(settings.pop("capacity"), BOX, FOUR, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"obs": np.zeros((3, 3))}, r"obs have shape \(3, 3\), the buffer takes \(2, 3\): give one for each env"),
        ({"next_obs": np.zeros(3)}, r"next_obs have shape \(3,\), the buffer takes \(2, 3\)"),
        ({"action": 1}, "action have shape"),
        ({"reward": [1.0]}, r"reward has shape \(1,\) for num_envs=2: give one number for each env"),
        ({"mask": [True] * 3}, "mask has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    zeros = np.zeros((2, 3))
    step = {"obs": zeros, "action": [0, 0], "reward": [0, 0], "terminated": [0, 0], "truncated": [0, 0]}
    with remuda.ReplayBuffer(10, BOX, FOUR, 2) as buffer:
        with pytest.raises(ConfigError, match=words):
            buffer.add(**{**step, "next_obs": zeros, **change})
        with pytest.raises(ConfigError, match="holds no step yet"):
            buffer.sample(4)
        buffer.add(**step, next_obs=zeros)
        with pytest.raises(ConfigError, match="batch_size=0 is too small"):
            buffer.sample(0)
        with pytest.raises(ConfigError, match="make it with prioritized=True"):
            buffer.update_priorities(buffer.sample(2).key, [1.0, 1.0])


def test_memory_is_freed_with_the_buffer() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    buffer = remuda.ReplayBuffer(10, BOX, FOUR)
    assert len(os.listdir("/proc/self/fd")) > before
    del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
