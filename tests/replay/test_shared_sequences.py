"""Transition and sequence replay of a ring that other processes write to: draws, lost writers, checkpoints."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_shared_ring import (
    EXAMPLE,
    GAMMA,
    KINDS,
    N_STEP,
    NO_GAP,
    SECONDS,
    WIDTH,
    assert_same,
    check_batch,
    check_ring,
    check_targets,
    closing_all,
    experience,
    interrupted,
    made,
    make,
    rollout,
    state_of,
    truth,
    writers_of,
    writing,
)
from test_shared_ring import all_closed as all_closed

from remuda.data import leaves
from remuda.data.packing import pack, unpack
from remuda.replay import Ring, SequenceReplay, counters
from remuda.replay.ring import NothingToDraw

T, BURN_IN, LENGTH = 5, 2, 3  # a sequence is complete before the rows that it bootstraps from
R = BURN_IN + LENGTH + N_STEP
HOW = pytest.mark.parametrize("how", ["append", "begin"])  # rows are overwritten completely or partly
KINDS_AND_HOW = pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("rows", "append"),
        ("frames", "begin"),
        pytest.param("rows", "begin", marks=pytest.mark.long),
        pytest.param("frames", "append", marks=pytest.mark.long),
    ],
)
WHAT = pytest.mark.parametrize("what", ["prioritized", "sequences"])
SOME = [("uniform", 1), pytest.param("uniform", 3, marks=pytest.mark.long), ("prioritized", 3), ("sequences", 2)]


def replay_of(what: str, ring: Ring) -> Any:
    if what != "sequences":
        return experience(ring, 1.0 if what == "prioritized" else None)
    settings: dict[str, Any] = {"ratio": 1.0, "warm_up": 0, "n_step": N_STEP, "gamma": GAMMA, "seed": 2}
    settings |= {"burn_in": BURN_IN, "length": LENGTH, "interval": T, "priorities": 1.0, "is_shared": True}
    made.append(SequenceReplay(ring, state_of(0, [0]), batch_size=3, **settings))
    return made[-1]


def check(replay: Any, batch: Any, written: Any, gap: tuple[int, int] = NO_GAP) -> None:
    """Check a batch. `written` are the counts before the draw; the gap is in group 0."""
    if not isinstance(replay, SequenceReplay):
        check_batch(batch, written, gap)
        return
    for s, (number, env) in enumerate(batch.key.tolist()):
        start, rest, newest = int(batch.state.c[s]), gap if env < WIDTH else NO_GAP, written[env // WIDTH]
        assert batch.state.h[s].tolist() == [start, env]
        assert start == number * T or rest != NO_GAP
        steps, row = batch.steps[:, s], np.arange(start, start + R)
        is_there = (steps.mask | (steps.discount > 0)).numpy()
        end, known = start + int(is_there.sum()), truth(row, env, rest)
        assert is_there[: end - start].all()
        assert end >= min(newest, start + R), "a stored row is blank"
        assert end >= start + BURN_IN + LENGTH, "an incomplete sequence was drawn"
        for name in ("action", "reward", "discount", "mask"):
            part, compared = getattr(steps, name).numpy(), is_there & (known.mask | (name != "action"))
            assert_same(part[compared], getattr(known, name)[compared], name, start, env)
            assert not part[~is_there].any()
        seen = (row <= rest[0]) | (row >= rest[1])
        assert_same(steps.obs[seen], truth(np.minimum(row, end), env, rest).obs[seen], "obs", start, env)
        targets, learned = batch.targets[:, s], row[BURN_IN : BURN_IN + LENGTH]
        assert max(targets.row.tolist()) <= end - start, "a target was bootstrapped from a blank row"
        next_obs = steps.obs[targets.row]
        check_targets(learned, np.full(LENGTH, env), rest, np.full(LENGTH, newest), targets, next_obs)


def check_all(replay: Any, gap: tuple[int, int] = NO_GAP, ahead: int = 0) -> int:
    """Check the ring, priorities and one batch while no writer runs; return the rows that can be drawn."""
    count = check_ring(replay.ring, gap)
    replay.sync()
    if isinstance(replay, SequenceReplay):
        check_states(replay, ahead)
    elif replay.priorities is not None:
        check_priorities(replay)
    check(replay, replay.draw(), replay.ring.written.copy(), gap)
    return count


def check_states(replay: Any, ahead: int = 0) -> None:
    """Check that every state belongs to its row, and that exactly the complete stored sequences have a priority.

    Sequences that a writer was about to overwrite, up to `ahead` rows later, may lack one.
    """
    sequence_index, ring, states, expected = replay.sequence_index, replay.ring, replay.sequence_index.states, set()
    spare: set[tuple[int, int]] = set()
    for group in range(ring.groups):
        columns, stored = ring.columns(group), int(states.counters.written[group])
        env = np.arange(columns.start, columns.stop)
        for number in range(max(0, stored - sequence_index.room + 1), stored):
            place = number % sequence_index.room
            row = int(states.row[place, group])
            for (_, kept), (_, known) in zip(leaves(states.states), leaves(state_of(row, env)), strict=True):
                assert_same(kept[place, columns], known, "state", number, group)
            learned = row + BURN_IN + np.arange(LENGTH)
            if learned[-1] < ring.written[group]:
                can = ring.is_stored(np.full(WIDTH, row), env) & ring.is_real(learned[:, None], env).any(0)
                expected |= {(place, each) for each in env[can].tolist()}
                if row <= ring.written[group] + ahead - ring.capacity:
                    spare |= {(place, each) for each in env.tolist()}
    found = set(zip(*np.divmod(np.flatnonzero(sequence_index.tree[:]), ring.envs), strict=True))
    assert expected - spare <= found <= expected


def check_priorities(replay: Any) -> None:
    """Check that exactly the real rows have a priority after `sync`."""
    row, env = replay.ring.counters.locate(np.arange(replay.ring.counters.count))
    kept = replay.ring.is_stored(row, env)
    priority = replay.priorities.tree[replay.index.place(np.stack([row, env], -1))]
    assert_same(priority[kept] > 0, replay.ring.is_real(row, env)[kept], "has a priority", row[kept], env[kept])


def failures_at_any_line(attempt: Callable[[int, list[str]], None]) -> dict[str, str]:
    """Call attempt(when, lines) for every line, and return the errors by line.

    `attempt` lets something happen before the `when`-th line and appends that line to `lines`; if it appends
    nothing, there are no more lines.
    """
    found: dict[str, str] = {}
    for when in itertools.count():
        lines: list[str] = []
        try:
            attempt(when, lines)
        except Exception as error:
            found[lines[0] if lines else "none"] = repr(error)
        if not lines:
            break
    return found


def drawn(replay: Any, error: float = 0.25) -> Any:
    replay.sync()
    batch = replay.draw()
    replay.feedback(batch.key, torch.full((len(batch.key),), error))
    return batch


@KINDS_AND_HOW
@pytest.mark.parametrize(("what", "groups"), SOME)
def test_writer_may_append_before_any_line_of_a_draw(kind: str, how: str, what: str, groups: int) -> None:
    replay = replay_of(what, make(kind, 40, groups))
    writer = writers_of(replay, kind, 14)[0]

    def attempt(when: int, lines: list[str]) -> None:
        def act(line: str) -> None:
            lines.append(line)
            rows = T if what == "sequences" else 12
            writer.append(rows) if how == "append" else writer.begin(rows, when * 7 % 80)

        written = replay.ring.written.copy()
        try:
            check(replay, interrupted(lambda: drawn(replay), when, act), written)
        finally:
            writer.finish()
        if what == "prioritized":
            replay.sync()
            check_priorities(replay)

    assert failures_at_any_line(attempt) == {}
    check_all(replay)


@KINDS
@HOW
@pytest.mark.parametrize("what", ["uniform", "prioritized", "sequences"])
def test_torn_rows_are_drawn_again(kind: str, how: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = replay_of(what, make(kind, 40, 2))
    _, writer = writers_of(replay, kind, 14)
    gather, written, torn = replay._draw_once, replay.ring.written.copy(), []

    def gather_and_overwrite() -> Any:
        batch = gather()
        if not torn:
            for append in (*[writer.append] * 4, writer.append if how == "append" else writer.begin):
                append(T)
        row, env = batch.key.T
        first = row if what != "sequences" else batch.state.c.numpy().astype(int)
        is_unreal = ~truth(row, env).mask & (what != "sequences")
        torn.append(np.count_nonzero((first <= replay.ring.counters.begun[env // WIDTH] - 40) | is_unreal))
        return batch

    monkeypatch.setattr(replay, "_draw_once", gather_and_overwrite)
    check(replay, replay.draw(), written)
    writer.finish()
    assert torn[0] > 0 == torn[-1]
    assert replay.counters.draws == len(torn)
    assert replay.metrics()["replay/redrawn"] == replay.counters.torn_rows >= sum(torn)
    if kind != "frames":  # the frames of short episodes are overwritten before their rows are
        assert replay.counters.torn_rows == sum(torn)


@KINDS
def test_learner_that_syncs_rarely_draws_only_valid_sequences(kind: str) -> None:
    """Between two draws, writers fill the ring once, almost once, or several times."""
    replay = replay_of("sequences", make(kind, 40, 2))
    writers = writers_of(replay, kind, 2)
    for rollouts in (1, 6, 7, 8, 9, 16, 17, 30, 1, 8):
        for writer in [*[writers[0]] * rollouts, writers[1]]:
            writer.append(T)
        batch = replay.draw()
        check(replay, batch, replay.ring.written.copy())
        replay.feedback(batch.key, torch.linspace(0.1, 2, 3))
        check_all(replay)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_update_stays_due_if_the_only_sequence_is_overwritten_before_its_draw(
    is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only complete sequence is overwritten between `is_due` and the draw, or during the draw."""
    replay = replay_of("sequences", make("rows", R + 3, 1))
    writer = writers_of(replay, "rows", 1)[0]
    writer.append(T)
    writer.append(T)
    replay.sync()
    assert replay.is_due
    credit, gather = replay.counters.credit, replay._draw_once

    def too_late() -> Any:
        batch = gather() if is_drawn else None
        for _ in range(R + 4):  # reset rows only
            replay.ring.cut(truth(replay.ring.written[0], np.arange(WIDTH)).obs)
        monkeypatch.setattr(replay, "_draw_once", gather)
        return gather() if batch is None else batch

    monkeypatch.setattr(replay, "_draw_once", too_late)
    assert list(replay.batches()) == []
    assert replay.counters.credit == credit
    assert not replay.can_draw()
    for _ in range(3):
        writer.append(T)
    replay.sync()
    assert len(list(replay.batches())) > 0


@KINDS
@pytest.mark.parametrize(("groups", "seconds"), [(3, 2.0), pytest.param(8, 600.0, marks=pytest.mark.long)])
def test_draws_are_valid_while_writers_run_at_full_speed(kind: str, groups: int, seconds: float) -> None:
    """All rows known to a reader may be overwritten while it does not run: then the draw fails and is repeated."""
    ring, draws, in_vain = make(kind, 83, groups), 0, 0
    replays = [replay_of(what, ring) for what in ("sequences", "prioritized", "uniform")]
    with writing(replays[0], kind, seconds, T, T):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for replay in replays:
                written = ring.written.copy()
                try:
                    check(replay, drawn(replay), written)
                except NothingToDraw:
                    in_vain += 1
                draws += 1
            time.sleep(0.05 * (draws % 30 == 0))  # meanwhile writers wrap around the ring several times
    torn = sum(replay.counters.torn_rows for replay in replays)
    print(f"{draws} batches, {torn} rows drawn again, {in_vain} draws of nothing")
    assert draws > 5 * seconds, "too few draws, even for a busy machine"
    assert in_vain <= 2 + 0.02 * draws
    assert (ring.written > 20 * ring.capacity).all()
    assert torn > 0
    for replay in replays:
        check_all(replay)
        assert replay.steps == ring.real.sum()


class Died(BaseException):
    """Raised in a writer to simulate its death."""


@WHAT
@pytest.mark.parametrize(
    ("kind", "rollouts"),  # before the ring is full, and after
    [
        ("rows", 1),
        ("frames", 14),
        pytest.param("rows", 14, marks=pytest.mark.long),
        pytest.param("frames", 1, marks=pytest.mark.long),
    ],
)
def test_writer_may_die_before_any_line_of_an_append(kind: str, what: str, rollouts: int) -> None:
    @closing_all()
    def attempt(when: int, lines: list[str]) -> None:
        replay = replay_of(what, make(kind, 24, 2))
        writer = writers_of(replay, kind, rollouts)[0]

        def die(line: str) -> None:
            lines.append(line)
            raise Died

        with suppress(Died):
            interrupted(lambda: writer.append(3 * T), when, die, "replay" if what == "sequences" else "")
        check_lost(replay, kind)

    assert failures_at_any_line(attempt) == {}


def check_lost(replay: Any, kind: str) -> None:
    ring, written, begun = replay.ring, int(replay.ring.written[0]), int(replay.ring.counters.begun[0])
    gap = (written, replay.on_writer_lost(0))
    assert gap[1] == ring.written[0] == ring.counters.begun[0]
    row, env = np.arange(max(0, begun + 2 - ring.capacity), written), np.arange(WIDTH)
    assert kind == "frames" or ring.is_stored(row[:, None], env).all(), "the writer cannot have overwritten these"
    assert gap[1] == written or not ring.is_real(np.full(WIDTH, written), env).any(), "a reset row must follow"
    check_ring(ring, gap)
    successor = writers_of(replay, kind, 0)[0]
    successor.gap = gap
    for _ in range(2):
        successor.append(T)
        check_all(replay, gap)


@WHAT
@KINDS
def test_writer_may_be_lost_before_any_line_of_a_draw(kind: str, what: str) -> None:
    """Another thread handles the loss. The writer had announced its rows and had not written any."""

    @closing_all()
    def attempt(when: int, lines: list[str]) -> None:
        replay, gap = replay_of(what, make(kind, 40, 2)), NO_GAP
        writer = writers_of(replay, kind, 2)[0]
        thread, written, replay.counters.draws = experience(writer.ring), replay.ring.written.copy(), when
        replay.ring.counters.begun[0] += T

        def on_writer_lost(line: str) -> None:
            nonlocal gap
            lines.append(line)
            gap = writer.gap = (int(written[0]), thread.on_writer_lost(0))
            writer.append(T)

        batch = interrupted(replay.draw, when, on_writer_lost)
        check(replay, batch, written, gap)

    assert failures_at_any_line(attempt) == {}


@pytest.mark.parametrize(("kind", "what"), [("rows", "sequences"), ("frames", "prioritized")])
def test_replay_is_saved_correctly_while_writers_write(kind: str, what: str, tmp_path: Path) -> None:
    replay, other = (replay_of(what, make(kind, 200, 3)) for _ in range(2))
    with writing(replay, kind, T=T, interval=T * (what == "sequences")):
        for number in range(4):
            fed: dict[tuple[int, int], float] = {}
            for error in np.arange(8) / 8 + number:
                written, batch = replay.ring.written.copy(), drawn(replay, error)
                was_known = (batch.key[:, 0] < written[batch.key[:, 1] // WIDTH]) | (what == "sequences")
                fed |= {tuple(key): error for key in batch.key[was_known].tolist()}
            other.load(tmp_path, unpack(pack(replay.save(tmp_path))))
            check_fed(other, fed)
            count = check_all(other, ahead=T)  # a writer may be about to overwrite rows when the replay is saved
            assert count == 199 * 3 * WIDTH or (kind == "frames" and count > 100 * 3 * WIDTH)


def check_fed(replay: Any, fed: dict[tuple[int, int], float]) -> None:
    """Check that the priorities of all stored keys are those that were fed back."""
    key, error = np.array(list(fed)), np.array(list(fed.values()))
    if isinstance(replay, SequenceReplay):
        assert replay.sequence_index is not None
        kept = key[:, 0] >= replay.sequence_index.first[key[:, 1]]
        found = replay.sequence_index.tree[replay.sequence_index._leaf(*key[kept].T)]
    else:
        kept = replay.ring.is_stored(*key.T)
        found = replay.priorities.tree[replay.index.place(key[kept])]
    np.testing.assert_allclose(found, error[kept], atol=1e-5)


@WHAT
@KINDS
def test_paused_writer_does_not_change_what_is_saved(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is at any line when the pause begins, and one line later: it may not have read the flag yet."""
    monkeypatch.setattr(counters, "POLL_SECONDS", 0.0)
    replay, other = (replay_of(what, make(kind, 40, 2)) for _ in range(2))
    ring, (writer, _) = replay.ring, writers_of(replay, kind, 14)
    hold = ring.counters.pause_writers

    def attempt(when: int, lines: list[str]) -> None:
        pauses, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

        def pause(line: str) -> None:
            lines.append(line)
            pauses.release()
            may_go_on.acquire(timeout=SECONDS)

        def append() -> None:
            interrupted(lambda: writer.append(T), when, pause, again=1)
            pauses.release(2)  # in case there are not as many lines

        @contextmanager
        def hold_while_it_pauses() -> Iterator[None]:
            thread.start()
            pauses.acquire(timeout=SECONDS)
            may_go_on.release(1 if ring.counters.begun[0] == ring.written[0] else 2)  # one that has begun must finish
            with hold():
                pauses.acquire(timeout=SECONDS)
                yield
            may_go_on.release(2)

        thread = threading.Thread(target=append)
        monkeypatch.setattr(ring.counters, "pause_writers", hold_while_it_pauses)
        state = unpack(pack(replay.save(tmp_path / str(when))))
        thread.join(SECONDS)
        other.load(tmp_path / str(when), state)
        count = check_all(other, ahead=T)
        expected = 39 * 2 * WIDTH
        assert 0 < count <= expected if kind == "frames" else count == expected

    assert failures_at_any_line(attempt) == {}


def test_state_stored_during_a_save_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only appending is paused: states may be stored during a save."""
    replay, other = (replay_of("sequences", make("rows", 40, 2)) for _ in range(2))
    writer, _ = writers_of(replay, "rows", 14)
    get_state = replay.get_state

    def attempt(when: int, lines: list[str]) -> None:
        def store(line: str) -> None:
            lines.append(line)
            writer.store()

        monkeypatch.setattr(replay, "get_state", lambda: interrupted(get_state, when, store))
        other.load(tmp_path, unpack(pack(replay.save(tmp_path))))
        writer.append(T)
        check_all(other)

    assert failures_at_any_line(attempt) == {}


def test_rows_without_td_error_when_saved_have_the_largest_priority_after_loading(tmp_path: Path) -> None:
    made.extend(Ring(EXAMPLE, 40, WIDTH, has_td_error=True) for _ in range(2))
    replay, other = (experience(ring, 1.0) for ring in made[-2:])
    for first in range(0, 60, 12):
        replay.ring.append(*rollout(first, 12, 0))
        if first < 48:
            replay.ring.set_td_error(0, first, np.ones((12, WIDTH), np.float32))
        replay.sync()
    other.load(tmp_path, replay.save(tmp_path))
    other.sync()
    check_priorities(other)
