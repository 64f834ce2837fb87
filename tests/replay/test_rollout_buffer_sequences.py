"""Minibatches of whole columns with their reset rows, for recurrent agents or with `whole=True`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.algorithms import Targets
from remuda.data import ArrayTuple, Batch, Steps
from remuda.replay import RolloutBuffer


class Carried(ArrayTuple):
    """A recurrent state with two parts."""

    h: Any
    c: Any


def numbered(mask: torch.Tensor) -> Batch:
    """Return a batch in which all fields of row t of env b are t * B + b; its state and next_obs contain b."""
    T, B = mask.shape
    number, envs = torch.arange(T * B).reshape(T, B), torch.arange(B)
    steps = Steps(number, number, number.float(), torch.ones(T, B), mask, None, number)
    state = Carried(envs.float().reshape(B, 1).expand(B, 3).clone(), -envs.float())
    return Batch(steps, Targets(number.float(), number.float()), state, next_obs=envs)


def whole(T: int, B: int) -> Batch:
    return numbered(torch.ones(T, B, dtype=torch.bool))


def round_of(replay: RolloutBuffer, batch: Batch) -> list[Batch]:
    replay.add(batch)
    return list(replay.batches())


def envs_of(minibatch: Batch) -> list[int]:
    return list(minibatch.next_obs.tolist())


def epochs_of(minibatches: list[Batch], per_epoch: int) -> list[list[int]]:
    envs = [envs_of(minibatch) for minibatch in minibatches]
    return [list(itertools.chain(*envs[k : k + per_epoch])) for k in range(0, len(envs), per_epoch)]


@settings(deadline=None, database=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_every_epoch_has_every_column_once(T: int, size: int, parts: int, epochs: int, seed: int) -> None:
    B = size * parts
    minibatches = round_of(RolloutBuffer(epochs, T * size, seed), whole(T, B))
    assert len(minibatches) == epochs * parts
    assert [sorted(epoch) for epoch in epochs_of(minibatches, parts)] == [list(range(B))] * epochs
    for minibatch in minibatches:
        assert minibatch.steps.obs.shape == (T, size)
        envs = torch.tensor(envs_of(minibatch))
        assert torch.equal(minibatch.steps.obs, torch.arange(T).unsqueeze(1) * B + envs), "rows must stay in order"


def test_all_fields_belong_to_the_same_envs() -> None:
    for minibatch in round_of(RolloutBuffer(2, 8, 3), whole(4, 6)):
        steps, targets, envs = minibatch.steps, minibatch.targets, torch.tensor(envs_of(minibatch))
        for field in (steps.action, steps.reward, steps.version, targets.advantage, targets.value):
            assert torch.equal(field.long(), steps.obs)
        assert torch.equal(minibatch.state.h, envs.float().unsqueeze(1).expand(-1, 3))
        assert torch.equal(minibatch.state.c, -envs.float())


def test_order_differs_between_epochs_and_rounds_and_depends_on_the_seed() -> None:
    def orders(seed: int, first_round: int, rounds: int) -> list[list[list[int]]]:
        replay = RolloutBuffer(3, 8, seed, first_round)
        return [epochs_of(round_of(replay, whole(4, 16)), 8) for _ in range(rounds)]

    torch.manual_seed(1)
    first = orders(7, 0, 3)
    torch.manual_seed(2)  # torch's global generator must not matter
    assert orders(7, 0, 3) == first
    assert orders(7, 1, 2) == first[1:], "resumed after one round"
    assert orders(8, 0, 1) != first[:1]
    every = [tuple(epoch) for found in first for epoch in found]
    assert len(set(every)) == 9
    assert tuple(range(16)) not in every


def test_reset_rows_keep_their_places() -> None:
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[2, 1] = mask[0, 3] = mask[4, 3] = False
    minibatches = round_of(RolloutBuffer(2, 10, 0), numbered(mask))
    assert len(minibatches) == 4
    for minibatch in minibatches:
        assert torch.equal(minibatch.steps.mask, mask[:, envs_of(minibatch)])


def test_minibatch_of_columns_without_a_real_row_is_skipped() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 2] = False
    minibatches = round_of(RolloutBuffer(3, 3, 0), numbered(mask))
    assert [sorted(epoch) for epoch in epochs_of(minibatches, 3)] == [[0, 1, 3]] * 3


def test_columns_without_a_real_row_may_share_a_minibatch() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 2] = False
    minibatches = round_of(RolloutBuffer(2, 6, 0), numbered(mask))
    assert [sorted(epoch) for epoch in epochs_of(minibatches, 2)] == [[0, 1, 2, 3]] * 2
    assert all(bool(minibatch.steps.mask.any()) for minibatch in minibatches)


@pytest.mark.parametrize("batch_size", [None, 12])
def test_single_minibatch_is_the_rollout_itself(batch_size: int | None) -> None:
    batch = whole(4, 3)
    minibatches = round_of(RolloutBuffer(2, batch_size, 0), batch)
    assert [envs_of(minibatch) for minibatch in minibatches] == [[0, 1, 2]] * 2
    assert all(minibatch.steps.obs is batch.steps.obs for minibatch in minibatches), "nothing is copied"


def test_rollout_is_used_once_and_only_reset_rows_give_no_minibatch() -> None:
    replay = RolloutBuffer(2, 4, 0)
    assert len(round_of(replay, whole(4, 2))) == 4
    assert list(replay.batches()) == []
    assert round_of(replay, numbered(torch.zeros(4, 2, dtype=torch.bool))) == []


def without_state(batch: Batch) -> Batch:
    return Batch(batch.steps, None, None, batch.next_obs)


@settings(deadline=None, database=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 15), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_whole_sequences_without_memory(T: int, B: int, batch_size: int, epochs: int, seed: int) -> None:
    """batch_size counts sequences: no minibatch has more, and the sizes differ by at most one."""
    minibatches = round_of(RolloutBuffer(epochs, batch_size, seed, whole=True), without_state(whole(T, B)))
    per_epoch = -(-B // batch_size)
    assert len(minibatches) == epochs * per_epoch
    assert [sorted(epoch) for epoch in epochs_of(minibatches, per_epoch)] == [list(range(B))] * epochs
    sizes = [len(envs_of(minibatch)) for minibatch in minibatches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    for minibatch in minibatches:
        envs = torch.tensor(envs_of(minibatch))
        assert minibatch.state is None
        assert torch.equal(minibatch.steps.obs, torch.arange(T).unsqueeze(1) * B + envs), "rows must stay in order"


def test_whole_changes_only_the_unit_of_batch_size_for_recurrent_agents() -> None:
    rows, sequences = RolloutBuffer(2, 8, 5), RolloutBuffer(2, 2, 5, whole=True)
    found = [[envs_of(minibatch) for minibatch in round_of(replay, whole(4, 6))] for replay in (rows, sequences)]
    assert found[0] == found[1]
    assert len(found[0]) == 6


def test_whole_sequences_keep_their_reset_rows() -> None:
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[2, 1] = mask[0, 3] = mask[4, 3] = False
    for minibatch in round_of(RolloutBuffer(2, 2, 0, whole=True), without_state(numbered(mask))):
        assert minibatch.steps.mask.shape == (5, 2)
        assert torch.equal(minibatch.steps.mask, mask[:, envs_of(minibatch)])


def test_whole_sequences_without_a_real_row_give_no_minibatch() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 2] = False
    minibatches = round_of(RolloutBuffer(2, 1, 0, whole=True), without_state(numbered(mask)))
    assert [sorted(epoch) for epoch in epochs_of(minibatches, 3)] == [[0, 1, 3]] * 2
    nothing = without_state(numbered(torch.zeros(3, 4, dtype=torch.bool)))
    assert round_of(RolloutBuffer(2, 1, 0, whole=True), nothing) == []


@pytest.mark.parametrize("batch_size", [None, 3, 100])
def test_single_minibatch_of_whole_sequences_is_the_rollout_itself(batch_size: int | None) -> None:
    batch = without_state(whole(4, 3))
    minibatches = round_of(RolloutBuffer(2, batch_size, 0, whole=True), batch)
    assert [envs_of(minibatch) for minibatch in minibatches] == [[0, 1, 2]] * 2
    assert all(minibatch.steps.obs is batch.steps.obs for minibatch in minibatches), "nothing is copied"
