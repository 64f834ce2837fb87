"""The ring on disk: files of rows, of which each is written once.

    saved = RingFiles(run / "checkpoints" / "replay")
    state = saved.write(ring)             # rows since the last time alone; small, names all files that are needed
    checkpoint.save(..., blobs={"replay": pack(state)}, files=saved.files)

    saved.read(ring, state)               # an equal ring has what that one had; the next write goes on from there

A file holds rows first to last of a group as they lie in memory, in parts that begin with a block of the disk. Its
parts are summed, and the sums kept in the state. What the ring has overwritten is no longer named: whoever prunes
checkpoints deletes the files that none of them names.

Parts go past the page cache, through a few buffers of the size of one. That costs one copy, as the cache would, and
no memory; where a machine has to find fresh pages for the cache first, it is several times as fast.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import queue
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from remuda.errors import CheckpointError
from remuda.replay.ring import Ring, Span

ASIDE = ".writing-"
O_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
NAME = re.compile(r"rows-\d+-\d+-\d+-[0-9a-f]{16}")
PART = 8 << 20  # bytes of a part, if a row is not larger
LARGEST_PART = 1 << 26  # of files that were written with another setting
BLOCK = 4096  # where parts begin, for transfers past the page cache
WORKERS = 3  # two of them copy and sum while one waits for the disk
MOST_FILES = 256  # of a ring: one with fewer rows than that part of it is written anew together with what follows
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)  # no state that we wrote

Bytes = NDArray[np.uint8]
T = TypeVar("T")


class Part(NamedTuple):
    """What is written or read at once."""

    begin: int  # in the file
    end: int
    pieces: list[NDArray[Any]]  # of the ring's memory; after them zeros up to the end of the block


class DamagedReplay(CheckpointError):
    """What was saved is not all there; what was saved earlier may be."""


@dataclass(frozen=True)
class Segment:
    """One file."""

    name: str
    span: Span
    part: int  # bytes at most
    sums: NDArray[np.uint32]  # crc32 of every part: as fast as the disk, which sha256 is not

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "part": self.part, "sums": self.sums, **self.span._asdict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Segment:
        if not NAME.fullmatch(state["name"]):
            raise ValueError(f"{state['name']!r} is no name of a file of rows")
        if not 0 < state["part"] <= LARGEST_PART:
            raise ValueError(f"parts of {state['part']} bytes")
        span = Span(*(state[field] for field in Span._fields))
        return cls(state["name"], span, state["part"], state["sums"])

    def parts(self, ring: Ring) -> list[Part]:
        return _parts(ring.views(self.span), self.part)


class RingFiles:
    """Of one ring, in a directory that nothing else is in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._segments: list[Segment] = []

    @property
    def files(self) -> list[str]:
        """Names of all that the newest state needs, oldest rows of a group first."""
        return [segment.name for segment in self._segments]

    def write(self, ring: Ring) -> dict[str, Any]:
        """All that the ring holds and no file does; it is on the disk when this returns. Nothing may be appended
        meanwhile. A disk that fails raises OSError, and leaves everything as it was."""
        self.directory.mkdir(parents=True, exist_ok=True)
        before = set(os.listdir(self.directory))
        known = self._segments if self._are_whole(ring) else []
        needed: list[Segment] = []
        fresh: list[Segment] = []
        try:
            for group in range(ring.groups):
                newest, oldest = int(ring.written[group]), ring.counters.oldest_written(group)
                mine = [each for each in known if each.span.group == group and each.span.last > oldest]
                if mine and mine[-1].span.last < newest and self._is_small(mine[-1].span, ring):
                    mine.pop()
                first = mine[-1].span.last if mine else oldest
                if first < newest:
                    fresh.append(self._write_segment(ring, ring.span(group, first, newest)))
                    mine.append(fresh[-1])
                needed += mine
            if fresh:
                _flush_directory(self.directory)
        except BaseException:
            for name in {segment.name for segment in fresh} - before:
                (self.directory / name).unlink(missing_ok=True)
            raise
        self._segments = needed
        return {
            "layout": ring.layout(),
            "files": [segment.state() for segment in needed],
            "tail": ring.get_tail(),
        }

    def read(self, ring: Ring, state: Mapping[str, Any]) -> None:
        """What a ring of the same layout held; CheckpointError, and an empty ring, if that is not all there."""
        try:
            _compare(state["layout"], ring.layout(), self.directory)
            segments = [Segment.from_state(each) for each in state["files"]]
            _must_cover(segments, state["tail"]["written"], ring)
            for segment in segments:
                self._check_file(segment, ring)
            for segment in segments:  # newer rows and frames over older ones that lay in the same place
                self._read_segment(ring, segment)
            ring.set_tail(state["tail"])
        except BaseException as error:
            ring.clear()
            if not isinstance(error, MALFORMED):
                raise
            raise DamagedReplay(f"what was saved of the replay in {self.directory} is damaged ({error}).") from None
        self._segments = segments

    def _are_whole(self, ring: Ring) -> bool:
        """Whether the files that were written or read last are still there, and are this ring's."""
        for segment in self._segments:
            if segment.span.last > ring.written[segment.span.group]:
                return False
            if not (self.directory / segment.name).is_file():
                return False
        return True

    def _is_small(self, span: Span, ring: Ring) -> bool:
        return span.last - span.first < ring.capacity * ring.groups // MOST_FILES

    def _write_segment(self, ring: Ring, span: Span) -> Segment:
        aside = self.directory / f"{ASIDE}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            with _opened(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:

                def write(part: Part, buffer: Bytes) -> int:
                    at = 0
                    for piece in part.pieces:
                        _like(piece, buffer[at : at + piece.nbytes])[...] = piece
                        at += piece.nbytes
                    buffer[at:] = 0
                    _transfer(os.pwritev, fd, buffer, part.begin)
                    return zlib.crc32(buffer.data)

                sums = np.array(_for_each(write, _parts(ring.views(span), PART)), np.uint32)
                os.fsync(fd)
            # The same rows may be written again by a run that was resumed from before them.
            name = f"rows-{span.group}-{span.first}-{span.last}-{hashlib.sha256(sums.data).hexdigest()[:16]}"
            aside.rename(self.directory / name)
        finally:
            aside.unlink(missing_ok=True)
        return Segment(name, span, PART, sums)

    def _check_file(self, segment: Segment, ring: Ring) -> None:
        """Before anything is read: that it is there, a file, and as long as it must be."""
        parts, path = segment.parts(ring), self.directory / segment.name
        if len(segment.sums) != len(parts):
            raise ValueError(f"{segment.name} has {len(parts)} parts, and {len(segment.sums)} sums are known")
        try:
            found = path.lstat()
        except FileNotFoundError:
            raise DamagedReplay(f"replay file {path} is missing.") from None
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(path, "it is not a file")
        if found.st_size != parts[-1].end:
            raise _damaged(path, f"it has {found.st_size:,} bytes instead of {parts[-1].end:,}")

    def _read_segment(self, ring: Ring, segment: Segment) -> None:
        path, parts = self.directory / segment.name, segment.parts(ring)
        expected = {part.begin: int(known) for part, known in zip(parts, segment.sums, strict=True)}
        with _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:

            def read(part: Part, buffer: Bytes) -> None:
                _transfer(os.preadv, fd, buffer, part.begin)
                if zlib.crc32(buffer.data) != expected[part.begin]:
                    raise _damaged(path, f"its bytes {part.begin:,} to {part.end:,} do not match their sum")
                at = 0
                for piece in part.pieces:
                    _pour(buffer[at : at + piece.nbytes], piece, ring)
                    at += piece.nbytes

            try:
                _for_each(read, parts)
            except OSError as error:
                raise _damaged(path, str(error)) from None


def _damaged(path: Path, how: str) -> DamagedReplay:
    return DamagedReplay(f"replay file {path} is damaged ({how}).")


def _compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], directory: Path) -> None:
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"the replay saved in {directory} has {name} {theirs.get(name)}, and this one {ours.get(name)}: "
                f"use the settings that the run was made with."
            )


def _must_cover(segments: Sequence[Segment], written: NDArray[np.int64], ring: Ring) -> None:
    """Every row that can be drawn is in one of them."""
    for group in range(ring.groups):
        spans = [segment.span for segment in segments if segment.span.group == group]
        newest = int(written[group])
        reached = max(0, newest - ring.capacity + 1)  # the oldest
        for span in spans:
            if not span.first <= reached < span.last:
                raise ValueError(f"rows {span.first} to {span.last} do not follow row {reached}")
            reached = span.last
        if reached != newest:
            raise ValueError(f"rows end with {reached} instead of {newest}")


def _parts(views: Sequence[NDArray[Any]], most: int) -> list[Part]:
    """All of the memory in order, and where in the file it is."""
    parts: list[Part] = []
    pieces: list[NDArray[Any]] = []
    begin = size = 0

    def finish() -> None:
        nonlocal begin, size, pieces
        end = begin + -(-size // BLOCK) * BLOCK
        parts.append(Part(begin, end, pieces))
        begin, size, pieces = end, 0, []

    for view in views:
        if not view.nbytes:
            continue
        row = view.nbytes // len(view)
        first = 0
        while first < len(view):
            if size and size + row > most:
                finish()
            last = min(len(view), first + max(1, (most - size) // row))
            pieces.append(view[first:last])
            size += (last - first) * row
            first = last
    if size:
        finish()
    return parts


def _for_each(transfer: Callable[[Part, Bytes], T], parts: Sequence[Part]) -> list[T]:
    """In a few threads, each with a buffer; in any order, because no two parts are of the same place."""
    size = max((part.end - part.begin for part in parts), default=BLOCK)
    workers = min(WORKERS, len(parts))
    buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    for _ in range(workers):
        buffers.put(np.frombuffer(mmap.mmap(-1, size), np.uint8))  # begins with a page, as the disk wants it

    def run(part: Part) -> T:
        buffer = buffers.get()
        try:
            return transfer(part, buffer[: part.end - part.begin])
        finally:
            buffers.put(buffer)

    if workers < 2:
        return [run(part) for part in parts]
    with ThreadPoolExecutor(workers, "replay") as pool:
        return list(pool.map(run, parts))


def _pour(data: Bytes, piece: NDArray[Any], ring: Ring) -> None:
    """Into memory that nobody has touched yet: by way of its file, because the kernel then neither blanks the pages
    nor is called for each of them, which takes a third of the time away."""
    if not piece.flags.c_contiguous:  # one group of envs among others
        piece[...] = _like(piece, data)
        return
    for memory in ring.memory:
        begin = memory[next(iter(memory.layout))]  # the first array is where the memory begins
        offset = piece.ctypes.data - begin.ctypes.data
        if 0 <= offset < os.fstat(memory.fd).st_size:
            _transfer(os.pwritev, memory.fd, data, offset)


def _like(piece: NDArray[Any], data: Bytes) -> NDArray[Any]:
    found: NDArray[Any] = data.view(piece.dtype).reshape(piece.shape)
    return found


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, buffer: Bytes, begin: int) -> None:
    """All of the buffer, in as many calls as it takes."""
    left, is_direct = buffer.data, bool(O_DIRECT)
    while left:
        try:
            done = call(fd, [left], begin)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct:
                raise
            # Not past the page cache after all: larger blocks, or the rest of half a transfer.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)
            is_direct = False
            continue
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        left, begin = left[done:], begin + done


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Past the page cache where the file system can do that."""
    try:
        fd = os.open(path, flags | O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags & ~os.O_EXCL, 0o644)  # it may exist by now
    try:
        yield fd
    finally:
        os.close(fd)


def _flush_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
