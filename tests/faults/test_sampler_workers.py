"""Sampler workers that are killed, hang or fail at any moment: rollouts stay complete, no process hangs or remains.

A fork server that has torch loaded takes seconds to start, so all tests share one, and the last test kills it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import prestarted
import psutil
import pytest
import torch
from counting_agents import CountingRNN
from processes import all_gone, find, is_alive, wait_for

from remuda.core import derive_seed
from remuda.data import Rollout
from remuda.envs import LocalEnvs, make_envs, resolve
from remuda.errors import EnvError, EnvSpecError, Interrupted, WorkerError
from remuda.learning.weights import LocalWeights, SharedWeights
from remuda.processes import worker_pool
from remuda.processes.fork_server import ForkServer
from remuda.sampling.sampler import EnvSampler
from remuda.sampling.worker_sampler import WorkerSampler

HERE = Path(__file__).parents[2]
SEED, LENGTHS = 11, (7, 4, 9)
torch.set_num_threads(1)  # on a busy machine, more threads are many times slower for arrays this small


class LastingServer(ForkServer):
    """A fork server that outlives the samplers that use it."""

    def close(self) -> None:
        """Do nothing: `end` closes the server."""

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def server() -> Iterator[LastingServer]:
    lasting = LastingServer("counting_agents")
    yield lasting
    lasting.end()


@pytest.fixture
def one_server(server: LastingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "ForkServer", lambda module: server)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if "one_server" in request.fixturenames:
        request.getfixturevalue("one_server")
    gc.collect()
    before, fds = processes(), descriptors()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while processes() != before:  # the shared server reaps its children with some delay
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert descriptors() == fds


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def descriptors() -> list[str]:
    """Return the targets of the open descriptors, except the one that is opened for listing them."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return sorted(names)


@contextlib.contextmanager
def acting(
    num_envs: int = 4, workers: int = 2, T: int = 6, is_padded: bool = False, **options: Any
) -> Iterator[WorkerSampler]:
    """Yield a sampler. The options named below are passed to the env, all others to the sampler."""
    names = ("fault", "at", "once", "only", "lengths", "raise_step", "raise_reset")
    kwargs = {"lengths": list(LENGTHS), **{name: options.pop(name) for name in names if name in options}}
    spec, agent = resolve(*options.pop("env", ("counting:make", kwargs))), CountingRNN()
    orders = [
        {"spec": spec.to_json(), "gamma": 0.9, "wait_reset": is_padded, "first": first, "last": last}
        for first, last in pairwise(worker * num_envs // workers for worker in range(workers + 1))
    ]
    observation = make_envs(resolve("counting:make"), 1).observation
    options = {"max_worker_restarts": 1000, **options}
    with contextlib.closing(SharedWeights(agent, version=7)) as weights, contextlib.closing(
        WorkerSampler("counting_agents", orders, agent, observation, weights, T, SEED, **options)
    ) as sampler:  # fmt: skip
        yield sampler


def pids(sampler: WorkerSampler) -> list[int]:
    return [worker.pid for worker in sampler._worker_pool.workers]


def kill_and_wait(pid: int) -> None:
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Hand:
    """Model of one env and of its agent's memory, which computes the expected rows."""

    def __init__(self, index: int) -> None:
        self.index, self.times_lost = index, 0
        self.renew()

    def renew(self) -> None:
        self.marker = derive_seed(SEED, self.index, self.times_lost) % 1000
        self.episode, self.step, self.rows, self.total = 1, 0, 0, 0.0
        self.is_over = self.is_lost = False

    def lose(self, times_lost: int) -> None:
        self.times_lost, self.is_lost = times_lost, True

    @property
    def obs(self) -> list[float]:
        return [float(self.marker), float(self.episode), float(self.step)]

    @property
    def value(self) -> float:
        return 100 * self.rows + self.total / 2 + self.step

    def row(self) -> tuple[Any, ...]:
        """Return the next row: obs, action, reward, discount, mask, value."""
        obs, value, action = self.obs, self.value, self.rows % 4
        if self.is_lost or self.is_over:
            if self.is_lost:
                self.renew()
            else:
                self.episode, self.step, self.rows, self.total, self.is_over = self.episode + 1, 0, 0, 0.0, False
            return obs, action, 0.0, 1.0, False, value
        self.rows, self.total = self.rows + 1, self.total / 2 + self.step
        self.step += 1
        self.is_over = self.step == LENGTHS[(self.episode - 1) % len(LENGTHS)]
        discount = 0.0 if self.is_over and self.episode % 2 == 1 else 1.0
        return obs, action, 100 * self.episode + self.step + action / 4, discount, True, value


def check_column(rollout: Rollout, b: int, hand: Hand) -> None:
    steps = rollout.steps
    assert (rollout.state.rows[b], rollout.state.total[b]) == (hand.rows, hand.total)
    columns = zip(*(hand.row() for _ in range(steps.mask.shape[0])), strict=True)
    found = (steps.obs, steps.action, steps.reward, steps.discount, steps.mask, steps.policy.value)
    for array, expected in zip(found, columns, strict=True):
        assert array[:, b].tolist() == list(expected)
    assert rollout.next_obs[b].tolist() == hand.obs
    assert float(rollout.last_value[b]) == hand.value


class Witness:
    """Collects rollouts and compares every row; a worker's columns restart exactly when it was replaced."""

    def __init__(self, sampler: WorkerSampler) -> None:
        self.sampler, self.replaced = sampler, 0
        self.hands = [Hand(index) for index in range(sampler.num_envs)]
        sampler.reset(SEED)

    def collect(self) -> Rollout:
        before = pids(self.sampler)
        rollout = self.sampler.collect()
        for worker, pid in zip(self.sampler._worker_pool.workers, before, strict=True):
            for b in range(worker.blueprint["first"], worker.blueprint["last"]):
                if worker.pid != pid:
                    self.hands[b].lose(self.sampler._worker_stats.lost[worker.index])
                    self.replaced += 1
                check_column(rollout, b, self.hands[b])
        assert rollout.steps.version.unique().tolist() == [7]
        return rollout


# --- R1, R2: killed -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_server")
def test_worker_killed_between_rollouts() -> None:
    """Only its own columns restart, with one reset row that holds the last observation; no rollout is lost."""
    with acting() as sampler:
        witness = Witness(sampler)
        for _ in range(2):
            last = witness.collect().next_obs.clone()
        old = pids(sampler)
        kill_and_wait(old[1])
        rollout = witness.collect()
        assert pids(sampler)[0] == old[0]
        assert pids(sampler)[1] != old[1]
        mask, obs, discount = rollout.steps.mask, rollout.steps.obs, rollout.steps.discount
        assert mask[0, 2:].tolist() == [False, False]
        assert mask[1:, 2:].all()
        assert torch.equal(obs[0], last), "row 0 must hold the observations that followed the last rollout"
        assert discount[0, 2:].tolist() == [1.0, 1.0], "a restart must look like a truncation"
        assert obs[1, 2:].tolist() == [[derive_seed(SEED, index, 1) % 1000, 1, 0] for index in (2, 3)]
        assert sampler.restarts() == 2
        for _ in range(4):
            witness.collect()
        kill_and_wait(pids(sampler)[1])
        assert witness.collect().steps.obs[1, 2, 0] == derive_seed(SEED, 2, 2) % 1000, "a restart has a new seed"
        assert sampler.restarts() == 4


@pytest.mark.usefixtures("one_server")
def test_workers_killed_twenty_times_at_random_moments() -> None:
    """Kill workers between and during calls of `collect`, which take about 20 ms."""
    rng = random.Random(3)
    with acting(num_envs=5, workers=3, T=60) as sampler:
        witness = Witness(sampler)
        witness.collect()
        for kill in range(20):
            victim = pids(sampler)[kill % 3]
            if kill % 4 == 0:
                os.kill(victim, signal.SIGKILL)
                witness.collect()
            else:
                timer = threading.Timer(rng.random() * 0.03, os.kill, (victim, signal.SIGKILL))
                timer.start()
                witness.collect()
                timer.join()
        for _ in range(2):
            witness.collect()
        assert sum(sampler._worker_stats.lost) == 20, "each loss must be counted once"
        assert sampler.restarts() == witness.replaced
        assert witness.replaced >= 20


@pytest.mark.usefixtures("one_server")
def test_all_workers_killed_at_once() -> None:
    with acting(num_envs=6, workers=3) as sampler:
        witness = Witness(sampler)
        witness.collect()
        old = pids(sampler)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        rollout = witness.collect()
        assert not set(old) & set(pids(sampler))
        assert rollout.steps.mask[0].tolist() == [False] * 6
        assert sampler.restarts() == 6
        witness.collect()


def first_row(rollouts_before: int, rollouts_after: int, is_padded: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the mask and the observations of row 0 of the last rollout.

    Worker 1 of 2 is killed after `rollouts_before` rollouts; `rollouts_after` are collected after that.
    """
    with acting(is_padded=is_padded, lengths=[20]) as sampler:
        sampler.reset(SEED)
        for _ in range(rollouts_before):
            sampler.collect()
        kill_and_wait(pids(sampler)[1])
        for _ in range(rollouts_after):
            steps = sampler.collect().steps
        return steps.mask[0].tolist(), steps.obs[0].tolist()


@pytest.mark.usefixtures("one_server")
def test_worker_killed_before_the_first_rollout() -> None:
    mask, obs = first_row(rollouts_before=0, rollouts_after=1)
    assert mask == [True, True, False, False]
    assert obs == [[derive_seed(SEED, index, 0) % 1000, 1, 0] for index in range(4)]


@pytest.mark.usefixtures("one_server")
def test_worker_lost_after_writing_the_end_of_an_unreported_rollout() -> None:
    """Its columns are sampled again, and must begin where the rollout before them ended."""
    with acting(lengths=[20]) as sampler:
        sampler.reset(SEED)
        rollout = sampler.collect()
        obs, rows = rollout.next_obs.clone(), sampler._buffers.next_state.rows.clone()
        kill_and_wait(pids(sampler)[1])
        sampler._buffers.next_obs[2:] = 99.0
        sampler._buffers.next_state[2:] = 99.0
        rollout = sampler.collect()
        assert rollout.steps.mask[0].tolist() == [True, True, False, False]
        assert torch.equal(rollout.steps.obs[0], obs)
        assert torch.equal(rollout.state.rows, rows)


@pytest.mark.usefixtures("one_server")
def test_reported_episodes_are_kept_and_lost_ones_are_not_invented() -> None:
    with acting(num_envs=2, workers=2, T=8, lengths=[8]) as sampler:
        sampler.reset(SEED)
        sampler.collect()  # both episodes end with the last row
        kill_and_wait(pids(sampler)[1])
        assert [episode.env for episode in sampler.episodes()] == [0, 1]
        sampler.collect()
        assert sampler.episodes() == []
        sampler.collect()
        assert [(episode.env, episode.values["ep_len"]) for episode in sampler.episodes()] == [(0, 8.0), (1, 8.0)]


@pytest.mark.usefixtures("one_server")
def test_worker_killed_repeatedly_ends_in_one_error_that_names_it() -> None:
    with acting(max_worker_restarts=2) as sampler:
        witness = Witness(sampler)
        witness.collect()
        sentence = r"^worker 1 \(pid \d+\) was killed by SIGKILL, more than 2 times within 60 s: .*\.$"
        for _ in range(2):
            kill_and_wait(pids(sampler)[1])
            witness.collect()
        kill_and_wait(pids(sampler)[1])
        with pytest.raises(WorkerError, match=sentence):
            sampler.collect()
        assert sampler._worker_stats.lost[1] == 3
        assert sampler._worker_stats.lost[0] == 0


@pytest.mark.usefixtures("one_server")
def test_worker_that_dies_in_every_rollout_ends_in_one_error() -> None:
    with acting(num_envs=2, workers=1, fault="kill", at=3, max_worker_restarts=3) as sampler:
        sampler.reset(SEED)
        with pytest.raises(WorkerError, match=r"worker 0 .* was killed by SIGKILL, more than 3 times"):
            sampler.collect()


@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize("fault", ["kill", "sys.exit", "os._exit"])
def test_worker_that_ends_in_a_step_or_reset_of_its_env(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sys.exit is a failure of the env alone; the other faults end the worker."""
    with acting(fault=fault, at=4, once=str(tmp_path / "step")) as sampler:
        sampler.reset(SEED)
        for _ in range(3):
            assert int((~sampler.collect().steps.mask).sum()) <= 4
        assert sampler.restarts() == (1 if fault == "sys.exit" else 2)
    with acting(fault=fault, at=0, once=str(tmp_path / "reset")) as sampler:
        sampler.reset(SEED)
        assert sampler.collect().steps.mask.all()
        assert sampler.restarts() == (1 if fault == "sys.exit" else 2)


@pytest.mark.usefixtures("one_server")
def test_worker_killed_while_rollouts_are_padded() -> None:
    mask, _ = first_row(rollouts_before=1, rollouts_after=2, is_padded=True)
    assert mask == [True] * 4


def test_env_that_raises_while_rollouts_are_padded(tmp_path: Path) -> None:
    """Padding works in the same way with local envs and central inference."""
    spec = resolve("counting:make", {"lengths": [20], "fault": "raise", "at": 2, "once": str(tmp_path / "done")})
    sampler = EnvSampler(LocalEnvs(spec, 1), CountingRNN(), LocalWeights(7), 4, SEED, wait_reset=True)
    sampler.reset(SEED)
    sampler.collect()
    mask = sampler.collect().steps.mask[:, 0].tolist()
    sampler.close()
    assert mask == [True] * 4


# --- R3, R4: raising and hanging ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_server")
def test_env_that_raises_is_rebuilt_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = derive_seed(SEED, 2, 0) % 1000
    with acting(fault="raise", at=3, only=marker, lengths=[50]) as sampler, caplog.at_level(logging.WARNING):
        sampler.reset(SEED)
        old = pids(sampler)
        rollout = sampler.collect()
        assert rollout.steps.mask.tolist() == [[True] * 4] * 2 + [[True, True, False, True]] + [[True] * 4] * 3
        assert rollout.steps.obs[3, 2].tolist() == [derive_seed(SEED, 2, 1) % 1000, 1, 0]
        assert sampler.restarts() == 1
        assert pids(sampler) == old
    (notice,) = [record.getMessage() for record in caplog.records if record.name == "remuda.sampling"]
    seed = derive_seed(SEED, 2, 0)
    assert re.fullmatch(
        rf"env 2 of counting:make \(seed {seed}, step 2 of its episode 1\) raised RuntimeError: told to fail "
        r"\(.*counting\.py:\d+, in misbehave\); it was rebuilt \(restart 1\)\.",
        notice,
    )


@pytest.mark.usefixtures("one_server")
def test_only_few_of_many_restarts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with acting(raise_step=0.1, T=100) as sampler, caplog.at_level(logging.WARNING):
        sampler.reset(SEED)
        for _ in range(2):
            sampler.collect()
        restarts = sampler.restarts()
    told = [record for record in caplog.records if record.name == "remuda.sampling"]
    assert restarts > 30
    assert len(told) == restarts.bit_length(), "the 1st, 2nd, 4th, 8th ... must be logged"


@pytest.mark.usefixtures("one_server")
def test_restarts_are_not_counted_again_after_resume() -> None:
    marker = derive_seed(SEED, 2, 0) % 1000
    with acting(fault="raise", at=3, only=marker, lengths=[50]) as sampler:
        sampler.reset(SEED)
        sampler.collect()
        kill_and_wait(pids(sampler)[0])
        sampler.collect()
        saved, before = sampler.get_state(), sampler.restarts()
        assert before == 3, "one env that raised, and two of a lost worker"
    with acting(lengths=[50]) as sampler:
        sampler.set_state(saved)
        assert sampler.restarts() == before
        sampler.collect()
        assert sampler.restarts() == before


@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize("fault", ["sleep", "hold"])
def test_a_worker_that_hangs_is_replaced(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with acting(fault=fault, at=9, once=str(tmp_path / "done"), step_timeout=1.0) as sampler:
        sampler.reset(SEED)
        sampler.collect()
        sampler.collect()  # the env hangs for ever, so this ends only because of the time limit
        assert sampler.restarts() == 2
        assert len(set(pids(sampler))) == 2
        sampler.collect()
    assert "was silent for 1 s while it was asked to collect; it is replaced." in caplog.text


@pytest.mark.usefixtures("one_server")
def test_worker_that_always_hangs_ends_in_one_error_that_names_it() -> None:
    hung = {"fault": "sleep", "at": 2, "step_timeout": 0.4, "max_worker_restarts": 1}
    with acting(num_envs=2, workers=1, **hung) as sampler:
        sampler.reset(SEED)
        with pytest.raises(
            WorkerError, match=r"worker 0 \(pid \d+\) was silent for 0.4 s while it was asked to collect, more than 1"
        ):
            sampler.collect()


@pytest.mark.usefixtures("one_server")
def test_worker_that_hangs_once_per_minute_without_progress_ends_in_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the usual limit of 60 s there is one loss per minute, so losses without a step in between are counted."""
    monkeypatch.setattr(worker_pool, "WINDOW_SECONDS", 0.1)
    assert "more than 2 times without a step in between" in end_of_hanging(seconds=60)


def end_of_hanging(seconds: float) -> str:
    deadline = time.monotonic() + seconds
    hung = {"fault": "sleep", "at": 2, "step_timeout": 0.2, "max_worker_restarts": 2}
    with acting(num_envs=1, workers=1, should_stop=lambda: time.monotonic() > deadline, **hung) as sampler:
        sampler.reset(SEED)
        try:
            sampler.collect()
        except (WorkerError, Interrupted) as error:
            return str(error)
        return "nothing"


@pytest.mark.usefixtures("one_server")
def test_hang_in_reset_has_the_time_limit_of_building(tmp_path: Path) -> None:
    with acting(fault="sleep", at=0, once=str(tmp_path / "done"), build_timeout=1.0) as sampler:
        sampler.reset(SEED)
        assert sampler.restarts() == 2
        assert sampler.collect().steps.mask.all()


@pytest.mark.usefixtures("one_server")
def test_long_rollout_does_not_exceed_the_step_timeout() -> None:
    """Busy workers report that they are alive: the limit is for a step, not for a rollout."""
    mock = {"observation": {"box": [3]}, "action": {"discrete": 4}, "seconds": 0.1, "wait": "sleep"}
    with acting(
        num_envs=1, workers=1, T=45, env=("Remuda/Mock-v0", mock), step_timeout=3.0, max_worker_restarts=1
    ) as sampler:
        sampler.reset(SEED)
        sampler.collect()
        assert sampler.restarts() == 0


# --- R5: data that violates its space -------------------------------------------------------------------------------

FORBIDDEN = {
    "nan": r"observation is nan at \[1\]",
    "infinite": r"observation is inf at \[2\]",
    "shape": r"observation has shape \(5,\), its space says \(3,\)",
    "complex": r"observation has dtype complex128, its space says float32",
    "nan reward": r"reward is nan",
}


@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize("fault", FORBIDDEN)
def test_data_that_violates_its_space_is_reported_before_learning(fault: str) -> None:
    only, seed = derive_seed(SEED, 3, 0) % 1000, derive_seed(SEED, 3, 0)
    with acting(fault=fault, at=5, only=only, lengths=[50]) as sampler:
        sampler.reset(SEED)
        with pytest.raises(EnvError) as caught:
            sampler.collect()
    text = str(caught.value)
    assert re.search(FORBIDDEN[fault], text), text
    assert text.startswith("env 3 of counting:make")
    assert f"(seed {seed}, step 5 of its episode 1)" in text
    assert "\n" not in text
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.usefixtures("one_server")
def test_env_that_cannot_be_built_raises_a_spec_error() -> None:
    with pytest.raises(EnvSpecError, match="OSError: no display") as caught, acting(env=("counting:make_failing",)):
        pass
    assert "Traceback" in caught.value.__notes__[0]


# --- R20, R21: stopping and closing ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_server")
def test_a_wait_can_be_interrupted(tmp_path: Path) -> None:
    stop = threading.Event()
    hung = {"fault": "sleep", "at": 8, "once": str(tmp_path / "done"), "step_timeout": 10_000.0}
    with acting(should_stop=stop.is_set, **hung) as sampler:
        sampler.reset(SEED)
        sampler.collect()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        with pytest.raises(Interrupted):
            sampler.collect()
        timer.join()


@pytest.mark.usefixtures("one_server")
def test_closing_may_be_repeated_and_does_not_wait_for_a_hung_worker(tmp_path: Path) -> None:
    """One worker hangs and holds the GIL; rollouts stay readable."""
    with acting(fault="hold", at=8, once=str(tmp_path / "done"), step_timeout=1.0) as sampler:
        sampler.reset(SEED)
        rollout = sampler.collect()
        for worker in sampler._worker_pool.workers:
            worker.send({"do": "collect", "row": 6})
        time.sleep(0.2)
        sampler.close()
        sampler.close()
        assert rollout.steps.mask.any()


ORPHANS = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_sampler_workers import SEED, acting, pids
with acting(fault="hold", at=8, once=sys.argv[1]) as sampler:
    sampler.reset(SEED)
    sampler.collect()
    print(sampler._worker_pool._server.pid, *pids(sampler), flush=True)
    sampler.collect()
"""


def test_a_killed_parent_leaves_no_orphan(tmp_path: Path) -> None:
    """The parent is killed in the middle of a rollout in which one worker hangs and holds the GIL."""
    script = prestarted.Popen(
        [sys.executable, "-c", ORPHANS, str(tmp_path / "done"), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{HERE / 'src'}:{HERE / 'tests'}"},
    )
    assert script.stdout is not None
    with script.stdout:
        orphans = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
        assert len(orphans) == 3
        deadline = time.monotonic() + 10
        while not (tmp_path / "done").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        script.kill()
        script.wait()
    deadline = time.monotonic() + 5
    while any(map(is_alive, orphans)):
        assert time.monotonic() < deadline, orphans
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.usefixtures("one_server")
def test_soak_of_kills() -> None:
    """Kill workers every few rollouts for 90 s: all rows are as computed, and no descriptors leak."""
    rng = random.Random(5)
    with acting(num_envs=6, workers=3, T=100) as sampler:
        witness = Witness(sampler)
        witness.collect()
        open_before = len(descriptors())
        end = time.monotonic() + 90
        while time.monotonic() < end:
            victims = rng.sample(pids(sampler), rng.choice([1, 1, 1, 2, 3]))
            timers = [threading.Timer(rng.random() * 0.05, _kill, (pid,)) for pid in victims]
            for timer in timers:
                timer.start()
            for _ in range(3):
                witness.collect()
            for timer in timers:
                timer.join()
        witness.collect()
        assert sampler.restarts() == witness.replaced > 100
        assert len(descriptors()) == open_before


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the worker was chosen twice
        os.kill(pid, signal.SIGKILL)


def test_killed_fork_server_ends_its_workers_and_all_are_replaced_and_closed(
    server: LastingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test must be the last: it kills the server that the others share. The sampler closes its replacement."""
    servers = [server]
    monkeypatch.setattr(worker_pool, "ForkServer", lambda module: servers.pop() if servers else ForkServer(module))
    with acting() as sampler:
        witness = Witness(sampler)
        witness.collect()
        assert sampler._worker_pool._server is not None
        everyone = [sampler._worker_pool._server.pid, *pids(sampler)]
        workers = [psutil.Process(pid) for pid in pids(sampler)]
        os.kill(everyone[0], signal.SIGKILL)
        deadline = time.monotonic() + 5
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        witness.collect()
        assert sampler.restarts() == 4
        witness.collect()
        assert type(sampler._worker_pool._server) is ForkServer
        everyone += [sampler._worker_pool._server.pid, *pids(sampler)]
        assert len(set(everyone)) == 6
    wait_for(lambda: all_gone(find(everyone)), 5)
