"""Minibatches of the rollout buffer: their rows, sizes and order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.algorithms import Targets
from remuda.data import Batch, Steps
from remuda.replay import RolloutBuffer


def numbered(mask: torch.Tensor) -> Batch:
    """Return a batch in which all fields of row t of env b are t * B + b."""
    T, B = mask.shape
    number = torch.arange(T * B).reshape(T, B)
    steps = Steps(number, number, number.float(), torch.ones(T, B), mask, None, number)
    return Batch(steps, Targets(number.float(), number.float()))


def round_of(replay: RolloutBuffer, batch: Batch) -> list[list[int]]:
    replay.add(batch)
    return [minibatch.steps.obs.tolist() for minibatch in replay.batches()]


@settings(deadline=None, database=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 30), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_every_epoch_has_every_real_row_once_and_no_reset_row(
    T: int, B: int, batch_size: int, num_epochs: int, seed: int
) -> None:
    mask = torch.rand(T, B, generator=torch.Generator().manual_seed(seed % 1000)) < 0.7
    real = mask.flatten().nonzero().squeeze(-1).tolist()
    minibatches = round_of(RolloutBuffer(num_epochs, batch_size, seed), numbered(mask))
    per_epoch = min(max(1, T * B // batch_size), len(real))
    assert len(minibatches) == num_epochs * per_epoch
    for epoch in range(num_epochs):
        chunk = minibatches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*chunk)) == real
        sizes = [len(minibatch) for minibatch in chunk]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_sizes_are_exact_without_reset_rows_and_even_with_some() -> None:
    mask = torch.ones(16, 4, dtype=torch.bool)
    assert [len(rows) for rows in round_of(RolloutBuffer(1, 16, 0), numbered(mask))] == [16, 16, 16, 16]
    mask[:6, 0] = False
    assert sorted(len(rows) for rows in round_of(RolloutBuffer(1, 16, 0), numbered(mask))) == [14, 14, 15, 15]


def test_fields_of_a_row_stay_together() -> None:
    """All fields of a minibatch's row, including the targets, belong to the same row of the rollout."""
    replay = RolloutBuffer(2, 8, 3)
    replay.add(numbered(torch.ones(8, 4, dtype=torch.bool)))
    for batch in replay.batches():
        for field in (batch.steps.action, batch.steps.reward, batch.targets.advantage, batch.targets.value):
            assert torch.equal(field.long(), batch.steps.obs)
        assert batch.steps.mask.all()


def test_order_is_a_function_of_seed_round_and_epoch() -> None:
    batch = numbered(torch.ones(8, 8, dtype=torch.bool))

    def orders(seed: int, first_round: int, rounds: int) -> list[list[list[int]]]:
        replay = RolloutBuffer(3, 16, seed, first_round)
        return [round_of(replay, batch) for _ in range(rounds)]

    torch.manual_seed(1)
    first = orders(7, 0, 4)
    torch.manual_seed(2)  # torch's global generator must not matter
    assert orders(7, 0, 4) == first
    assert orders(7, 2, 2) == first[2:]  # resumed after two rounds
    epochs = [tuple(itertools.chain(*found[epoch * 4 : epoch * 4 + 4])) for found in first for epoch in range(3)]
    assert len(set(epochs)) == 12
    assert orders(8, 0, 1) != first[:1]


def test_order_is_shuffled_over_time_and_envs() -> None:
    (minibatch, *_) = round_of(RolloutBuffer(1, 64, 0), numbered(torch.ones(32, 8, dtype=torch.bool)))
    assert len({number // 8 for number in minibatch}) > 16
    assert len({number % 8 for number in minibatch}) == 8


@pytest.mark.parametrize("batch_size", [None, 12])
def test_single_minibatch_has_the_order_of_the_rollout(batch_size: int | None) -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    assert round_of(RolloutBuffer(2, batch_size, 0), numbered(mask)) == [list(range(12))] * 2
    mask[1, 1] = False
    assert round_of(RolloutBuffer(1, batch_size, 0), numbered(mask)) == [[0, 1, 2, 3, *range(5, 12)]]


def test_rollout_is_used_once() -> None:
    replay = RolloutBuffer(2, 4, 0)
    assert list(replay.batches()) == []
    assert len(round_of(replay, numbered(torch.ones(4, 2, dtype=torch.bool)))) == 4
    assert list(replay.batches()) == []


def test_only_reset_rows_give_no_minibatch() -> None:
    assert round_of(RolloutBuffer(3, 2, 0), numbered(torch.zeros(2, 2, dtype=torch.bool))) == []


@settings(deadline=None, database=None, max_examples=150)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 80),
    st.sampled_from(["rows", "sequences", "whole"]),
    st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    st.integers(0, 1000),
)
def test_number_of_batches_due_is_the_same_for_all_masks(
    T: int, B: int, num_epochs: int, size: int, kind: str, real: float, seed: int
) -> None:
    """It is the number without reset rows, and `batches` never yields more, so parts of a run agree on it."""
    mask = torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < real
    batch_size = T * min(size, B) if kind == "sequences" else size
    state = torch.zeros(B) if kind == "sequences" else None

    def due_and_yielded(mask: torch.Tensor) -> tuple[int, int]:
        replay = RolloutBuffer(num_epochs, batch_size, seed, whole=kind == "whole")
        assert replay.num_due == 0
        assert replay.append(replace(numbered(mask), state=state)) == (int(mask.sum()), True)
        replay.count_steps(10**6, False)
        due = replay.num_due
        yielded = len(list(replay.batches()))
        assert replay.num_due == 0
        return due, yielded

    all_real = due_and_yielded(torch.ones(T, B, dtype=torch.bool))
    due, yielded = due_and_yielded(mask)
    assert all_real == (due, due)
    assert yielded <= due
