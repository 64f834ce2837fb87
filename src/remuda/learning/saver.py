"""Checkpoints written by a background thread: training waits only while tensors are copied.

saver = Saver(directory, keep="last", done=on_written)
saver.save(snapshot(...), number=3)        # waits if the previous checkpoint is still being written
saver.poll()                               # calls `done` if the checkpoint has been written by now
saver.wait()                               # waits for the checkpoint, and calls `done`
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from remuda.learning.checkpoint import Snapshot, sweep, write


class Saver:
    """Writes checkpoints to a directory that has no other writer.

    When a checkpoint has been written, the next call of `save`, `poll` or `wait` calls `done(snapshot, path)`. If
    writing failed with an OSError, that error is passed in place of the path.
    """

    def __init__(self, directory: Path, keep: str, done: Callable[[Snapshot, Path | OSError], None]) -> None:
        self._directory, self._keep, self._done = directory, keep, done
        self._thread: threading.Thread | None = None
        self._found: tuple[Snapshot, Path | Exception] | None = None
        sweep(directory)

    def save(self, snapshot: Snapshot, number: int) -> None:
        self.wait()
        # The thread is a daemon, so that a second stop signal ends the process without waiting for the disk.
        self._thread = threading.Thread(target=self._write, args=(snapshot, number), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot, number: int) -> None:
        try:
            self._found = snapshot, write(self._directory, snapshot, self._keep, number)
        except Exception as error:
            self._found = snapshot, error

    def poll(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the thread. Pass its result or OSError to `done`; raise any other exception of the thread."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        assert self._found is not None
        (snapshot, found), self._found = self._found, None
        if isinstance(found, Exception) and not isinstance(found, OSError):
            raise found
        self._done(snapshot, found)
