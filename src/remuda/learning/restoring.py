"""Context managers for code that restores a saved state. If restoring fails, they raise CheckpointError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.errors import CheckpointError


@contextmanager
def must_fit(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the code in the context cannot load the state from `path` into the env or net."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the env and net given: use those that the run was made with."
        ) from error


@contextmanager
def of_this_version() -> Iterator[None]:
    """Raise CheckpointError if the state that is loaded in the context does not have the expected entries."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint was written by another version of Remuda ({type(error).__name__}: {error}): resume it "
            "with the one that wrote it; `remuda eval` and `remuda record` can still play it."
        ) from error
