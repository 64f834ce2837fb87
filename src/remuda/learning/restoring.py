"""Context managers for code that restores a saved state; they raise a CheckpointError if that is impossible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.errors import CheckpointError


@contextmanager
def must_fit(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the state loaded inside, from `path`, belongs to another env or network."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the env and net given: use those that the run was made with."
        ) from error


@contextmanager
def of_this_version() -> Iterator[None]:
    """Raise CheckpointError if a saved state lacks entries or has others, because another version wrote it."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint was written by another version of Remuda ({type(error).__name__}: {error}): resume it "
            "with the one that wrote it; `remuda eval` and `remuda record` can still play it."
        ) from error
