"""A fork server for all tests of a module: one that has torch loaded takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remuda.processes import worker_pool as crew
from remuda.processes.fork_server import ForkServer


class LastingServer(ForkServer):
    """Outlives the crews that use it."""

    def close(self) -> None:
        """Not yet."""

    def end(self) -> None:
        super().close()


@contextmanager
def shared_server(module: str) -> Iterator[None]:
    """Whoever wants a fork server of this module gets the same one."""
    lasting = LastingServer(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "ForkServer", lambda name: lasting if name == module else ForkServer(name))
        yield
    lasting.end()
