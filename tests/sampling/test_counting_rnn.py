"""Tests of every sampler with the counting env and the counting RNN, against rows and states of a reference."""

import contextlib
from dataclasses import dataclass
from itertools import pairwise

import gymnasium
import pytest
import torch
from counting_agents import CountingRNN

from remuda.core import derive_seed
from remuda.envs import NativeEnvs, make_envs, resolve
from remuda.learning.weights import LocalWeights, SharedWeights
from remuda.sampling.sampler import EnvSampler
from remuda.sampling.worker_sampler import WorkerSampler

LENGTHS, NUM_ENVS, SEED, GAMMA = (3, 5, 2, 9), 6, 11, 0.9
PATHS = [  # where inference runs, workers, slots
    pytest.param("central", 0, 1, id="serial"),
    pytest.param("central", 0, 3, id="serial, three slots"),
    pytest.param("central", 2, 1, id="central inference"),
    pytest.param("central", 2, 2, id="alternating"),
    pytest.param("central", 3, 2, id="alternating, one env a worker and slot"),
    pytest.param("workers", 2, 1, id="acting workers"),
    pytest.param("workers", 4, 1, id="acting workers, uneven"),
]  # each sampler with inference in workers starts a fork server with torch, which takes 2 s


@dataclass
class Row:
    obs: tuple
    action: int
    reward: float
    discount: float
    mask: bool
    rows: float  # the state before the row
    total: float

    @property
    def value(self):
        return 100 * self.rows + self.total / 2 + self.obs[2]


class HandCount:
    """A reference simulation of one counting env and its agent's memory."""

    def __init__(self, index):
        self.marker = derive_seed(SEED, index, 0) % 1000  # native envs have one seed per slot
        self.episode, self.step, self.rows, self.total, self.is_over = 1, 0, 0, 0.0, False

    @property
    def obs(self):
        return (self.marker, self.episode, self.step)

    def begin_rollout(self, is_padded):
        if is_padded and self.is_over:
            self.begin_episode()

    def begin_episode(self):
        self.episode, self.step, self.rows, self.total, self.is_over = self.episode + 1, 0, 0, 0.0, False

    def row(self, is_padded):
        obs, rows, total = self.obs, self.rows, self.total
        action = rows % 4
        if self.is_over:
            out = Row(obs, action, 0.0, 1.0, False, rows, total)
            if is_padded:
                self.rows, self.total = 0, 0.0  # masked rows reset the memory
            else:
                self.begin_episode()
            return out
        self.step += 1
        self.rows, self.total = rows + 1, total / 2 + obs[2]
        self.is_over = self.step == LENGTHS[(self.episode - 1) % len(LENGTHS)]
        terminates = self.is_over and self.episode % 2 == 1
        reward = 100 * self.episode + self.step + action / 4
        return Row(obs, action, reward, 0.0 if terminates else 1.0, True, rows, total)


@contextlib.contextmanager
def sampler_of(who, workers, slots, T, is_padded, **kwargs):
    spec = resolve("counting:make", {"lengths": list(LENGTHS), **kwargs})
    agent = CountingRNN()
    if who == "central":
        envs = make_envs(spec, NUM_ENVS, num_workers=workers, slots=slots, gamma=GAMMA)
        with contextlib.closing(EnvSampler(envs, agent, LocalWeights(7), T, SEED, wait_reset=is_padded)) as sampler:
            yield sampler
        return
    bounds = [worker * NUM_ENVS // workers for worker in range(workers + 1)]
    orders = [
        {"spec": spec.to_json(), "gamma": GAMMA, "wait_reset": is_padded, "first": first, "last": last}
        for first, last in pairwise(bounds)
    ]
    observation = make_envs(spec, 1).observation
    weights = SharedWeights(agent, version=7)
    with contextlib.closing(weights), contextlib.closing(
        WorkerSampler("counting_agents", orders, agent, observation, weights, T, SEED)
    ) as sampler:  # fmt: skip
        yield sampler


def check_by_hand(sampler, hands, is_padded=False, T=6, rounds=6):
    assert sampler.reset(SEED) == 0
    for round in range(rounds):
        rollout = sampler.collect()
        steps = rollout.steps
        for b, hand in enumerate(hands):
            hand.begin_rollout(is_padded)
            assert (rollout.state.rows[b], rollout.state.total[b]) == (hand.rows, hand.total)
            assert bool(rollout.begins[b]) == (hand.step == 0)
            rows = [hand.row(is_padded) for _ in range(T)]
            assert steps.obs[:, b].tolist() == [list(map(float, row.obs)) for row in rows]
            assert steps.action[:, b].tolist() == [row.action for row in rows]
            assert steps.reward[:, b].tolist() == [row.reward for row in rows]
            assert steps.discount[:, b].tolist() == [row.discount for row in rows]
            assert steps.mask[:, b].tolist() == [row.mask for row in rows]
            assert steps.policy.value[:, b].tolist() == [row.value for row in rows]
            # The episode continues in the next rollout; computing the last value does not advance the memory.
            assert rollout.next_obs[b].tolist() == list(map(float, hand.obs))
            assert float(rollout.last_value[b]) == 100 * hand.rows + hand.total / 2 + hand.step
        assert steps.version.unique().tolist() == [7], f"round {round}"


@pytest.mark.parametrize("is_padded", [False, True], ids=["not padded", "padded"])
@pytest.mark.parametrize(("who", "workers", "slots"), PATHS)
def test_every_row_and_state_matches_the_reference(who, workers, slots, is_padded):
    with sampler_of(who, workers, slots, 6, is_padded) as sampler:
        check_by_hand(sampler, [HandCount(index) for index in range(NUM_ENVS)], is_padded)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_native_vector_env_matches_the_reference(slots):
    name = "CountingVectorForSamplers-v0"
    gymnasium.register(name, vector_entry_point="counting_vector:CountingVectorEnv")
    try:
        spec = resolve(name, {"lengths": list(LENGTHS)})
        envs = make_envs(spec, NUM_ENVS, slots=slots, gamma=GAMMA)
        assert isinstance(envs, NativeEnvs)
        with contextlib.closing(EnvSampler(envs, CountingRNN(), LocalWeights(7), 6, SEED)) as sampler:
            per_slot = NUM_ENVS // slots
            check_by_hand(sampler, [HandCount(b // per_slot * per_slot) for b in range(NUM_ENVS)])
    finally:
        del gymnasium.registry[name]


@pytest.mark.parametrize(("who", "workers", "slots"), [path.values for path in PATHS[:5]])
def test_padded_columns_hold_one_episode_each(who, workers, slots):
    with sampler_of(who, workers, slots, 8, True) as sampler:
        sampler.reset(SEED)
        for _ in range(5):
            steps = sampler.collect().steps
            for b in range(NUM_ENVS):
                real = steps.mask[:, b]
                assert steps.obs[:, b, 1].unique().numel() == 1
                length = int(real.sum())
                assert real.tolist() == [True] * length + [False] * (8 - length)


def test_noise_and_episodes_do_not_depend_on_where_inference_runs():
    found = []
    for who, workers in (("central", 0), ("central", 2), ("workers", 3)):
        with sampler_of(who, workers, 1, 12, False) as sampler:
            sampler.reset(SEED)
            said = [sampler.collect().steps.policy.log_prob.clone() for _ in range(2)]
            episodes = sorted((episode.env, sorted(episode.values.items())) for episode in sampler.episodes())
            assert sampler.episodes() == [], "episodes are reported once"
            found.append((said, [(env, [pair for pair in values if pair[1] == pair[1]]) for env, values in episodes]))
    for said, episodes in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(said, found[0][0], strict=True))
        assert episodes == found[0][1]


def test_sampler_workers_act_with_published_weights():
    with sampler_of("workers", 2, 1, 4, False) as sampler:
        sampler.reset(SEED)
        before = sampler.collect().steps.policy.value.clone()
        weights = sampler._weights
        weights._tensors()[0].fill_(1e6)
        again = sampler.collect()
        assert again.steps.version.unique().tolist() == [7]
        assert float(again.steps.policy.value.max()) < 1e5, "the new weights are not published yet"
        weights.publish(8)
        after = sampler.collect()
        assert after.steps.version.unique().tolist() == [8]
        assert float(after.steps.policy.value.min()) > 1e5
        assert before.shape == after.steps.policy.value.shape
