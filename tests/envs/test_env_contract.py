"""Envs that break their contract are named with index, seed and step; envs that raise are rebuilt."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from remuda.core import derive_seed
from remuda.envs import LocalEnvs, examine, make_envs, resolve
from remuda.errors import EnvError, WorkerError


def run(envs: Any, steps: int, seed: int = 7) -> list[Any]:
    """Step all envs with action 0 and return the masks of all rows."""
    envs.reset(seed)
    masks = []
    for _ in range(steps):
        slot, step = envs.recv()
        masks.append(step.mask.copy())
        envs.send(slot, np.zeros(envs.num_envs, np.int64))
    return masks


FAULTS = [
    ("nan", "box", "observation is nan at [1]"),
    ("infinite", "box", "observation is inf at [2]"),
    ("shape", "box", "observation has shape (5,), its space says (3,)"),
    ("overflow", "box", "observation is inf at [1]"),
    ("complex", "box", "observation has dtype complex128, its space says float32"),
    ("lossy", "uint8", "observation has dtype float64, its space says uint8, which cannot hold 0.5 at [0, 0]"),
    ("beyond", "uint8", "observation has dtype int64, its space says uint8, which cannot hold 256 at [0, 0]"),
    ("text", "box", "observation is a list, its space says a numpy array"),
    ("range", "discrete", "observation is 4, its space says 5 to 1004"),
    ("fraction", "discrete", "observation is 6.5, its space says an integer"),
    ("nan reward", "box", "reward is nan"),
    ("no reward", "box", "reward is None"),
    ("long reward", "box", "reward is array([0., 0.])"),
    ("flag", "box", "terminated is 'no', not a bool"),
    ("four", "box", "step() did not return (obs, reward, terminated, truncated, info)"),
]


@pytest.mark.parametrize(
    ("fault", "observation", "what", "workers"),
    [(*each, 0) for each in FAULTS] + [(*each, 2) for each in FAULTS if each[0] in ("nan", "shape", "lossy", "four")],
)
def test_invalid_results_of_step_are_refused(
    fault: str, observation: str, what: str, workers: int, tmp_path: Path
) -> None:
    # The 5th call is step 2 of episode 2, after the 3 steps of episode 1. The first of three envs to get there fails.
    kwargs = {"fault": fault, "at": 5, "once": str(tmp_path / "done"), "observation": observation}
    with make_envs(resolve("counting:make", kwargs), 3, workers) as envs, pytest.raises(EnvError) as caught:
        run(envs, 12)
    text = str(caught.value)
    index = int(text.split()[1])
    seed = derive_seed(7, index, 0)
    assert text.startswith(f"env {index} of counting:make (seed {seed}, step 2 of its episode 2): {what}")
    assert text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize("workers", [0, 1])
def test_first_observation_is_checked_too(workers: int) -> None:
    with (
        make_envs(resolve("counting:make", {"fault": "nan", "at": 0}), 2, workers) as envs,
        pytest.raises(EnvError, match=r"env 0 of counting:make \(seed \d+, step 0 of its episode 1\): obs.* nan"),
    ):
        envs.reset(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["raise", "sys.exit"])
def test_env_that_raises_is_rebuilt_and_returns_a_reset_row(
    workers: int, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = resolve("counting:make", {"fault": fault, "at": 4, "lengths": [100]})
    with caplog.at_level(logging.WARNING, "remuda.envs"), make_envs(spec, 2, workers) as envs:
        envs.reset(7)
        seen = []
        for t in range(8):
            if t > 0:
                envs.send(0, np.zeros(2, np.int64))
            _, step = envs.recv()
            seen.append((step.obs[1].tolist(), float(step.reward[1]), bool(step.mask[1])))
        assert envs.restarts() == 2
        assert envs.episodes() == []
    first, second = derive_seed(7, 1, 0) % 1000, derive_seed(7, 1, 1) % 1000
    assert seen == [
        ([first, 1, 0], 0.0, False),
        ([first, 1, 1], 101.0, True),
        ([first, 1, 2], 102.0, True),
        ([first, 1, 3], 103.0, True),
        ([second, 1, 0], 0.0, False),  # the action was ignored: a new env with a new seed
        ([second, 1, 1], 101.0, True),
        ([second, 1, 2], 102.0, True),
        ([second, 1, 3], 103.0, True),
    ]
    assert "it was rebuilt (restart 1)" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_env_that_always_raises_ends_with_its_own_message(workers: int) -> None:
    with (
        make_envs(resolve("counting:make", {"fault": "raise", "at": 1}), 1, workers) as envs,
        pytest.raises(
            EnvError, match=r"RuntimeError: told to fail \(.*\), 21 times in a row without completing a step"
        ),
    ):
        run(envs, 40)
    envs = make_envs(resolve("counting:make", {"fault": "raise", "at": 0}), 1, workers)
    with envs, pytest.raises(EnvError, match=r"RuntimeError: told to fail \(.*\), 21 times in a row"):
        envs.reset(1)


def test_total_of_restarts_is_limited_too() -> None:
    with LocalEnvs(resolve("counting:make", {"fault": "raise", "at": 2, "lengths": [1]}), 1, max_restarts=30) as envs:
        with pytest.raises(EnvError, match=r"more than envs\.max_restarts=30 times"):
            run(envs, 500)
        assert envs.restarts() == 31


@pytest.mark.parametrize("workers", [0, 2])
def test_envs_that_fail_randomly_are_rebuilt(workers: int) -> None:
    kwargs = {"raise_step": 0.02, "raise_reset": 0.2, "lengths": [5, 9]}
    with make_envs(resolve("counting:make", kwargs), 4, workers) as envs:
        masks = np.stack(run(envs, 400))
        restarts, finished = envs.restarts(), len(envs.episodes())
    assert restarts > 20
    assert finished > 50
    assert 0.5 < masks.mean() < 0.95


def test_evaluation_repeats_an_episode_that_failed(tmp_path: Path) -> None:
    kwargs = {"fault": "raise", "at": 2, "once": str(tmp_path / "done"), "lengths": [3]}
    with LocalEnvs(resolve("counting:make", kwargs), 1, seeds=[[41, 42]]) as envs:
        envs.reset(1)
        rows = []
        for _ in range(10):
            _, step = envs.recv()
            rows.append(step.obs[0, 0])
            envs.send(0, np.zeros(1, np.int64))
        assert [episode.values["ep_len"] for episode in envs.episodes()] == [3, 3]
    assert rows == [41] * 6 + [42] * 4


def test_error_in_user_statistics_is_raised() -> None:
    envs = LocalEnvs(resolve("counting:make"), 1, stats="counting:BrokenStats")
    with envs, pytest.raises(KeyError, match="no such key"):
        run(envs, 9)
    pool = make_envs(resolve("counting:make"), 1, 1, stats="counting:BrokenStats")
    expected = r"worker 0 \(pid \d+\) failed with KeyError: 'no such key'"
    with pool, pytest.raises(WorkerError, match=expected) as caught:
        run(pool, 9)
    assert "Traceback" in caught.value.__notes__[0]
    assert "counting.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "observation"), [("dtype", "box"), ("list", "box"), ("whole", "uint8"), ("wide", "uint8")]
)
def test_observations_of_another_dtype_are_cast_if_lossless(fault: str, observation: str, workers: int) -> None:
    def rows(**kwargs: Any) -> list[Any]:
        with make_envs(resolve("counting:make", {"observation": observation, **kwargs}), 2, workers) as envs:
            envs.reset(7)
            seen = []
            for _ in range(8):
                slot, step = envs.recv()
                seen.append(step.obs.tolist())
                envs.send(slot, np.zeros(2, np.int64))
            return seen

    assert rows(fault=fault, at=5) == rows()


class Bounded(gymnasium.Env[Any, Any]):
    """Exceeds its bounds [-1, 1] by `excess` at one step of every episode of 300 steps."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at: int, excess: float = 1.5, nested: bool = False, dtype: str = "float32") -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"arm": box}) if nested else box
        self.at, self.excess, self.nested, self.dtype = at, excess, nested, dtype

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 0.0, self.steps == 300, False, {}

    def observe(self) -> Any:
        obs = np.array([0.0, 1.0 + self.excess * (self.steps == self.at)], self.dtype)
        return {"arm": obs} if self.nested else obs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [0, 7, 300])  # the first, an early and the last observation of an episode
def test_observations_out_of_bounds_log_one_warning(at: int, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    spec = resolve("test_env_contract:Bounded", {"at": at})
    with caplog.at_level(logging.WARNING, "remuda.envs"), make_envs(spec, 4, workers) as envs:
        run(envs, 605)
    (text,) = [record.getMessage() for record in caplog.records]
    where = rf"env 0 of test_env_contract:Bounded \(seed \d+, step {at} of its episode 1\)"
    what = r"observation is 2\.5 at \[1\], its space says -1 to 1"
    assert re.match(f"{where}: {what}: .*widen the bounds of observation_space, or clip", text)


def test_bounds_of_entries_tolerate_rounding(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "remuda.envs"):
        for kwargs in ({"nested": True}, {"excess": 1e-6}):
            with LocalEnvs(resolve("test_env_contract:Bounded", {"at": 3, **kwargs}), 1) as envs:
                run(envs, 8)
    (record,) = caplog.records
    assert "observation.arm is 2.5 at [1], its space says -1 to 1" in record.getMessage()


def test_bounds_are_checked_for_the_first_observations_only() -> None:
    """Later steps take the same time as without bounds."""
    with LocalEnvs(resolve("test_env_contract:Bounded", {"at": -1}), 1) as envs:
        run(envs, 250)
        (env,) = envs._env_groups[0].envs
        assert (env._unchecked, env._dtype) == (0, np.dtype(np.float32))


def test_examine_reports_casts_and_bounds() -> None:
    found = examine(resolve("test_env_contract:Bounded", {"at": 3, "dtype": "float64"}), seconds=0.01).problems
    cast = "observation has dtype float64, its space says float32: it is cast at every step."
    assert f"test_env_contract:Bounded: {cast}" in found
    assert sum("observation is 2.5 at [1], its space says -1 to 1" in problem for problem in found) == 1
