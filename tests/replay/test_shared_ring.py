"""A ring that other processes write to: every row says by its own bytes whether it is whole and where it belongs.

Run as a script this is the other processes: one writer for each group, until its input ends or its time is up.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import slow_n_steps

import remuda
from remuda.data import ArrayTuple, leaves
from remuda.errors import WorkerError
from remuda.replay import FrameRing, Priorities, RecurrentStates, Ring, Row, SequenceReplay, TransitionReplay

FRAMES, SIDE, WIDTH, GAMMA, N_STEP = 3, 4, 2, 0.5, 3  # with a half, sums of whole rewards are exact
SECONDS = 60.0  # that a writer writes if nobody ends it, and that a test waits
NO_GAP = (0, 0)
NUMBER = np.zeros((), np.float32)
EXAMPLE = Row(np.zeros((FRAMES, SIDE, SIDE), np.int64), np.zeros((), np.int64), NUMBER, NUMBER, np.zeros((), bool))
KINDS = pytest.mark.parametrize("kind", ["rows", "frames"])


made: list[Any] = []  # what a test has to close


@contextmanager
def closing_all() -> Iterator[None]:
    before = len(made)
    try:
        yield
    finally:
        while len(made) > before:
            made.pop().close()


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    with closing_all():
        yield


class Memory(ArrayTuple):
    """A recurrent state: of each env the row that it belongs before, and the env."""

    h: Any
    c: Any


def state_of(row: int, env: Any) -> Memory:
    env = torch.as_tensor(env, dtype=torch.float64)
    return Memory(torch.stack([torch.full_like(env, row), env], -1), torch.full_like(env, row))


def truth(row: Any, env: Any, gap: tuple[int, int] = NO_GAP) -> Row:
    """What envs give in these rows, a function of both: episodes of 5 to 8 steps, every other one terminated, and a
    reset row after each. Rows of the gap were lost with their writer; behind it episodes begin anew."""
    row, env = np.broadcast_arrays(row, env)
    first, length = np.where(row >= gap[1], gap[1], 0), 5 + env % 4
    episode, age = np.divmod(row - first, length + 1)
    mask = (age < length) & ((row < gap[0]) | (row >= gap[1]))
    back = np.arange(FRAMES)[::-1]
    before = -10 * (row - age)[..., None] + age[..., None] - back  # frames of its own before the first row
    frame = np.where(back <= age[..., None], row[..., None] - back, before) * 16 + env[..., None]
    obs = np.broadcast_to(frame[..., None, None], (*frame.shape, SIDE, SIDE))
    is_end = mask & (age == length - 1) & (episode % 2 == 1)
    reward, discount = np.where(mask, (row * 31 + env * 17) % 101, 0), np.where(is_end, 0, 1)
    return Row(obs, 7 * row + env + 1, reward.astype(np.float32), discount.astype(np.float32), mask)


@functools.lru_cache(4096)
def rollout(first: int, T: int, group: int, gap: tuple[int, int] = NO_GAP) -> tuple[Row, Any]:
    env = np.arange(group * WIDTH, (group + 1) * WIDTH)
    return truth(np.arange(first, first + T)[:, None], env, gap), truth(first + T, env, gap).obs


def make(kind: str, capacity: int, groups: int, fds: Any = None) -> Ring:
    size = (EXAMPLE, capacity, groups * WIDTH)
    made.append(FrameRing(*size, FRAMES, groups, fds) if kind == "frames" else Ring(*size, groups, fds))
    return made[-1]


class Writer:
    """Appends to a group what comes next, by a ring of its own over the memory of a replay."""

    def __init__(self, kind: str, capacity: int, groups: int, fds: Any, group: int = 0, interval: int = 0) -> None:
        self.ring, self.group, self.gap = make(kind, capacity, groups, fds), group, NO_GAP
        self.states = RecurrentStates(self.ring, state_of(0, [0]), interval, fds[-1]) if interval else None
        made.extend([] if self.states is None else [self.states.memory])
        self._thread: threading.Thread | None = None

    def append(self, T: int) -> None:
        self.store()
        self.ring.append(*rollout(int(self.ring.written[self.group]), T, self.group, self.gap), self.group)

    def store(self) -> None:
        if self.states is not None:
            columns = self.ring.columns(self.group)
            state = state_of(int(self.ring.written[self.group]), range(columns.start, columns.stop))
            self.states.store(state, self.group)

    def begin(self, T: int, when: int | None = None) -> None:
        """Append, but stop when rows are there and nobody was told, until `finish`; or before the when-th line."""
        write, is_there, self._may_go_on = self.ring._write, threading.Event(), threading.Event()

        def pause(_: str = "") -> None:
            is_there.set()
            self._may_go_on.wait(SECONDS)

        def write_and_pause(*part: Any) -> None:
            write(*part)
            pause()

        def append() -> None:
            self.append(T) if when is None else interrupted(lambda: self.append(T), when, pause)
            is_there.set()

        if when is None:
            self.ring._write = write_and_pause  # type: ignore[method-assign]
        self._thread = threading.Thread(target=append)
        self._thread.start()
        assert is_there.wait(SECONDS)

    def finish(self) -> None:
        if self._thread is not None:
            self._may_go_on.set()
            self._thread.join(SECONDS)
            self._thread = None
            self.ring.__dict__.pop("_write", None)

    def write_until_told(self, T: int, seconds: float) -> None:
        """As fast as it can: rollouts of T rows, or of 1 to 9."""
        deadline = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() > deadline or select.select([0], [], [], 0)[0]:
                return
            self.append(T or 1 + number * 5 % 9)


def serve() -> None:
    """The writers, forked from one process: to import torch takes longer than a test."""
    ring, T, interval, seconds = json.loads(sys.argv[1])
    children = []
    for group in range(ring[2]):
        if not (pid := os.fork()):
            Writer(*ring, group, interval).write_until_told(T, seconds)
            os._exit(0)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(codes))


@contextmanager
def writing(replay: Any, kind: str, seconds: float = 0.0, T: int = 0, interval: int = 0) -> Iterator[None]:
    """One process for each group: when this begins the ring is full, and when it ends they have ended."""
    ring, fds = replay.ring, replay.fds
    order = json.dumps([[kind, ring.capacity, ring.groups, fds], T, interval, seconds + SECONDS])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, order]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, env=environment) as process:
        try:
            wait_for_rows(ring, 2 * ring.capacity)
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(SECONDS) == 0


def wait_for_rows(ring: Ring, written: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while (ring.written < written).any():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def experience(ring: Ring, alpha: float | None = None, **options: Any) -> TransitionReplay:
    settings: dict[str, Any] = {"batch_size": 12, "ratio": 1.0, "warm_up": 0, "n_step": N_STEP, "gamma": GAMMA}
    priorities = None if alpha is None else Priorities(ring, alpha, is_shared=True)
    return TransitionReplay(ring, **{**settings, "seed": 1, "is_shared": True, **options}, priorities=priorities)


def writers_of(replay: Any, kind: str, rollouts: int, T: int = 5) -> list[Writer]:
    """After so many rollouts each."""
    ring, interval = replay.ring, T * isinstance(replay, SequenceReplay)
    writers = [Writer(kind, ring.capacity, ring.groups, replay.fds, group, interval) for group in range(ring.groups)]
    for writer in writers * rollouts:
        writer.append(T)
    replay.sync()
    return writers


def assert_same(found: Any, known: Any, *what: Any) -> None:
    assert np.array_equal(found, known), (*what, found, known)


def check_targets(row: Any, env: Any, gap: tuple[int, int], newest: Any, found: Any, next_obs: Any) -> None:
    """`newest` is where rows ended before these were drawn: returns may stop there, or where rows ended later."""
    ahead = truth(row[:, None] + np.arange(N_STEP + 1), env[:, None], gap)
    for i in np.flatnonzero(ahead.mask[:, 0]):
        rows = list(zip(ahead.reward[i].tolist(), ahead.discount[i].tolist(), ahead.mask[i].tolist(), strict=True))
        ends = range(min(max(int(newest[i] - row[i]), 1), N_STEP), N_STEP + 1)
        known = [slow_n_steps(rows, end, 0, N_STEP, GAMMA) for end in ends]
        this = (float(found.reward[i]), float(found.discount[i]))
        seen = [ahead.obs[i, at] for *returns, at in known if tuple(returns) == this]
        assert any(np.array_equal(next_obs[i], each) for each in seen), (row[i], env[i], this, known, next_obs[i])


def check_batch(batch: Any, written: Any, gap: tuple[int, int] = NO_GAP) -> None:
    """All of it is what the keys say; `written` were the rows before it was drawn, and the gap is group 0's."""
    row, env = batch.key.T
    for here, rest in ((env < WIDTH, gap), (env >= WIDTH, NO_GAP)):
        r, e, part = row[here], env[here], torch.from_numpy(here)
        known = truth(r, e, rest)
        assert known.mask.all(), "a reset row was drawn"
        for name in Row._fields:
            assert_same(getattr(batch.steps, name)[part], getattr(known, name), name, r, e)
        check_targets(r, e, rest, written[e // WIDTH], batch.targets[part], batch.next_obs[part])


def check_ring(ring: Ring, gap: tuple[int, int] = NO_GAP) -> int:
    """While nobody writes: all that can be drawn, and how many rows that are; the gap is group 0's."""
    row, env = ring.counters.locate(np.arange(ring.counters.count))
    kept = ring.is_stored(row, env)
    for group in range(ring.groups):
        mine = kept & (env // ring.width == group)
        r, e, rest = row[mine], env[mine], gap if group == 0 else NO_GAP
        taken, known = ring.take(r, e), truth(r, e, rest)
        assert_same(taken.mask, known.mask, "mask")
        is_seen = (r <= rest[0]) | (r >= rest[1])
        assert_same(taken.obs[is_seen], known.obs[is_seen], "obs")
        for name in ("action", "reward", "discount"):
            assert_same(getattr(taken, name)[known.mask], getattr(known, name)[known.mask], name)
        found = ring.n_steps(r, e, N_STEP, GAMMA)
        check_targets(r, e, rest, np.full(len(r), ring.written[group]), found, ring.obs(found.row, e))
    return int(kept.sum())


def interrupted(
    call: Callable[[], Any], when: int, act: Callable[[str], None], where: str = "replay", again: int = 0
) -> Any:
    """What a call returns if something happens before its `when`-th line, and so many lines later again: act is told
    which line that is."""
    here, count = str(Path(remuda.__file__).parent / where), itertools.count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if path.startswith(here) and event == "line" and next(count) in (when, when + again):
            act(f"line {when}, {Path(path).name}:{frame.f_lineno}")
        return trace if path.startswith(here) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


@KINDS
def test_two_rings_over_one_memory_see_the_same_and_groups_move_at_their_own_pace(kind: str) -> None:
    ours, rng = make(kind, 30, 3), np.random.default_rng(0)
    theirs = make(kind, 30, 3, ours.fds)
    given, real = np.zeros(3, int), np.zeros(3, int)
    for _ in range(40):
        group, T = int(rng.choice(3, p=[0.1, 0.3, 0.6])), int(rng.choice([1, 2, 5, 9, 35]))
        (ours, theirs)[rng.integers(2)].append(*rollout(int(given[group]), T, group), group)
        real[group] += rollout(int(given[group]), T, group)[0].mask.sum()
        given[group] += T
        for ring in (ours, theirs):
            assert ring.written.tolist() == ring.counters.begun.tolist() == given.tolist()
            assert ring.real.tolist() == real.tolist()
            expected = np.minimum(given, 29).sum() * WIDTH
            # The frames of short episodes are overwritten before their rows are, so a frame ring may hold fewer.
            assert 0 < check_ring(ring) <= expected if kind == "frames" else check_ring(ring) == expected


def test_what_is_about_to_be_overwritten_is_said_beforehand() -> None:
    replay = experience(make("rows", 40, 2))
    ring, (_, writer) = replay.ring, writers_of(replay, "rows", 12)
    row, env = np.arange(10, 80), np.full(70, WIDTH)
    writer.begin(12)
    assert (ring.written.tolist(), ring.counters.begun.tolist()) == ([60, 60], [60, 72])
    assert row[ring.is_stored(row, env)].tolist() == list(range(33, 60))
    assert row[ring.is_stored(row, env - WIDTH)].tolist() == list(range(21, 60))
    writer.finish()
    assert (ring.written.tolist(), ring.counters.begun.tolist()) == ([60, 72], [60, 72])
    assert row[ring.is_stored(row, env)].tolist() == list(range(33, 72))


@KINDS
def test_a_reset_row_that_is_overwritten_while_it_is_looked_at_is_still_a_reset_row(
    kind: str,
) -> None:
    """Of env 0 row 5 is a reset row, and row 45, which comes to the same place, is a real one."""
    replay = experience(make(kind, 40, 2), 1.0)
    writer, _ = writers_of(replay, kind, 2)
    ring, look = replay.ring, replay.ring.is_stored

    def look_and_lose_the_core(row: Any, env: Any) -> Any:
        found = look(row, env)
        for _ in range(8):
            writer.append(5)
        return found

    ring.is_stored = look_and_lose_the_core
    assert replay.index.count_torn(np.array([[5, 0]])) == 1
    assert ring.rows.mask[5, 0], "the row that was looked at is gone by now"


def test_what_is_due_for_rows_of_others() -> None:
    replay = experience(make("rows", 40, 2), ratio=2.0, batch_size=8, warm_up=10, max_batches_per_round=2)
    one, two = (Writer("rows", 40, 2, replay.fds, group) for group in range(2))
    found = []
    for writer, T in ((one, 4), (two, 7), (one, 4), (one, 1)):  # of group 0, one row of each env is a reset row
        writer.append(T)
        found.append(
            (replay.sync(), replay.counters.credit, len(list(replay.batches())), len(list(replay.batches())))
        )
    assert found == [(8, 0, 0, 0), (14, 24, 2, 1), (6, 12, 1, 0), (2, 8, 1, 0)]
    assert (replay.sync(), replay.steps, replay.counters.credit) == (0, 30, 0)
    assert replay.metrics() == {"replay/ratio": 5 * 8 / (30 - 10), "replay/redrawn": 0}
    assert one.ring.counters.may_write()


def test_without_a_ratio_updates_are_always_due_after_the_warm_up() -> None:
    replay = experience(make("rows", 40, 1), ratio=None, warm_up=8, max_batches_per_round=3, max_lead=5)
    writer = Writer("rows", 40, 1, replay.fds)
    writer.append(4)
    assert (replay.sync(), list(replay.batches())) == (8, [])
    writer.append(1)
    assert replay.sync() == 2
    assert [len(list(replay.batches())) for _ in range(4)] == [3, 3, 3, 3]
    assert writer.ring.counters.may_write(), "without a ratio nobody is ahead"


def test_writers_wait_while_they_are_too_far_ahead() -> None:
    replay = experience(make("rows", 40, 1), ratio=2.0, batch_size=8, max_lead=6)
    writer = Writer("rows", 40, 1, replay.fds)
    assert (replay.sync(), writer.ring.counters.may_write()) == (0, True)
    writer.append(2)
    assert (replay.sync(), writer.ring.counters.may_write()) == (4, True)
    writer.append(2)
    assert (replay.sync(), replay.counters.credit, writer.ring.counters.may_write()) == (4, 16, False)
    assert len(list(replay.batches())) == 2
    assert (replay.sync(), writer.ring.counters.may_write()) == (0, True)


def test_after_loading_too_writers_wait_for_what_is_owed(tmp_path: Path) -> None:
    replay, other = (experience(make("rows", 40, 1), ratio=2.0, batch_size=8, max_lead=6) for _ in range(2))
    writer = Writer("rows", 40, 1, replay.fds)
    writer.append(3)
    assert (replay.sync(), replay.counters.credit, writer.ring.counters.may_write()) == (6, 12, False)
    replay.commit()
    other.load(tmp_path, replay.save(tmp_path))
    assert (other.sync(), other.counters.credit, other.ring.counters.may_write()) == (0, 12, False), (
        "6 steps are still owed updates"
    )
    assert len(list(other.batches())) == 1
    assert (other.sync(), other.ring.counters.may_write()) == (0, True)


def test_writers_wait_once_all_that_was_wanted_is_there() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    assert (replay.sync(6), writer.ring.counters.may_write()) == (0, True)
    writer.append(2)
    assert (replay.sync(6), writer.ring.counters.may_write()) == (4, True)
    writer.append(2)
    assert (replay.sync(2), writer.ring.counters.may_write()) == (4, False)


@KINDS
def test_what_was_seen_since_is_shown_once(kind: str) -> None:
    """For statistics of observations, which images in integers have none of."""
    example = EXAMPLE.replace(obs=EXAMPLE.obs.astype(np.float32))
    size = (example, 40, WIDTH)
    made.append(ring := FrameRing(*size, FRAMES) if kind == "frames" else Ring(*size))
    replay, shown = experience(ring), 0
    for T in (30, 25):  # beyond the end of the ring
        ring.append(*rollout(int(ring.written[0]), T, 0))
        found = list(replay.new_observations())
        expected = truth(np.arange(shown, shown + T)[:, None], np.arange(WIDTH))
        assert_same(np.concatenate([part.steps.obs.numpy() for part in found]), expected.obs)
        assert_same(np.concatenate([part.steps.mask.numpy() for part in found]), expected.mask)
        shown += T
        assert list(replay.new_observations()) == []


def test_nobody_may_write_before_it_is_said_how_much_is_wanted() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    assert not writer.ring.counters.may_write()
    with replay.paused():
        assert not writer.ring.counters.may_write()
    assert not writer.ring.counters.may_write()
    replay.sync(6)
    assert writer.ring.counters.may_write()


def test_while_it_is_paused_nobody_may_write() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    replay.sync()
    with replay.paused():
        assert not writer.ring.counters.may_write()
    assert writer.ring.counters.may_write()


def test_rows_that_nobody_had_counted_when_it_was_saved_are_counted_later(tmp_path: Path) -> None:
    replay, other = (experience(make("rows", 40, 1), ratio=2.0, batch_size=8) for _ in range(2))
    writer = Writer("rows", 40, 1, replay.fds)
    writer.append(2)
    assert replay.sync() == 4
    replay.commit()
    writer.append(2)
    other.load(tmp_path, replay.save(tmp_path))
    assert (replay.steps, other.steps) == (4, 4)
    assert (other.sync(), other.steps, other.counters.credit) == (4, 8, 16)
    assert other.sync() == 0


def test_rows_of_a_round_that_was_cut_short_are_counted_later_and_what_was_learned_from_them_is_not_due_again(
    tmp_path: Path,
) -> None:
    replay, other = (experience(make("rows", 40, 1), ratio=2.0, batch_size=8) for _ in range(2))
    writer = Writer("rows", 40, 1, replay.fds)
    writer.append(2)
    replay.sync()
    replay.commit()
    writer.append(4)
    assert (replay.sync(), replay.steps, replay.counters.credit) == (7, 11, 22)  # one of them is a reset row
    for _ in range(2):
        next(replay.batches())
    other.load(tmp_path, replay.save(tmp_path))
    assert (replay.steps, replay.counters.credit, other.steps) == (11, 6, 4)
    assert (other.sync(), other.steps, other.counters.credit) == (7, 11, 6)
    again = experience(make("rows", 40, 1), ratio=2.0, batch_size=8)
    again.load(tmp_path, other.save(tmp_path))
    assert (again.sync(), again.steps, again.counters.credit) == (7, 11, 6), "cut short once more"


def test_while_writers_are_held_nothing_changes_and_then_they_go_on() -> None:
    ring = make("frames", 150, 3)
    assert isinstance(ring, FrameRing)

    def bytes_of_all() -> list[bytes]:
        """But for what writers that wait say they would like to begin."""
        counters = [ring.written, ring.real, ring.frame_counters.kept, ring.frame_counters.announced, ring.begins]
        return [part.tobytes() for part in (*(rows for _, rows in leaves(ring.rows)), ring.images, *counters)]

    with writing(experience(ring), "frames"):
        for _ in range(5):
            with ring.counters.pause_writers():
                before = bytes_of_all()
                check_ring(ring)
                time.sleep(0.02)
                assert bytes_of_all() == before
            wait_for_rows(ring, ring.written + 1)


def test_a_writer_that_is_lost_while_others_are_held_changes_nothing_either() -> None:
    """A checkpoint is being written: of frames, too, what is in it is of one moment."""
    replay = experience(make("frames", 40, 1))
    Writer("frames", 40, 1, replay.fds).append(30)
    ring = replay.ring
    assert isinstance(ring, FrameRing)
    lost = threading.Thread(target=replay.on_writer_lost, args=(0,))
    with ring.counters.pause_writers():
        before = [ring.frame_counters.kept.copy(), ring.begins.copy(), ring.written.copy()]
        lost.start()
        time.sleep(0.05)
        for was, now in zip(before, (ring.frame_counters.kept, ring.begins, ring.written), strict=True):
            assert was.tolist() == now.tolist()
    lost.join(10)
    assert not lost.is_alive()
    assert ring.written.tolist() == [31], "a reset row is where it was cut"


@pytest.mark.parametrize("kind", ["rows", "frames"])
def test_a_writer_that_died_in_the_middle_is_replaced_after_another_while_both_are_held(kind: str) -> None:
    """Who waits for the second to end must not be waited for by who cuts the rows of the first."""
    replay = experience(make(kind, 40, 2))
    ring, writers = replay.ring, writers_of(replay, kind, 3)
    writers[1].begin(5)
    ring.counters.pause_timeout = SECONDS

    def lose_both() -> None:
        while not ring.counters._is_paused[0]:
            time.sleep(0.001)
        replay.on_writer_lost(0)
        replay.on_writer_lost(1)

    thread = threading.Thread(target=lose_both)
    thread.start()
    start = time.monotonic()
    with ring.counters.pause_writers():
        assert time.monotonic() - start < SECONDS / 2
        assert (ring.counters.begun == ring.written).all()
    thread.join(SECONDS)
    writers[1].finish()


def test_a_writer_that_died_is_waited_for_no_longer_than_asked() -> None:
    replay = experience(make("rows", 40, 2))
    ring, writers = replay.ring, writers_of(replay, "rows", 12)
    writers[1].begin(5)
    ring.counters.pause_timeout = 0.05
    with pytest.raises(WorkerError, match=r"groups \[1\] .* within 0\.05 s"), ring.counters.pause_writers():
        pass
    writers[0].append(3)  # nobody is held any more
    ring.abandon(1)
    with ring.counters.pause_writers():
        assert ring.written.tolist()[0] == 63
    writers[1].finish()


if __name__ == "__main__":
    serve()
