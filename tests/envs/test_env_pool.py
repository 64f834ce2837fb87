"""EnvPool: steps as futures and several batches in flight; every row is compared with those of LocalEnvs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import counting
import numpy as np
import pytest

from remuda.core import derive_seed
from remuda.envs import LocalEnvs, resolve
from remuda.envs.pool_futures import EnvPool
from remuda.errors import ConfigError, EnvError, EnvSpecError, WorkerError

LENGTHS = [3, 5, 2]
ZEROS = np.zeros(2, np.int64)


def copied(step: Any) -> tuple[Any, ...]:
    return tuple(np.array(each) for each in (step.obs, step.reward, step.terminated, step.truncated, step.mask))


def expected_rows(seed: int, batch: int, actions: np.ndarray) -> list[tuple[Any, ...]]:
    """Return the rows of envs 2 * batch and 2 * batch + 1 for [T, 2] actions, of which the first is ignored."""
    with LocalEnvs(resolve("counting:make", {"lengths": LENGTHS}), 6, slots=3) as envs:
        envs.reset(seed)
        rows = []
        for t in range(len(actions)):
            for _ in range(3):
                slot, step = envs.recv()
                if slot == batch:
                    rows.append(copied(step))
                envs.send(slot, actions[(t + 1) % len(actions)] if slot == batch else ZEROS)
    return rows


def test_several_batches_in_flight_and_results_in_any_order() -> None:
    actions = np.random.default_rng(0).integers(0, 4, (3, 20, 2))
    found: list[list[Any]] = [[], [], []]
    with EnvPool("counting:make", 2, 2, 3, kwargs={"lengths": LENGTHS}, seed=4) as pool:
        for t in range(20):
            futures = [pool.step(batch, actions[batch, t]) for batch in range(3)]
            order = np.random.default_rng(t).permutation(3).tolist()
            for batch in order:
                step = futures[batch].result()
                assert futures[batch].done()
                assert futures[batch].result() is step  # result() may be called again
                found[batch].append(copied(step))
    for batch in range(3):
        for mine, row in zip(found[batch], expected_rows(4, batch, actions[batch]), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, row, strict=True))
        assert not found[batch][0][4].any()  # the first step was a reset and ignored its action


def test_batches_advance_independently() -> None:
    with EnvPool("counting:make", 1, 2, 2, kwargs={"lengths": [100]}) as pool:
        slow = pool.step(0, ZEROS)
        for t in range(7):
            assert pool.step(1, ZEROS).result().obs[:, 2].tolist() == [t, t]
        assert slow.result().obs[:, 2].tolist() == [0, 0]


def test_reset_restarts_every_batch() -> None:
    with EnvPool("counting:make", 1, 2, 2, seed=9) as pool:
        first = pool.step(0, ZEROS)
        steps = pool.reset(seed=5)
        assert [step.obs[:, 0].tolist() for step in steps] == [
            [derive_seed(5, index, 0) % 1000 for index in pair] for pair in ((0, 1), (2, 3))
        ]
        with pytest.raises(RuntimeError, match="batch 0 was stepped or reset again"):
            first.result()
        assert first.done()
        assert pool.step(0, ZEROS).result().obs[:, 2].tolist() == [1, 1]
        own = [float(pool.reset()[0].obs[0, 0]) for _ in range(2)]
        assert own[0] != own[1]  # seeds are derived from the pool's own
    with EnvPool("counting:make", 1, 2, 2, seed=9) as again:
        markers = again.reset()[0].obs[:, 0].tolist()
    assert markers == [derive_seed(9, index, 0) % 1000 for index in (0, 1)]


def test_info_truncation_and_statistics() -> None:
    kwargs = {"lengths": [2], "ends": "truncate"}
    with EnvPool("counting:make", 1, 2, kwargs=kwargs, info=["half", "lost"]) as pool:
        seen = []
        for _ in range(4):
            step = pool.step(0, ZEROS).result()
            seen.append((step.truncated[0].item(), step.terminated[0].item(), step.info["half"][0].item()))
            assert np.isnan(step.info["lost"]).all()
        assert np.isnan(seen[0][2])
        assert seen[1:3] == [(False, False, 0.5), (True, False, 1.0)]
        assert step.obs[:, 1].tolist() == [2, 2]  # reset on the step after the end
        assert [episode.env for episode in pool.episodes()] == [0, 1]
        assert pool.restarts() == 0


@pytest.mark.parametrize("env", ["counting:make", counting.make, counting.CountingEnv])
def test_continuous_actions_and_every_way_to_specify_an_env(env: Any) -> None:
    with EnvPool(env, 2, 2, kwargs={"action": "box"}) as pool:
        pool.reset()
        step = pool.step(0, np.array([[0.5, 0.25], [-1.0, 1.0]], np.float32)).result()
        assert step.reward.tolist() == [101 + 0.75 / 4, 101]
        assert pool.action.kind == "box"


def test_nested_and_multi_actions() -> None:
    with EnvPool("counting:make_nested", 1, 2) as pool:
        pool.reset()
        plain = {
            "modes": np.array([[1, 2], [0, 1]]),
            "move": (np.array([2, 0]), np.array([[0.5, 0.25], [0.0, -1.0]])),
            "buttons": np.array([[1, 1], [0, 1]]),
        }
        step = pool.step(0, plain).result()
        assert step.reward.tolist() == [1 + 0.75 + 20 + 800, -1 - 1 + 10 + 600]
        assert step.obs.camera.left.shape == (2, 2, 2)
    with EnvPool("counting:make", 1, 2, kwargs={"action": "multi"}) as pool:
        pool.reset()
        assert pool.step(0, np.array([[1, 2], [0, 1]])).result().reward.tolist() == [101.75, 101.25]


def test_misuse_is_refused_in_one_sentence() -> None:
    with EnvPool("counting:make", 1, 2, 2) as pool:
        future = pool.step(0, ZEROS)
        with pytest.raises(RuntimeError, match="batch 0 is in flight: take the result of its last step"):
            pool.step(0, ZEROS)
        future.result()
        with pytest.raises(ValueError, match=r"actions have shape \(3,\), this slot takes \(2,\)"):
            pool.step(0, np.zeros(3, np.int64))
        pool.step(0, ZEROS)
        with pytest.raises(RuntimeError, match="batch 0 was stepped or reset again, which overwrote this result"):
            future.result()
        with pytest.raises(ValueError, match="batch 2 of num_batches=2: they are numbered from 0"):
            pool.step(2, ZEROS)
    for arguments, sentence in [
        ((3, 2), "num_processes=3 for batch_size=2: every process steps its share"),
        ((1, 2, 0), "num_batches=0: each is at least 1"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            EnvPool("counting:make", *arguments)
    with pytest.raises(EnvSpecError, match=r"and pass my_code\.make or 'my_code:make'\.$"):
        EnvPool(lambda: None, 1, 1)  # the remedy must not mention schemes, which a pool does not have
    with pytest.raises(EnvSpecError, match="has no nothing"):
        EnvPool("counting:nothing", 1, 1)


def test_result_may_be_awaited_with_repeated_timeouts(tmp_path: Path) -> None:
    kwargs = {"fault": "sleep", "at": 1, "once": str(tmp_path / "done")}
    with EnvPool("counting:make", 1, 2, 2, kwargs=kwargs, step_timeout=0.6) as pool:
        pool.step(1, ZEROS).result()
        pool.reset()
        future = pool.step(0, ZEROS)
        assert not future.done()
        with pytest.raises(TimeoutError, match=r"batch 0 was not ready within 0\.05 s"):
            future.result(timeout=0.05)
        waits = 0
        while True:  # short waits add up, so that the hanging worker is replaced
            try:
                step = future.result(timeout=0.1)
                break
            except TimeoutError:
                waits += 1
                assert waits < 100
        assert not step.mask.any()
        assert pool.restarts() == 4


def test_done_detects_a_lost_worker_and_never_hangs(tmp_path: Path) -> None:
    kwargs = {"fault": "kill", "at": 2, "once": str(tmp_path / "done"), "lengths": [100]}
    with EnvPool("counting:make", 2, 2, kwargs=kwargs) as pool:
        pool.reset()
        masks = []
        for _ in range(4):
            future = pool.step(0, ZEROS)
            deadline = time.monotonic() + 10
            while not future.done():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            masks.append(future.result(timeout=0).mask.tolist())
        assert sorted(map(tuple, np.array(masks).T.tolist())) == [(True, False, True, True), (True,) * 4]
        assert pool.restarts() == 1


def test_overdue_step_counts_as_done(tmp_path: Path) -> None:
    kwargs = {"fault": "sleep", "at": 1, "once": str(tmp_path / "done")}
    with EnvPool("counting:make", 1, 2, kwargs=kwargs, step_timeout=0.3) as pool:
        pool.reset()
        future = pool.step(0, ZEROS)
        deadline = time.monotonic() + 10
        while not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not future.result().mask.any()


def test_envs_of_a_killed_process_restart() -> None:
    with EnvPool("counting:make", 2, 4, 2, kwargs={"lengths": [1000]}) as pool:
        pool.reset()
        actions = np.zeros(4, np.int64)
        for _ in range(5):
            futures = [pool.step(batch, actions) for batch in range(2)]
            steps = [copied(future.result()) for future in futures]
        victim = pool._envs._worker_pool.workers[0].pid
        os.kill(victim, signal.SIGKILL)
        for _ in range(3):
            futures = [pool.step(batch, actions) for batch in range(2)]
            steps = [copied(future.result()) for future in futures]
        assert pool.restarts() == 4
        for batch in range(2):  # the first two of 4 envs were lost and have restarted
            assert steps[batch][4].all()
            assert (steps[batch][0][2:, 2] == 8).all()
            assert (steps[batch][0][:2, 2] < 8).all()


def test_result_raises_the_error_of_an_env() -> None:
    with EnvPool("counting:make", 1, 2, kwargs={"fault": "nan", "at": 2}) as pool:
        pool.reset()
        pool.step(0, ZEROS).result()
        with pytest.raises(EnvError, match=r"env 0 of counting:make \(seed \d+, step 2 of its episode 1\)"):
            pool.step(0, ZEROS).result()
    with EnvPool("counting:make", 1, 1, kwargs={"fault": "os._exit", "at": 1}, max_worker_restarts=1) as pool:
        pool.reset()
        with pytest.raises(WorkerError, match="exited with code 3, more than 1 times"):
            step_until_it_fails(pool)


def step_until_it_fails(pool: EnvPool) -> None:
    for _ in range(9):
        pool.step(0, ZEROS[:1]).result()


def test_thousands_of_envs_created_while_threads_run() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with EnvPool("counting:make", 2, 512, 8, kwargs={"lengths": [1]}) as pool:
            actions = np.zeros(512, np.int64)
            for t in range(3):
                futures = [pool.step(batch, actions) for batch in range(8)]
                for future in futures:
                    assert (future.result().obs[:, 2] == t % 2).all()
            assert len(pool.episodes()) == 4096
    finally:
        stop.set()
        thread.join()
