"""Checkpoints: `step-<N>/` with tensors.safetensors (what was learned), blobs.safetensors (the packed state of envs
and of the run log), state.json and a manifest of sha256 sums.

    save(directory, step, learner.state_dict(), {"rounds": 12}, keep="last")
    found = load_newest(directory)           # the newest that is whole; damaged ones are named and passed over

What is too large to be written every time lies in files in `replay/`, which several checkpoints may share (see
replay/ring_files.py): the manifest names those that its checkpoint needs, and they are deleted with the last that
does.

A checkpoint is written aside, flushed to disk and renamed, so it exists whole or not at all. Nothing in it is
code: tensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remuda.errors import CheckpointError
from remuda.learning.tensor_file import Piece, safetensors, tensors_of

FORMAT = 3  # 1 kept the optimizer of every parameter by itself, 2 had channels first
ASIDE = ".writing-"
REPLACED = ".replaced-"  # and its name: counts until another checkpoint of the same step has taken its place
NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-([0-9]+)")
REPLAY = "replay"  # the directory of files that checkpoints share
BETWEEN_CUTS = "between_cuts"  # in a manifest
BEST = "best"  # a link to the checkpoint with the best evaluation, which is never pruned
BLOBS = "blobs.safetensors"  # bytes, where there are any
MOST_BYTES = {"manifest.json": 1 << 16, "state.json": 1 << 24}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a manifest
FILES = ("state.json", "tensors.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back from disk."""

    path: Path
    step: int
    learner: dict[str, Any]
    progress: dict[str, Any]
    blobs: dict[str, bytes]  # packed by whoever unpacks them
    skipped: list[str]  # sentences about damaged checkpoints that are newer than this one
    is_between_cuts: bool = False  # a run that cuts episodes is bit-equal only if it continues from an earlier one


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold, apart from what goes on changing."""

    step: int
    state: bytes  # JSON
    tensors: dict[str, Tensor]  # clones
    blobs: dict[str, Tensor]  # bytes
    files: tuple[str, ...] = ()  # names in replay/ that were written for it or before
    is_between_cuts: bool = False


def snapshot(
    step: int,
    learner: dict[str, Any],
    progress: dict[str, Any],
    blobs: Mapping[str, bytes] | None = None,
    files: Sequence[str] = (),
    is_between_cuts: bool = False,
) -> Snapshot:
    tensors: dict[str, Tensor] = {}
    state = {"learner": _pack(learner, "", tensors), "progress": progress}
    packed = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in (blobs or {}).items()}
    return Snapshot(step, json.dumps(state).encode(), tensors, packed, tuple(files), is_between_cuts)


def save(
    directory: Path,
    step: int,
    learner: dict[str, Any],
    progress: dict[str, Any],
    keep: str = "last",
    number: int = 0,
    blobs: Mapping[str, bytes] | None = None,
    files: Sequence[str] = (),
) -> Path:
    """Write checkpoint `step`, point `latest` at it, and delete the old ones that `keep` does not want.

    `number` counts the checkpoints of a run: with keep="10" every tenth stays. `files` are in `replay/` already, and
    flushed to disk.
    """
    return write(directory, snapshot(step, learner, progress, blobs, files), keep, number)


def write(directory: Path, snapshot: Snapshot, keep: str = "last", number: int = 0) -> Path:
    """As `save`, of what was there when the snapshot was taken."""
    contents: dict[str, list[Piece]] = {
        "state.json": [snapshot.state],
        "tensors.safetensors": safetensors(snapshot.tensors),
    }
    if snapshot.blobs:  # apart from the tensors: equal runs have equal tensors, however many workers they had
        contents[BLOBS] = safetensors(snapshot.blobs)
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "number": number,
        "files": {
            name: {"bytes": sum(map(len, pieces)), "sha256": _sha256(pieces)} for name, pieces in contents.items()
        },
    }
    if snapshot.files:
        manifest[REPLAY] = list(snapshot.files)
    if snapshot.is_between_cuts:
        manifest[BETWEEN_CUTS] = True
    manifest["sha256"] = _manifest_sum(manifest)
    unused: set[str] = set()
    final, aside = directory / f"step-{snapshot.step}", _aside(directory)
    replaced = directory / f"{REPLACED}{final.name}"
    try:
        aside.mkdir(parents=True)
        for name, pieces in contents.items():
            _write_through(aside / name, pieces)
        _write_through(aside / "manifest.json", [json.dumps(manifest, indent=1).encode()])
        _flush_directory(aside)
        if final.exists():  # written before and resumed from, or of a round that was cut short: the same step again
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        unused |= _files_of(replaced) or set()
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _point(directory, "latest", final.name)
    _flush_directory(directory)
    unused |= _prune(directory, keep, final)
    if unused:  # only what some checkpoint has needed: the next one's files may be there already
        _delete_unnamed(directory, unused.__contains__)
    return final


def sweep(directory: Path) -> None:
    """Remove what a process that was killed while it wrote has left; for whoever alone may write there."""
    for path in directory.glob(f"{REPLACED}step-*"):
        final = directory / path.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in directory.glob(f"{ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (directory / REPLAY).glob(f"{ASIDE}*"):
        path.unlink(missing_ok=True)
    _delete_unnamed(directory, lambda name: True)


def load(path: Path) -> Checkpoint:
    """One checkpoint, verified against its manifest."""
    try:
        manifest = _manifest(path)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest['format']} and this version of Remuda reads {FORMAT}: use "
                "the one that wrote it."
            )
        if manifest.pop("sha256") != _manifest_sum(manifest):
            raise ValueError("manifest.json does not match its sha256 sum")
        for name in manifest.get(REPLAY, ()):
            if not (path.parent / REPLAY / name).is_file():
                raise ValueError(f"{REPLAY}/{name} is missing")
        contents = {}
        for name in (*FILES, *([BLOBS] if BLOBS in manifest["files"] else [])):
            expected = manifest["files"][name]
            data = _read(path / name, MOST_BYTES.get(name, expected["bytes"]))
            if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
                raise ValueError(f"{name} does not match its sha256 sum")
            contents[name] = data
        state = json.loads(contents["state.json"])
        learner = _unpack(state["learner"], tensors_of(contents["tensors.safetensors"]))
        found = tensors_of(contents[BLOBS]) if BLOBS in contents else {}
        blobs = {name: tensor.numpy().tobytes() for name, tensor in found.items()}
        is_between_cuts = bool(manifest.get(BETWEEN_CUTS, False))
        return Checkpoint(path, int(manifest["step"]), learner, state["progress"], blobs, [], is_between_cuts)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({error}): delete it, or resume from an earlier one."
        ) from None


def _read(path: Path, most: int) -> bytes:
    """A file of a checkpoint: nothing else, and no more of it than there can be."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a file")
    if found.st_size > most:
        raise ValueError(f"{path.name} has {found.st_size:,} bytes, more than the {most:,} that it may have")
    return path.read_bytes()


def load_newest(directory: Path, before: int | None = None, skipped: Sequence[str] = ()) -> Checkpoint:
    """The newest whole checkpoint, of those before a step.

    What was damaged on the way there is told in its `skipped`, beside what the caller knows of newer ones.
    """
    skipped = list(skipped)
    for path in reversed(list_checkpoints(directory, before)):
        try:
            return replace(load(path), skipped=skipped)
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(f"no checkpoint of {directory.parent} can be used; the newest: {skipped[0]}")
    raise CheckpointError(f"{directory.parent} holds no checkpoint yet: train it first, or start a new run.")


def list_checkpoints(directory: Path, before: int | None = None) -> list[Path]:
    """Return all checkpoints, of those before a step if one is given, oldest first.

    A checkpoint that was moved aside by a process that died before it could write its replacement is one of them.
    """
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*")):  # replaced ones sort first, so that their replacements overwrite them
        if (name := NAME.fullmatch(path.name)) and path.is_dir():
            found[int(name[1])] = path
    return [found[step] for step in sorted(found) if before is None or step < before]


def _pack(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON with a reference wherever a tensor stood; dicts become pairs, because JSON has no integer keys."""
    if isinstance(node, Tensor):
        # A clone, because shared nets share memory; contiguous, because channels_last is not saved.
        tensors[path] = node.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    if isinstance(node, dict):
        return {"pairs": [[key, _pack(value, f"{path}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"list": [_pack(value, f"{path}/{index}", tensors) for index, value in enumerate(node)]}
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise TypeError(f"{path} of a checkpoint is a {type(node).__name__}: only tensors and plain values are saved")


def _unpack(node: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "pairs":
        return {key: _unpack(value, tensors) for key, value in content}
    return [_unpack(value, tensors) for value in content]


def _manifest_sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_through(path: Path, pieces: Sequence[Piece]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _sha256(pieces: Sequence[Piece]) -> str:
    sums = hashlib.sha256()
    for piece in pieces:
        sums.update(piece)
    return sums.hexdigest()


def _flush_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def point_best(directory: Path, step: int) -> None:
    """Mark the checkpoint of this step as the best one, and keep it until another is marked."""
    _point(directory, BEST, f"step-{step}")
    _flush_directory(directory)


def _point(directory: Path, name: str, target: str) -> None:
    link = directory / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(directory / name)


def _prune(directory: Path, keep: str, newest: Path) -> set[str]:
    """Delete checkpoints that `keep` does not want; return the names in `replay/` that these needed.

    The newest two always stay, because one may be damaged, and so do the one that `best` points to and the newest
    that does not lie between two cuts. "all" keeps every checkpoint, a number N every Nth.
    """
    names: set[str] = set()
    if keep == "all":
        return names
    found = list_checkpoints(directory)
    at_cut = next((path for path in reversed(found) if not _is_between_cuts(path)), None)
    for path in found[:-2]:
        # Damaged ones of later steps, which the run was not resumed from, do not make the newest an old one.
        if path in (newest, at_cut) or path.resolve() == (directory / BEST).resolve():
            continue
        if not keep.isdigit() or _number(path) % int(keep):
            names |= _files_of(path) or set()
            with suppress(OSError):  # it takes space, and does no harm
                _remove(path)
    return names


def _remove(path: Path) -> None:
    """Whoever is killed meanwhile leaves no half of it."""
    aside = path.rename(_aside(path.parent))
    shutil.rmtree(aside, ignore_errors=True)


def _aside(directory: Path) -> Path:
    """A name that nobody reads."""
    return directory / f"{ASIDE}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _number(path: Path) -> int:
    """Which checkpoint of the run this is; 0, which is always kept, where the manifest cannot be read."""
    try:
        return int(_manifest(path)["number"])
    except UNREADABLE:
        return 0


def _is_between_cuts(path: Path) -> bool:
    try:
        return bool(_manifest(path).get(BETWEEN_CUTS, False))
    except UNREADABLE:
        return True  # a damaged checkpoint is none to continue from


def _files_of(path: Path) -> set[str] | None:
    """Names in `replay/` that a checkpoint needs; None where the manifest cannot be read."""
    try:
        manifest = _manifest(path)
        return set(manifest.get(REPLAY, ())) if manifest.pop("sha256") == _manifest_sum(manifest) else None
    except UNREADABLE:
        return None


def _manifest(path: Path) -> Any:
    return json.loads(_read(path / "manifest.json", MOST_BYTES["manifest.json"]))


def _delete_unnamed(directory: Path, may_go: Callable[[str], bool]) -> None:
    """Files in `replay/` that no checkpoint needs; one that does not tell may need all that is older than itself."""
    if not (directory / REPLAY).is_dir():
        return
    named: set[str] = set()
    kept_until = 0.0
    for path in list_checkpoints(directory):
        names = _files_of(path)
        if names is None:
            kept_until = max(kept_until, path.stat().st_mtime)
        else:
            named |= names
    for path in (directory / REPLAY).iterdir():
        if path.name not in named and may_go(path.name) and path.lstat().st_mtime > kept_until:
            with suppress(OSError):  # the checkpoint is written all the same
                path.unlink()


def parameters_hash(state: dict[str, Any]) -> str:
    """sha256 over every tensor of a (nested) state, for comparing runs bit by bit."""
    tensors: dict[str, Tensor] = {}
    _pack(state, "", tensors)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
