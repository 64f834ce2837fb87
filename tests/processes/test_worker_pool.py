"""The worker pool with workers that have no envs: its messages and errors are those of the caller's WorkerKind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from remuda.errors import ConfigError, RemudaError, TrainingError, WorkerError
from remuda.processes.worker_pool import Worker, WorkerKind, WorkerPool

pytestmark = pytest.mark.usefixtures("fresh_servers")

KIND = WorkerKind(
    name="echo workers",
    building="building its echo",
    remedy="shout less.",
    count_option="echo.workers",
    logger=logging.getLogger("remuda.echo"),
    errors=(ConfigError,),
    build_errors=(TrainingError,),
)


@contextlib.contextmanager
def echo_pool(build_timeout: float = 60.0, max_restarts: int = 3, **blueprint: Any) -> Iterator[WorkerPool]:
    blueprints = [{"name": f"echo {index}", **blueprint} for index in range(2)]
    with contextlib.closing(WorkerPool("echo_worker", blueprints, KIND, build_timeout, max_restarts)) as pool:
        yield pool


def no_loss(worker: Worker) -> None:
    raise AssertionError(f"worker {worker.index} {worker.exit_reason}")


def listen_until_lost(pool: WorkerPool, worker: Worker) -> None:
    while not worker.is_lost:
        pool.listen(0.2)


def test_workers_build_and_answer() -> None:
    with echo_pool() as pool:
        assert pool.start() == "echo 0"
        requests = [{"do": "echo", "text": text} for text in ("a", "b")]
        assert pool.ask(requests, "echo", 60.0, no_loss) == [{"echo": "a"}, {"echo": "b"}]
        assert not pool.has_lost


def test_a_file_of_the_user_does_not_replace_a_module_of_the_standard_library(
    tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "signal.py").write_text("raise ImportError('this file is not a part of Python')")
    monkeypatch.chdir(tmp_path)
    with echo_pool() as pool:
        assert pool.start() == "echo 0"


def test_errors_of_the_kind_keep_their_class_and_others_become_worker_errors(caplog: Any) -> None:
    expected: dict[str, tuple[type[RemudaError], str]] = {
        "config": (ConfigError, "^a bad option"),
        "other": (WorkerError, r"worker 1 \(pid \d+\) failed with KeyError: 'k'"),
    }
    with echo_pool() as pool:
        pool.start()
        worker = pool.workers[1]
        for how, (kind, text) in expected.items():
            worker.send({"do": "fail", "how": how})
            with pytest.raises(kind, match=text):
                listen_until_lost(pool, worker)
            listen_until_lost(pool, worker)
            assert worker.exit_reason == "exited with code 1"
            pool.restart(worker, made_progress=True)
        # `build_errors` are raised only before the workers have started; afterwards they count as restarts.
        worker.send({"do": "fail", "how": "training"})
        listen_until_lost(pool, worker)
        assert "TrainingError: not finite" in worker.traceback
    assert "worker 1" in caplog.text
    assert "exited with code 1; it is replaced." in caplog.text


def test_error_messages_use_the_wording_of_the_worker_kind() -> None:
    sentence = r"was silent for 0.3 s while building its echo, more than 1 times .*: shout less\."
    with echo_pool(build_timeout=0.3, max_restarts=1, hangs=True) as pool, pytest.raises(WorkerError, match=sentence):
        pool.start()
