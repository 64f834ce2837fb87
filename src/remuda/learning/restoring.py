"""What is said where a state that was saved cannot be taken up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.errors import CheckpointError


@contextmanager
def must_fit(path: Path) -> Iterator[None]:
    """Around the loading of weights: those of another env or net are the user's mistake."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the env and net given: use those that the run was made with."
        ) from error


@contextmanager
def of_this_version() -> Iterator[None]:
    """Around what takes up a state that was saved: an entry more or less is of another version."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint was written by another version of Remuda ({type(error).__name__}: {error}): resume it "
            "with the one that wrote it; `remuda eval` and `remuda record` can still play it."
        ) from error
