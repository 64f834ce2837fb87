"""Replays of several parts: all parts draw equally often, whatever their episodes are, also after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parted import EXAMPLE, make_replay, parted, rows_with_mask

from remuda.data import Batch
from remuda.parts import LocalGroup, PartedReplay
from remuda.replay import Ring, RolloutBuffer, SequenceReplay


def make(parts: int, **options: Any) -> PartedReplay:
    return PartedReplay([make_replay(part, parts, **options) for part in range(parts)], LocalGroup(parts))


def masks(parts: int, round: int, real: Sequence[float], T: int = 3) -> list[torch.Tensor]:
    """Return masks [T, 2] in which each part has its own fraction of real rows, but always one in the first round."""
    found = []
    for part in range(parts):
        generator = torch.Generator().manual_seed(100 * round + part)
        mask = torch.rand(T, 2, generator=generator) < real[part]
        mask[0, 0] |= round == 0
        found.append(mask)
    return found


def rows_of_parts(found: Sequence[torch.Tensor], round: int) -> Any:
    """Return a batch for each part, in which the observation is 1000 * part + the number of the row and env."""
    return parted(*(rows_with_mask(mask, 1000.0 * part + 6 * round) for part, mask in enumerate(found)))


def observations(batch: Any) -> list[list[float]]:
    return [part.steps.obs[:, 0].tolist() for part in batch.parts]


def sequence_replay(part: int, parts: int) -> SequenceReplay:
    options: dict[str, Any] = {"batch_size": 2, "ratio": 2.0, "warm_up": 0, "n_step": 1, "gamma": 0.9, "seed": 1}
    replay = SequenceReplay(Ring(EXAMPLE, 40, 2), None, **options, burn_in=1, length=2, priorities=0.9)
    replay.set_part(part, parts)
    return replay


# --- what is due ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from([0.0, 0.2, 0.8, 1.0]), min_size=4, max_size=4),
    st.sampled_from([0.25, 1.0, 2.5]),
    st.integers(0, 20),
)
def test_all_parts_draw_equally_often_and_as_often_as_an_undivided_replay(
    parts: int, real: list[float], ratio: float, warm_up: int
) -> None:
    """The credit counts the steps of all parts. An undivided replay has batches that are `parts` times as large."""
    replay = make(parts, ratio=ratio, warm_up=warm_up)
    steps = drawn = 0
    for round in range(6):
        found = masks(parts, round, real)
        steps += sum(int(mask.sum()) for mask in found)
        replay.add(rows_of_parts(found, round))
        assert {each.num_due for each in replay._replays} == {replay._replays[0].num_due}
        assert {each.steps for each in replay._replays} == {steps}  # type: ignore[attr-defined]
        due = replay._replays[0].num_due
        batches: list[Any] = list(replay.batches())
        assert len(batches) == due
        for batch in batches:
            assert [len(part.steps.mask) for part in batch.parts] == [4] * parts
        drawn += due
        assert drawn == int(ratio * max(0, steps - warm_up) / (4 * parts) + 1e-9)
        assert list(replay.batches()) == []


def test_every_part_draws_its_own_rows_with_its_own_numbers() -> None:
    replay = make(3, ratio=8.0)
    same = torch.ones(6, 2, dtype=torch.bool)
    replay.add(rows_of_parts([same] * 3, 0))
    drawn = [observations(batch) for batch in replay.batches()]
    assert len(drawn) == 24
    for part in range(3):
        own = [number for batch in drawn for number in batch[part]]
        assert all(1000 * part <= number < 1000 * part + 12 for number in own)
    places = [[number - 1000 * part for batch in drawn for number in batch[part]] for part in range(3)]
    assert places[0] != places[1] != places[2] != places[0]


def test_feedback_reaches_the_part_whose_rows_were_drawn() -> None:
    replay = make(3, ratio=2.0, alpha=1.0)
    mask = torch.ones(4, 2, dtype=torch.bool)
    replay.add(rows_of_parts([mask] * 3, 0))
    batch: Any = next(replay.batches())
    totals = [each.priorities.tree.total for each in replay._replays]  # type: ignore[attr-defined]
    replay.feedback(batch.key, [torch.full((4,), 5.0), None, torch.full((4,), 0.0)])  # type: ignore[arg-type]
    now = [each.priorities.tree.total for each in replay._replays]  # type: ignore[attr-defined]
    assert now[0] > totals[0]
    assert now[1] == totals[1]
    assert now[2] < totals[2]
    replay.feedback(batch.key, None)
    assert [each.priorities.tree.total for each in replay._replays] == now  # type: ignore[attr-defined]


def test_part_whose_batch_is_missing_gets_no_feedback() -> None:
    replay = make(2, alpha=1.0)
    replay.add(rows_of_parts([torch.ones(4, 2, dtype=torch.bool)] * 2, 0))
    before = [each.priorities.tree.total for each in replay._replays]  # type: ignore[attr-defined]
    replay.feedback((None, None), [None, None])  # type: ignore[arg-type]
    assert [each.priorities.tree.total for each in replay._replays] == before  # type: ignore[attr-defined]


def test_steps_earn_nothing_until_every_part_can_draw() -> None:
    """A sequence has burn_in + length = 3 rows, so no part can draw after two rows, and only part 0 after four."""
    replay = PartedReplay([sequence_replay(part, 2) for part in range(2)], LocalGroup(2))

    def add(round: int, real: Sequence[bool]) -> int:
        found = [torch.full((2, 2), each) for each in real]
        batch = rows_of_parts(found, round)
        batches = [Batch(each.steps, state=torch.zeros(2), next_obs=each.next_obs) for each in batch.parts]
        replay.add(parted(*batches))
        return len(list(replay.batches()))

    assert add(0, [True, False]) == 0
    assert add(1, [True, False]) == 0
    assert replay._replays[0].can_draw()  # type: ignore[attr-defined]
    assert not replay._replays[1].can_draw()  # type: ignore[attr-defined]
    assert add(2, [True, True]) == 2, (
        "8 real steps of both parts earn 16 rows, and a batch of 2 parts has 2 * 2 * 2 rows"
    )
    assert add(3, [True, True]) == 2
    assert {each.num_due for each in replay._replays} == {0}


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.sampled_from([0.0, 0.2, 1.0]), min_size=3, max_size=3),
    st.integers(1, 8),
)
def test_rollout_buffers_of_all_parts_yield_equally_many_batches(
    epochs: int, T: int, real: list[float], batch_size: int
) -> None:
    """A part with too few real rows has no batch where the others still have one."""
    buffers = [RolloutBuffer(epochs, batch_size, 3) for _ in range(3)]
    for part, buffer in enumerate(buffers):
        buffer.set_part(part, 3)
    replay = PartedReplay(buffers, LocalGroup(3))
    found = masks(3, 1, real, T)
    replay.add(rows_of_parts(found, 0))
    batches: list[Any] = list(replay.batches())
    assert len(batches) == epochs * max(1, 2 * T // batch_size)
    for part, mask in enumerate(found):
        rows = [
            number for batch in batches if batch.parts[part] for number in batch.parts[part].steps.obs[:, 0].tolist()
        ]
        expected = (1000.0 * part + mask.flatten().nonzero()[:, 0]).tolist()
        assert sorted(rows) == sorted(expected * epochs)
    assert list(replay.batches()) == []


# --- one part -------------------------------------------------------------------------------------------------------


def test_add_is_append_followed_by_count() -> None:
    whole, divided = make_replay(0, 1), make_replay(0, 1)
    for round in range(4):
        (mask,) = masks(1, round, [0.6])
        batch = rows_with_mask(mask, 6.0 * round)
        whole.add(batch)
        steps, can_draw = divided.append(batch)
        assert (steps, can_draw) == (int(mask.sum()), True)
        divided.count_steps(steps, can_draw)
        assert (whole.counters.steps, whole.counters.credit) == (divided.counters.steps, divided.counters.credit)
        assert whole.num_due == divided.num_due
        mine, theirs = ([batch.steps.obs.tolist() for batch in each.batches()] for each in (divided, whole))
        assert mine == theirs


def test_batch_of_one_part_takes_the_credit_of_all_parts() -> None:
    replay = make_replay(1, 3)  # 4 rows per batch and part
    replay.append(rows_with_mask(torch.ones(6, 2, dtype=torch.bool), 0.0))
    replay.count_steps(11, True)
    assert replay.num_due == 1
    replay.count_steps(1, True)
    assert replay.num_due == 2
    replay.count_steps(100, False)
    assert (replay.num_due, replay.steps) == (2, 112)
    assert len(list(replay.batches())) == 2


def test_draws_of_part_0_are_those_of_an_undivided_replay() -> None:
    mask = torch.ones(6, 2, dtype=torch.bool)
    drawn = []
    for replay in (make_replay(0, 1), make_replay(0, 3), make_replay(1, 3)):
        replay.append(rows_with_mask(mask, 0.0))
        drawn.append([replay.draw().steps.obs[:, 0].tolist() for _ in range(70)])
    assert drawn[0] == drawn[1]
    assert all(first != second for first, second in zip(drawn[1], drawn[2], strict=True) if len(set(first)) > 1)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_loaded_replay_continues_with_the_same_draws(alpha: float | None, tmp_path: Path) -> None:
    """Every part has files of its own. They are saved while some credit is left."""
    first = make(3, alpha=alpha, ratio=1.7)
    real = [0.9, 0.2, 0.6]
    for round in range(4):
        first.add(rows_of_parts(masks(3, round, real), round))
        use(first)
    assert first.needs_saving
    state = first.save(tmp_path)
    assert state is not None
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(state["files"]) == names
    assert {Path(name).parts[0] for name in names} == {"part-0", "part-1", "part-2"}
    second = make(3, alpha=alpha, ratio=1.7)
    second.load(tmp_path, state)
    assert second.loaded == (str(tmp_path), state)
    drawn = 0
    for round in range(4, 9):
        for replay in (first, second):
            replay.add(rows_of_parts(masks(3, round, real), round))
        found = use(second)
        assert use(first) == found
        drawn += len(found)
    assert drawn > 3
    for mine, theirs in zip(first._replays, second._replays, strict=True):
        np.testing.assert_equal(mine.get_state(), theirs.get_state())  # type: ignore[attr-defined]
    again = second.save(tmp_path)
    assert again is not None
    assert len(again["files"]) >= len(state["files"])
    for replay in (first, second):
        replay.close()


def use(replay: PartedReplay) -> list[list[list[float]]]:
    """Draw what is due, give priorities that depend on the rows, and return the observations of all parts."""
    found = []
    for batch in replay.batches():
        drawn: Any = batch
        found.append(observations(drawn))
        errors: Any = [1.0 + part.steps.obs[:, 0] % 7 for part in drawn.parts]
        replay.feedback(drawn.key, errors)
    return found


def test_rollout_buffers_save_nothing(tmp_path: Path) -> None:
    replay = PartedReplay([RolloutBuffer(1, 4, 0) for _ in range(2)], LocalGroup(2))
    assert not replay.needs_saving
    assert replay.save(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_cut_ends_the_episodes_of_all_parts() -> None:
    replay = make(2)
    replay.add(rows_of_parts([torch.ones(3, 2, dtype=torch.bool)] * 2, 0))
    with replay.paused():
        replay.cut()
    assert [int(each.ring.written[0]) for each in replay._replays] == [4, 4]  # type: ignore[attr-defined]
    replay.cut()
    assert [int(each.ring.written[0]) for each in replay._replays] == [4, 4]  # type: ignore[attr-defined]
