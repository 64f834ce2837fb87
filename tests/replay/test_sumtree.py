"""The sum tree against plain cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.replay.sumtree import SumTree


def slow_find(priorities: np.ndarray, mass: float) -> int:
    """The first place whose running sum is above the mass."""
    total = 0.0
    for place, priority in enumerate(priorities):
        total += priority
        if total > mass:
            return place
    return int(np.flatnonzero(priorities)[-1])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**31), st.integers(1, 30))
def test_it_finds_what_running_sums_find(capacity: int, seed: int, changes: int) -> None:
    rng = np.random.default_rng(seed)
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(changes):
        index = rng.integers(0, capacity, rng.integers(1, 50))
        priority = rng.integers(0, 4, len(index)).astype(float)  # whole numbers: sums are exact, and many are 0
        tree[index] = priority
        plain[index] = priority
    np.testing.assert_array_equal(tree[:], plain)
    assert tree.total == plain.sum()
    if tree.total:
        mass = rng.integers(0, int(tree.total), 20) + 0.5
        assert tree.find(mass).tolist() == [slow_find(plain, each) for each in mass]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31))
def test_a_place_without_priority_is_never_found(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(capacity)
    index = rng.integers(0, capacity, rng.integers(1, 40))
    tree[index] = 10.0 ** rng.uniform(-12, 6, len(index))
    total = tree.total
    edges = np.concatenate([np.cumsum(tree[:]), [0.0, total, np.nextafter(total, np.inf), total * 2]])
    assert (tree[tree.find(edges)] > 0).all()


def test_frequencies_are_in_proportion() -> None:
    """Chi-square against exact probabilities; 40 places, so 39 degrees of freedom: 72.1 has probability 0.001."""
    rng = np.random.default_rng(1)
    tree = SumTree(2000)
    places = rng.choice(2000, 40, replace=False)
    tree[places] = rng.uniform(0.1, 3, 40)
    draws = 200_000
    found = np.bincount(tree.find(rng.random(draws) * tree.total), minlength=2000)
    expected = tree[:] / tree.total * draws
    assert found[expected == 0].sum() == 0
    chi_square = ((found - expected)[places] ** 2 / expected[places]).sum()
    assert chi_square < 72.1


def test_of_a_place_that_is_named_twice_the_last_counts() -> None:
    tree = SumTree(10)
    tree[np.array([3, 3, 4])] = np.array([5.0, 1.0, 2.0])
    assert tree[3] == 1.0
    assert tree.total == 3.0


def test_slices_and_single_places() -> None:
    tree = SumTree(5000)
    tree[:] = 1.0
    tree[100:200] = 0.0
    tree[7] = 3.0
    tree[np.arange(0)] = np.zeros(0)
    assert tree.total == 4902.0
    assert tree.find(np.array([0.0, 99.5, 103.0])).tolist() == [0, 97, 201]


def test_errors_do_not_add_up() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    for _ in range(3000):
        tree[rng.integers(0, 1000, 16)] = 10.0 ** rng.uniform(-9, 9, 16)
    tree[:] = 1.0
    assert tree.total == 1000.0


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_bad_priorities_are_refused(bad: float) -> None:
    tree = SumTree(10)
    with pytest.raises(ValueError, match="negative or not a number"):
        tree[np.array([1, 2])] = np.array([1.0, bad])
    assert tree.total == 0.0
