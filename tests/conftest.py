"""Settings of the whole test session."""

import gc
from pathlib import Path

import pytest
from hypothesis import settings
from lasting import SharedServers

from remuda.processes import worker_pool

# Property tests set no deadline, because a busy machine is no failure, and keep no examples.

settings.register_profile("any machine", deadline=None, database=None)
settings.load_profile("any machine")


SLOW_FIRST = ("docs", "learns", "equivalence", "schemes", "runs", "config", "replay", "cli")


def pytest_collection_modifyitems(items):
    """Run slow directories first, so that the two workers of `make test` end at about the same time."""

    def rank(item):
        folder = item.path.parent.name
        return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)

    items.sort(key=rank)


def pytest_collection_finish(session):
    """Exclude imported modules and collected tests from garbage collections, of which each training starts one."""
    gc.collect()
    gc.freeze()


KILLS_SERVERS = ("faults", "processes")


@pytest.fixture(scope="session")
def shared_servers():
    servers = SharedServers()
    yield servers
    servers.end()


@pytest.fixture(scope="module", autouse=True)
def _servers_of_a_module(request, shared_servers):
    """Give worker pools a fork server that already runs."""
    if Path(request.path).parent.name in KILLS_SERVERS:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "ForkServer", shared_servers)
        yield
