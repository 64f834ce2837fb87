"""Env workers that are killed, hang or fail at any moment: rows stay correct, and no process hangs or remains."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import prestarted
import psutil
import pytest
from processes import is_alive

from remuda.core import Step, derive_seed
from remuda.envs import PooledEnvs, resolve
from remuda.errors import EnvSpecError, Interrupted, WorkerError
from remuda.processes import fork_server as forkserver
from remuda.processes import worker_pool
from remuda.processes.requests import ON_LINK

HERE = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before, fds = _processes(), _descriptors()
    yield
    gc.collect()
    assert _processes() == before
    assert _descriptors() == fds


def _processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _descriptors() -> list[str]:
    """Return the targets of the open descriptors, except the one that is opened for listing them."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return sorted(names)


def pool(num_envs: int = 4, num_workers: int = 2, slots: int = 1, **options: Any) -> PooledEnvs:
    kwargs = {
        name: options.pop(name) for name in ("fault", "at", "once", "only", "lengths", "chatter") if name in options
    }
    return PooledEnvs(resolve("counting:make", kwargs), num_envs, num_workers, slots, **options)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes the forks with these numbers fail."""

    def refuse(numbers: str) -> None:
        monkeypatch.setenv("SCARCE_FORKS", numbers)
        monkeypatch.setattr(worker_pool, "ForkServer", lambda module: forkserver.ForkServer("scarce_forks"))

    return refuse


def test_fork_that_fails_is_tried_again(scarce: Callable[[str], None]) -> None:
    """The other workers are not replaced."""
    scarce("3 4")
    with contextlib.closing(pool()) as envs:
        envs.reset(0)
        step_often(envs, 3)
        first, second = (worker.pid for worker in envs._worker_pool.workers)
        os.kill(first, signal.SIGKILL)
        step_often(envs, 20)
        assert envs._worker_pool.workers[0].pid != first
        assert envs._worker_pool.workers[1].pid == second


def test_system_that_refuses_all_forks_is_reported(scarce: Callable[[str], None]) -> None:
    scarce(" ".join(map(str, range(2, 100))))
    with pytest.raises(WorkerError, match=r"worker 1 cannot be started, tried 4 times .*: allow more processes"):
        pool(max_worker_restarts=3)


def step_once(envs: PooledEnvs) -> tuple[int, Any]:
    slot, step = envs.recv()
    step = Step(*map(np.array, step))  # its arrays are valid until the next send
    envs.send(slot, np.zeros(envs.num_envs // envs.num_slots, np.int64))
    return slot, step


def step_often(envs: PooledEnvs, times: int) -> None:
    for _ in range(times):
        step_once(envs)


def kill_often(envs: PooledEnvs, index: int, times: int) -> None:
    for _ in range(times):
        os.kill(pids(envs)[index], signal.SIGKILL)
        step_often(envs, 3)


def kill_and_wait(pid: int) -> None:
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pids(envs: PooledEnvs) -> list[int]:
    return [worker.pid for worker in envs._worker_pool.workers]


def check_rows(previous: Any, step: Any) -> None:
    """Check that each row continues its episode by one step, begins one, or is the reset row of a rebuilt env."""
    for before, after, mask, ended in zip(previous[0], step.obs, step.mask, previous[1], strict=True):
        if mask:
            assert not ended
            assert after.tolist() == [before[0], before[1], before[2] + 1]
        else:
            assert after[2] == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_workers_killed_at_random_moments(slots: int) -> None:
    rng = random.Random(slots)
    with pool(4, 2, slots, lengths=[7, 4]) as envs:
        envs.reset(1)
        previous: list[Any] = [None, None]
        for kill in range(6):
            for _ in range(rng.randrange(4, 14)):
                slot, step = step_once(envs)
                if previous[slot] is not None:
                    check_rows(previous[slot], step)
                previous[slot] = step.obs.copy(), step.terminated | step.truncated
            time.sleep(rng.choice([0.0, 0.0003, 0.002]))
            os.kill(pids(envs)[kill % 2], signal.SIGKILL)
        for _ in range(20):
            slot, step = step_once(envs)
            check_rows(previous[slot], step)
            previous[slot] = step.obs.copy(), step.terminated | step.truncated
        assert envs.restarts() == 6 * 2  # every worker has two envs


def test_only_the_envs_of_the_lost_worker_restart_with_a_new_seed() -> None:
    with pool(4, 2, lengths=[1000]) as envs:
        envs.reset(9)
        step_often(envs, 5)
        envs.recv()
        kill_and_wait(pids(envs)[1])
        envs.send(0, np.zeros(4, np.int64))
        _, step = envs.recv()
        assert step.mask.tolist() == [True, True, False, False]
        assert step.obs[:2, 2].tolist() == [6, 6]
        expected = [[derive_seed(9, index, 1) % 1000, 1, 0] for index in (2, 3)]
        assert step.obs[2:].tolist() == expected
        assert step.reward[2:].tolist() == [0, 0]
        envs.send(0, np.zeros(4, np.int64))
        _, step = envs.recv()
        assert step.mask.all()
        assert step.obs[:, 2].tolist() == [7, 7, 1, 1]


def test_answers_written_before_the_worker_died_are_kept() -> None:
    with pool(4, 1, slots=2, lengths=[3]) as envs:
        envs.reset(1)
        for _ in range(6):
            step_once(envs)  # the next answer of both slots ends their episodes
        deadline = time.monotonic() + 5
        while envs._requests.unanswered(0):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill_and_wait(pids(envs)[0])
        for _ in range(2):
            _, step = envs.recv()
            assert step.terminated.all()
            assert step.obs[:, 2].tolist() == [3, 3]
        assert [episode.env for episode in envs.episodes()] == [0, 1, 2, 3]
        assert envs.restarts() == 0  # no request was sent to the dead worker yet
        envs.send(0, np.zeros(2, np.int64))
        _, step = envs.recv()
        assert not step.mask.any()
        assert envs.restarts() == 4


def test_stats_of_a_finished_slot_survive_the_loss_of_another_worker() -> None:
    # There are two slots of two envs. Worker 0 has envs 0 and 2, worker 1 has 1 and 3. Env 0 hangs in its last step.
    hung = {"fault": "sleep", "at": 3, "only": derive_seed(1, 0, 0) % 1000}
    with pool(4, 2, slots=2, lengths=[3], step_timeout=0.4, **hung) as envs:
        envs.reset(1)
        step_often(envs, 6)
        deadline = time.monotonic() + 5
        while envs._requests.unanswered(1):  # until worker 1 has ended the episodes of both its envs
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill_and_wait(pids(envs)[1])
        slot, step = envs.recv()
        assert (slot, step.mask.tolist(), step.obs[:, 2].tolist()) == (0, [False, True], [0, 3])
        assert [episode.env for episode in envs.episodes()] == [1]
        slot, step = envs.recv()
        assert (slot, step.mask.tolist(), step.obs[:, 2].tolist()) == (1, [False, True], [0, 3])
        assert [episode.env for episode in envs.episodes()] == [3]


@pytest.mark.parametrize("chatter", [0, 300])  # 300 numbers exceed the shared memory and go through the link
def test_evaluation_plays_every_seed_once_although_its_worker_is_lost(chatter: int, tmp_path: Path) -> None:
    hung = {"fault": "sleep", "at": 2, "once": str(tmp_path / "done"), "only": 21}  # env 1, the only one of its slot
    seeds = [[11, 12], [21, 22]]
    with pool(2, 1, slots=2, lengths=[2], seeds=seeds, chatter=chatter, step_timeout=0.4, **hung) as envs:
        envs.reset(1)
        step_often(envs, 4)
        assert envs.recv(1)[1].mask.tolist() == [False]  # replaced before the end in slot 0 was received
        _, step = envs.recv(0)
        assert (step.terminated.tolist(), step.obs[0, 0]) == ([True], 11)
        markers = []
        for slot in (0, 1):
            envs.send(slot, np.zeros(1, np.int64))
        for _ in range(14):
            slot, step = step_once(envs)
            markers.append((slot, int(step.obs[0, 0])))
        episodes = envs.episodes()
    assert [marker for slot, marker in markers if slot == 0] == [12] * 7
    assert [marker for slot, marker in markers if slot == 1] == [21] * 2 + [22] * 5
    assert sorted(episode.env for episode in episodes) == [0, 0, 1, 1]
    assert all(len(episode.values) == 7 + chatter for episode in episodes)


def test_stats_of_a_request_that_was_never_finished_are_discarded(tmp_path: Path) -> None:
    with pool(2, 1, fault="sleep", at=2, once=str(tmp_path / "done"), step_timeout=0.3) as envs:
        envs.reset(1)
        step_often(envs, 1)
        envs.recv()
        envs.send(0, np.zeros(2, np.int64))
        # The worker hangs. Simulate that it died after sending its statistics and before marking the request done.
        envs._requests._stats_of[0][0] = envs._number
        envs._requests._stats_size[0][0] = ON_LINK
        news = b"\0" + msgspec.msgpack.encode([[[0, {"ep_len": 2.0}]], []])
        envs._worker_pool.workers[0].inbox.append({"slot": 0, "number": envs._number, "news": news})
        _, step = envs.recv()
        assert not step.mask.any()
        assert envs.episodes() == []
        assert envs._worker_pool.lost() == []  # those statistics were not waited for
        assert envs._worker_pool.workers[0].inbox == []


def test_worker_lost_while_its_envs_are_held_waits_for_renew_too() -> None:
    with pool(4, 2, lengths=[3, 50]) as envs:
        envs.reset(9)
        for t in range(6):  # all episodes end after 3 steps, and their envs wait
            envs.recv()
            if t == 4:
                kill_and_wait(pids(envs)[1])
            envs.send(0, np.zeros(4, np.int64), hold=True)
        _, step = envs.recv()
        assert not step.mask.any()
        assert step.obs[:, 2].tolist() == [3, 3, 3, 3]
        assert envs.restarts() == 2
        envs.renew(0)
        _, step = envs.recv()
        seeds = [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert step.obs[:, 0].tolist() == [derive_seed(9, *keys) % 1000 for keys in seeds]
        assert step.obs[:, 1:].tolist() == [[2, 0], [2, 0], [1, 0], [1, 0]]
        envs.send(0, np.zeros(4, np.int64), hold=True)
        _, step = envs.recv()
        assert step.mask.all()
        assert step.obs[:, 2].tolist() == [1, 1, 1, 1]
        os.kill(pids(envs)[0], signal.SIGKILL)
        envs.renew(0)  # the lost envs restart, the others continue
        _, step = envs.recv()
        assert step.obs[:, 2].tolist() == [0, 0, 1, 1]


def test_all_workers_killed_at_once() -> None:
    with pool(6, 3) as envs:
        envs.reset(1)
        step_once(envs)
        old = pids(envs)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        step_often(envs, 5)
        assert not set(old) & set(pids(envs))
        assert envs.restarts() == 6


def test_killed_fork_server_ends_its_workers_and_all_are_replaced() -> None:
    with pool() as envs:
        envs.reset(1)
        step_once(envs)
        assert envs._worker_pool._server is not None
        old = [envs._worker_pool._server.pid, *pids(envs)]
        dying = [psutil.Process(pid) for pid in old]
        os.kill(old[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(map(is_alive, dying)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        step_often(envs, 5)
        assert not set(old) & {envs._worker_pool._server.pid, *pids(envs)}
        assert envs.restarts() == 4


def test_worker_killed_more_often_than_its_restart_budget_raises() -> None:
    with pool(max_worker_restarts=3) as envs:
        envs.reset(1)
        kill_often(envs, 1, 3)
        sentence = r"worker 1 \(pid \d+\) was killed by SIGKILL, more than 3 times within 60 s: .*max_worker_restarts"
        with pytest.raises(WorkerError, match=sentence):
            kill_often(envs, 1, 1)


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("kill", "was killed by SIGKILL"),
        ("os._exit", "exited with code 3"),
        ("sleep", "was silent for 0.4 s"),
        ("hold", "was silent for 0.4 s"),
    ],
)
def test_env_that_ends_or_hangs_its_worker(
    fault: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pool(fault=fault, at=3, once=str(tmp_path / "done"), lengths=[100], step_timeout=0.4) as envs:
        envs.reset(1)
        masks = []
        for _ in range(8):
            _, step = step_once(envs)
            masks.append(step.mask)
        assert envs.restarts() == 2
    assert (~np.array(masks)[1:]).sum() == 2  # one reset row for each env of that worker, and no others
    assert how in caplog.text


def test_env_that_ends_its_worker_while_being_built(tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text("import os\ndef make():\n    os._exit(5)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(WorkerError, match=r"exited with code 5, more than 2 times within 60 s"):
            PooledEnvs(resolve("deadly:make"), 1, 1, max_worker_restarts=2)
    finally:
        sys.path.remove(str(tmp_path))


def test_worker_that_hangs_repeatedly_raises_even_if_it_is_rarely_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_pool, "WINDOW_SECONDS", 0.1)  # shorter than the time limit of a step
    spec = resolve("counting:make", {"fault": "sleep", "at": 1})
    with PooledEnvs(spec, 1, 1, step_timeout=0.3, max_worker_restarts=2) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerError, match="more than 2 times without a step in between"):
            step_until_it_fails(envs)


def step_until_it_fails(envs: PooledEnvs) -> None:
    for _ in range(20):
        slot, _ = envs.recv()
        envs.send(slot, np.zeros(1, np.int64))


def test_building_has_its_own_time_limit(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ndef make():\n    time.sleep(60)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(WorkerError, match=r"was silent for 0.2 s while building its envs, more than 1 times"):
            PooledEnvs(resolve("sleepy:make"), 1, 1, build_timeout=0.2, max_worker_restarts=1)
    finally:
        sys.path.remove(str(tmp_path))


def test_env_that_cannot_be_built_in_a_worker_raises_a_spec_error() -> None:
    with pytest.raises(EnvSpecError, match="OSError: no display") as caught:
        PooledEnvs(resolve("counting:make_failing"), 4, 2)
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.parametrize("fault", ["kill", "sleep"])
def test_a_worker_lost_while_resetting(fault: str, tmp_path: Path) -> None:
    with pool(fault=fault, at=0, once=str(tmp_path / "done"), build_timeout=1.0) as envs:
        assert envs.reset(1, warm_up=20) > 0
        _, step = step_once(envs)
        assert not step.mask.any()
        step_often(envs, 4)
        assert envs.restarts() == 2


def test_a_wait_can_be_interrupted(tmp_path: Path) -> None:
    with pool(fault="sleep", at=2, once=str(tmp_path / "done")) as envs:
        envs.reset(1)
        stop = threading.Event()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        envs.should_stop = stop.is_set
        with pytest.raises(Interrupted):
            step_often(envs, 5)
        timer.join()


def test_workers_and_fork_server_ignore_ctrl_c() -> None:
    with pool() as envs:
        envs.reset(1)
        assert envs._worker_pool._server is not None
        for pid in (envs._worker_pool._server.pid, *pids(envs)):
            os.kill(pid, signal.SIGINT)
        step_often(envs, 5)
        assert envs.restarts() == 0


def test_closing_is_quick_and_may_be_repeated(tmp_path: Path) -> None:
    envs = pool(fault="hold", at=1, once=str(tmp_path / "done"))
    envs.reset(1)
    step_once(envs)  # now a worker hangs and holds the GIL
    envs.close()
    envs.close()


@pytest.mark.usefixtures("fresh_servers")
def test_workers_use_little_memory_and_do_not_import_torch() -> None:
    with PooledEnvs(resolve("CartPole-v1"), 8, 2) as envs:
        envs.reset(1)
        for _ in range(20):
            slot, _ = envs.recv()
            envs.send(slot, np.zeros(8, np.int64))
        found = envs.inspect_workers()
        assert [each["pid"] for each in found] == pids(envs)
        assert not any(each["torch"] for each in found)
        for each in found:
            assert psutil.Process(each["pid"]).memory_full_info().uss < 60e6
            assert each["peak_rss"] < 200e6


ORPHANS = """
import os, sys, time, threading
import numpy
from remuda.envs import PooledEnvs, resolve

def start():
    envs = PooledEnvs(resolve("counting:make", {"fault": "hold", "at": 2, "once": sys.argv[1]}), 4, 2)
    envs.reset(1)
    for _ in range(2):
        slot, step = envs.recv()
        envs.send(slot, numpy.zeros(4, numpy.int64))
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(3)  # keeps the parent's end of every link open
        os._exit(0)
    print(envs._worker_pool._server.pid, *(worker.pid for worker in envs._worker_pool.workers), flush=True)
    time.sleep(60)

if sys.argv[2] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
"""


@pytest.mark.parametrize("how", ["main", "thread", "fork"])
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path, how: str) -> None:
    path = f"{HERE / 'src'}:{HERE / 'tests'}"
    script = prestarted.Popen(
        [sys.executable, "-c", ORPHANS, str(tmp_path / "done"), how],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": path},
    )
    assert script.stdout is not None
    with script.stdout:
        orphans = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
        assert len(orphans) == 3
        script.kill()
        script.wait()
    deadline = time.monotonic() + 2
    while any(map(is_alive, orphans)):
        assert time.monotonic() < deadline, orphans
        time.sleep(0.01)


def test_pool_outlives_the_thread_that_created_it() -> None:
    made: list[PooledEnvs] = []
    thread = threading.Thread(target=lambda: made.append(pool()))
    thread.start()
    thread.join()
    with made[0] as envs:
        envs.reset(1)
        step_often(envs, 5)
        assert envs.restarts() == 0


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2])
def test_no_wake_up_is_lost(slots: int) -> None:
    """A process that misses a wake-up sleeps for 0.2 s or more."""
    late = 0
    with pool(2 * slots, 2, slots, lengths=[10**9]) as envs:
        envs.reset(1)
        for moment in range(300_000):
            start = time.perf_counter()
            slot, _ = envs.recv()
            late += time.perf_counter() - start > 0.19
            sum(range(moment % 601))  # so that requests arrive before, while and after workers fall asleep
            envs.send(slot, np.zeros(2, np.int64))
        assert envs.restarts() == 0
    assert late <= 3  # a busy machine may delay a few of them
