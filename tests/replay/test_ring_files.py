"""A ring on disk: all rows are restored, only new rows are written, and damage is reported in one sentence."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_shared_ring import interrupted

from remuda.data import Batch, Steps, leaves, map_tree, namedarraytuple
from remuda.data.packing import pack, unpack
from remuda.errors import CheckpointError
from remuda.replay import ring_files as saving
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Ring, Row
from remuda.replay.ring_files import BLOCK, RingFiles
from remuda.replay.transitions import TransitionReplay

FRAMES, ENVS = 3, 4
Seen = namedarraytuple("Seen", ["image", "speed"])
made: list[Ring] = []


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use parts of a few rows, so that small rings have many parts, and skip fsync."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "PART", 1000)
        patch.setattr(os, "fsync", lambda fd: None)
        yield
    while made:
        made.pop().close()


def make(kind: str, capacity: int = 40, groups: int = 1, envs: int = ENVS, side: int = 5) -> Ring:
    number = np.zeros((), np.float32)
    row = Row(np.zeros((FRAMES, side, side), np.uint8), np.zeros(2, np.int64), number, number, np.zeros((), bool))
    if kind == "nested":
        row = row.replace(obs=Seen(row.obs, np.zeros(3)))
    is_frames = kind == "frames"
    made.append(FrameRing(row, capacity, envs, FRAMES, groups) if is_frames else Ring(row, capacity, envs, groups))
    return made[-1]


class Source:
    """Random rows for a ring; the same seed gives the same rows."""

    def __init__(self, seed: int = 0, ends: float = 0.1) -> None:
        self.numbers, self.ends = np.random.default_rng(seed), ends

    def noise(self, like: Any, *leading: int) -> Any:
        def make(x: Any) -> Any:
            return self.numbers.integers(0, 256, (*leading, *x.shape[2:])).astype(x.dtype)

        return map_tree(make, like)

    def append(self, ring: Ring, T: int, group: int = 0, is_cut: bool = False) -> None:
        rows = self.noise(ring.rows.replace(obs=None), T, ring.width)
        mask = self.numbers.random((T, ring.width)) >= self.ends
        stacks = self.stacks(ring, T)
        ring.append(rows.replace(obs=stacks, mask=mask), self.stacks(ring), group)
        if is_cut:
            ring.cut(self.stacks(ring), group)

    def stacks(self, ring: Ring, *T: int) -> Any:
        if isinstance(ring, FrameRing):
            return self.numbers.integers(0, 256, (*T, ring.width, FRAMES, *ring.images.shape[3:]), np.uint8)
        return self.noise(ring.rows.obs, *T, ring.width)


def assert_same(ours: Ring, theirs: Ring) -> None:
    """Compare all stored rows of two rings, and the observations after the newest rows that are not reset rows."""
    assert ours.written.tolist() == theirs.written.tolist()
    row, env = ours.counters.locate(np.arange(ours.counters.count))
    kept = ours.is_stored(row, env)
    np.testing.assert_array_equal(kept, theirs.is_stored(row, env))
    row, env = row[kept], env[kept]
    newest, every = np.repeat(ours.written, ours.width), np.arange(ours.envs)
    is_followed = ours.is_real(newest - 1, every)
    after = np.concatenate([row, newest[is_followed]]), np.concatenate([env, every[is_followed]])
    pairs = [(ours.take(row, env), theirs.take(row, env)), (ours.obs(*after), theirs.obs(*after))]
    for mine, other in pairs:
        for (name, a), (_, b) in zip(leaves(mine), leaves(other), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def saved_to(directory: Path, ring: Ring) -> tuple[RingFiles, Any]:
    files = RingFiles(directory)
    return files, through_bytes(files.write(ring))


def through_bytes(state: Any) -> Any:
    return unpack(pack(state))


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["rows", "frames", "nested"]),
    capacity=st.integers(3, 40),
    groups=st.sampled_from([1, 2]),
    moves=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=8
    ),
    ends=st.sampled_from([0.0, 0.05, 0.6]),
)
@example(kind="frames", capacity=30, groups=1, moves=[(9, 0, False, True)] * 8, ends=0.05)
@example(kind="frames", capacity=30, groups=2, moves=[(9, i, i > 0, True) for i in (0, 0, 0, 1, 0, 1)], ends=0.6)
def test_any_ring_is_restored_and_can_be_appended_to(
    kind: str, capacity: int, groups: int, moves: list[tuple[int, int, bool, bool]], ends: float
) -> None:
    ring, source = make(kind, capacity, groups), Source(ends=ends)
    with tempfile.TemporaryDirectory() as directory:
        saved = RingFiles(Path(directory))
        for T, group, is_cut, is_saved in moves:
            source.append(ring, T, group % groups, is_cut)
            if is_saved:
                state = through_bytes(saved.write(ring))
        state = through_bytes(saved.write(ring))
        restored = make(kind, capacity, groups)
        RingFiles(Path(directory)).read(restored, state)
    assert_same(ring, restored)
    for seed, (T, group, is_cut, _) in enumerate(moves):  # appending depends on more than the rows
        for each in (ring, restored):
            Source(seed).append(each, T, group % groups, is_cut)
        assert_same(ring, restored)
    while made:
        made.pop().close()


class Killed(BaseException):
    """Raised in a writer to simulate that it is killed."""


@pytest.mark.parametrize("kind", ["rows", "frames", "nested"])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 5), (7, 0), (7, 5), (100, 0)])
def test_ring_is_restored_after_two_writers_were_lost_at_once(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    """The writers are lost at any line of `append`, also before any row was written."""

    def kill(where: str) -> None:
        raise Killed(where)

    for when in itertools.count():
        ring, restored, source, lost = make(kind), make(kind), Source(), 0
        replay = TransitionReplay(ring, batch_size=4, ratio=1, warm_up=0, n_step=1, gamma=0.9, seed=7)
        if before:
            source.append(ring, before)
        for _ in range(2):
            try:
                interrupted(functools.partial(source.append, ring, 9), when, kill)
            except Killed:
                lost += 1
                replay.on_writer_lost(0)
        if after:
            source.append(ring, after)
        RingFiles(tmp_path).read(restored, through_bytes(RingFiles(tmp_path).write(ring)))
        assert_same(ring, restored)
        for each in (ring, restored):
            Source(1).append(each, 20)
        assert_same(ring, restored)
        while made:
            made.pop().close()
        if not lost:
            break
    assert when > 20, "append must have more than 20 lines"


def test_ring_without_rows_is_restored(tmp_path: Path) -> None:
    _, state = saved_to(tmp_path, make("frames"))
    assert sizes(tmp_path) == {}
    ring = make("frames")
    RingFiles(tmp_path).read(ring, state)
    assert ring.counters.count == 0


@pytest.mark.parametrize("kind", ["rows", "frames"])
def test_restored_ring_gives_the_same_draws(tmp_path: Path, kind: str) -> None:
    def draws(ring: Ring) -> list[Any]:
        replay = TransitionReplay(ring, batch_size=16, ratio=1, warm_up=0, n_step=3, gamma=0.9, seed=7)
        drawn = [replay.draw() for _ in range(5)]
        return [(batch.steps, batch.targets, batch.next_obs, batch.key) for batch in drawn]

    ring, restored = make(kind), make(kind)
    Source().append(ring, 100)
    saved, state = saved_to(tmp_path, ring)
    saved.read(restored, state)
    for ours, theirs in zip(draws(ring), draws(restored), strict=True):
        for (name, a), (_, b) in zip(leaves(ours), leaves(theirs), strict=True):
            assert np.array_equal(a, b), name


def added(replay: TransitionReplay, T: int) -> None:
    obs = torch.arange(T * ENVS * 75, dtype=torch.uint8).reshape(T, ENVS, FRAMES, 5, 5)
    ones = torch.ones(T, ENVS)
    steps = Steps(obs, torch.zeros(T, ENVS, 2, dtype=torch.int64), ones, ones, ones.bool(), None, None)
    replay.add(Batch(steps, next_obs=obs[-1]))


def test_rows_added_through_a_replay_are_saved(tmp_path: Path) -> None:
    ring, restored = make("frames"), make("frames")
    replay = TransitionReplay(ring, batch_size=16, ratio=1, warm_up=0, n_step=1, gamma=0.9, seed=7)
    saved = RingFiles(tmp_path)
    for _ in range(7):
        added(replay, 9)
        state = through_bytes(saved.write(ring))
    RingFiles(tmp_path).read(restored, state)
    assert_same(ring, restored)


def bytes_of(rows: int, kind: str) -> int:
    """Return the least size of the files of one group without new episodes."""
    per_row = ENVS * (2 * 8 + 4 + 4 + 1) + ENVS * (FRAMES * 25 if kind == "rows" else 8)
    return rows * per_row + (0 if kind == "rows" else ENVS * 25 * (rows + FRAMES - 1))


@pytest.mark.parametrize("kind", ["rows", "frames"])
def test_only_new_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(saving, "PART", 1 << 20)
    ring, source, saved = make(kind, 500), Source(ends=0.0), RingFiles(tmp_path)
    seen: dict[str, int] = {}
    for rows in (300, 1, 150, 30, 400):
        source.append(ring, rows)
        saved.write(ring)
        new = {name: size for name, size in sizes(tmp_path).items() if name not in seen}
        ((name, size),) = new.items()
        assert name in saved.files
        written = int(ring.written[0])
        assert name.startswith(f"rows-0-{written - rows}-{written}-")
        assert bytes_of(rows, kind) <= size < bytes_of(rows, kind) + BLOCK
        seen |= new
    assert saved.write(ring)["files"][-1]["name"] == name
    assert sizes(tmp_path) == seen, "without new rows, nothing may be written"
    assert [each.split("-")[2] for each in saved.files] == ["301", "451", "481"], "382 rows are overwritten"


def test_files_of_overwritten_rows_are_no_longer_listed(tmp_path: Path) -> None:
    ring, source, saved = make("frames", 30), Source(), RingFiles(tmp_path)
    for _ in range(20):
        source.append(ring, 7)
        saved.write(ring)
        first = [int(name.split("-")[2]) for name in saved.files]
        last = [int(name.split("-")[3]) for name in saved.files]
        assert first[0] <= ring.counters.oldest(0) < last[0]
        assert first[1:] == last[:-1]
        assert last[-1] == ring.written[0]
    source.append(ring, 100)  # more rows than the ring holds
    state = through_bytes(saved.write(ring))
    assert [name.split("-")[2:4] for name in saved.files] == [["211", "240"]]
    restored = make("frames", 30)
    saved.read(restored, state)
    assert_same(ring, restored)


def test_each_group_has_its_own_files(tmp_path: Path) -> None:
    ring, source, saved = make("rows", 20, groups=2), Source(), RingFiles(tmp_path)
    source.append(ring, 5, 0)
    source.append(ring, 3, 1)
    saved.write(ring)
    source.append(ring, 4, 1)
    saved.write(ring)
    assert [name[: name.rindex("-")] for name in saved.files] == ["rows-0-0-5", "rows-1-0-3", "rows-1-3-7"]
    source.append(ring, 50, 1)
    saved.write(ring)
    assert [name[: name.rindex("-")] for name in saved.files] == ["rows-0-0-5", "rows-1-38-57"]


def test_many_small_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_FILES", 8)
    ring, source, saved = make("frames", 80), Source(), RingFiles(tmp_path)
    for _ in range(200):
        source.append(ring, 1)
        state = saved.write(ring)
        assert len(saved.files) <= 8 + 2
        rows = [int(name.split("-")[3]) - int(name.split("-")[2]) for name in saved.files]
        assert all(count >= 10 for count in rows[:-1])
    saved.write(ring)
    restored = make("frames", 80)
    RingFiles(tmp_path).read(restored, through_bytes(state))
    assert_same(ring, restored)


@pytest.mark.parametrize("kind", ["rows", "frames"])
def test_resumed_run_adds_to_the_same_files(tmp_path: Path, kind: str) -> None:
    ring, saved = make(kind), RingFiles(tmp_path)
    states = []
    for seed in range(3):
        Source(seed).append(ring, 15)
        states.append(through_bytes(saved.write(ring)))
    before = sizes(tmp_path)
    resumed, again = make(kind), RingFiles(tmp_path)
    again.read(resumed, states[1])
    assert again.files == [each["name"] for each in states[1]["files"]]
    Source(99).append(resumed, 15)  # rows with the same numbers, but different contents
    state = through_bytes(again.write(resumed))
    assert len(sizes(tmp_path)) == len(before) + 1
    assert before.items() <= sizes(tmp_path).items()
    assert again.files[:-1] == saved.files[:-1]
    assert again.files[-1].rsplit("-", 1)[0] == saved.files[-1].rsplit("-", 1)[0]
    for of, expected in ((states[2], ring), (state, resumed)):
        restored = make(kind)
        RingFiles(tmp_path).read(restored, of)
        assert_same(restored, expected)


def test_files_with_parts_of_another_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may have written parts of another size."""
    ring, restored, source, saved = make("frames"), make("frames"), Source(), RingFiles(tmp_path)
    for part in (5000, 300, 1 << 20):
        monkeypatch.setattr(saving, "PART", part)
        source.append(ring, 12)
        state = through_bytes(saved.write(ring))
    RingFiles(tmp_path).read(restored, state)
    assert_same(ring, restored)


def test_same_rows_are_written_to_the_same_file(tmp_path: Path) -> None:
    ring = make("frames")
    Source().append(ring, 30)
    first, second = RingFiles(tmp_path), RingFiles(tmp_path)
    first.write(ring)
    second.write(ring)
    assert first.files == second.files == list(sizes(tmp_path))


def test_deleted_files_are_written_again(tmp_path: Path) -> None:
    ring, source, saved = make("rows"), Source(), RingFiles(tmp_path / "replay")
    for _ in range(3):
        source.append(ring, 10)
        saved.write(ring)
    (tmp_path / "replay" / saved.files[1]).unlink()
    source.append(ring, 5)
    state = saved.write(ring)
    assert [name.split("-")[2:4] for name in saved.files] == [["0", "35"]]
    elsewhere = RingFiles(tmp_path / "other")  # the directory of a run that continues from another run's replay
    elsewhere._segments = saved._segments
    elsewhere.write(ring)
    assert elsewhere.files == saved.files == list(sizes(tmp_path / "other"))
    source.append(ring, 5)
    saved.write(make("rows"))  # a new ring has none of these rows
    assert saved.files == []
    restored = make("rows")
    saved.read(restored, through_bytes(state))
    assert restored.counters.count == 35 * ENVS


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def become_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "do not match their sum"),
    "one block short": (lambda path: os.truncate(path, path.stat().st_size - BLOCK), "instead of"),
    "one byte more": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "instead of"),
    "empty": (lambda path: path.write_bytes(b""), "it has 0 bytes instead of"),
    "all zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "do not match their sum"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "a link": (become_a_link, "it is not a file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "it is not a file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a file"),
}


@pytest.mark.parametrize("kind", ["rows", "frames"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damage_raises_one_sentence_and_an_earlier_state_can_be_read(tmp_path: Path, kind: str, how: str) -> None:
    ring, source, saved = make(kind), Source(), RingFiles(tmp_path)
    source.append(ring, 15)
    earlier = through_bytes(saved.write(ring))
    expected = make(kind)
    saved.read(expected, earlier)
    source.append(ring, 15)
    state = through_bytes(saved.write(ring))
    path, (harm, says) = tmp_path / saved.files[-1], DAMAGES[how]
    harm(path)
    restored = make(kind)
    source.append(restored, 20)  # a ring that already has rows
    assert_refused(restored, tmp_path, state, str(path), says)
    assert restored.counters.count == 0
    saved.read(restored, earlier)
    assert_same(expected, restored)


def assert_refused(ring: Ring, directory: Path, state: Any, *says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        RingFiles(directory).read(ring, state)
    message = str(caught.value)
    assert all(each in message for each in says), message
    assert message.endswith(".")
    assert "\n" not in message


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    ring = make("frames", 10, envs=1, side=3)
    Source().append(ring, 9)
    saved, state = saved_to(tmp_path, ring)
    path = tmp_path / saved.files[0]
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert_refused(ring, tmp_path, state, "do not match their sum")
        assert ring.counters.count == 0
    path.write_bytes(whole)
    saved.read(ring, state)
    assert ring.counters.count == 9


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"capacity": 41}, "has capacity 40, and this one 41"),
        ({"envs": 2}, "has envs 4, and this one 2"),
        ({"groups": 2}, "has groups 1, and this one 2"),
        ({"side": 6}, "has obs |u1[40, 4, 3, 5, 5], and this one |u1[40, 4, 3, 6, 6]"),
        ({"kind": "nested"}, "has obs |u1[40, 4, 3, 5, 5], and this one None"),
        ({"kind": "frames"}, "has obs |u1[40, 4, 3, 5, 5], and this one <i8[40, 4]"),
    ],
)
def test_ring_with_other_settings_is_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    ring, another = make("rows"), make(**{"kind": "rows", **other})
    Source().append(ring, 15)
    _, state = saved_to(tmp_path, ring)
    Source().append(another, 3)
    assert_refused(another, tmp_path, state, says, "use the settings that the run was made with")
    assert another.counters.count == 0


def test_stacks_of_other_frames_are_refused(tmp_path: Path) -> None:
    ring = make("frames")
    Source().append(ring, 15)
    _, state = saved_to(tmp_path, ring)
    stack, number = np.zeros((6, 5, 5), np.uint8), np.zeros((), np.float32)
    row = Row(stack, np.zeros(2, np.int64), number, number, np.zeros((), bool))
    made.extend(FrameRing(row, 40, ENVS, frames) for frames in (FRAMES, 6))
    assert_refused(made[-2], tmp_path, state, "has stacks |u1[3, 5, 5], and this one |u1[6, 5, 5]")
    assert_refused(made[-1], tmp_path, state, "has frames 3, and this one 6")


def change(state: Any, index: int, **values: Any) -> None:
    state["files"][index] |= values


HOSTILE: dict[str, Callable[[Any], object]] = {
    "a file elsewhere": lambda state: change(state, 0, name="../../etc/passwd"),
    "a gap": lambda state: state["files"].pop(1),
    "no end": lambda state: state["files"].pop(),
    "no file": lambda state: state["files"].clear(),
    "the wrong order": lambda state: state["files"].reverse(),
    "another group": lambda state: change(state, 0, group=1),
    "no group": lambda state: change(state, 0, group="0"),
    "rows from before the beginning": lambda state: change(state, 0, first=-5),
    "more rows than there can be": lambda state: change(state, 2, last=1 << 60),
    "parts without end": lambda state: change(state, 0, part=1 << 40),
    "parts of nothing": lambda state: change(state, 0, part=0),
    "fewer sums": lambda state: change(state, 0, sums=state["files"][0]["sums"][:1]),
    "frames without end": lambda state: change(state, 0, frames=np.array([[0, 1 << 62]] * ENVS)),
    "negative frames": lambda state: change(state, 0, frames=np.array([[-5, 5]] * ENVS)),
    "frames of other envs": lambda state: change(state, 0, frames=np.array([[0, 5]])),
    "no frames at all": lambda state: change(state, 0, frames=None),
    "no tail": lambda state: state.pop("tail"),
    "no counters": lambda state: state["tail"].pop("kept"),
    "fewer rows than none": lambda state: state["tail"].update(written=np.array([-1])),
    "other observations": lambda state: state["tail"].update(obs=[]),
    "other frames": lambda state: state["tail"].update(frames=np.zeros(7)),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_invalid_states_raise_one_sentence(tmp_path: Path, how: str) -> None:
    ring, source, saved = make("frames"), Source(), RingFiles(tmp_path)
    for _ in range(3):
        source.append(ring, 10)
        state = through_bytes(saved.write(ring))
    HOSTILE[how](state)
    restored = make("frames")
    assert_refused(restored, tmp_path, state, "is damaged")
    assert restored.counters.count == 0


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
def test_full_disk_leaves_all_files_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    ring, source, saved = make("frames", groups=2), Source(), RingFiles(tmp_path)
    for group in (0, 1):
        source.append(ring, 10, group)
    saved.write(ring)
    before, files = sizes(tmp_path), saved.files
    for group in (0, 1):
        source.append(ring, 10, group)
    calls: list[int] = []
    real = getattr(os, call)

    def full(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) >= (4 if call == "pwritev" else 2):  # after the first group was written
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            saved.write(ring)
    assert sizes(tmp_path) == before
    assert saved.files == files
    state = through_bytes(saved.write(ring))
    restored = make("frames", groups=2)
    RingFiles(tmp_path).read(restored, state)
    assert_same(ring, restored)


def test_unreadable_disk_raises_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make("rows")
    Source().append(ring, 10)
    _, state = saved_to(tmp_path, ring)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert_refused(make("rows"), tmp_path, state, "is damaged", "Input/output error")


def test_file_is_renamed_after_it_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, calls = make("frames"), []
    Source().append(ring, 30)
    rename = os.rename

    def note(name: str) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(name), rename(*arguments) if name == "rename" else None)

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, note(name))
    RingFiles(tmp_path).write(ring)
    assert calls == ["fsync", "rename", "fsync"], "sync the file, rename it, sync the directory"


def test_file_systems_that_refuse_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse O_DIRECT when a file is opened, others when it is written or read."""
    ring = make("frames")
    Source().append(ring, 30)
    real, refused = {name: getattr(os, name) for name in ("open", "pwritev", "preadv")}, []

    def open_(path: Any, flags: int, *rest: Any) -> Any:
        if flags & saving.O_DIRECT:
            refused.append(path)
            real["open"](path, flags & ~saving.O_DIRECT, *rest)  # the file is created nevertheless
            raise OSError(errno.EINVAL, "Invalid argument")
        return real["open"](path, flags, *rest)

    def transfer(name: str) -> Callable[..., int]:
        def call(fd: int, *rest: Any) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & saving.O_DIRECT:
                refused.append(name)
                raise OSError(errno.EINVAL, "Invalid argument")
            found: int = real[name](fd, *rest)
            return found

        return call

    for patches in ({"open": open_}, {"pwritev": transfer("pwritev"), "preadv": transfer("preadv")}):
        with monkeypatch.context() as patch:
            for name, function in patches.items():
                patch.setattr(os, name, function)
            saved, state = saved_to(tmp_path / "-".join(patches), ring)
            restored = make("frames")
            saved.read(restored, state)
        assert_same(ring, restored)
    if saving.O_DIRECT:
        assert len(refused) >= 4


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is none")
def test_ring_is_saved_to_and_restored_from_dev_shm() -> None:
    ring, restored = make("frames"), make("frames")
    Source().append(ring, 30)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        saved, state = saved_to(Path(directory), ring)
        saved.read(restored, state)
    assert_same(ring, restored)
