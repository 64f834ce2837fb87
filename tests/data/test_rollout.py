"""Rollouts and batches whose numbers identify their origin: row t of env b contains 10 * t + b."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remuda.data import Batch, Rollout, Steps, leaves, map_tree, namedarraytuple

Policy = namedarraytuple("Policy", "log_prob value")
State = namedarraytuple("State", "h c")
T, B = 4, 3


def number(t: Any, b: Any) -> Any:
    return 10 * t + b


def make_steps(num_rows: int = T, num_envs: int = B) -> Steps:
    """Return steps whose numbers identify row, env and field: obs is 1000 + n, value 5000 + n, version t."""
    n = number(*np.mgrid[0:num_rows, 0:num_envs])
    return Steps(
        obs=np.stack([1000 + n, -1000 - n], axis=-1),
        action=2000 + n,
        reward=3000.0 + n,
        discount=np.ones((num_rows, num_envs)),
        mask=n % 2 == 0,
        policy=Policy(log_prob=4000.0 + n, value=5000.0 + n),
        version=n // 10,
    )


def make_rollout(library: str = "numpy") -> Rollout:
    """Return a rollout of T rows whose next_obs and last_value are those of row T; state h is 100 + b."""
    steps = make_steps(T + 1)
    rollout = Rollout(
        steps=steps[:T],
        next_obs=steps.obs[T],
        last_value=steps.policy.value[T],
        state=State(h=np.arange(B) + 100, c=np.zeros((B, 2))),
    )
    if library == "numpy":
        return rollout
    parts = (rollout.steps, rollout.next_obs, rollout.last_value, rollout.state)
    return Rollout(*map_tree(torch.from_numpy, parts))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("t0", "t1"), [(t0, t1) for t0 in range(T) for t1 in range(t0 + 1, T + 1)])
def test_window_ends_with_the_observation_of_the_next_row(library: str, t0: int, t1: int) -> None:
    window = make_rollout(library).window(t0, t1)
    assert np.asarray(window.steps.action).tolist() == [
        [2000 + number(t, b) for b in range(B)] for t in range(t0, t1)
    ]
    assert np.asarray(window.next_obs)[:, 0].tolist() == [1000 + number(t1, b) for b in range(B)]
    assert np.asarray(window.last_value).tolist() == [5000 + number(t1, b) for b in range(B)]
    if t0 == 0:
        assert np.asarray(window.state.h).tolist() == [100, 101, 102]
    else:
        assert window.state is None


@pytest.mark.parametrize(
    ("b", "envs"),
    [(slice(1, 3), [1, 2]), ([2, 0], [2, 0]), (np.array([True, False, True]), [0, 2])],
    ids=["slice", "list", "mask"],
)
@pytest.mark.parametrize("t1", [2, T], ids=["inside", "end"])
def test_window_of_some_envs_takes_all_its_parts_from_them(b: Any, envs: list[int], t1: int) -> None:
    window = make_rollout().window(0, t1, b)
    assert window.steps.reward.tolist() == [[3000 + number(t, env) for env in envs] for t in range(t1)]
    assert window.steps.policy.value[0].tolist() == [5000 + env for env in envs]
    assert window.last_value.tolist() == [5000 + number(t1, env) for env in envs]
    assert window.next_obs[:, 1].tolist() == [-1000 - number(t1, env) for env in envs]
    assert window.state.h.tolist() == [100 + env for env in envs]
    assert window.state.c.shape == (len(envs), 2)


@pytest.mark.parametrize(("t0", "t1"), [(-1, 2), (2, 2), (3, 1), (0, T + 1), (T, T + 1)])
def test_window_outside_the_rollout_is_refused(t0: int, t1: int) -> None:
    with pytest.raises(ValueError, match=f"window {t0}:{t1} is not inside the rollout's {T} rows"):
        make_rollout().window(t0, t1)


@given(st.data())
def test_window_of_a_window_is_a_window(data: st.DataObject) -> None:
    t0, t1 = sorted(data.draw(st.sets(st.integers(0, T), min_size=2, max_size=2)))
    s0, s1 = sorted(data.draw(st.sets(st.integers(0, t1 - t0), min_size=2, max_size=2), label="inner"))
    twice = make_rollout().window(t0, t1).window(s0, s1)
    once = make_rollout().window(t0 + s0, t0 + s1)
    for (path, mine), (_, theirs) in zip(leaves(vars(twice)), leaves(vars(once)), strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=path)


def test_window_of_a_feed_forward_rollout_has_no_state() -> None:
    rollout = make_rollout()
    plain = Rollout(rollout.steps, rollout.next_obs, rollout.last_value)
    assert plain.window(0, 2).state is None


def test_later_window_begins_where_the_row_before_it_is_masked() -> None:
    rollout = replace(make_rollout(), begins=np.array([True, False, True]))
    assert rollout.window(0, 2, [2, 1]).begins.tolist() == [True, False]
    assert rollout.window(1, 3).begins.tolist() == (~rollout.steps.mask[0]).tolist() == [False, True, False]
    assert make_rollout().window(0, 2).begins is None


def test_flatten_keeps_the_envs_of_a_row_together() -> None:
    steps = make_steps()
    flat = Batch(steps, targets=steps.policy, state=State(h=np.zeros(B), c=None)).flatten()
    assert flat.steps.action.tolist() == [2000 + number(t, b) for t in range(T) for b in range(B)]
    assert flat.steps.obs.shape == (T * B, 2)
    assert flat.steps.obs[B + 1].tolist() == [1011, -1011]
    assert flat.targets.value[-1] == 5000 + number(T - 1, B - 1)
    assert flat.state is None


def test_rows_are_selected_in_index_order_with_weight_and_key() -> None:
    flat = Batch(make_steps(), targets=make_steps().reward).flatten()
    drawn = Batch(flat.steps, flat.targets, weight=np.arange(12) / 10, key=(np.arange(12), np.arange(12) + 50))
    got = drawn.rows(np.array([7, 0, 7]))
    assert got.steps.action.tolist() == [2021, 2000, 2021]
    assert got.steps.policy.value.tolist() == [5021, 5000, 5021]
    assert got.targets.tolist() == [3021, 3000, 3021]
    assert got.weight.tolist() == [0.7, 0, 0.7]
    index, generation = got.key
    assert (index.tolist(), generation.tolist()) == ([7, 0, 7], [57, 50, 57])


def test_columns_are_whole_sequences_with_state_weight_and_key() -> None:
    batch = Batch(
        make_steps(),
        targets=make_steps().reward,
        state=make_rollout().state,
        weight=np.array([0.1, 0.2, 0.3]),
        key=(np.arange(B), np.arange(B) + 50),
    )
    got = batch.columns([2, 0])
    assert got.steps.action.tolist() == [[2000 + number(t, b) for b in (2, 0)] for t in range(T)]
    assert got.targets[1].tolist() == [3012, 3010]
    assert got.state.h.tolist() == [102, 100]
    assert got.weight.tolist() == [0.3, 0.1]
    assert got.key[1].tolist() == [52, 50]


@pytest.mark.parametrize("extra", [{"weight": np.ones(B)}, {"key": (np.arange(B), np.arange(B))}])
def test_flatten_refuses_a_prioritized_draw_of_sequences(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="use columns, not flatten"):
        Batch(make_steps(), **extra).flatten()


@given(st.permutations(range(T * B)))
def test_shuffled_minibatches_cover_every_row_once(order: list[int]) -> None:
    flat = Batch(map_tree(torch.from_numpy, make_steps())).flatten()
    parts = [flat.rows(torch.tensor(order[start : start + 5])) for start in range(0, T * B, 5)]
    actions = torch.cat([part.steps.action for part in parts])
    assert sorted(actions.tolist()) == flat.steps.action.tolist()
    for part in parts:
        assert torch.equal(part.steps.policy.value - 3000, part.steps.action.double())


def test_absent_parts_stay_absent() -> None:
    steps = make_steps().replace(policy=None)
    for got in (Batch(steps).flatten(), Batch(steps).columns([0]), Batch(steps).flatten().rows([0])):
        assert (got.steps.policy, got.targets, got.state, got.weight, got.key) == (None,) * 5


def test_batches_and_rollouts_compare_by_identity() -> None:
    first, second = Batch(make_steps()), Batch(make_steps())
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    assert make_rollout() != make_rollout()
