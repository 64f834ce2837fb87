"""The replay of a run that is divided into parts: every part stores and draws the rows of its own envs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from remuda.core import DivisibleReplay, Replay
from remuda.data import Batch
from remuda.errors import ConfigError
from remuda.learning.checkpoint import ASIDE
from remuda.parts.group import Group


@dataclass(frozen=True, eq=False)
class PartedBatch:
    """The batches of this process's parts; None for a part that has no batch, because it has too few real rows."""

    parts: tuple[Batch | None, ...]
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(None if part is None else part.key for part in self.parts)


class PartedReplay:
    """A `core.Replay` of several parts.

    The replay of each part counts the real steps of all parts. Batches therefore become due at the same time in all
    parts, even if one part has more reset rows than another.
    """

    def __init__(self, replays: Sequence[DivisibleReplay], group: Group) -> None:
        """`replays` has one replay for each part of this process."""
        self._replays, self._group = replays, group
        # Where `save` writes the files of all parts. Under `replicas`, every rank must see this directory of rank 0.
        self.directory: Path | None = None
        self.loaded: tuple[str, dict[str, Any]] | None = None  # the arguments of `load`, which followers need too
        group.serve("replay", lambda directory: [self._save_part(*pair, directory) for pair in self._by_part()])

    def _by_part(self) -> Iterator[tuple[int, DivisibleReplay]]:
        return zip(self._group.local, self._replays, strict=True)

    def add(self, batch: Batch) -> None:
        parts: tuple[Batch, ...] = batch.parts  # type: ignore[attr-defined]  # a PartedBatch
        added = [replay.append(part) for replay, part in zip(self._replays, parts, strict=True)]
        found = self._group.gather(list(added))
        for replay in self._replays:
            replay.count_steps(sum(steps for steps, _ in found), all(can_draw for _, can_draw in found))

    def batches(self) -> Iterator[Batch]:
        """Yield a PartedBatch for every update that is due. All processes yield the same number of batches."""
        due = [replay.batches() for replay in self._replays]
        for _ in range(self._replays[0].num_due):
            yield self._with_returns([next(batches, None) for batches in due])

    def _with_returns(self, batches: list[Batch | None]) -> Batch:
        """Return a PartedBatch. If batches have a range of returns, replace it by the range over all parts."""
        if any(batch is not None and batch.returns is not None for batch in batches):
            found = [each for each in self._group.gather([b.returns if b else None for b in batches]) if each]
            low, high, steady = zip(*found, strict=True)
            returns = (min(low), max(high), sum(steady) / len(steady))
            batches = [batch and replace(batch, returns=returns) for batch in batches]
        return PartedBatch(tuple(batches))  # type: ignore[return-value]

    def feedback(self, key: Any, priority: Tensor | None) -> None:
        priorities: Any = [None] * len(self._replays) if priority is None else priority
        for replay, own, each in zip(self._replays, key, priorities, strict=True):
            if own is not None:
                replay.feedback(own, each)

    def cut(self) -> None:
        for replay in self._replays:
            replay.cut()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replay in self._replays:
                stack.enter_context(replay.paused())
            yield

    @property
    def needs_saving(self) -> bool:
        return self._replays[0].needs_saving

    def save(self, directory: Path) -> dict[str, Any] | None:
        """Save all parts, each in a directory of its own. Under `replicas`, only the leader may call this."""
        if not self.needs_saving:
            return None
        states = self._group.call("replay", str(directory.absolute()))
        return {"parts": states, "files": [name for state in states for name in state["files"]]}

    @staticmethod
    def _save_part(part: int, replay: Replay, directory: str) -> dict[str, Any]:
        own = Path(directory) / part_name(part)
        own.mkdir(parents=True, exist_ok=True)
        state = replay.save(own)
        assert state is not None
        return {**state, "files": [f"{part_name(part)}/{name}" for name in state["files"]]}

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        directory = directory.absolute()  # the ranks may have been started in different directories
        self.loaded = (str(directory), state)
        for part, replay in self._by_part():
            replay.load(directory / part_name(part), state["parts"][part])

    def close(self) -> None:
        for replay in self._replays:
            replay.close()


@contextmanager
def visible_file(replay: PartedReplay) -> Iterator[str | None]:
    """Create an empty file in the directory of the replay, for other ranks to `look_for`, and yield its path.

    Yield None if nothing will be saved there, or if the file cannot be written, as on a full disk.
    """
    if replay.directory is None or not replay.needs_saving:
        yield None
        return
    path = replay.directory.absolute() / f"{ASIDE}{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        yield None
        return
    try:
        yield str(path)
    finally:
        with suppress(OSError):
            path.unlink()


def look_for(file: str | None) -> None:
    """Raise ConfigError if `file`, which rank 0 has created, is not visible here; do nothing if `file` is None."""
    if file is not None and not Path(file).exists():
        raise ConfigError(
            f"the directory {Path(file).parent} of rank 0 is not visible here, and every rank saves its replay in "
            "it: choose a directory with --out that all hosts share."
        )


def part_name(part: int) -> str:
    """Return the name of the directory with the files of one part."""
    return f"part-{part}"
