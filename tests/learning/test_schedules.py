"""Tests of schedules parsed from text and of their error messages, one sentence each."""

from __future__ import annotations

import pytest

from remuda.errors import ConfigError
from remuda.learning.schedules import parse_schedule


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", [3e-4] * 5),
        (0.25, [0.25] * 5),
        ("0", [0.0] * 5),
        ("linear(1, 0)", [1, 0.75, 0.5, 0.25, 0]),
        (" linear(0,2) ", [0, 0.5, 1, 1.5, 2]),
        ("piecewise(0:4, 0.5:2, 1:0)", [4, 3, 2, 1, 0]),
        ("piecewise(0:4, 0.5:2, 0.75:2, 1:10)", [4, 3, 2, 2, 10]),
        ("piecewise(0.25:1, 0.75:3)", [1, 1, 2, 3, 3]),
        ("piecewise(0.5:7)", [7] * 5),
    ],
)
def test_values_over_a_run(text: str | float, expected: list[float]) -> None:
    schedule = parse_schedule(text)
    assert [schedule(progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(expected)


def test_schedules_are_constant_before_and_after_the_run() -> None:
    schedule = parse_schedule("linear(1, 0.5)")
    assert (schedule(-0.1), schedule(1.5)) == (1.0, 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "nan",
        "inf",
        "-3e-4",
        "1 2",
        "linear()",
        "linear(1)",
        "linear(1, 2, 3)",
        "linear(1, x)",
        "linear(1, nan)",
        "linear(1, -1)",
        "linear(1, 0",
        "cosine(1, 0)",
        "Linear(1, 0)",
        "piecewise()",
        "piecewise(1, 2)",
        "piecewise(0:1:2)",
        "piecewise(0:1, 0:2)",
        "piecewise(0.5:1, 0.2:2)",
        "piecewise(-0.1:1, 1:2)",
        "piecewise(0:1, 1.1:2)",
        "piecewise(0:1, nan:2, 1:3)",
        "piecewise(0:1, 1:inf)",
    ],
)
def test_invalid_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, "algo.learning_rate")
    message = str(caught.value)
    assert message.startswith(f"algo.learning_rate={text!r} is not a schedule: give a number, ")
    assert message.endswith(".")
    assert "\n" not in message
