"""A long run with workers that die: memory, descriptors and threads stay what they are."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import remuda

pytestmark = pytest.mark.long

UPDATES = 10_000
KILL_SECONDS = 30.0
MIN_SECONDS = 150.0  # so that some are killed, however fast the machine


@pytest.mark.parametrize("act", ["central", "workers"])
def test_ten_thousand_updates_with_a_worker_killed_every_thirty_seconds(act: str, tmp_path: Path) -> None:
    me, chance = psutil.Process(), random.Random(3)
    seen: list[tuple[int, int, int, int]] = []  # updates, resident bytes, descriptors, threads
    start = time.monotonic()
    killed, next_kill, next_look = 0, start + KILL_SECONDS, 0

    def watch(round: Any) -> bool:
        nonlocal killed, next_kill, next_look
        now, updates = time.monotonic(), round.learner.version
        if now >= next_kill:
            os.kill(chance.choice(workers(me)), signal.SIGKILL)
            killed, next_kill = killed + 1, now + KILL_SECONDS
        if updates >= next_look:
            next_look = updates + 500
            seen.append((updates, me.memory_info().rss, me.num_fds(), threading.active_count()))
        return updates >= UPDATES and now - start >= MIN_SECONDS

    remuda.train(
        "ppo",
        env="Acrobot-v1",
        steps=100_000_000,
        seed=1,
        scheme="parallel",
        out=tmp_path / "run",
        callbacks=watch,
        quiet=True,
        sampler={"envs": 8, "workers": 2, "act": act},
        algo={"n_steps": 64, "batch_size": 64, "n_epochs": 2},
        eval={"episodes": 0},
        checkpoint={"every": 20_000},
    )
    assert killed >= 4
    settled = [row for row in seen if row[0] >= 2000]
    (first, memory, *counts), (last, memory_at_the_end, *counts_at_the_end) = settled[0], settled[-1]
    assert last - first >= 7500
    grown = (memory_at_the_end - memory) / 2**20 / ((last - first) / 1000)
    assert grown <= 1.0, f"{grown:.2f} MB per 1,000 updates: {seen}"
    assert [abs(a - b) <= 2 for a, b in zip(counts, counts_at_the_end, strict=True)] == [True, True], seen


def workers(me: psutil.Process) -> list[int]:
    """Those that step envs: children of the fork server, without children of their own."""
    return [child.pid for child in me.children(recursive=True) if child.ppid() != me.pid and not child.children()]
