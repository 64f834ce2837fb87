"""Test the statistics of the last episodes against numbers computed by hand."""

import math

import pytest

from remuda.logs import Window


def test_five_statistics_of_every_field() -> None:
    window = Window()
    for ep_rew, ep_len in ((1.0, 10), (2.0, 20), (6.0, 30)):
        window.add({"ep_rew": ep_rew, "ep_len": ep_len})
    summary = window.summary()
    assert summary["rollout/ep_rew_mean"] == 3.0
    assert summary["rollout/ep_rew_std"] == pytest.approx(math.sqrt(14 / 3))
    assert summary["rollout/ep_rew_median"] == 2.0
    assert summary["rollout/ep_rew_min"] == 1.0
    assert summary["rollout/ep_rew_max"] == 6.0
    assert summary["rollout/ep_len_mean"] == 20.0
    assert len(summary) == 10
    assert all(type(value) is float for value in summary.values())


def test_only_the_last_episodes_count() -> None:
    window = Window(size=3)
    for value in range(10):
        window.add({"ep_rew": float(value)})
    assert len(window) == 3
    assert window.summary()["rollout/ep_rew_min"] == 7.0


def test_a_field_of_one_episode_is_in_the_summary_while_in_the_window() -> None:
    window = Window(size=2)
    window.add({"ep_rew": 1.0})
    window.add({"ep_rew": 1.0, "info/success": 1.0})
    assert window.summary()["rollout/info/success_mean"] == 1.0
    window.add({"ep_rew": 1.0})
    window.add({"ep_rew": 1.0})
    assert "rollout/info/success_mean" not in window.summary()


def test_nan_is_skipped_and_infinity_is_not() -> None:
    window = Window()
    window.add({"ep_rew": math.nan, "score": math.nan})
    window.add({"ep_rew": 4.0, "score": math.nan})
    assert window.summary()["rollout/ep_rew_mean"] == 4.0
    assert "rollout/score_mean" not in window.summary()
    window.add({"ep_rew": math.inf})
    assert window.summary()["rollout/ep_rew_mean"] == math.inf
    assert math.isnan(window.summary()["rollout/ep_rew_std"])


def test_summary_is_empty_before_the_first_episode() -> None:
    assert Window().summary() == {}


def test_added_values_are_copied() -> None:
    window, values = Window(), {"ep_rew": 1.0}
    window.add(values)
    values["ep_rew"] = 9.0
    assert window.summary()["rollout/ep_rew_mean"] == 1.0
