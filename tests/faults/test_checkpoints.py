"""Checkpoints whose writers are killed, and whose files are damaged (R18, R19)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

from remuda.learning.checkpoint import list_checkpoints, load_newest, save, sweep

KILLS, DAMAGES = 100, 1000


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((20_000,), float(step)), "step": step}


def write_for_ever(directory: Path, first: int) -> None:
    os.fsync = lambda fd: None  # a busy disk would leave no time for anything else
    for step in range(first, first + 1_000_000):
        save(directory, step, state(step), {"steps": step}, number=step, blobs={"sampler": bytes(50_000)})


def test_writer_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is complete and never older than before, and the next writer continues from it."""
    draw = random.Random(0)
    save(tmp_path, 0, state(0), {"steps": 0})
    newest = 0
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(tmp_path, newest + 1)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = load_newest(tmp_path)
        assert found.skipped == []
        assert found.step >= newest
        assert found.learner["weight"].tolist() == [float(found.step)] * 20_000
        assert found.progress == {"steps": found.step}
        newest = found.step
        sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".writing")} == set()
    assert newest > KILLS / 4, "the writers must have saved checkpoints before they were killed"
    save(tmp_path, newest + 1, state(newest + 1), {"steps": newest + 1})  # save() removes what killed writers left
    assert len(list_checkpoints(tmp_path)) == 2


def test_all_of_a_thousand_damages_are_detected_and_the_previous_checkpoint_is_used(tmp_path: Path) -> None:
    draw = random.Random(1)
    save(tmp_path, 1, {"weight": torch.arange(50.0)}, {"steps": 1})
    newest = save(tmp_path, 2, {"weight": torch.arange(50.0) + 1}, {"steps": 2}, blobs={"sampler": bytes(100)})
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    for _ in range(DAMAGES):
        name, data = draw.choice(list(whole.items()))
        if draw.random() < 0.3:
            damaged = data[: draw.randrange(len(data))]
        else:
            place = draw.randrange(len(data))
            damaged = data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
        (newest / name).write_bytes(damaged)
        found = load_newest(tmp_path)
        assert found.step == 1, (name, len(damaged))
        assert len(found.skipped) == 1
        (newest / name).write_bytes(data)
    assert load_newest(tmp_path).step == 2
