"""Tests of checkpoints written by a background thread."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from remuda.learning import saver as module
from remuda.learning.checkpoint import list_checkpoints, load_newest, snapshot
from remuda.learning.saver import Saver


def learner(value: float) -> dict[str, Any]:
    return {"weight": torch.full((3,), value)}


class Told:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.found: list[Any] = []
        self.threads: list[str] = []

    def __call__(self, taken: Any, found: Any) -> None:
        self.steps.append(taken.step)
        self.found.append(found)
        self.threads.append(threading.current_thread().name)


def test_snapshot_is_written_although_the_state_changes_meanwhile(tmp_path: Path) -> None:
    told = Told()
    saver = Saver(tmp_path, "last", told)
    state = learner(1.0)
    taken = snapshot(7, state, {"rounds": 2}, {"sampler": b"envs"})
    state["weight"].fill_(9.0)
    saver.save(taken, 1)
    saver.wait()
    found = load_newest(tmp_path)
    assert (found.step, found.progress, found.blobs) == (7, {"rounds": 2}, {"sampler": b"envs"})
    assert found.learner["weight"].tolist() == [1.0] * 3
    assert told.steps == [7]
    assert told.found == [tmp_path / "step-7"]
    assert told.threads == ["MainThread"], "the callback runs in the main thread"
    saver.wait()
    saver.poll()
    assert told.steps == [7], "the callback is called once"


def test_checkpoints_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, may_go, real = Told(), threading.Event(), module.write
    running: list[int] = []

    def slow(directory: Path, taken: Any, keep: str, number: int) -> Path:
        running.append(number)
        assert len(running) == 1
        may_go.wait(20)
        running.remove(number)
        return real(directory, taken, keep, number)

    monkeypatch.setattr(module, "write", slow)
    saver = Saver(tmp_path, "all", told)
    saver.save(snapshot(1, learner(1.0), {}), 1)
    saver.poll()
    assert told.steps == [], "poll does not wait for the writing thread"
    threading.Timer(0.2, may_go.set).start()
    saver.save(snapshot(2, learner(2.0), {}), 2)
    assert told.steps == [1]
    saver.wait()
    assert told.steps == [1, 2]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1", "step-2"]


def test_full_disk_is_reported_to_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    saver = Saver(tmp_path, "last", told)
    saver.save(snapshot(1, learner(1.0), {}), 1)
    saver.wait()

    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(module, "write", full)
    saver.save(snapshot(2, learner(2.0), {}), 2)
    saver.wait()
    assert isinstance(told.found[1], OSError)
    assert load_newest(tmp_path).step == 1


def test_other_failures_are_raised_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Path:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(module, "write", broken)
    saver = Saver(tmp_path, "last", Told())
    saver.save(snapshot(1, learner(1.0), {}), 1)
    with pytest.raises(TypeError, match="a mistake of ours"):
        saver.wait()


def test_leftovers_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    (tmp_path / ".writing-123").mkdir()
    (tmp_path / ".writing-123/tensors.safetensors").write_bytes(b"half")
    Saver(tmp_path, "last", Told())
    assert list(tmp_path.iterdir()) == []
