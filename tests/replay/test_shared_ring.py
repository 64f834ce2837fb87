"""A ring that other processes write to. The contents of a row show whether it is complete and where it belongs.

As a script, this module runs the writer processes, one per group, until its input ends or its time is up.
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

FRAMES, SIDE, WIDTH, GAMMA, N_STEP = 3, 4, 2, 0.5, 3  # with gamma 0.5, sums of integer rewards are exact
SECONDS = 60.0  # time limit of a writer and of each wait in a test
NO_GAP = (0, 0)
NUMBER = np.zeros((), np.float32)
EXAMPLE = Row(np.zeros((FRAMES, SIDE, SIDE), np.int64), np.zeros((), np.int64), NUMBER, NUMBER, np.zeros((), bool))
KINDS = pytest.mark.parametrize("kind", ["rows", "frames"])


made: list[Any] = []  # rings and replays that are closed after each test


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
    """A recurrent state that contains, for each env, the row that it belongs to and the env."""

    h: Any
    c: Any


def state_of(row: int, env: Any) -> Memory:
    env = torch.as_tensor(env, dtype=torch.float64)
    return Memory(torch.stack([torch.full_like(env, row), env], -1), torch.full_like(env, row))


def truth(row: Any, env: Any, gap: tuple[int, int] = NO_GAP) -> Row:
    """Return the contents of these rows, which are a function of row and env.

    Episodes have 5 to 8 steps and a reset row, and every other one is terminated. Rows of the gap were lost with
    their writer; a new episode begins after it.
    """
    row, env = np.broadcast_arrays(row, env)
    first, length = np.where(row >= gap[1], gap[1], 0), 5 + env % 4
    episode, age = np.divmod(row - first, length + 1)
    mask = (age < length) & ((row < gap[0]) | (row >= gap[1]))
    back = np.arange(FRAMES)[::-1]
    before = -10 * (row - age)[..., None] + age[..., None] - back  # unique frames before the first row of an episode
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
    """Appends the next rows to a group, with its own ring over the memory of a replay."""

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
        """Append in a thread that pauses until `finish`: after storing rows and before counting them, or at a line.

        The line is the `when`-th one that is executed.
        """
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
        """Append rollouts of T rows, or of 1 to 9 if T is 0, without pause until the input ends or the time is up."""
        deadline = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() > deadline or select.select([0], [], [], 0)[0]:
                return
            self.append(T or 1 + number * 5 % 9)


def serve() -> None:
    """Run the writers, forked from one process, because importing torch takes longer than a test."""
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
    """Run one writer process per group. The block begins with a full ring, and the writers end with the block."""
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
    """Return writers that have appended `rollouts` rollouts each."""
    ring, interval = replay.ring, T * isinstance(replay, SequenceReplay)
    writers = [Writer(kind, ring.capacity, ring.groups, replay.fds, group, interval) for group in range(ring.groups)]
    for writer in writers * rollouts:
        writer.append(T)
    replay.sync()
    return writers


def assert_same(found: Any, known: Any, *what: Any) -> None:
    assert np.array_equal(found, known), (*what, found, known)


def check_targets(row: Any, env: Any, gap: tuple[int, int], newest: Any, found: Any, next_obs: Any) -> None:
    """Check n-step targets. `newest` was the number of rows before the draw: returns may end there or later."""
    ahead = truth(row[:, None] + np.arange(N_STEP + 1), env[:, None], gap)
    for i in np.flatnonzero(ahead.mask[:, 0]):
        rows = list(zip(ahead.reward[i].tolist(), ahead.discount[i].tolist(), ahead.mask[i].tolist(), strict=True))
        ends = range(min(max(int(newest[i] - row[i]), 1), N_STEP), N_STEP + 1)
        known = [slow_n_steps(rows, end, 0, N_STEP, GAMMA) for end in ends]
        this = (float(found.reward[i]), float(found.discount[i]))
        seen = [ahead.obs[i, at] for *returns, at in known if tuple(returns) == this]
        assert any(np.array_equal(next_obs[i], each) for each in seen), (row[i], env[i], this, known, next_obs[i])


def check_batch(batch: Any, written: Any, gap: tuple[int, int] = NO_GAP) -> None:
    """Check that a batch matches its keys. `written` are the counts before the draw; the gap is in group 0."""
    row, env = batch.key.T
    for here, rest in ((env < WIDTH, gap), (env >= WIDTH, NO_GAP)):
        r, e, part = row[here], env[here], torch.from_numpy(here)
        known = truth(r, e, rest)
        assert known.mask.all(), "a reset row was drawn"
        for name in Row._fields:
            assert_same(getattr(batch.steps, name)[part], getattr(known, name), name, r, e)
        check_targets(r, e, rest, written[e // WIDTH], batch.targets[part], batch.next_obs[part])


def check_ring(ring: Ring, gap: tuple[int, int] = NO_GAP) -> int:
    """Check all rows that can be drawn while no writer runs, and return their number; the gap is in group 0."""
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
    """Return the result of a call during which act(line) runs before the `when`-th line, and `again` lines later."""
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
def test_two_rings_over_one_memory_agree_and_groups_are_independent(kind: str) -> None:
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


def test_writer_announces_the_rows_that_it_will_overwrite() -> None:
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
def test_reset_row_overwritten_during_the_check_is_still_a_reset_row(
    kind: str,
) -> None:
    """Row 5 of env 0 is a reset row, and row 45, which is stored in the same place, is a real one."""
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
    assert ring.rows.mask[5, 0], "the checked row must be overwritten by now"


def test_due_batches_for_rows_of_other_processes() -> None:
    replay = experience(make("rows", 40, 2), ratio=2.0, batch_size=8, warm_up=10, max_batches_per_round=2)
    one, two = (Writer("rows", 40, 2, replay.fds, group) for group in range(2))
    found = []
    for writer, T in ((one, 4), (two, 7), (one, 4), (one, 1)):  # one row of each env of group 0 is a reset row
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
    assert writer.ring.counters.may_write(), "without a ratio, writers are never ahead"


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


def test_writers_wait_for_due_updates_after_loading_too(tmp_path: Path) -> None:
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


def test_writers_wait_once_all_requested_steps_are_written() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    assert (replay.sync(6), writer.ring.counters.may_write()) == (0, True)
    writer.append(2)
    assert (replay.sync(6), writer.ring.counters.may_write()) == (4, True)
    writer.append(2)
    assert (replay.sync(2), writer.ring.counters.may_write()) == (4, False)


@KINDS
def test_new_observations_returns_each_row_once(kind: str) -> None:
    """The rows are for the normalization of observations, which integer images do not have."""
    example = EXAMPLE.replace(obs=EXAMPLE.obs.astype(np.float32))
    size = (example, 40, WIDTH)
    made.append(ring := FrameRing(*size, FRAMES) if kind == "frames" else Ring(*size))
    replay, shown = experience(ring), 0
    for T in (30, 25):  # the second rollout wraps around the ring
        ring.append(*rollout(int(ring.written[0]), T, 0))
        found = list(replay.new_observations())
        expected = truth(np.arange(shown, shown + T)[:, None], np.arange(WIDTH))
        assert_same(np.concatenate([part.steps.obs.numpy() for part in found]), expected.obs)
        assert_same(np.concatenate([part.steps.mask.numpy() for part in found]), expected.mask)
        shown += T
        assert list(replay.new_observations()) == []


def test_writers_wait_before_the_first_sync() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    assert not writer.ring.counters.may_write()
    with replay.paused():
        assert not writer.ring.counters.may_write()
    assert not writer.ring.counters.may_write()
    replay.sync(6)
    assert writer.ring.counters.may_write()


def test_writers_wait_while_the_replay_is_paused() -> None:
    replay = experience(make("rows", 40, 1), ratio=None)
    writer = Writer("rows", 40, 1, replay.fds)
    replay.sync()
    with replay.paused():
        assert not writer.ring.counters.may_write()
    assert writer.ring.counters.may_write()


def test_rows_not_counted_when_saved_are_counted_later(tmp_path: Path) -> None:
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


def test_rows_of_an_interrupted_round_are_counted_later_without_repeated_updates(
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
    assert (again.sync(), again.steps, again.counters.credit) == (7, 11, 6), "interrupted a second time"


def test_nothing_changes_while_writers_are_paused_and_then_they_continue() -> None:
    ring = make("frames", 150, 3)
    assert isinstance(ring, FrameRing)

    def bytes_of_all() -> list[bytes]:
        """Return all shared memory, except the counter with which waiting writers announce their rows."""
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


def test_loss_of_a_writer_changes_nothing_while_writers_are_paused() -> None:
    """Writers are paused while a checkpoint is written, which must be consistent for frames, too."""
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
    assert ring.written.tolist() == [31], "a reset row must follow the rows of the lost writer"


@pytest.mark.parametrize("kind", ["rows", "frames"])
def test_two_lost_writers_are_handled_while_writers_are_paused(kind: str) -> None:
    """`pause_writers` waits for the second writer, so `on_writer_lost` of the first must not wait for it."""
    replay = experience(make(kind, 40, 2))
    ring, writers = replay.ring, writers_of(replay, kind, 3)
    writers[1].begin(5)
    ring.counters.pause_timeout = 10_000.0  # a pause that waits for this limit fails by the time limit of tests

    def lose_both() -> None:
        while not ring.counters._is_paused[0]:
            time.sleep(0.001)
        replay.on_writer_lost(0)
        replay.on_writer_lost(1)

    thread = threading.Thread(target=lose_both)
    thread.start()
    with ring.counters.pause_writers():
        assert (ring.counters.begun == ring.written).all()
    thread.join(SECONDS)
    writers[1].finish()


def test_waiting_for_a_dead_writer_ends_with_the_pause_timeout() -> None:
    replay = experience(make("rows", 40, 2))
    ring, writers = replay.ring, writers_of(replay, "rows", 12)
    writers[1].begin(5)
    ring.counters.pause_timeout = 0.05
    with pytest.raises(WorkerError, match=r"groups \[1\] .* within 0\.05 s"), ring.counters.pause_writers():
        pass
    writers[0].append(3)  # writers are no longer paused
    ring.abandon(1)
    with ring.counters.pause_writers():
        assert ring.written.tolist()[0] == 63
    writers[1].finish()


if __name__ == "__main__":
    serve()
