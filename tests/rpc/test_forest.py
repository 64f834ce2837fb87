"""The forest all-reduce: sums, their bits, the load of every member, and lost messages."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from remuda.rpc.core.forest import Ask, Down, Forest, Reduction, Up
from remuda.rpc.core.messages import Send

SHAPES = [(1, 1), (1, 2), (1, 8), (3, 2), (8, 2), (8, 7), (4, 3)]  # trees and arity


def reduce(
    members: list[str], trees: int, arity: int, vectors: dict[str, np.ndarray], seed: int = 0, loss: float = 0.0
) -> tuple[dict[str, np.ndarray], Counter[str]]:
    """Run an all-reduce with messages in random order; return all results, and the numbers of floats received."""
    drawn = random.Random(seed)
    forest = Forest(members, trees, arity)
    cuts = len(members) + 3
    reductions = {
        name: Reduction(forest, name, (1, 5), np.array_split(vectors[name], cuts), lambda a, b: a + b)
        for name in members
    }
    network: list[Send] = [send for each in reductions.values() for send in each.start()]
    received: Counter[str] = Counter()
    now = 0.0
    while not all(each.result is not None for each in reductions.values()):
        if not network:
            now += 0.06
            network += [send for each in reductions.values() for send in each.on_tick(now)]
            assert now < 60, "the reduction stands still"
            continue
        send = network.pop(drawn.randrange(len(network)))
        if drawn.random() < loss:
            continue
        received[send.to] += 0 if send.payload is None else len(send.payload)
        if drawn.random() < loss:  # the message arrives again
            network.append(send)
        network += reductions[send.to].on_message(send.message, send.payload)
    return {name: np.concatenate(each.result) for name, each in reductions.items()}, received


def some_vectors(count: int, size: int = 37) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(count)
    return {f"m{index:02}": drawn.normal(size=size).astype(np.float32) for index in range(count)}


@pytest.mark.parametrize(("trees", "arity"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_every_member_gets_the_same_bits_in_every_order_of_messages(count: int, trees: int, arity: int) -> None:
    vectors = some_vectors(count)
    results = [reduce(list(vectors), trees, arity, vectors, seed)[0] for seed in (0, 1)]
    expected = np.sum([vector.astype(np.float64) for vector in vectors.values()], axis=0)
    first = results[0]["m00"]
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5)
    assert all(np.array_equal(result, first) for found in results for result in found.values())


def test_lost_and_repeated_messages_change_nothing() -> None:
    vectors = some_vectors(7)
    expected, _ = reduce(list(vectors), 7, 2, vectors)
    for seed in range(20):
        found, _ = reduce(list(vectors), 7, 2, vectors, seed, loss=0.3)
        assert all(np.array_equal(found[name], expected[name]) for name in vectors)


def test_direct_exchange_adds_in_the_order_of_the_members_after_the_root() -> None:
    """With trees = P and arity P - 1, the owner of a slice adds all vectors to its own, in the order of the view."""
    vectors = some_vectors(4, size=40)
    found, _ = reduce(list(vectors), 4, 3, vectors)
    parts = {name: np.array_split(vector, 7) for name, vector in vectors.items()}
    for part in range(7):
        owner = f"m{part % 4:02}"
        expected = parts[owner][part]
        for name in sorted(set(vectors) - {owner}):
            expected = expected + parts[name][part]
        assert np.array_equal(np.array_split(found["m00"], 7)[part], expected)


def test_forests_spread_the_load_and_a_star_does_not() -> None:
    vectors = some_vectors(8, size=8 * 11 * 20)
    sizes = {shape: reduce(list(vectors), *shape, vectors)[1] for shape in [(1, 7), (8, 2), (8, 7)]}
    total = 2 * 7 * 8 * 11 * 20  # every member's vector goes up once, and comes down once
    assert all(sum(found.values()) == total for found in sizes.values())
    largest = {shape: max(found.values()) / (total / 8) for shape, found in sizes.items()}
    assert largest[1, 7] == pytest.approx(4.0, rel=0.01), "the root of a star receives all vectors"
    assert largest[8, 7] < 1.35
    assert largest[8, 2] < 1.35


@pytest.mark.parametrize(("trees", "arity"), SHAPES)
def test_every_tree_reaches_every_member_once(trees: int, arity: int) -> None:
    members = [f"m{index:02}" for index in range(11)]
    forest = Forest(members, trees, arity)
    for part in range(12):
        root = members[forest.root(part)]
        assert forest.parent(part, root) is None
        below = [child for name in members for child in forest.children(part, name)]
        assert sorted([root, *below]) == members
        assert all(forest.parent(part, child) == name for name in members for child in forest.children(part, name))
    roots = Counter(forest.root(part) for part in range(forest.trees))
    assert len(roots) == forest.trees, "every tree has another root"


def test_messages_of_other_reductions_and_of_strangers_are_ignored() -> None:
    def parts() -> list[Any]:
        return [np.ones(2), np.ones(2)]

    reduction = Reduction(Forest("ABC", 1, 2), "A", (4, 9), parts(), np.add)
    assert reduction.start() == []
    for message in [
        Up(3, 9, "B", 0),
        Up(4, 8, "B", 0),
        Up(4, 9, "X", 0),
        Up(4, 9, "B", 2),
        Up(4, 9, "B", -1),
        Ask(4, 9, "B", 0, False),
        Down(5, 9, 0),
    ]:
        assert reduction.on_message(message, np.full(2, 7.0)) == []
    assert reduction.on_message(Up(4, 9, "B", 0), np.full(2, 2.0)) == []
    assert reduction.on_message(Up(4, 9, "B", 0), np.full(2, 100.0)) == [], "a repeated message"
    (one, other) = reduction.on_message(Up(4, 9, "C", 0), np.full(2, 4.0))
    assert (one.to, other.to, one.payload.tolist()) == ("B", "C", [7.0, 7.0])
    assert reduction.result is None
