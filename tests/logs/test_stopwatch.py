"""Test the times that a run reports for its activities."""

import pytest

from remuda.logs import stopwatch
from remuda.logs.stopwatch import Stopwatch


def test_time_of_an_activity_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may end an evaluation; its time must not be counted as time of the next round."""
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def fail() -> None:
        with watch.timed("evaluation"):
            now[0] += 8.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    now[0] += 1.0
    assert watch.lap({}) == 1.0
    assert dict(watch.total) == {"evaluation": 8.0, "other": 1.0}
    assert watch.trained() == 1.0
