"""Tests of the rollout queue: rows of every env are consecutive, within max_lag, and not overwritten while in use.

Workers step the counting env of tests/counting.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from processes import all_gone, find, wait_for

from remuda.build.algorithm import make_algorithm
from remuda.build.envs import agent_view, num_workers
from remuda.build.nets import find_net
from remuda.build.workers import make_rollout_queue
from remuda.config.resolve import resolve_config
from remuda.core import derive_seed
from remuda.data import Rollout, SharedArrays, leaves, map_tree, resets
from remuda.errors import EnvError, Interrupted, WorkerError
from remuda.learning.weights import SharedWeights
from remuda.sampling import rollout_queue
from remuda.sampling.rollout_queue import RolloutQueue, slots_for

SEED, LENGTHS, T = 11, (3, 5, 2, 9), 6
torch.set_num_threads(1)  # more threads are many times slower on arrays this small when the machine is busy


class Streaming:
    """A queue, a learner that only counts versions, and the columns taken of each env."""

    def __init__(self, queue: RolloutQueue, weights: SharedWeights, agent: Any) -> None:
        self.queue, self.weights, self.agent, self.version = queue, weights, agent, 0
        self.columns: dict[int, list[Any]] = defaultdict(list)

    def take(self) -> Rollout:
        deadline = time.monotonic() + 60
        rollout = self.queue.take(self.version, lambda: time.monotonic() > deadline)
        for place, env in enumerate(rollout.envs.tolist()):
            column = map_tree(lambda x, b=place: x[:, b].clone(), rollout.steps)
            step, begins = int(column.obs[0, 2]), bool(rollout.begins[place])
            assert begins == (step == 0) or not self.columns[env]  # the warm-up may have taken random steps before
            self.columns[env].append((column, rollout.next_obs[place].clone()))
        return rollout

    def rounds(self, count: int, envs: int = 4) -> Iterator[int]:
        """Count rounds up to `count`, and further until every env has sent a rollout; workers differ in speed."""
        number = 0
        while number < count or len(self.columns) < envs:
            yield number
            number += 1

    def release(self, updates: int = 1) -> None:
        self.version += updates
        self.weights.publish(self.version)
        self.queue.release(self.version)


@contextlib.contextmanager
def streaming(
    envs: int = 4,
    workers: int = 2,
    batch: int = 4,
    act: str = "workers",
    max_lag: int | None = None,
    kwargs: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    starts: bool = True,
    **groups: Any,
) -> Iterator[Streaming]:
    options = {
        "algo": {"n_steps": T, "batch_size": batch},
        "sampler": {"envs": envs, "workers": workers, "inference": act},
        "envs": {"kwargs": {"lengths": list(LENGTHS), **(kwargs or {})}, **(limits or {})},
        **groups,
    }
    settings = {"algo": "impala", "env": "counting:make", "seed": SEED, "scheme": "async", "steps": 1000}
    config, spec, info = resolve_config(settings, options)
    agent: Any = make_algorithm(config, agent_view(config, info), find_net(config.agent)).agent
    with contextlib.closing(SharedWeights(agent)) as weights:
        count = num_workers(config)
        queue = make_rollout_queue(
            config, spec, agent_view(config, info), count, agent, weights, 0, max_lag, lambda: False
        )
        with contextlib.closing(queue):
            if starts:
                assert queue.start(SEED) == 0
            yield Streaming(queue, weights, agent)


def check_rows(column: Any, before: list[float] | None = None) -> None:
    """Assert that every row follows the previous one by the rules of the counting env."""
    for t in range(T):
        marker, episode, step = column.obs[t].tolist()
        assert before is None or [marker, episode, step] == before
        is_over = step == LENGTHS[int(episode - 1) % len(LENGTHS)]
        assert bool(column.mask[t]) == (not is_over)
        if is_over:  # the true final observation, on a masked row
            assert (column.reward[t], column.discount[t]) == (0.0, 1.0)
            before = [marker, episode + 1, 0.0]
            continue
        assert column.reward[t] == 100 * episode + step + 1 + float(column.action[t]) / 4
        ends = step + 1 == LENGTHS[int(episode - 1) % len(LENGTHS)]
        assert column.discount[t] == (0.0 if ends and episode % 2 == 1 else 1.0)
        before = [marker, episode, step + 1]


def check_all_rows(columns: dict[int, list[Any]], num_envs: int) -> None:
    """Assert that the columns of every env begin at its first row and have no gap."""
    assert sorted(columns) == list(range(num_envs))
    for env, parts in columns.items():
        before = [float(derive_seed(SEED, env, 0) % 1000), 1.0, 0.0]
        for column, next_obs in parts:
            check_rows(column, before)
            before = next_obs.tolist()


def slots_now(queue: RolloutQueue) -> list[int]:
    """Return all slots that are free, held, or full; a slot that is being assembled is briefly in none of them."""
    with queue._changed:
        held = [slot for slots in queue._held for slot in slots]
        full = [each.slot for each in (*queue._full, *(queue._staged or ()), *queue._taken)]
        return [*queue._free, *held, *full]


WAYS = [  # where inference runs, envs, workers, sequences per round
    pytest.param("workers", 4, 2, 4, id="workers"),
    pytest.param("workers", 4, 4, 2, id="workers, half of the envs"),
    pytest.param("workers", 4, 2, 8, id="workers, each env twice"),
    pytest.param("central", 4, 2, 4, id="central"),
    pytest.param("central", 6, 3, 2, id="central, a third of the envs"),
    pytest.param("central", 4, 1, 4, id="central, one group"),
]


@pytest.mark.parametrize(("act", "envs", "workers", "batch"), WAYS)
def test_rows_are_consecutive_and_unchanged_until_released(act: str, envs: int, workers: int, batch: int) -> None:
    with streaming(envs, workers, batch, act) as found:
        queue = found.queue
        for _ in found.rounds(12, envs):
            rollout = found.take()
            assert rollout.steps.mask.shape == (T, batch)
            assert len(rollout.envs) == batch
            firsts = rollout.envs.tolist()[:: envs // workers]
            assert firsts == sorted(firsts), "shares are in the order of their envs"
            parts = (rollout.steps, rollout.next_obs, rollout.last_value)
            kept = map_tree(lambda x: x.clone(), parts)
            wait_for(lambda: queue.metrics()["async/slots_full"] >= batch * workers // envs)  # other workers continue
            slots = slots_now(queue)
            assert len(slots) == len(set(slots)) <= len(queue._slots)
            for (path, now), (_, before) in zip(leaves(parts), leaves(kept), strict=True):
                assert torch.equal(now, before), path
            assert int(rollout.steps.version.max()) <= found.version
            found.release()
    check_all_rows(found.columns, envs)
    assert queue.dropped == 0


@pytest.mark.parametrize("act", ["workers", "central"])
def test_every_rollout_carries_its_initial_state(act: str) -> None:
    """Unrolling from the stored state reproduces the values that the agent computed while acting."""
    with streaming(act=act, agent={"core": "gru", "core_size": 4, "shared": True}) as found:
        for _ in found.rounds(5):
            rollout = found.take()
            with torch.no_grad():
                outputs, _ = found.agent.unroll(rollout.steps.obs, rollout.state, resets(rollout.steps.mask))
            torch.testing.assert_close(outputs.value, rollout.steps.policy.value, rtol=1e-4, atol=1e-5)
            found.release()
    check_all_rows(found.columns, 4)


@pytest.mark.parametrize("act", ["workers", "central"])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_rollouts_older_than_max_lag_are_dropped(act: str, max_lag: int) -> None:
    """The learner makes 5 updates at once in every second round, so that full slots become too old."""
    with streaming(act=act, max_lag=max_lag) as found:
        queue = found.queue
        assert len(queue._slots) == slots_for(2, 2, max_lag)
        for number in range(12):
            rollout = found.take()
            assert int(rollout.steps.version.min()) >= found.version - max_lag
            # After a round of more updates than max_lag, workers wait for the next weights.
            wait_for(lambda: max_lag < queue._updates or queue.metrics()["async/slots_full"] > 0)
            slots = slots_now(queue)
            assert len(slots) == len(set(slots)) <= len(queue._slots)
            found.release(updates=5 if number % 2 else 1)
        wait_for(lambda: len(slots_now(queue)) == len(queue._slots))
    for parts in found.columns.values():
        for column, _ in parts:
            check_rows(column)
    assert (queue.dropped > 0) == (max_lag > 0), "with max_lag=0 workers wait for the newest weights"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("act", ["workers", "central"])
def test_workers_wait_for_the_release_with_max_lag_0(act: str, times: int) -> None:
    with streaming(act=act, batch=4 * times, max_lag=0) as found:
        for _ in range(6):
            rollout = found.take()
            assert rollout.steps.version.unique().tolist() == [found.version]
            assert times > 1 or rollout.envs.tolist() == [0, 1, 2, 3], "the round holds one share of each worker"
            time.sleep(0.05)
            metrics = found.queue.metrics()
            assert (metrics["async/slots_free"], metrics["async/slots_full"]) == (0.0, 0.0)
            assert all(not held for held in found.queue._held)
            found.release()
    check_all_rows(found.columns, 4)
    assert found.queue.dropped == 0


@pytest.mark.parametrize("act", ["workers", "central"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_every_env_is_learned_from_with_fewer_slots_than_workers(act: str, max_lag: int) -> None:
    with streaming(envs=4, workers=4, batch=1, act=act, max_lag=max_lag) as found:
        assert len(found.queue._slots) == max_lag + 1
        for _ in found.rounds(16):
            found.take()
            found.release()
    assert sorted(found.columns) == [0, 1, 2, 3]


def test_number_of_slots() -> None:
    assert slots_for(per_round=2, num_groups=4, max_lag=None) == 2 + 2 + 4
    assert slots_for(per_round=2, num_groups=4, max_lag=0) == 2
    assert slots_for(per_round=2, num_groups=4, max_lag=1) == 4
    assert slots_for(per_round=2, num_groups=4, max_lag=100) == 8, "a queue has at most the slots that can be in use"


def test_lag_of_acting_weights() -> None:
    with streaming(max_lag=0) as found:
        for _ in range(3):
            found.take()
            assert found.queue.metrics()["lag/acting_weights"] == 0.0
            found.release()


def test_episodes_of_every_env_are_reported_once() -> None:
    with streaming(kwargs={"lengths": [3]}) as found:
        episodes = []
        for _ in found.rounds(6):
            found.take()
            episodes += found.queue.episodes()
            found.release()
    assert {episode.env for episode in episodes} == {0, 1, 2, 3}
    assert {episode.values["ep_len"] for episode in episodes} == {3.0}
    scores = [(episode.env, episode.values["ep_rew"]) for episode in episodes]
    assert len(set(scores)) == len(scores), "returns identify episodes, and none is reported twice"


def test_warm_up_steps_are_counted() -> None:
    with streaming(starts=False) as found:
        assert 0 < found.queue.start(SEED, 20) <= 4 * 20
        rollout = found.take()
        assert len(rollout.steps.obs[0, :, 1:].unique(dim=0)) > 1, "envs are at different steps"


@pytest.mark.parametrize("act", ["workers", "central"])
def test_env_errors_are_raised_by_take(act: str) -> None:
    def take_for_ever(found: Streaming) -> None:
        while True:
            found.take()
            found.release()

    with streaming(act=act, kwargs={"fault": "nan", "at": 20}) as found:
        with pytest.raises(EnvError, match=r"env \d of counting:make .* nan"):
            take_for_ever(found)
        with pytest.raises(EnvError):
            take_for_ever(found)


def test_worker_lost_too_often_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    limits = {"max_worker_restarts": 2}
    with (
        caplog.at_level(logging.CRITICAL, "remuda"),
        streaming(kwargs={"fault": "kill", "at": 3}, limits=limits) as found,
        pytest.raises(WorkerError, match="more than 2 times"),
    ):
        found.take()


@pytest.mark.parametrize("act", ["workers", "central"])
def test_killed_worker_is_replaced_and_every_rollout_is_whole(act: str) -> None:
    with streaming(act=act) as found:
        queue = found.queue
        for _ in range(2):
            found.take()
            found.release()
        os.kill(queue._worker_pool.workers[-1].pid, signal.SIGKILL)
        first, envs = (2, 2) if act == "workers" else (0, 4)
        wait_for(lambda: queue.restarts() == envs)
        deadline = time.monotonic() + 60
        while sum(is_new(column, env) for env, (column, _) in last_columns(found, first)) < envs:
            assert time.monotonic() < deadline
            found.take()
            found.release()
        assert len(slots_now(queue)) <= len(queue._slots)
    for parts in found.columns.values():
        for column, _ in parts:
            check_rows(column)


def test_killed_env_worker_is_replaced_by_the_inference_server() -> None:
    with streaming(act="central") as found:
        found.take()
        found.release()
        (actor,) = found.queue._worker_pool.workers
        fork_server, *others = psutil.Process(actor.pid).children()
        assert others == []
        os.kill(fork_server.children()[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while sum(is_new(column, env) for env, (column, _) in last_columns(found, 0)) < 2:
            assert time.monotonic() < deadline
            found.take()
            found.release()
        assert found.queue.restarts() == 2, "both envs of the killed worker are restarted"


def last_columns(found: Streaming, first: int) -> list[Any]:
    return [(env, parts[-1]) for env, parts in found.columns.items() if env >= first]


def is_new(column: Any, env: int) -> bool:
    """Return whether the column is of an env that was restarted with another seed."""
    return bool(column.obs[0, 0] != derive_seed(SEED, env, 0) % 1000)


def test_take_is_interrupted_when_should_stop_returns_true() -> None:
    with streaming(max_lag=0) as found:
        found.take()
        with pytest.raises(Interrupted):  # nothing comes before the release
            found.queue.take(0, lambda: True)
        asked: list[float] = []

        def after_a_while() -> bool:
            asked.append(time.monotonic())
            return len(asked) > 2

        with pytest.raises(Interrupted):
            found.queue.take(0, after_a_while)


def test_closing_twice_leaves_no_process_or_thread() -> None:
    with streaming(act="central") as found:
        found.take()
        pids = [member.pid for member in found.queue._worker_pool.workers]
        children = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
        assert len(children) >= 2, "there is an env worker per group"
        found.queue.close()
        found.queue.close()
        wait_for(lambda: all_gone(find([*pids, *children])))
        assert "remuda-workers" not in {thread.name for thread in threading.enumerate()}


def test_close_before_start() -> None:
    with streaming(starts=False) as found:
        found.queue.close()


def test_failed_allocation_frees_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of the learner are allocated after the shared memory of the slots."""
    allocate, calls, memories = rollout_queue.allocate, list[int](), list[SharedArrays]()
    share_slots = rollout_queue.share_slots

    def allocate_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("no memory is left")
        return allocate(*arguments)

    def remember(*arguments: Any) -> Any:
        memory, slots = share_slots(*arguments)
        memories.append(memory)
        return memory, slots

    monkeypatch.setattr(rollout_queue, "allocate", allocate_once)
    monkeypatch.setattr(rollout_queue, "share_slots", remember)
    with pytest.raises(MemoryError, match="no memory is left"), streaming():
        pass
    (memory,) = memories
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)
