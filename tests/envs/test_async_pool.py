"""A pool in which each slot belongs to one worker: rows equal those of LocalEnvs, and no slot waits for another."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_env_rows import LENGTHS, play, rows_by_hand

from remuda.core import derive_seed
from remuda.envs import AsyncPooledEnvs, LocalEnvs, resolve
from remuda.errors import ConfigError, EnvError, Interrupted, WorkerError

COUNTING = ("counting:make", {"lengths": list(LENGTHS)})
SLOW = ("own_things:slow", {"seconds": 5.0, "only_seed": derive_seed(7, 0, 0)})  # only env 0 is slow


def step_until(
    envs: AsyncPooledEnvs, is_enough: Callable[[], bool], leave: int | None = None, answers: int = 0
) -> list[Any]:
    """Step the slots that are ready, except `leave`, until `is_enough`; return (slot, obs, mask) of every step.

    Every slot has returned at least `answers` steps then: on a busy machine a slot may be hundreds ahead of another.
    """
    width, seen = envs.num_envs // envs.num_slots, []
    awaited = [slot for slot in range(envs.num_slots) if slot != leave for _ in range(answers)]
    deadline = time.monotonic() + 60
    while awaited or not is_enough():
        assert time.monotonic() < deadline, "the condition was not met in time"
        for slot in envs.ready(0.05):
            if slot != leave:
                _, step = envs.recv(slot)
                seen.append((slot, step.obs.copy(), step.mask.copy()))
                if slot in awaited:
                    awaited.remove(slot)
                envs.send(slot, np.zeros(width, np.int64))
    return seen


def step_for_ever(envs: AsyncPooledEnvs, leave: int | None = None) -> None:
    envs.reset(7)
    step_until(envs, lambda: False, leave)


def kill(envs: AsyncPooledEnvs, index: int) -> None:
    os.kill(envs._worker_pool.workers[index].pid, signal.SIGKILL)


@pytest.mark.parametrize(("workers", "slots"), [(1, 1), (3, 5), (5, 5), (2, 10)])
def test_rows_received_in_order_equal_local_envs(workers: int, slots: int) -> None:
    actions = np.random.default_rng(0).integers(0, 4, (30, 10))
    with AsyncPooledEnvs(resolve(*COUNTING), 10, workers, slots) as envs:
        rows, episodes = play(envs, 11, actions), envs.episodes()
    with LocalEnvs(resolve(*COUNTING), 10, slots) as envs:
        expected, told = play(envs, 11, actions), envs.episodes()
    for mine, row in zip(rows, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, row, strict=True))
    lengths = lambda found: sorted((episode.env, episode.values["ep_rew"]) for episode in found)  # noqa: E731
    assert lengths(episodes) == lengths(told)


@pytest.mark.parametrize(("workers", "slots"), [(3, 3), (2, 3), (1, 3)])
def test_slots_advance_independently(workers: int, slots: int) -> None:
    rng = np.random.default_rng(1)
    counts = [0] * slots
    with AsyncPooledEnvs(resolve(*COUNTING), 6, workers, slots) as envs:
        envs.reset(11)
        found: list[list[Any]] = [[] for _ in range(slots)]
        while min(map(len, found)) < 12:
            ready = envs.ready(5.0)
            assert ready
            for slot in rng.permutation(ready).tolist():
                if rng.random() < 0.4:
                    continue  # not received, and therefore still ready
                answered, step = envs.recv(slot)
                assert answered == slot
                found[slot].append([np.array(field) for field in step])
                envs.send(slot, np.full(2, counts[slot] % 4))
                counts[slot] += 1
    for slot, rows in enumerate(found):
        for b in range(2):
            actions = [t % 4 for t in range(len(rows) - 1)]
            for row, expected in zip(rows, rows_by_hand(11, 2 * slot + b, actions), strict=True):
                obs, reward, terminated, truncated, mask = (field[b] for field in row)
                assert (tuple(obs), reward, terminated, truncated, mask) == expected


def test_ready_returns_only_slots_that_have_answered() -> None:
    with AsyncPooledEnvs(resolve(*SLOW), 3, 3, 3) as envs:
        envs.reset(7)
        assert sorted(envs.ready(0.0)) == [0, 1, 2], "after a reset all slots are ready"
        for slot in range(3):
            envs.recv(slot)
        assert envs.ready(0.0) == [], "nothing was sent"
        start = time.monotonic()
        for slot in range(3):
            envs.send(slot, np.zeros(1, np.int64))
        for _ in range(10):
            for slot in (1, 2):
                while slot not in (ready := envs.ready(1.0)):
                    assert 0 not in ready
                envs.recv(slot)
                envs.send(slot, np.zeros(1, np.int64))
        assert time.monotonic() - start < 5.0, "recv waited for the slow slot"
        while 0 not in envs.ready(1.0):
            assert time.monotonic() - start < 60.0
        assert time.monotonic() - start > 4.9
        assert envs.recv(0)[0] == 0


def test_ready_waits_no_longer_than_its_timeout() -> None:
    with AsyncPooledEnvs(resolve(*SLOW), 1, 1, 1) as envs:
        envs.reset(7)
        envs.recv(0)
        envs.send(0, np.zeros(1, np.int64))
        for seconds in (0.0, 0.3):
            start = time.monotonic()
            assert envs.ready(seconds) == [], "the slot is ready after 5 s, so `ready` has returned before"
            assert seconds * 0.9 <= time.monotonic() - start


def test_killed_worker_is_replaced_while_others_continue() -> None:
    with AsyncPooledEnvs(resolve("counting:make", {"lengths": [10**6]}), 6, 3, 3) as envs:
        envs.reset(7)
        step_until(envs, lambda: True, answers=5)
        kill(envs, 1)
        seen = step_until(envs, lambda: envs.restarts() == 2 and 1 in envs.ready(0.0))
        again = step_until(envs, lambda: True, answers=20)
    steps: dict[int, list[Any]] = {slot: [] for slot in range(3)}
    for slot, obs, mask in seen + again:
        steps[slot].append((obs, mask))
    for slot in (0, 2):
        rows = [obs[:, 2].tolist() for obs, _ in steps[slot]]
        assert all(after == [n + 1 for n in before] for before, after in pairwise(rows))
    (first,) = [n for n, (_, mask) in enumerate(steps[1]) if not mask.any()]
    assert steps[1][first][0].tolist() == [[derive_seed(7, env, 1) % 1000, 1, 0] for env in (2, 3)]


def killed_and_slow_to_rebuild(envs: AsyncPooledEnvs, file: Path) -> None:
    envs.reset(7)
    step_until(envs, lambda: True, answers=1)
    file.touch()
    kill(envs, 1)
    step_until(envs, lambda: bool(envs._building))


def test_other_slots_continue_while_a_new_worker_builds_its_envs(tmp_path: Path) -> None:
    file = tmp_path / "slow"
    with AsyncPooledEnvs(resolve("own_things:slow_to_rebuild", {"file": str(file), "seconds": 20}), 3, 3, 3) as envs:
        killed_and_slow_to_rebuild(envs, file)
        step_until(envs, lambda: True, leave=1, answers=20)
        assert envs._building, "building must take 20 s, longer than the other slots need"


def test_lost_worker_is_detected_although_another_slot_is_always_ready() -> None:
    """In an inference server, some slot is ready at nearly every poll; here one slot always is."""
    with AsyncPooledEnvs(resolve(*COUNTING), 3, 3, 3) as envs:
        envs.reset(7)
        step_until(envs, lambda: True, leave=2, answers=5)
        kill(envs, 1)
        step_until(envs, lambda: envs.restarts() == 1, leave=2)


def test_hung_worker_is_replaced_although_another_slot_is_always_ready() -> None:
    kwargs = {"fault": "sleep", "at": 5, "only": derive_seed(7, 1, 0) % 1000, "lengths": [10**6]}
    with AsyncPooledEnvs(resolve("counting:make", kwargs), 3, 3, 3, step_timeout=1.0) as envs:
        envs.reset(7)
        step_until(envs, lambda: envs.restarts() >= 1, leave=2)


@pytest.mark.parametrize("leave", [None, 2], ids=["waiting", "others always have an answer"])
def test_error_of_an_env_is_raised(leave: int | None) -> None:
    kwargs = {"fault": "nan", "at": 5, "only": derive_seed(7, 1, 0) % 1000, "lengths": [10**6]}
    with (
        AsyncPooledEnvs(resolve("counting:make", kwargs), 3, 3, 3) as envs,
        pytest.raises(EnvError, match=r"env 1 of counting:make \(seed \d+, step 5 of its episode 1\): .* nan"),
    ):
        step_for_ever(envs, leave)


def test_worker_that_is_lost_too_often_raises(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.CRITICAL, "remuda"),
        AsyncPooledEnvs(resolve("counting:make", {"fault": "kill", "at": 3}), 2, 2, 2, max_worker_restarts=2) as envs,
        pytest.raises(WorkerError, match="more than 2 times"),
    ):
        step_for_ever(envs)


def test_recv_of_a_slot_waits_for_its_new_worker(tmp_path: Path) -> None:
    spec = resolve("own_things:slow_to_rebuild", {"file": str(tmp_path / "slow"), "seconds": 1})
    with AsyncPooledEnvs(spec, 2, 2, 2, step_timeout=10_000.0) as envs:  # recv must not wait for this limit
        killed_and_slow_to_rebuild(envs, tmp_path / "slow")
        _, step = envs.recv(1)
        assert not step.mask.any()


def test_should_stop_interrupts_waiting() -> None:
    with AsyncPooledEnvs(resolve(*SLOW), 1, 1, 1) as envs:
        envs.reset(7)
        envs.recv(0)
        envs.send(0, np.zeros(1, np.int64))
        envs.should_stop = lambda: True
        with pytest.raises(Interrupted):
            envs.ready(5.0)


def test_more_workers_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers=3 for 2 slots, each of which belongs to one"):
        AsyncPooledEnvs(resolve(*COUNTING), 6, 3, 2)


def test_calls_out_of_order_are_refused() -> None:
    with AsyncPooledEnvs(resolve(*COUNTING), 2, 2, 2) as envs:
        envs.reset(7)
        with pytest.raises(RuntimeError, match="slot 1 has not been received"):
            envs.send(1, np.zeros(1, np.int64))
        envs.recv(1)
        with pytest.raises(RuntimeError, match=r"recv\(1\) without a send\(1"):
            envs.recv(1)
    envs.close()
