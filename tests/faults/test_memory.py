"""A long run whose workers are killed does not leak memory, descriptors or threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from soaking import Soak
from test_async_runs import workers_below

import remuda

pytestmark = pytest.mark.long


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", ["central", "workers"])
def test_ten_thousand_updates_with_a_worker_killed_every_thirty_seconds(act: str, tmp_path: Path) -> None:
    soak = Soak(workers_below)
    remuda.train(
        "ppo",
        env="Acrobot-v1",
        steps=100_000_000,
        seed=1,
        scheme="parallel",
        out=tmp_path / "run",
        callbacks=soak,
        quiet=True,
        sampler={"envs": 8, "workers": 2, "inference": act},
        algo={"n_steps": 64, "batch_size": 64, "n_epochs": 2},
        eval={"episodes": 0},
        checkpoint={"every": 20_000},
    )
    soak.check()
