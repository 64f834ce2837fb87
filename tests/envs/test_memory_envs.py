"""The memory tasks follow their rules and are regular Gymnasium envs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from remuda.envs import LocalEnvs, examine, make_envs, probe, resolve
from remuda.envs.families import register
from remuda.envs.memory_envs import CartPolePositions, Recall

IDS = ["Remuda/Recall-v0", "Remuda/CartPolePositions-v0"]


def play(env: Recall, seed: int, answer: int | None = None) -> tuple[list[Any], list[float], list[bool]]:
    """Return observations, rewards and ends of one episode; the last action is the cue, or `answer` if given."""
    obs, _ = env.reset(seed=seed)
    seen, rewards, ends = [obs], [], []
    action = int(obs[:-1].argmax()) if answer is None else answer
    while not ends or not ends[-1]:
        obs, reward, terminated, truncated, _ = env.step(action)
        assert not truncated
        seen.append(obs)
        rewards.append(reward)
        ends.append(terminated)
    return seen, rewards, ends


@pytest.mark.parametrize(("cues", "delay"), [(2, 10), (2, 0), (5, 1), (3, 4)])
def test_cue_is_shown_once_and_asked_for_after_the_delay(cues: int, delay: int) -> None:
    env = Recall(cues, delay)
    for seed in range(8):
        seen, rewards, ends = play(env, seed)
        assert len(rewards) == delay + 1
        assert ends == [False] * delay + [True]
        assert rewards == [0.0] * delay + [1.0]
        assert seen[0][:-1].sum() == 1.0
        assert not any(obs[:-1].any() for obs in seen[1:]), "the cue must be shown only once"
        assert [float(obs[-1]) for obs in seen] == [float(step == delay) for step in range(delay + 2)]


def test_every_cue_occurs_and_only_its_own_answer_is_right() -> None:
    env = Recall(cues=3, delay=2)
    found = []
    for seed in range(30):
        cue = int(env.reset(seed=seed)[0][:-1].argmax())
        found.append(cue)
        assert [play(env, seed, answer)[1][-1] for answer in range(3)] == [float(k == cue) for k in range(3)]
    assert set(found) == {0, 1, 2}


def test_actions_before_the_question_have_no_effect() -> None:
    env = Recall()
    cue = int(env.reset(seed=3)[0][:-1].argmax())
    for _ in range(10):
        obs, reward, terminated, _, _ = env.step(1 - cue)
        assert (reward, terminated) == (0.0, False)
    assert obs.tolist() == [0.0, 0.0, 1.0]
    assert env.step(cue)[1:3] == (1.0, True)


def test_observation_at_the_question_does_not_depend_on_the_cue() -> None:
    """Without memory, the best mean reward with two cues is therefore one half."""
    env = Recall()
    questions = {tuple(play(env, seed)[0][10].tolist()) for seed in range(20)}
    assert questions == {(0.0, 0.0, 1.0)}


def test_equal_seeds_give_equal_cues() -> None:
    def cues(seed: int) -> list[int]:
        env = Recall(cues=4)
        first = int(env.reset(seed=seed)[0][:-1].argmax())
        return [first, *(int(env.reset()[0][:-1].argmax()) for _ in range(20))]

    assert cues(1) == cues(1)
    assert cues(1) != cues(2)


def test_positions_equal_cartpole_without_velocities() -> None:
    whole, positions = gymnasium.make("CartPole-v1"), CartPolePositions()
    assert positions.observation_space.shape == (2,)
    assert positions.observation_space.low.tolist() == whole.observation_space.low[::2].tolist()
    all_of_it, _ = whole.reset(seed=5)
    part, _ = positions.reset(seed=5)
    over = False
    steps = 0
    while not over:
        assert part.tolist() == [all_of_it[0], all_of_it[2]]
        assert part.dtype == np.float32
        action = steps % 2
        all_of_it, *rest, _ = whole.step(action)
        part, *same, _ = positions.step(action)
        assert same == rest
        over, steps = rest[1] or rest[2], steps + 1
    assert steps > 5
    whole.close()
    positions.close()


def test_positions_are_truncated_after_500_steps() -> None:
    """This is CartPole's own limit, because the wrapped env is the registered one."""
    env = CartPolePositions()
    env.reset(seed=0)
    pole: Any = env.unwrapped
    truncated = False
    steps = 0
    while not truncated:
        pole.state = np.zeros(4)  # upright
        _, _, terminated, truncated, _ = env.step(steps % 2)
        assert not terminated
        steps += 1
    assert steps == 500
    env.close()


@pytest.mark.parametrize("name", IDS)
def test_ids_are_found_and_built(name: str) -> None:
    spec = resolve(name)
    info = probe(spec)
    assert (info.label, info.action.kind, info.action.n) == (name, "discrete", 2)
    with make_envs(spec, 2) as envs:
        assert isinstance(envs, LocalEnvs)
        envs.reset(seed=1)
        for _ in range(30):
            slot, _ = envs.recv()
            envs.send(slot, np.zeros(2, np.int64))
        assert envs.episodes()


@pytest.mark.parametrize("name", IDS)
def test_ids_are_found_in_a_worker(name: str) -> None:
    with make_envs(resolve(name), 2, num_workers=1) as envs:
        envs.reset(seed=1)
        _, step = envs.recv()
        assert np.isfinite(step.obs).all()


def test_arguments_of_an_id_are_passed_to_the_env() -> None:
    env = resolve("Remuda/Recall-v0", {"cues": 5, "delay": 3}).build()
    assert (env.observation_space.shape, env.action_space.n) == ((6,), 5)
    inner: Any = env.unwrapped
    assert inner.delay == 3
    env.close()


@pytest.mark.parametrize("name", IDS)
@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version.*")  # `make` adds wrappers
def test_gymnasium_checker_finds_no_problem(name: str) -> None:
    register(name)
    env = gymnasium.make(name)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("name", IDS)
def test_examine_finds_no_problem(name: str) -> None:
    report = examine(resolve(name), seconds=0.1)
    assert report.problems == []
    assert report.is_repeatable
    assert report.mean_episode_length is not None
