"""Asynchronous sampling whose processes are killed, hang or fail: rows continue or restart, and none is repeated.

Most tests run with both places of inference: in the sampler workers, and in an inference server with its own env
workers. The envs count their steps and the agent counts its rows, so that a rollout shows which rows were repeated,
skipped or mixed up.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from counting_agents import CountingRNN
from processes import is_alive, wait_for
from test_sampler_workers import FORBIDDEN, LENGTHS, SEED
from test_sampler_workers import _nothing_is_left as _nothing_is_left
from test_sampler_workers import one_server as one_server
from test_sampler_workers import server as server

from remuda.core import derive_seed
from remuda.data import Rollout
from remuda.envs import AsyncPooledEnvs, make_envs, resolve
from remuda.errors import EnvError, WorkerError
from remuda.learning.weights import SharedWeights
from remuda.processes import worker_pool
from remuda.processes.fork_server import ForkServer
from remuda.sampling.rollout_queue import RolloutQueue

FORMS = ("workers", "central")
SOON = 30.0  # time limit in seconds for what takes about 1 s on an idle machine
torch.set_num_threads(1)  # on a busy machine, more threads are many times slower for arrays this small
pytestmark = pytest.mark.usefixtures("one_server", "_no_thread_is_left")


@pytest.fixture
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("remuda-")] == []


@contextlib.contextmanager
def streaming(
    form: str, num_envs: int = 4, workers: int = 2, T: int = 6, per_round: int = 2, **options: Any
) -> Iterator[RolloutQueue]:
    """Yield a queue. The options named below are passed to the env, all others to the queue."""
    names = ("fault", "at", "once", "only", "lengths", "raise_step", "raise_reset")
    kwargs = {"lengths": list(LENGTHS), **{name: options.pop(name) for name in names if name in options}}
    spec, agent = resolve(*options.pop("env", ("counting:make", kwargs))), CountingRNN()
    limits = {"step_timeout": 60.0, "build_timeout": 120.0, "max_worker_restarts": 1000}
    limits = {name: options.pop(name, value) for name, value in limits.items()}
    is_central = form == "central"
    common = {"spec": spec.to_json(), "gamma": 0.9, "wait_reset": False, "is_central": is_central, "limits": limits}
    shares = pairwise(worker * num_envs // workers for worker in range(workers + 1))
    bounds = [(0, num_envs)] if is_central else list(shares)
    groups = workers if is_central else 1
    orders = [{**common, "first": first, "last": last, "groups": groups} for first, last in bounds]
    observation = make_envs(resolve("counting:make"), 1).observation
    with contextlib.closing(SharedWeights(agent, version=7)) as weights, contextlib.closing(
        RolloutQueue("counting_agents", orders, agent, observation, weights, T, per_round, SEED, **limits, **options)
    ) as queue:  # fmt: skip
        yield queue


def actors(queue: RolloutQueue) -> list[psutil.Process]:
    """Return the living processes that run the policy: all workers, or the inference server."""
    found = []
    for worker in queue._worker_pool.workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
            found.append(psutil.Process(worker.pid))
    return [process for process in found if is_alive(process)]


def steppers(form: str, queue: RolloutQueue) -> list[psutil.Process]:
    """Return the processes that step envs, oldest first: the sampler workers, or those of the inference server."""
    if form == "workers":
        return actors(queue)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        servers = actors(queue)[0].children()
        return sorted((child for one in servers for child in one.children()), key=lambda child: child.create_time())
    return []


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


class Witness:
    """Takes rollouts and checks every row of every env; counts the restarts without an end of the episode."""

    def __init__(self, queue: RolloutQueue) -> None:
        self.queue, self.begun_anew, self.rows, self.taken = queue, 0, 0, 0
        self.last: dict[int, tuple[list[float], float]] = {}  # by env: its next observation, and the agent's rows
        self.noises: set[tuple[float, ...]] = set()
        queue.start(SEED)

    def see_all(self, num_envs: int) -> None:
        """Take rollouts until every env has appeared: only then can its restart be detected."""
        take_until(self, lambda: len(self.last) == num_envs)

    def take(self, rollouts: int = 1) -> Rollout:
        for _ in range(rollouts):
            deadline = time.monotonic() + SOON
            rollout = self.queue.take(7, lambda: time.monotonic() > deadline)  # noqa: B023  (called at once)
            for column, env in enumerate(rollout.envs.tolist()):
                self.sync(rollout, column, env)
            self.queue.release(7)
            self.taken += 1
        return rollout

    def sync(self, rollout: Rollout, column: int, env: int) -> None:
        steps, rows = rollout.steps, float(rollout.state.rows[column])
        shown = [*steps.obs[:, column].tolist(), rollout.next_obs[column].tolist()]
        if (shown[0], rows) != self.last.get(env, (shown[0], 0.0)):
            assert (shown[0][1:], rows) == ([1.0, 0.0], 0.0), "neither continued nor restarted"
            self.begun_anew += 1
        noise = (env, *steps.policy.log_prob[:2, column].tolist())
        assert noise not in self.noises, "a replacement must draw noise of its own"
        self.noises.add(noise)
        for t, (obs, following) in enumerate(pairwise(shown)):
            rows = self.follow_row(obs, following, rows, map_row(steps, t, column))
        assert float(rollout.last_value[column]) // 100 == rows
        self.last[env] = (shown[-1], rows)

    def follow_row(self, obs: list[float], following: list[float], rows: float, row: tuple[Any, ...]) -> float:
        """Check one row against the rules of the env and the agent, and return the agent's rows after it."""
        action, reward, discount, mask = row
        marker, episode, step = obs
        has_ended = step == LENGTHS[int(episode - 1) % len(LENGTHS)]
        assert action == rows % 4
        if mask:
            assert not has_ended
            assert following == [marker, episode, step + 1], "a step was skipped or applied twice"
            assert reward == 100 * episode + step + 1 + action / 4
            ends = step + 1 == LENGTHS[int(episode - 1) % len(LENGTHS)]
            assert discount == (0.0 if ends and episode % 2 == 1 else 1.0)
            self.rows += 1
            return rows + 1
        assert (reward, discount, following[2]) == (0.0, 1.0, 0.0), "a restart must look like a truncation"
        if not (has_ended and following == [marker, episode + 1, 0.0]):
            assert following[1] == 1.0
            self.begun_anew += 1
        return 0.0


def map_row(steps: Any, t: int, column: int) -> tuple[Any, ...]:
    return tuple(array[t, column].item() for array in (steps.action, steps.reward, steps.discount, steps.mask))


def take_until(witness: Witness, condition: Any, seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        witness.take()


# --- R1, R2: killed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_one_of_eight_workers_killed_twenty_times_at_random_moments(form: str) -> None:
    """No rollout is lost or torn: the envs of the killed worker restart, and all others continue."""
    chance = random.Random(4)
    with streaming(form, num_envs=8, workers=8, T=20, per_round=4) as queue:
        witness = Witness(queue)
        witness.see_all(8)
        killed: list[psutil.Process] = []
        while len(killed) < 20:
            take_until(witness, lambda: len(set(steppers(form, queue)) - set(killed)) > 4)
            killed.append(chance.choice([process for process in steppers(form, queue) if process not in killed]))
            timer = threading.Timer(chance.random() * 0.05, kill, (killed[-1],))
            timer.start()
            witness.take(chance.randint(1, 4))
            timer.join()
        take_until(witness, lambda: queue.restarts() == 20)
        take_until(witness, lambda: len(steppers(form, queue)) == 8)
        assert 0 < witness.begun_anew <= 20, "at most 20, because some are killed before their first rollout"


@pytest.mark.parametrize("form", FORMS)
def test_all_workers_killed_at_once(form: str) -> None:
    with streaming(form, num_envs=6, workers=3) as queue:
        witness = Witness(queue)
        witness.see_all(6)
        old = steppers(form, queue)
        for process in old:
            kill(process)
        take_until(witness, lambda: witness.begun_anew == 6)
        assert queue.restarts() == 6
        assert not set(old) & set(steppers(form, queue))
        assert not any(map(is_alive, old))


@pytest.mark.parametrize("form", FORMS)
def test_worker_killed_repeatedly_ends_in_one_error_that_names_it(form: str) -> None:
    with streaming(form, max_worker_restarts=2) as queue:
        witness = Witness(queue)
        witness.see_all(4)
        sentence = r"worker 1 \(pid \d+\) was killed by SIGKILL, more than 2 times within 60 s: .*\.$"
        with pytest.raises(WorkerError, match=sentence) as caught:
            kill_thrice(form, witness)
        assert "\n" not in str(caught.value)
        assert witness.begun_anew == 4


def kill_thrice(form: str, witness: Witness) -> None:
    for times in range(1, 4):
        take_until(witness, lambda: len(steppers(form, witness.queue)) == 2)
        kill(second(form, witness.queue))
        take_until(witness, lambda: witness.begun_anew == 2 * times)  # noqa: B023  (called at once)


def second(form: str, queue: RolloutQueue) -> psutil.Process:
    """Return the worker of the last envs. The first worker is never lost, so it is always the oldest."""
    return actors(queue)[1] if form == "workers" else steppers(form, queue)[-1]


@pytest.mark.parametrize("form", FORMS)
def test_worker_that_dies_in_every_rollout_ends_in_one_error(form: str) -> None:
    with streaming(form, num_envs=2, workers=2, fault="kill", at=3, max_worker_restarts=2) as queue:
        queue.start(SEED)
        with pytest.raises(WorkerError, match=r"worker [01] .* was killed by SIGKILL, more than 2 times"):
            take_finite(queue)


def take_finite(queue: RolloutQueue) -> None:
    """Take rollouts until an error is raised, and check that all of them are finite."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        rollout = queue.take(7, lambda: time.monotonic() > deadline)
        assert torch.isfinite(rollout.steps.obs).all()
        assert torch.isfinite(rollout.steps.reward).all()
        queue.release(7)


# --- R3, R4: raising and hanging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_envs_that_raise_randomly_are_rebuilt_and_counted(form: str) -> None:
    with streaming(form, T=50, raise_step=0.02, raise_reset=0.02) as queue:
        witness = Witness(queue)
        first = queue.restarts()  # an env may have failed in its first reset
        take_until(witness, lambda: witness.begun_anew >= 30)
        assert queue.restarts() - first >= witness.begun_anew
        assert len(steppers(form, queue)) == 2
        assert queue._worker_stats.lost == [0] * len(queue._worker_stats.lost)


@pytest.mark.parametrize(("form", "fault"), [("workers", "sleep"), ("workers", "hold"), ("central", "hold")])
def test_env_that_hangs_is_replaced_while_the_others_continue(form: str, fault: str, tmp_path: Path) -> None:
    """Each round takes the rollout of one worker, so the others fill many before the hung one is back."""
    hung = {"fault": fault, "at": 30, "once": str(tmp_path / "done"), "step_timeout": 3.0}
    with streaming(form, num_envs=6, workers=3, per_round=1, **hung) as queue:
        witness = Witness(queue)
        take_until(witness, lambda: (tmp_path / "done").exists())
        taken = witness.taken
        take_until(witness, lambda: witness.begun_anew >= 2)
        assert witness.taken - taken > 20
        assert queue.restarts() == 2


@pytest.mark.parametrize("form", FORMS)
def test_env_that_always_hangs_ends_in_one_error_that_names_its_worker(form: str) -> None:
    hung = {"fault": "sleep", "at": 2, "step_timeout": 0.4, "max_worker_restarts": 1}
    with streaming(form, num_envs=2, workers=2, **hung) as queue:
        queue.start(SEED)
        with pytest.raises(WorkerError, match=r"worker [01] \(pid \d+\) was silent for 0.4 s while it owed"):
            take_finite(queue)


def test_worker_that_hangs_once_per_minute_without_progress_ends_in_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit of 60 s there is one loss per minute: the progress of other workers must not excuse it."""
    monkeypatch.setattr(worker_pool, "WINDOW_SECONDS", 0.1)
    monkeypatch.setattr(worker_pool, "ForkServer", ForkServer)  # without torch
    spec = resolve("counting:make", {"lengths": [50]})
    with AsyncPooledEnvs(spec, 2, 2, 2, step_timeout=0.3, max_worker_restarts=2) as envs:
        envs.reset(SEED)
        with pytest.raises(WorkerError, match=r"worker 1 .* was silent .*, more than 2 times without a step in betw"):
            step_while_suspended(envs)


def step_while_suspended(envs: AsyncPooledEnvs) -> None:
    """Step slot 0 continually, and suspend every worker of slot 1 as soon as it is built."""
    deadline, hung = time.monotonic() + SOON, 0
    while time.monotonic() < deadline:
        worker = envs._worker_pool.workers[1]
        if worker.pid != hung and worker not in envs._building:
            psutil.Process(worker.pid).suspend()
            hung = worker.pid
        for slot in envs.ready(0.02):
            envs.recv(slot)
            envs.send(slot, np.zeros(1, np.int64))


# --- R5: data that violates its space -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "fault"), [*(("workers", fault) for fault in FORBIDDEN), ("central", "nan"), ("central", "nan reward")]
)
def test_data_that_violates_its_space_is_reported_before_learning(form: str, fault: str) -> None:
    seed = derive_seed(SEED, 3, 0)
    with streaming(form, fault=fault, at=5, only=seed % 1000, lengths=[50]) as queue:
        queue.start(SEED)
        with pytest.raises(EnvError) as caught:
            take_finite(queue)
    text = str(caught.value)
    assert re.search(FORBIDDEN[fault], text), text
    assert text.startswith("env 3 of counting:make")
    assert f"(seed {seed}, step 5 of its episode 1)" in text
    assert "\n" not in text
    assert "Traceback" in caught.value.__notes__[0]


# --- R7: the inference server ---------------------------------------------------------------------------------------


def test_inference_server_killed_in_mid_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Its env workers end with it, its unfinished rollouts are filled again, and no step occurs twice."""
    chance = random.Random(6)
    with streaming("central", num_envs=8, workers=4, T=20, per_round=2) as queue:
        witness = Witness(queue)
        for times in range(1, 4):
            witness.see_all(8)
            victim = actors(queue)[0]
            below = victim.children(recursive=True)
            assert len(below) == 5
            threading.Timer(chance.random() * 0.05, kill, (victim,)).start()
            take_until(witness, lambda: witness.begun_anew == 8 * times)  # noqa: B023  (called at once)
            wait_for(lambda: not any(map(is_alive, below)), 5.0)  # noqa: B023
            assert queue.restarts() == 8 * times
        assert caplog.text.count("was killed by SIGKILL; it is replaced.") == 3


@pytest.mark.parametrize("form", FORMS)
def test_closing_does_not_wait_for_a_hung_process(form: str, tmp_path: Path) -> None:
    hung = {"fault": "hold", "at": 8, "once": str(tmp_path / "done")}
    with streaming(form, **hung) as queue:
        queue.start(SEED)
        wait_for((tmp_path / "done").exists)
        everyone = [process for actor in actors(queue) for process in (actor, *actor.children(recursive=True))]
        queue.close()
        queue.close()
        wait_for(lambda: not any(map(is_alive, everyone)), 5.0)
