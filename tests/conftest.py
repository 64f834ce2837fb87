"""Settings of the whole test session."""

import gc

from hypothesis import settings

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
    """Exclude imported modules and collected tests from garbage collections; each took 0.2 s before every training."""
    gc.collect()
    gc.freeze()
