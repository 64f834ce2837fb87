"""The sum tree compared with plain cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.replay.priorities import SumTree


def slow_find(priorities: np.ndarray, mass: float) -> int:
    """Return the first place whose running sum is above the mass."""
    total = 0.0
    for place, priority in enumerate(priorities):
        total += priority
        if total > mass:
            return place
    return int(np.flatnonzero(priorities)[-1])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**31), st.integers(1, 30))
def test_find_matches_running_sums(capacity: int, seed: int, changes: int) -> None:
    rng = np.random.default_rng(seed)
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(changes):
        index = rng.integers(0, capacity, rng.integers(1, 50))
        priority = rng.integers(0, 4, len(index)).astype(float)  # integers: their sums are exact, and many are 0
        tree[index] = priority
        plain[index] = priority
    np.testing.assert_array_equal(tree[:], plain)
    assert tree.total == plain.sum()
    if tree.total:
        mass = rng.integers(0, int(tree.total), 20) + 0.5
        assert tree.find(mass).tolist() == [slow_find(plain, each) for each in mass]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31))
def test_place_without_priority_is_never_found(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(capacity)
    index = rng.integers(0, capacity, rng.integers(1, 40))
    tree[index] = 10.0 ** rng.uniform(-12, 6, len(index))
    total = tree.total
    edges = np.concatenate([np.cumsum(tree[:]), [0.0, total, np.nextafter(total, np.inf), total * 2]])
    assert (tree[tree.find(edges)] > 0).all()


def test_frequencies_are_proportional_to_priorities() -> None:
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


def test_last_value_of_a_repeated_place_is_kept() -> None:
    tree = SumTree(10)
    tree[np.array([3, 3, 4])] = np.array([5.0, 1.0, 2.0])
    assert tree[3] == 1.0
    assert tree.total == 3.0


def test_priorities_can_be_set_by_slice_and_by_single_place() -> None:
    tree = SumTree(5000)
    tree[:] = 1.0
    tree[100:200] = 0.0
    tree[7] = 3.0
    tree[np.arange(0)] = np.zeros(0)
    assert tree.total == 4902.0
    assert tree.find(np.array([0.0, 99.5, 103.0])).tolist() == [0, 97, 201]


def test_mass_beyond_the_end_finds_the_last_place_with_a_priority() -> None:
    tree = SumTree(600)
    tree[np.array([300, 310])] = np.array([1.0, 2.0])
    assert tree.find(np.array([0.5, 2.999, 3.0, np.nextafter(3, 4), 9.0])).tolist() == [300, 310, 310, 310, 310]


def test_rounding_errors_do_not_accumulate() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    for _ in range(3000):
        tree[rng.integers(0, 1000, 16)] = 10.0 ** rng.uniform(-9, 9, 16)
    tree[:] = 1.0
    assert tree.total == 1000.0


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_priorities_are_refused(bad: float) -> None:
    tree = SumTree(10)
    with pytest.raises(ValueError, match=f"{bad}: none is negative or not a number"):
        tree[np.array([1, 2])] = np.array([1.0, bad])
    assert tree.total == 0.0


Change = tuple[int, list[int]]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 15, 16, 17, 255, 256, 257, 600]),
    st.lists(st.tuples(st.integers(0, 599), st.lists(st.integers(0, 9), min_size=1, max_size=40)), max_size=20),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=10),
)
def test_tree_behaves_like_a_list_of_numbers(capacity: int, changes: list[Change], shares: list[float]) -> None:
    """Consecutive places are set, to integers, whose sums are exact."""
    tree, plain = SumTree(capacity), [0] * capacity
    for first, priorities in changes:
        places = [(first + k) % capacity for k in range(len(priorities))]
        tree[np.array(places)] = np.array(priorities)
        for place, priority in zip(places, priorities, strict=True):
            plain[place] = priority
    assert tree[:].tolist() == plain
    assert tree.total == sum(plain)
    assert len(tree) == capacity
    mass = np.array([share * sum(plain) for share in shares])
    if sum(plain):
        assert tree.find(mass).tolist() == [slow_find(np.array(plain), each) for each in mass]
    elif shares:
        with pytest.raises(ValueError, match="no place has a priority"):
            tree.find(mass)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 12))
def test_draws_are_correct_for_priorities_of_any_size(seed: int, decades: float) -> None:
    """The mass lies between the running sums before and after the drawn place, except for rounding."""
    rng = np.random.default_rng(seed)
    tree = SumTree(3000)
    tree[:] = 10.0 ** rng.uniform(-decades, 0, 3000) * (rng.random(3000) < 0.7)
    position = np.arange(64) + rng.random(64)
    place, priority = tree.draw(position)
    np.testing.assert_array_equal(priority, tree[place])
    assert (priority > 0).all()
    ends, mass, error = np.cumsum(tree[:]), position * tree.total / 64, 1e-12 * tree.total
    assert (ends[place] >= mass - error).all()
    assert (ends[place] - priority <= mass + error).all()


def test_results_of_a_draw_are_not_changed_by_later_draws() -> None:
    tree = SumTree(500)
    tree[:] = 1.0
    first, priority = tree.draw(np.arange(20) + 0.5)
    before = first.tolist()
    tree[:] = 2.0
    tree.draw(np.arange(20) + 0.1)
    tree.find(np.array([3.0]))
    assert first.tolist() == before == [12 + 25 * k for k in range(20)]
    assert (priority == 1.0).all()
    assert tree.find(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("count", [900, 5000])
def test_many_places_can_be_set_at_once_in_any_order(count: int) -> None:
    rng = np.random.default_rng(count)
    tree, plain = SumTree(20_000), np.zeros(20_000)
    ring = np.arange(19_000, 19_000 + count) % 20_000  # wrapping around the end, like rows of a ring
    for index in (rng.integers(0, 20_000, count), np.arange(300, 300 + count), ring, ring[::-1]):
        priority = rng.integers(0, 9, count).astype(float)
        tree[index] = priority
        plain[index] = priority
        np.testing.assert_array_equal(tree[:], plain)
        assert tree.total == plain.sum()
        assert tree.find(np.array([plain.sum() / 2 + 0.5])) == slow_find(plain, plain.sum() / 2 + 0.5)


def test_tree_restored_from_its_state_is_bit_equal() -> None:
    rng = np.random.default_rng(3)
    tree, restored = SumTree(7000), SumTree(7000)
    for _ in range(300):
        tree[rng.integers(0, 7000, 37)] = 10.0 ** rng.uniform(-9, 3, 37)
    state = tree.get_state()
    restored[:] = 5.0
    restored.set_state(state)
    before = tree[:].copy()
    for _ in range(50):
        assert restored.total == tree.total
        position = np.arange(100) + rng.random(100)
        (place, priority), (same_place, same_priority) = tree.draw(position), restored.draw(position)
        np.testing.assert_array_equal(place, same_place)
        np.testing.assert_array_equal(priority, same_priority)
        fresh = 10.0 ** rng.uniform(-9, 3, 100)
        tree[place], restored[place] = fresh, fresh
    np.testing.assert_array_equal(state["places"], before)  # the state is a copy
    with pytest.raises(ValueError, match="7000 places, and this tree has 6999"):
        SumTree(6999).set_state(state)
