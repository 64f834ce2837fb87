"""Fork servers that tests share, because a fork server that imports torch takes seconds to start.

conftest.py shares servers among all tests except those of faults/ and processes/, which kill them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remuda.processes import worker_pool
from remuda.processes.fork_server import ForkServer


class LastingServer(ForkServer):
    """A fork server that outlives the worker pools that use it."""

    def close(self) -> None:
        """Do nothing: the fixture ends the server."""

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

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


class SharedServers:
    """Starts a fork server once for each module, import path, working directory and environment."""

    def __init__(self) -> None:
        self._servers: dict[object, LastingServer] = {}

    def __call__(self, module: str) -> LastingServer:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        key = (module, tuple(sys.path), os.getcwd(), tuple(sorted(environment.items())))
        server = self._servers.get(key)
        if server is None or not server.is_running:
            server = self._servers[key] = LastingServer(module)
        return server

    def end(self) -> None:
        for server in self._servers.values():
            server.end()
