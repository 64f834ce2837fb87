"""Groups under random faults: no invariant is violated, and the group goes on when the faults end."""

from __future__ import annotations

import random

import pytest

from remuda.rpc.core.accumulator import Accumulator
from remuda.rpc.simulator import Faults, Setting, Simulation, Violation


def run(seed: int) -> Simulation:
    """Simulate a group whose size, window and faults are drawn at random."""
    drawn = random.Random(seed)
    faults = Faults(
        delay=drawn.choice([0.0005, 0.005, 0.03]),
        loss=drawn.choice([0.0, 0.02, 0.2]),
        duplication=drawn.choice([0.0, 0.1]),
        crashes=drawn.randint(0, 3),
        pauses=drawn.randint(0, 3),
        partitions=drawn.randint(0, 2),
        clock_jumps=drawn.randint(0, 2),
        broker_crashes=drawn.randint(0, 2),
        joins=drawn.randint(0, 2),
    )
    simulation = Simulation(seed, Setting(peers=drawn.randint(3, 8), window=drawn.choice([1, 1, 2, 3])), faults)
    simulation.run(drawn.uniform(5.0, 15.0))
    return simulation


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_satisfy_the_invariants_and_make_progress(seed: int) -> None:
    assert run(seed).committed > 10


@pytest.mark.long
@pytest.mark.parametrize("first", range(4, 204, 20))
def test_many_random_schedules(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


def test_a_simulation_is_the_same_for_every_run_of_a_seed() -> None:
    runs = [Simulation(3, Setting(peers=3), Faults(loss=0.1, crashes=1)) for _ in range(2)]
    for simulation in runs:
        simulation.run(2.0)
    assert runs[0].committed == runs[1].committed
    assert list(runs[0].events) == list(runs[1].events)


def run_twenty() -> None:
    for seed in range(20):
        Simulation(seed, Setting(peers=3), Faults(loss=0.2, crashes=3, pauses=3)).run(10.0)


def test_a_violation_names_the_seed_and_shows_the_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accumulator, "_may_commit", lambda self, version: version in self.prepared)
    with pytest.raises(Violation, match=r"seed \d+, Setting\(peers=3.*\n(.*\n)+.*->"):
        run_twenty()
