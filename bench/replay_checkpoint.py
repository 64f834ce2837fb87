"""Measure saving and reading a replay of a million image observations, against `dd` on the same disk.

    .venv/bin/python bench/replay_checkpoint.py --rows 1000000 --envs 8 --out runs/replay_checkpoint.json

A FrameRing of stacks of four 84 x 84 frames is filled with 7.2 GB of noise. Each turn of the writing process does:

    dd         write zeros, then the ring's bytes, to a file of the ring's size (bs=16M conv=fsync); then the ring's
               bytes with oflag=direct as well
    first      write a checkpoint of the whole ring to an empty directory
    second     write a checkpoint after one row in sixteen was added

Each turn of the reading process does:

    dd         read the file of the first checkpoint, which is not in the page cache; then also with iflag=direct;
               then to memory (/dev/shm), which is most of the work of reading if a disk is fast
    read       read the files of both checkpoints into a new ring, whose memory has not been touched before

There are two processes so that neither holds more than one ring. The reported memory is that of the ring, plus the
peak of other memory of the process. The growth of the page cache, which does not belong to the process, is reported
separately. Bytes are those of the files. All files are in a directory next to `--out`, on the disk that is measured,
and are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from remuda.data.packing import pack, unpack
from remuda.replay.frames import FrameRing
from remuda.replay.ring import Row
from remuda.replay.ring_files import RingFiles

FRAMES, SIDE = 4, 84
ADDED = 16  # one row in 16 is new in the second checkpoint
Figures = dict[str, Any]


def make_ring(rows: int, envs: int) -> FrameRing:
    stack, number = np.zeros((FRAMES, SIDE, SIDE), np.uint8), np.zeros((), np.float32)
    example = Row(stack, np.zeros((), np.int64), number, number, np.zeros((), bool))
    return FrameRing(example, rows // envs, envs, FRAMES)


class Noise:
    """A source of rows whose frames are noise, which a disk cannot compress, drawn from a fixed set of frames."""

    def __init__(self, envs: int, T: int = 128) -> None:
        self.envs, self.T, self.numbers = envs, T, np.random.default_rng(0)
        self.frames = self.numbers.integers(0, 256, (4 * T + 16 * envs, SIDE, SIDE), np.uint8)

    def fill(self, ring: FrameRing, rows: int) -> None:
        for done in range(0, rows, self.T):
            T = min(self.T, rows - done)
            first = int(self.numbers.integers(len(self.frames) - T - 16 * self.envs - FRAMES))
            day, one = self.frames[first:], self.frames.strides
            shape = (T + 1, self.envs, FRAMES, SIDE, SIDE)
            obs = np.lib.stride_tricks.as_strided(day, shape, (one[0], 16 * one[0], one[0], *one[1:]))
            reward = self.numbers.random((T, self.envs), np.float32)
            mask = self.numbers.random((T, self.envs)) > 1e-3  # an episode ends after a thousand rows
            rest = Row(obs[:-1], np.zeros((T, self.envs), np.int64), reward, np.ones_like(reward), mask)
            ring.append(rest, obs[-1])


def ring_bytes(ring: FrameRing) -> int:
    return sum(os.fstat(memory.fd).st_size for memory in ring.memory)


def draws(ring: FrameRing) -> str:
    """Return sums over some rows as text, by which two rings are compared."""
    row, env = ring.counters.locate(np.random.default_rng(1).integers(0, ring.counters.count, 512))
    kept = ring.is_stored(row, env)
    return str([float(np.float64(part[kept[: len(part)]].astype(np.float64)).sum()) for part in ring.take(row, env)])


def dd(size: int, *words: str) -> float:
    """Copy `size` bytes with dd and return the rate in bytes per second."""
    start = time.perf_counter()
    subprocess.run(["dd", "bs=16M", f"count={size >> 24}", *words], check=True, capture_output=True)
    return (size >> 24 << 24) / (time.perf_counter() - start)


def forget(path: Path) -> None:
    """Flush a file to the disk and drop it from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def status(path: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def page_cache() -> int:
    return status("/proc/meminfo", "Cached") - status("/proc/meminfo", "Shmem")


@contextmanager
def memory(ring: FrameRing, figures: Figures, name: str) -> Iterator[None]:
    """Record the peak memory of the process and the growth of the page cache, both as multiples of the ring."""
    before, peak, is_over = page_cache(), [0, 0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            ours = sum(os.fstat(each.fd).st_blocks * 512 for each in ring.memory)
            apart = status("/proc/self/status", "RssAnon") + status("/proc/self/status", "RssFile")
            peak[:] = max(peak[0], ours + apart), max(peak[1], page_cache() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    is_over.set()
    watcher.join()
    figures[f"{name}: memory / ring"].append(peak[0] / ring_bytes(ring))
    figures[f"{name}: page cache / ring"].append(peak[1] / ring_bytes(ring))


def written_by(saved: RingFiles, ring: FrameRing) -> tuple[float, int, dict[str, Any]]:
    """Save the ring; return the seconds that this took, the bytes of new files, and the state for a checkpoint."""
    before = set(saved.directory.glob("*"))
    start = time.perf_counter()
    state = saved.write(ring)
    seconds = time.perf_counter() - start
    return seconds, sum(path.stat().st_size for path in {*saved.directory.glob("*")} - before), state


def write(given: argparse.Namespace) -> Figures:
    figures: Figures = defaultdict(list)
    ring, noise = make_ring(given.rows, given.envs), Noise(given.envs)
    noise.fill(ring, ring.capacity + ring.capacity // 3)
    size = ring_bytes(ring)
    own, target = f"if=/proc/{os.getpid()}/fd/{ring.memory[1].fd}", given.directory / "dd"
    for _ in range(given.turns):
        for name, words in {
            "dd write, zeros": ["if=/dev/zero", "conv=fsync"],
            "dd write, the ring's bytes": [own, "conv=fsync"],
            "dd write, the ring's bytes, direct": [own, "conv=fsync", "oflag=direct"],
        }.items():
            figures[name].append(dd(size, *words, f"of={target}") / 1e6)
            target.unlink()
            os.sync()
        directory = given.directory / "replay"
        shutil.rmtree(directory, ignore_errors=True)
        saved = RingFiles(directory)
        with memory(ring, figures, "first"):
            seconds, count, _ = written_by(saved, ring)
        figures["first"].append(count / seconds / 1e6)
        figures["first: bytes / ring"].append(count / size)
        noise.fill(ring, ring.capacity // ADDED)
        seconds, count, state = written_by(saved, ring)
        figures["second"].append(count / seconds / 1e6)
        figures["second: bytes / what is new"].append(count / size * ADDED)
        figures["load"].append(os.getloadavg()[0])
    (given.directory / "state").write_bytes(pack({"state": state, "draws": draws(ring)}))
    return {**figures, "bytes": size}


def read(given: argparse.Namespace) -> Figures:
    figures: Figures = defaultdict(list)
    found = unpack((given.directory / "state").read_bytes())
    saved, state = RingFiles(given.directory / "replay"), found["state"]
    files = [saved.directory / each["name"] for each in state["files"]]
    size = files[0].stat().st_size
    for _ in range(given.turns):
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as target:
            for name, words in {
                "dd read": ["of=/dev/null"],
                "dd read, direct": ["of=/dev/null", "iflag=direct"],
                "dd read, direct, to memory": [f"of={target.name}", "iflag=direct"],
            }.items():
                forget(files[0])
                figures[name].append(dd(size, f"if={files[0]}", *words) / 1e6)
        for path in files:
            forget(path)
        ring = make_ring(given.rows, given.envs)
        with memory(ring, figures, "read"):
            start = time.perf_counter()
            saved.read(ring, state)
            seconds = time.perf_counter() - start
        figures["read"].append(sum(path.stat().st_size for path in files) / seconds / 1e6)
        assert draws(ring) == found["draws"]
        ring.close()
        figures["load"].append(os.getloadavg()[0])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows over all envs")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/replay_checkpoint.json"))
    parser.add_argument("--part", choices=["write", "read"], help=argparse.SUPPRESS)  # runs in a separate process
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(write(given) if given.part == "write" else read(given)))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out.parent) as directory:
        figures = {part: run_part(part, Path(directory), given) for part in ("write", "read")}
    ratios = compare(figures["write"], figures["read"])
    given.out.write_text(json.dumps({"rows": given.rows, "envs": given.envs, **figures, **ratios}, indent=1) + "\n")
    for part in figures.values():
        for name, values in part.items():
            middle = statistics.median(values) if isinstance(values, list) else values
            print(f"{name:36} {middle:16,.3f}   {values}")
    for name, ratio in ratios.items():
        print(f"{name:60} {ratio:.2f}")


def compare(write: Figures, read: Figures) -> dict[str, float]:
    """Return the median rates of checkpoints divided by the median rates of dd."""
    pairs = [("first", write, name) for name in write if name.startswith("dd")]
    pairs += [("read", read, name) for name in read if name.startswith("dd")]
    return {f"{ours} / {dd}": statistics.median(of[ours]) / statistics.median(of[dd]) for ours, of, dd in pairs}


def run_part(part: str, directory: Path, given: argparse.Namespace) -> Figures:
    words = ["--part", part, "--directory", str(directory)]
    for name in ("rows", "envs", "turns"):
        words += [f"--{name}", str(getattr(given, name))]
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    main()
