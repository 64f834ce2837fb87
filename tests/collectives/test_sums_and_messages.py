"""Sums and messages of ranks that are real processes: every rank gets the bits of the sum from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks, leaves_nothing, left_to_right

from remuda.collectives import SharedCollective
from remuda.collectives.shared import BOX_BYTES, SMALL, ordered_sum
from remuda.processes.fork_server import ForkServer

LENGTHS = [1, 7, SMALL - 1, SMALL, SMALL + 1, 300_000]
KINDS = pytest.mark.parametrize("kind", ["shared", "gloo"])
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


@pytest.fixture(scope="module")
def server(shared_servers: Any) -> Iterator[ForkServer]:
    with leaves_nothing(shared_servers("ranks")) as server:
        yield server


@SIZES
@KINDS
def test_sums_are_added_in_the_order_of_ranks(kind: str, size: int, server: ForkServer, tmp_path: Path) -> None:
    """Each length is used three times in a row, and most lengths again after others."""
    lengths = [length for length in LENGTHS for _ in range(3)] + LENGTHS[::-1] + [7, 300_000, 7, 1, SMALL]
    with Ranks(server, kind, size, tmp_path, "check_sums", {"lengths": lengths}) as ranks:
        assert ranks.results() == [len(lengths)] * size


def test_vectors_of_the_tests_depend_on_the_order() -> None:
    """Otherwise the tests of this module could not notice a wrong order."""
    for size in (3, 4):
        for length in LENGTHS[1:]:
            forward, backward = (
                left_to_right(0, 1, range(size), length),
                left_to_right(0, 1, range(size)[::-1], length),
            )
            assert not np.array_equal(forward, backward)


@KINDS
def test_messages_of_all_lengths_arrive_in_the_order_of_ranks(kind: str, server: ForkServer, tmp_path: Path) -> None:
    lengths = [
        [0, 0, 0],
        [3, 0, 5],
        [0, 1, 0],
        [BOX_BYTES, BOX_BYTES + 1, BOX_BYTES - 1],
        [2 * BOX_BYTES + 9, 0, 3],
        [1, 2 * BOX_BYTES, 3 * BOX_BYTES],
        [0, 0, 0],
        [7, 7, 7],
    ]
    with Ranks(server, kind, 3, tmp_path, "check_messages", {"lengths": lengths}) as ranks:
        assert ranks.results() == [len(lengths)] * 3


@pytest.mark.parametrize(("kind", "seed"), [("shared", 1), ("shared", 2), ("gloo", 3)])
def test_messages_and_sums_in_any_sequence(kind: str, seed: int, server: ForkServer, tmp_path: Path) -> None:
    options = {
        "seed": seed,
        "count": 120,
        "lengths": [1, 9, SMALL, SMALL + 1],
        "longest": 2 * BOX_BYTES + 5,
        "pauses": 0.05,
    }
    with Ranks(server, kind, 3, tmp_path, "check_mixture", options) as ranks:
        assert ranks.results() == [120] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_ahead_overwrites_nothing_that_others_still_read(
    size: int, server: ForkServer, tmp_path: Path
) -> None:
    """In thousands of small sums, ranks sleep at random before they contribute and before they read."""
    options = {"seed": size, "count": 2000, "lengths": [3], "longest": 40, "pauses": 0.1}
    with Ranks(server, "shared", size, tmp_path, "check_mixture", options) as ranks:
        assert ranks.results() == [2000] * size


def test_large_sums_with_ranks_that_are_ahead(server: ForkServer, tmp_path: Path) -> None:
    """Vectors above SMALL have one place only, so a rank must not write before all others have read."""
    options = {"seed": 5, "count": 400, "lengths": [9], "longest": 40, "pauses": 0.2}
    with Ranks(server, "shared", 3, tmp_path, "check_mixture", options, {"shared.SMALL": 4}) as ranks:
        assert ranks.results() == [400] * 3


def test_a_collective_of_one_rank() -> None:
    collective = SharedCollective.create(1, "here", lambda address: None)
    for length in (5, SMALL + 3):
        collective.vector(length)[:] = torch.arange(length)
        assert torch.equal(collective.sum(), torch.arange(length, dtype=torch.float32))
    assert collective.gather(b"alone") == [b"alone"]
    assert collective.gather(b"") == [b""]
    collective.close()
    collective.close()


def test_ordered_sum_by_worked_numbers() -> None:
    """2 ** 24 + 1 is not a float32 number, so the order of addition decides about the result."""
    large = float(2**24)
    rows = torch.tensor([[large, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert ordered_sum(rows, torch.empty(2)).tolist() == [large, 6.0]
    assert ordered_sum(rows.flip(0), torch.empty(2)).tolist() == [large + 2, 6.0]
    assert ordered_sum(rows[:1], torch.empty(2)).tolist() == [large, 1.0]
