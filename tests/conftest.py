"""Settings of the whole test session."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import prestarted
import pytest
from hypothesis import settings
from lasting import SharedServers

from remuda.processes import fork_server, worker_pool

# On a busy machine the threads of an operation wait for each other, and waiting takes as much CPU time as working:
# up to a hundred times that of one thread. Nothing above has imported torch, and commands inherit these variables.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

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


IN_ONE_PROCESS = ("agents", "algorithms", "build", "maths", "nets", "processes")


@pytest.fixture(scope="session", autouse=True)
def _template(request):
    """Fork the processes of `prestarted` and all fork servers from one process that has imported remuda.

    It is started before the first test, because tests compare the processes before and after.
    """
    if sys.platform != "linux" or all(item.path.parent.name in IN_ONE_PROCESS for item in request.session.items):
        yield
        return
    template = prestarted.Template.start()
    prestarted.use(template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "subprocess", prestarted)
        yield
    prestarted.use(None)
    template.end()


@pytest.fixture
def fresh_servers(monkeypatch):
    """Start fork servers as new interpreters, as they are outside tests."""
    monkeypatch.setattr(fork_server, "subprocess", subprocess)


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
