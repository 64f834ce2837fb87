"""Checkpoints: directories `step-<N>/` with tensors.safetensors (parameters and optimizers), blobs.safetensors
(packed states of sampler, replay and log), state.json, and a manifest of sha256 sums.

    save(directory, step, learner.state_dict(), {"rounds": 12}, keep="last")
    found = load_newest(directory)           # the newest intact checkpoint; found.skipped has errors of damaged ones

Data too large to be rewritten for every checkpoint is in files in `replay/`. Several checkpoints may share one of
these files (see replay/ring_files.py). A manifest names the files in `replay/` that its checkpoint needs. A file in
`replay/` is deleted together with the last checkpoint that needs it.

A checkpoint is written under a temporary name, flushed to disk and renamed, so it is complete or absent. It contains
only tensors and JSON, so loading it executes no code.
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
from remuda.learning.tensor_file import Piece, read_tensors, safetensors

StateDict = dict[str, Any]  # nested dicts and lists of tensors and plain values
FORMAT = 3  # older formats: 1 had one optimizer state per parameter, 2 stored convolutions channels first
ASIDE = ".writing-"  # prefix of files and directories while they are written or deleted
REPLACED = ".replaced-"  # prefix of a checkpoint while a new one of the same step takes its place
NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-([0-9]+)")
REPLAY = "replay"  # the directory of files that checkpoints share
BETWEEN_CUTS = "between_cuts"  # key in a manifest, see `Checkpoint.is_between_cuts`
BEST = "best"  # name of a link to the checkpoint with the best evaluation; this checkpoint is never deleted
BLOBS = "blobs.safetensors"  # name of the file for blobs, which exists only if there are blobs
MAX_BYTES = {"manifest.json": 1 << 16, "state.json": 1 << 24}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised by damaged manifests
FILES = ("state.json", "tensors.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back from disk."""

    path: Path
    step: int
    learner: StateDict
    progress: StateDict
    blobs: dict[str, bytes]  # packed states of the sampler, replay and log, by name
    skipped: list[str]  # error messages of damaged checkpoints that are newer than this one
    is_between_cuts: bool = False  # if True, an exact resume needs an earlier checkpoint, made when episodes were cut


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that a checkpoint will contain."""

    step: int
    state: bytes  # JSON text
    tensors: dict[str, Tensor]  # copies on the CPU
    blobs: dict[str, Tensor]  # the bytes of each blob, as a uint8 tensor
    files: tuple[str, ...] = ()  # names of the files in replay/ that the checkpoint needs
    is_between_cuts: bool = False


def snapshot(
    step: int,
    learner: StateDict,
    progress: StateDict,
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
    learner: StateDict,
    progress: StateDict,
    keep: str = "last",
    number: int = 0,
    blobs: Mapping[str, bytes] | None = None,
    files: Sequence[str] = (),
) -> Path:
    """Write checkpoint `step`, point the link `latest` to it, and delete old checkpoints according to `keep`.

    `number` counts the checkpoints of a run, so that keep="10" can keep every tenth. `files` are the names of files
    that are already in `replay/` and flushed to disk.
    """
    return write(directory, snapshot(step, learner, progress, blobs, files), keep, number)


def write(directory: Path, snapshot: Snapshot, keep: str = "last", number: int = 0) -> Path:
    """Write a snapshot as a checkpoint and return its path; `keep` and `number` are as in `save`."""
    contents: dict[str, list[Piece]] = {
        "state.json": [snapshot.state],
        "tensors.safetensors": safetensors(snapshot.tensors),
    }
    if snapshot.blobs:  # a separate file, because blobs depend on the number of workers and tensors do not
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
        if final.exists():  # for example, because the run was resumed from an earlier checkpoint
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
    if unused:  # delete no other files, because they may belong to the next checkpoint
        _delete_unnamed(directory, unused.__contains__)
    return final


def sweep(directory: Path) -> None:
    """Clean up after a process that was killed while writing. Only the writer of `directory` may call this."""
    for path in directory.glob(f"{REPLACED}step-*"):
        final = directory / path.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in directory.glob(f"{ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (directory / REPLAY).rglob(f"{ASIDE}*"):
        path.unlink(missing_ok=True)
    _delete_unnamed(directory, lambda name: True)


def load(path: Path) -> Checkpoint:
    """Load a checkpoint and verify it against its manifest; raise CheckpointError if it cannot be used."""
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
            data = _read(path / name, MAX_BYTES.get(name, expected["bytes"]))
            if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
                raise ValueError(f"{name} does not match its sha256 sum")
            contents[name] = data
        state = json.loads(contents["state.json"])
        learner = _unpack(state["learner"], read_tensors(contents["tensors.safetensors"]))
        found = read_tensors(contents[BLOBS]) if BLOBS in contents else {}
        blobs = {name: tensor.numpy().tobytes() for name, tensor in found.items()}
        is_between_cuts = bool(manifest.get(BETWEEN_CUTS, False))
        return Checkpoint(path, int(manifest["step"]), learner, state["progress"], blobs, [], is_between_cuts)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({error}): delete it, or resume from an earlier one."
        ) from None


def _read(path: Path, max_bytes: int) -> bytes:
    """Read a file of a checkpoint; raise ValueError if it is not a regular file or exceeds `max_bytes`."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a file")
    if found.st_size > max_bytes:
        raise ValueError(f"{path.name} has {found.st_size:,} bytes, more than the {max_bytes:,} that it may have")
    return path.read_bytes()


def load_newest(directory: Path, before: int | None = None, skipped: Sequence[str] = ()) -> Checkpoint:
    """Load the newest intact checkpoint; if `before` is given, the newest intact checkpoint before this step.

    Raise CheckpointError if there is none. The result's `skipped` is the argument plus a message per damaged one.
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
    """Return all checkpoints, or those before step `before`, oldest first.

    A checkpoint with the prefix REPLACED is included only if its replacement was never written.
    """
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*")):  # `step-N` comes after `.replaced-step-N` and replaces it in `found`
        if (name := NAME.fullmatch(path.name)) and path.is_dir():
            found[int(name[1])] = path
    return [found[step] for step in sorted(found) if before is None or step < before]


def _pack(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a state to JSON values, and add its tensors to `tensors`. Dicts become pairs, to allow integer keys."""
    if isinstance(node, Tensor):
        # The tensor is cloned, because training changes it while a thread writes the clone to a file. The clone is
        # contiguous, because files cannot store the channels_last format.
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


def _manifest_sum(manifest: StateDict) -> str:
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
    """Mark the checkpoint of this step as the best. It is not deleted until another checkpoint is marked instead."""
    _point(directory, BEST, f"step-{step}")
    _flush_directory(directory)


def _point(directory: Path, name: str, target: str) -> None:
    link = directory / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(directory / name)


def _prune(directory: Path, keep: str, newest: Path) -> set[str]:
    """Delete old checkpoints according to `keep`.

    Return the names of the files in `replay/` that the deleted checkpoints needed. "all" keeps every checkpoint, a
    number N every Nth, and "last" only those that are always kept: the newest two, because one of them may be
    damaged; the target of the link `best`; and the newest checkpoint whose `is_between_cuts` is False.
    """
    names: set[str] = set()
    if keep == "all":
        return names
    found = list_checkpoints(directory)
    at_cut = next((path for path in reversed(found) if not _is_between_cuts(path)), None)
    for path in found[:-2]:
        # `newest` was just written and stays, even if damaged checkpoints of later steps exist.
        if path in (newest, at_cut) or path.resolve() == (directory / BEST).resolve():
            continue
        if not keep.isdigit() or _number(path) % int(keep):
            names |= _files_of(path) or set()
            with suppress(OSError):  # a checkpoint that cannot be deleted does no harm
                _remove(path)
    return names


def _remove(path: Path) -> None:
    """Delete a checkpoint; rename it first, so that a process killed meanwhile leaves no incomplete `step-<N>`."""
    aside = path.rename(_aside(path.parent))
    shutil.rmtree(aside, ignore_errors=True)


def _aside(directory: Path) -> Path:
    """Return an unused path for a temporary directory, which readers of checkpoints ignore."""
    return directory / f"{ASIDE}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _number(path: Path) -> int:
    """Return the number of a checkpoint, or 0 if its manifest cannot be read; keep="N" never deletes number 0."""
    try:
        return int(_manifest(path)["number"])
    except UNREADABLE:
        return 0


def _is_between_cuts(path: Path) -> bool:
    try:
        return bool(_manifest(path).get(BETWEEN_CUTS, False))
    except UNREADABLE:
        return True  # so that `_prune` does not keep a damaged checkpoint in place of an intact one


def _files_of(path: Path) -> set[str] | None:
    """Return the names of the files in `replay/` that a checkpoint needs; None if its manifest cannot be read."""
    try:
        manifest = _manifest(path)
        return set(manifest.get(REPLAY, ())) if manifest.pop("sha256") == _manifest_sum(manifest) else None
    except UNREADABLE:
        return None


def _manifest(path: Path) -> Any:
    return json.loads(_read(path / "manifest.json", MAX_BYTES["manifest.json"]))


def _delete_unnamed(directory: Path, may_go: Callable[[str], bool]) -> None:
    """Delete the files in `replay/` that no checkpoint needs and whose names `may_go` accepts.

    A checkpoint whose manifest cannot be read may need any file older than itself, so such files are kept.
    """
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
    for path in (directory / REPLAY).rglob("*"):  # files are in subdirectories if a run is divided into parts
        name = path.relative_to(directory / REPLAY).as_posix()
        if not path.is_dir() and name not in named and may_go(name) and path.lstat().st_mtime > kept_until:
            with suppress(OSError):  # a file that cannot be deleted does no harm
                path.unlink()


def parameters_hash(state: StateDict) -> str:
    """Return the sha256 of all tensors of a nested state, for comparing runs bit by bit."""
    tensors: dict[str, Tensor] = {}
    _pack(state, "", tensors)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
