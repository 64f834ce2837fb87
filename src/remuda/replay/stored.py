"""What replays over a ring have in common: cutting episodes, saving, loading, and giving the memory back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remuda.replay.ring import Ring
from remuda.replay.saving import RingFiles


class Stored(ABC):
    """Base of replays whose rows are in a ring; each says what else it must save."""

    ring: Ring
    _files: RingFiles | None = None

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """All but the ring's rows."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """With the ring as it was then."""

    def cut(self) -> None:
        """Envs begin anew: what comes next does not follow what came last. Again, nothing happens."""
        for group in range(self.ring.groups):
            self.cut_group(group)

    def cut_group(self, group: int) -> None:
        columns, written = self.ring.columns(group), int(self.ring.written[group])
        env = np.arange(columns.start, columns.stop)
        if written and self.ring.is_real(np.full(len(env), written - 1), env).any():
            self.ring.cut(self.ring.obs(np.full(len(env), written), env), group)

    def lose(self, group: int) -> None:
        """The process that wrote these envs' rows is dead; another may begin where it left off."""
        self.ring.abandon(group)
        self.cut_group(group)

    def save(self, directory: Path) -> dict[str, Any]:
        """Rows since the last time go to files in the directory; the rest is returned, with the names of all."""
        if self._files is None or self._files.directory != directory:
            self._files = RingFiles(directory)
        with self.ring.still():
            rows = self._files.write(self.ring)
            return {"rows": rows, "files": list(self._files.files), "replay": self.get_state()}

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        self._files = RingFiles(directory)
        self._files.read(self.ring, state["rows"])
        self.set_state(state["replay"])

    def close(self) -> None:
        self.ring.close()
