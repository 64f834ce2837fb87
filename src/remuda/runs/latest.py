"""The link runs/latest, which points to the newest run, and how a run is opened by the path of a link."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from remuda.errors import CheckpointError

LATEST = "latest"
MAX_LINKS = 40  # maximum number of links to follow in one path, as in Linux


def point_latest(run: Path) -> str | None:
    """Point the link `latest`, in the directory that contains `run`, to `run`.

    Return the former target of the link, or None if the link is new or already pointed to `run`. If `latest` exists
    and is not a link, do nothing and return None.
    """
    latest = run.parent / LATEST
    if run == latest or (latest.exists() and not latest.is_symlink()):
        return None
    former = os.readlink(latest) if latest.is_symlink() else None
    _replace(latest, run.name)
    return former if former != run.name else None


def restore_latest(run: Path, former: str | None) -> None:
    """Undo `point_latest(run)`, which returned `former`, unless another run has changed the link since."""
    latest = run.parent / LATEST
    with contextlib.suppress(OSError):
        if run == latest or not latest.is_symlink() or os.readlink(latest) != run.name:
            return
        if former is None:
            latest.unlink()
        else:
            _replace(latest, former)


def _replace(link: Path, target: str) -> None:
    """Point `link` to `target` by an atomic rename, so that the link never disappears."""
    partial = link.parent / f".{link.name}-{os.getpid()}"
    partial.symlink_to(target, target_is_directory=True)
    os.replace(partial, link)


def follow_links(path: Path) -> Path:
    """Return `path`, or its target if it is a link; raise CheckpointError for a link that leads back to itself.

    Another run may change runs/latest at any time. A run that was opened by this link must not change with it, so
    every run is opened by the name of its own directory. Links among the parents of `path` are not resolved.
    """
    found = path
    for _ in range(MAX_LINKS):
        if not found.is_symlink():
            return found
        found = found.parent / os.readlink(found)
    raise CheckpointError(f"{path} is a link that leads back to itself: {_name_newest(path.parent)}")


def _name_newest(runs: Path) -> str:
    """Return advice for an error message: name the run's own directory, such as the newest run in `runs`."""
    logs = sorted(runs.glob("*/log.txt"), key=lambda log: log.stat().st_mtime)
    newest = f"; the newest run there is {logs[-1].parent}" if logs else ""
    return f"name the run's own directory instead{newest}."
