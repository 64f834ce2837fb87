"""Tests that evaluation completes the requested episodes with any number of envs."""

import os
import signal

import numpy as np
import pytest
import torch
from test_counting import CountingAgent

from remuda.core import derive_seed
from remuda.envs import make_envs, resolve
from remuda.errors import Interrupted
from remuda.sampling.evaluation import evaluate


def play(num_envs: int, episodes: int, env: str = "counting:make", agent=None, **kwargs):
    spec = resolve(env, kwargs)
    seeds = [[derive_seed(5, k) for k in range(i, episodes, num_envs)] for i in range(num_envs)]
    envs = make_envs(spec, num_envs, seeds=seeds)
    try:
        return evaluate(envs, agent or CountingAgent(), episodes)
    finally:
        envs.close()


def test_lengths_and_returns_by_worked_numbers():
    found = play(1, 3, lengths=[4])
    assert found.lengths == [4, 4, 4]
    rewards = [[100 * episode + step + 1 + step / 4 for step in range(4)] for episode in (1, 2, 3)]
    assert found.returns == [pytest.approx(sum(reward)) for reward in rewards]
    summary = found.summary()
    assert summary["episodes"] == 3
    assert summary["mean_length"] == 4
    assert summary["mean_reward"] == pytest.approx(np.mean(found.returns))
    assert summary["std_reward"] == pytest.approx(np.std(found.returns))
    assert summary["returns"] == found.returns


class Upright(torch.nn.Module):
    """A policy that pushes the cart to the side of the pole's tilt, so that episodes differ in length."""

    noise = (("uniform", 1),)

    def initial_state(self, batch):
        return None

    def act(self, obs, state, explore, noise):
        return (obs[:, 2] > 0).long(), None, state


@pytest.mark.parametrize("num_envs", [2, 3, 7])
def test_result_does_not_depend_on_the_number_of_envs(num_envs):
    alone = play(1, 7, "CartPole-v1", Upright())
    together = play(num_envs, 7, "CartPole-v1", Upright())
    assert alone.returns == together.returns
    assert len(set(alone.returns)) > 2, "episodes must differ for a meaningful comparison"


def test_stop_request_interrupts_evaluation():
    spec = resolve("counting:make")
    envs = make_envs(spec, 1, seeds=[[1, 2, 3]])
    envs.should_stop = lambda: True
    with pytest.raises(Interrupted):
        evaluate(envs, CountingAgent(), 3)
    envs.close()


def test_result_does_not_depend_on_workers_even_if_they_are_killed():
    """Unfinished episodes of a lost worker are repeated from their seeds, and finished ones are not."""
    seeds = [[derive_seed(5, k) for k in range(i, 12, 4)] for i in range(4)]
    expected = play(4, 12, "CartPole-v1", Upright())
    for kills in (0, 3):
        envs = make_envs(resolve("CartPole-v1"), 4, num_workers=2, seeds=seeds)
        try:
            assert evaluate(envs, Killing(envs, kills), 12).returns == expected.returns
            assert (envs.restarts() > 0) == (kills > 0)
        finally:
            envs.close()


class Killing(Upright):
    """The policy of Upright, which also kills a worker at every 30th call, `kills` times."""

    def __init__(self, envs, kills):
        super().__init__()
        self.envs, self.kills, self.calls = envs, kills, 0

    def act(self, obs, state, explore, noise):
        self.calls += 1
        if self.calls % 30 == 0 and self.kills > 0:
            self.kills -= 1
            os.kill(self.envs.inspect_workers()[self.kills % 2]["pid"], signal.SIGKILL)
        return super().act(obs, state, explore, noise)
