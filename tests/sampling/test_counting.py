"""Tests of every sampling path with the counting env, against rows, masks, resets and bootstraps of a reference."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from remuda.agents import PolicyOutput
from remuda.algorithms import ActorCritic
from remuda.core import derive_seed
from remuda.envs import make_envs, resolve
from remuda.errors import Interrupted
from remuda.learning.weights import LocalWeights
from remuda.sampling.sampler import EnvSampler

LENGTHS, NUM_ENVS, SEED, GAMMA, LAMBDA = (3, 5, 2), 6, 11, 0.9, 0.8
PATHS = [  # workers, slots
    pytest.param(0, 1, id="serial"),
    pytest.param(0, 2, id="serial, two slots"),
    pytest.param(1, 1, id="pool of one"),
    pytest.param(2, 1, id="central inference"),
    pytest.param(2, 2, id="alternating"),
    pytest.param(3, 2, id="alternating, one env a worker and slot"),
    pytest.param(4, 1, id="uneven"),
]


class CountingAgent(nn.Module):
    """An agent whose action is the observed step modulo 4 and whose value is 1000 * episode + 10 * step."""

    noise = (("uniform", 1),)

    def __init__(self):
        super().__init__()
        self.calls = []

    def initial_state(self, batch):
        return None

    def act(self, obs, state, explore, noise):
        self.calls.append(len(obs))
        action = obs[:, 2].long() % 4
        return action, PolicyOutput(-obs[:, 2] - noise[:, 0], self.value(obs, state)), state

    def value(self, obs, state):
        return 1000 * obs[:, 1] + 10 * obs[:, 2]


@dataclass
class Row:
    """The expected contents of one row of one env."""

    obs: tuple
    action: int
    reward: float
    discount: float
    mask: bool


def expected_rows(index: int, count: int, seed: int = SEED) -> list[Row]:
    """Return the rows of one env by the rules of tests/counting.py and the docstring of remuda.data.rollout."""
    marker = derive_seed(seed, index, 0) % 1000
    rows, episode, step = [], 1, 0
    while len(rows) <= count:
        length = LENGTHS[(episode - 1) % 3]
        action = step % 4
        if step < length:  # an ordinary row, the last of which ends the episode
            ends = step + 1 == length
            terminates = ends and episode % 2 == 1
            reward = 100 * episode + (step + 1) + action / 4
            rows.append(Row((marker, episode, step), action, reward, 0.0 if terminates else 1.0, True))
            step += 1
        else:  # the reset row: it holds the final observation
            rows.append(Row((marker, episode, step), action, 0.0, 1.0, False))
            episode, step = episode + 1, 0
    return rows


def episode_advantages(rows: list[Row], last: Row) -> list[float]:
    """Return GAE of one env's rows as defined: the sum of discounted TD errors within each episode."""
    value = lambda row: 1000 * row.obs[1] + 10 * row.obs[2]  # noqa: E731
    following = [*rows[1:], last]
    out = [0.0] * len(rows)
    for start, row in enumerate(rows):
        if not row.mask:
            continue
        weight = 1.0
        for now, after in zip(rows[start:], following[start:], strict=True):
            if not now.mask:
                break  # beyond the episode's end
            bootstrap = now.discount * value(after)
            out[start] += weight * (now.reward + GAMMA * bootstrap - value(now))
            weight *= GAMMA * LAMBDA
            if now.discount == 0:
                break
    return out


def make_sampler(workers, slots, num_steps, **kwargs):
    spec = resolve("counting:make", {"lengths": list(LENGTHS), **kwargs})
    envs = make_envs(spec, NUM_ENVS, num_workers=workers, slots=slots, gamma=GAMMA)
    weights = LocalWeights(version=41)
    return EnvSampler(envs, CountingAgent(), weights, num_steps, seed=SEED), envs, weights


@pytest.mark.parametrize("reuse_buffer", [False, True], ids=["fresh arrays", "reused buffer"])
@pytest.mark.parametrize(("workers", "slots"), PATHS)
def test_every_row_matches_the_reference(workers, slots, reuse_buffer):
    T, rounds = 7, 4
    sampler, envs, weights = make_sampler(workers, slots, T, reuse_buffer=reuse_buffer)
    truth = [expected_rows(index, rounds * T) for index in range(NUM_ENVS)]
    algorithm = ActorCritic.__new__(ActorCritic)
    nn.Module.__init__(algorithm)
    algorithm.agent = SimpleNamespace(inputs=SimpleNamespace(arrange=lambda obs: obs))
    algorithm.gamma, algorithm.gae_lambda, algorithm.reward_scale, algorithm.clip_reward = GAMMA, LAMBDA, None, False
    try:
        sampler.reset(SEED)
        for round in range(rounds):
            rollout = sampler.collect()
            steps = rollout.steps
            assert steps.reward.shape == (T, NUM_ENVS)
            advantage = algorithm.prepare(rollout).targets.advantage
            for b, rows in enumerate(truth):
                part, after = rows[round * T : (round + 1) * T], rows[(round + 1) * T]
                assert steps.obs[:, b].tolist() == [list(map(float, row.obs)) for row in part]
                assert steps.action[:, b].tolist() == [row.action for row in part]
                assert steps.reward[:, b].tolist() == [row.reward for row in part]
                assert steps.discount[:, b].tolist() == [row.discount for row in part]
                assert steps.mask[:, b].tolist() == [row.mask for row in part]
                assert steps.policy.value[:, b].tolist() == [1000 * row.obs[1] + 10 * row.obs[2] for row in part]
                # The last row bootstraps from the first row of the next rollout.
                assert rollout.next_obs[b].tolist() == list(map(float, after.obs))
                assert float(rollout.last_value[b]) == 1000 * after.obs[1] + 10 * after.obs[2]
                np.testing.assert_allclose(advantage[:, b], episode_advantages(part, after), rtol=1e-5)
            assert steps.version.unique().tolist() == [41 + round]
            weights.publish(42 + round)
        assert set(sampler.agent.calls[1:]) == {NUM_ENVS // slots}
    finally:
        envs.close()


@pytest.mark.parametrize(("workers", "slots"), PATHS)
def test_episodes_by_worked_numbers(workers, slots):
    sampler, envs, _ = make_sampler(workers, slots, num_steps=12)
    try:
        sampler.reset(SEED)
        sampler.collect()
        found = envs.episodes()
        # The 12 rows are 3 steps, reset, 5 steps, reset, 2 steps; episodes are ordered by time, then by env.
        assert sorted(episode.env for episode in found) == sorted(list(range(NUM_ENVS)) * 3)
        mine = [episode.values for episode in found if episode.env == 4]
        assert [values["ep_len"] for values in mine] == [3, 5, 2]
        rewards = [100 + 1 + step + (step % 4) / 4 for step in range(3)]
        assert mine[0]["ep_rew"] == pytest.approx(sum(rewards))
        assert mine[0]["ep_discounted_rew"] == pytest.approx(sum(GAMMA**t * r for t, r in enumerate(rewards)))
        assert mine[0]["ep_nonzero_rew"] == 3
        assert mine[1]["info/half"] == 2.5
        assert envs.episodes() == [], "episodes are reported once"
    finally:
        envs.close()


def test_noise_does_not_depend_on_the_number_of_slots():
    said = []
    for slots in (1, 2, 3):
        sampler, envs, _ = make_sampler(0, slots, num_steps=5)
        sampler.reset(SEED)
        said.append([sampler.collect().steps.policy.log_prob.clone() for _ in range(2)])
        envs.close()
    for other in said[1:]:
        assert all(torch.equal(a, b) for a, b in zip(said[0], other, strict=True))


def test_warm_up_spreads_envs_over_their_episodes_and_counts_steps():
    sampler, envs, _ = make_sampler(0, 1, num_steps=1)
    taken = sampler.reset(SEED, warm_up=8)
    assert envs.episodes() == [], "episodes that end during the warm-up are not reported"
    first = sampler.collect().steps.obs[0]
    assert len(torch.unique(first[:, 1:], dim=0)) > 1, "all envs are at the same step"
    done_before = torch.tensor([sum(LENGTHS[(n - 1) % 3] for n in range(1, int(e))) for e in first[:, 1]])
    assert taken == int(done_before.sum() + first[:, 2].sum())
    envs.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_request_interrupts_collect_between_steps(workers):
    sampler, envs, _ = make_sampler(workers, 1, num_steps=50)
    sampler.reset(SEED)
    answers = iter([False] * 5)
    envs.should_stop = lambda: next(answers, True)
    with pytest.raises(Interrupted):
        sampler.collect()
    envs.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_time_is_split_into_env_inference_and_wait(workers):
    sampler, envs, _ = make_sampler(workers, 1, num_steps=50)
    sampler.reset(SEED)
    sampler.collect()
    seconds = sampler.take_seconds()
    assert seconds["env"] > 0
    assert seconds["inference"] > 0
    assert (seconds["wait"] > 0) == (workers > 0)
    assert set(sampler.take_seconds().values()) == {0.0}, "seconds are reported once"
    envs.close()


def test_waiting_for_a_slow_env_counts_as_wait():
    """One of two workers sleeps, and the other waits for it almost all of the time."""
    spec = resolve("own_things:slow", {"seconds": 0.02, "only_seed": derive_seed(SEED, 0, 0)})
    envs = make_envs(spec, 2, num_workers=2)
    sampler = EnvSampler(envs, CountingAgent(), LocalWeights(), 10, seed=SEED)
    sampler.reset(SEED)
    sampler.take_seconds()
    sampler.collect()
    seconds = sampler.take_seconds()
    assert seconds["wait"] > 0.15  # 10 sleeps of 20 ms, minus scheduling noise
    assert seconds["wait"] > 2 * seconds["env"]
    envs.close()
