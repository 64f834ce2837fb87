"""A fork server that all tests of a module share, because one that imports torch takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remuda.processes import worker_pool
from remuda.processes.fork_server import ForkServer


class LastingServer(ForkServer):
    """Outlives the worker pools that use it."""

    def close(self) -> None:
        """Do nothing: the fixture ends the server."""

    def end(self) -> None:
        super().close()


@contextmanager
def shared_server(module: str) -> Iterator[None]:
    """Give all worker pools of this module the same fork server."""
    lasting = LastingServer(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "ForkServer", lambda name: lasting if name == module else ForkServer(name))
        yield
    lasting.end()
