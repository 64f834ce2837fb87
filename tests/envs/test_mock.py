"""The mock env: arbitrary spaces, steps of known cost, and the same observations in every episode."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from remuda.envs import EnvSpec, make_envs, resolve
from remuda.envs.mock import MockEnv, space_from_json
from remuda.errors import EnvSpecError

spaces = gymnasium.spaces


@pytest.mark.parametrize(
    ("values", "space"),
    [
        ({"box": [84, 84, 4], "dtype": "uint8"}, spaces.Box(0, 255, (84, 84, 4), np.uint8)),
        ({"box": [2]}, spaces.Box(-1.0, 1.0, (2,), np.float32)),
        ({"box": [2], "low": 0, "high": 3, "dtype": "float64"}, spaces.Box(0, 3, (2,), np.float64)),
        ({"discrete": 6, "start": 2}, spaces.Discrete(6, start=2)),
        ({"multidiscrete": [2, 3]}, spaces.MultiDiscrete([2, 3])),
        ({"multibinary": 5}, spaces.MultiBinary(5)),
        (
            {"dict": {"a": {"tuple": [{"discrete": 2}, {"box": [1]}]}}},
            spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32)])}),
        ),
    ],
)
def test_spaces_from_json(values: Any, space: Any) -> None:
    assert space_from_json(values, "observation") == space


@pytest.mark.parametrize("values", [{}, 3, {"cube": 3}, {"box": "wide"}, {"discrete": 0}, {"dict": {"a": {}}}])
def test_invalid_spaces_are_refused_in_one_sentence(values: Any) -> None:
    with pytest.raises(EnvSpecError, match=r"^observation.*of the mock env is not a space.*\.$"):
        space_from_json(values, "observation")


@pytest.mark.parametrize(
    "kwargs", [{"wait": "spin"}, {"ends": "never"}, {"length": 0}, {"seconds": -1}, {"observation": {"cube": 1}}]
)
def test_wrong_kwargs_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(EnvSpecError, match="of the mock env"):
        resolve("Remuda/Mock-v0", kwargs).build()


def test_episodes_have_the_given_length_and_equal_observations() -> None:
    env = MockEnv(length=3, reward=2.5, ends="truncate")
    first = [env.reset(seed=1)[0]] + [env.step(0)[0] for _ in range(3)]
    second = [env.reset(seed=2)[0]]
    for step in range(1, 4):
        obs, reward, terminated, truncated, _ = env.step(1)
        second.append(obs)
        assert (reward, terminated, truncated) == (2.5, False, step == 3)
    assert np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    assert env.render().shape == (64, 64, 3)
    assert MockEnv(length=1).step(0)[2:4] == (True, False)


@pytest.mark.parametrize("wait", ["busy", "sleep"])
def test_step_takes_the_configured_time(wait: Any) -> None:
    env = MockEnv(seconds=0.1, wait=wait)
    env.reset()
    worked = []
    for _ in range(5):  # on a busy machine a single step may get no CPU time
        start, before = time.perf_counter(), time.process_time()
        env.step(0)
        assert time.perf_counter() - start >= 0.1
        worked.append(time.process_time() - before)
    assert min(worked) < 0.01 if wait == "sleep" else max(worked) > 0.01


def test_workers_build_the_mock_env_from_its_id() -> None:
    spec = resolve("Remuda/Mock-v0", {"observation": {"dict": {"image": {"box": [2, 2]}}}, "length": 2})
    assert EnvSpec.from_json(spec.to_json()) == spec
    with make_envs(spec, 2, 1) as envs:
        envs.reset(1)
        slot, step = envs.recv()
        for _ in range(2):
            envs.send(slot, np.zeros(2, np.int64))
            slot, step = envs.recv()
        assert step.terminated.all()
        assert step.obs.image.shape == (2, 2, 2)
        assert [episode.values["ep_rew"] for episode in envs.episodes()] == [2.0, 2.0]
