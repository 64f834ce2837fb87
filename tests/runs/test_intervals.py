"""Test the intervals between metrics lines, evaluations and checkpoints."""

from __future__ import annotations

import pytest

from remuda.runs.intervals import Interval


def test_interval_is_due_after_its_number_of_steps() -> None:
    interval = Interval(100)
    interval.start(30)
    assert [interval.is_due(steps) for steps in (129, 130, 500)] == [False, True, True]
    interval.restart(500)
    assert [interval.is_due(steps) for steps in (599, 600)] == [False, True]


def test_interval_of_zero_is_never_due() -> None:
    interval = Interval(0)
    interval.start(30)
    assert not interval.is_due(10**9)


@pytest.mark.parametrize(("every", "saved", "expected"), [(100, 150, 150), (10, 150, 110), (100, 300, 200)])
def test_a_resumed_interval_is_due_at_the_earlier_step(every: int, saved: int, expected: int) -> None:
    interval = Interval(every)
    interval.start(100, saved)
    assert interval.next_steps == expected
