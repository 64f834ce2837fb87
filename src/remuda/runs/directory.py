"""The directory of a run: its configuration, log, metrics, checkpoints, videos and result.

    with RunDirectory.create(None, "ppo-CartPole-v1-1", config) as run:      # runs/ppo-CartPole-v1-1-20260131-120000
        run.point_latest()                                                   # links runs/latest to the run
        run.log("training starts")
        ...                                                                  # run.checkpoints, run.videos, run.tb
        run.write_result({"status": "complete", "steps": 200_000})
    RunDirectory.open("runs/latest").read_config()

Only one process at a time may write to a run. It locks log.txt; when the process ends, the system releases the lock.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import yaml

from remuda.errors import CheckpointError, ConfigError
from remuda.logs.files import append_atomic, plain, to_json, write_atomic
from remuda.runs.advice import resume_advice
from remuda.runs.latest import LATEST, follow_links, point_latest, restore_latest
from remuda.torchrun import is_torchrun, launch_id

if sys.platform != "win32":
    import fcntl

RUNS = "runs"
# A directory that contains any of these is the directory of a run.
RUN_FILES = ("config.yaml", "meta.json", "metrics.jsonl", "result.json", "checkpoints")
EVALUATIONS = "evaluations.jsonl"
SPACES = "spaces.json"  # the env's spaces, so that a policy can be loaded without building the env
WEIGHTS = "weights.safetensors"  # the newest weights; only written with scheme.weights=file
# Files and directories that a run writes in addition to those that `create` makes.
WRITTEN = ("metrics.jsonl", "metrics.csv", "result.json", "wandb-id.txt", "profile", EVALUATIONS, SPACES, WEIGHTS)
PACKAGES = ("remuda", "torch", "numpy", "gymnasium")


class RunDirectory:
    """The directory of a run. `create` makes or resumes a run and locks it until `close`; `open` is for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_traceback = False  # whether this process has written a traceback to log.txt
        self._log: IO[str] | None = None
        self._former_latest: str | None = None  # the target of runs/latest before `point_latest` changed it
        self._made: list[Path] = []  # files and directories that `create` made and `discard` deletes

    @classmethod
    def create(
        cls, path: Path | str | None, name: str, config: Mapping[str, object], resume: bool = False
    ) -> RunDirectory:
        """Create a run at `path` (default: runs/<name>-<time>), or continue the run at `path` if `resume` is True."""
        settings = _config_text(config)
        if resume:
            if path is None:
                raise ConfigError("resume needs the directory of a run: give it with --resume RUN.")
            return cls._resume(Path(path), settings)
        made: list[Path] = []
        if path is None:
            directory = _default_path(name, made)
        else:
            directory = follow_links(Path(path))
            _check_free(directory)
        run = cls(directory)
        try:
            _make_directories(directory, made)
            with (directory / "config.yaml").open("x", encoding="utf-8") as file:  # fails if the file exists
                made.append(directory / "config.yaml")
                file.write(settings)
            for child in (run.checkpoints, run.videos, run.tb):
                _make_directories(child, made)
            made += [file for file in (directory / "meta.json", directory / "log.txt") if not file.exists()]
            write_atomic(directory / "meta.json", to_json({"name": name, **_meta(config)}, indent=2) + "\n")
            run._lock()
        except FileExistsError:
            _remove(made)
            raise ConfigError(_taken(directory)) from None
        except OSError as error:
            run.close()
            _remove(made)
            raise ConfigError(_unwritable(directory, error)) from None
        except BaseException:
            run.close()
            _remove(made)
            raise
        run._made = made
        return run

    @classmethod
    def _resume(cls, path: Path, settings: str) -> RunDirectory:
        """Lock the run at `path`, write `settings` to its config.yaml, and record the resume in meta.json."""
        run = cls.open(path)
        path = run.path
        try:
            run._lock()
            write_atomic(path / "config.yaml", settings)  # options may have changed, such as the number of steps
            (path / "result.json").unlink(missing_ok=True)  # the file holds the result of the earlier process
            meta = run.read_meta()
            meta.setdefault("resumed", []).append(_start())
            write_atomic(path / "meta.json", to_json(meta, indent=2) + "\n")
            for child in (run.checkpoints, run.videos, run.tb):
                child.mkdir(exist_ok=True)
        except OSError as error:
            run.close()
            raise CheckpointError(_unwritable(path, error)) from None
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open an existing run for reading. If `path` is a link, the attribute `path` of the result is the target."""
        given, path = Path(path), follow_links(Path(path))
        if not (path / "config.yaml").is_file():
            there = "holds no config.yaml" if path.is_dir() else "is not a directory"
            link = "" if path == given else f" (a link to {path})"
            raise CheckpointError(
                f"{given}{link} is not a run: it {there}; name a directory that `remuda train` made."
            )
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    @property
    def tb(self) -> Path:
        return self.path / "tb"

    def log(self, line: str, traceback: str = "") -> None:
        """Append a line, preceded by the time, to log.txt, followed by `traceback` if it is not empty."""
        self.has_traceback |= bool(traceback)
        line = f"{line}\n{traceback}" if traceback else line
        if self._log is None:
            self._log = (self.path / "log.txt").open("a", encoding="utf-8", buffering=1)
        with contextlib.suppress(OSError):  # a full disk must not end a run because of a log line
            self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")

    def add_evaluation(self, found: Mapping[str, object]) -> None:
        """Append a result of the evaluator process to evaluations.jsonl."""
        with io.FileIO(self.path / EVALUATIONS, "a") as file:
            append_atomic(file, (to_json(found) + "\n").encode())

    def cut_evaluations(self, steps: int) -> None:
        """Delete evaluations of weights that are newer than `steps`, the env step where a resumed run continues."""
        path = self.path / EVALUATIONS
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            write_atomic(path, "".join(line for line in lines if _is_up_to(steps, line)))

    def write_result(self, result: Mapping[str, object]) -> None:
        """Write result.json atomically."""
        write_atomic(self.path / "result.json", to_json(result, indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        """Return the resolved configuration; raise CheckpointError if it is damaged."""
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{path} cannot be read ({reason}): restore it or start a new run.") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} is damaged: it holds no mapping; restore it or start a new run.")
        return config

    def read_meta(self) -> dict[str, Any]:
        """Return the content of meta.json (versions, machine, times); an empty dict if the file was deleted."""
        path = self.path / "meta.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}): delete it to continue without it.") from None
        return dict(meta)

    def launches(self) -> set[str]:
        """Return the ids of the torchrun processes that have started or resumed this run (`Torchrun.launch`)."""
        meta = self.read_meta()
        return {start["launch"] for start in (meta, *meta.get("resumed", [])) if "launch" in start}

    def close(self) -> None:
        """Close log.txt and release the lock."""
        if self._log is not None:
            with contextlib.suppress(OSError):  # closing writes buffered lines, which fails on a full disk
                self._log.close()  # also releases the lock
            self._log = None

    def discard(self) -> None:
        """Delete a run that has learned nothing, but not the files that were in its directory before `create`.

        Files named in WRITTEN are all from this run, because `create` refuses directories that contain any of them.
        """
        self.close()
        inside = [path for path in self._made if self.path in path.parents]
        for path in (*inside, *(self.path / name for name in WRITTEN)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        restore_latest(self.path, self._former_latest)
        _remove([path for path in self._made if path.exists()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        self._log = (self.path / "log.txt").open("a", encoding="utf-8", buffering=1)
        if sys.platform == "win32":
            return  # Windows has no flock, so nothing prevents two processes from using one run there
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{self.path} is in use by another process: wait until it ends, or stop it."
            ) from None

    def write_config(self, config: Mapping[str, object]) -> None:
        """Replace the configuration in config.yaml, which a resumed run uses."""
        write_atomic(self.path / "config.yaml", _config_text(config))

    def point_latest(self) -> None:
        """Point the link runs/latest to this run. Do nothing if the run is not in a directory named runs."""
        if self.path.parent.name == RUNS:
            try:
                self._former_latest = point_latest(self.path)
            except OSError as error:  # for example, the file system does not support links; the run goes on
                self.log(f"the link {self.path.parent / LATEST} could not be created: {error}")


def _is_up_to(steps: int, line: str) -> bool:
    """Return whether a line of evaluations.jsonl is complete, and its weights are from at most `steps` env steps."""
    try:
        return bool(json.loads(line)["steps"] <= steps)
    except (ValueError, KeyError, TypeError):
        return False


def _default_path(name: str, made: list[Path]) -> Path:
    """Create the directory runs/<name>-<time>, with a number appended if the name is taken; return its path.

    New directories are appended to `made`.
    """
    stem = Path(RUNS) / f"{safe_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        _make_directories(stem.parent, made)
        for count in range(1, 1000):
            directory = stem if count == 1 else stem.with_name(f"{stem.name}-{count}")
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            made.append(directory)
            return directory
    except OSError as error:
        _remove(made)
        raise ConfigError(_unwritable(stem, error)) from None
    raise ConfigError(f"{stem} and 998 more names are taken: choose a directory with --out.")


def safe_name(name: str) -> str:
    """Replace characters that a file name should not contain by hyphens: ppo-<lambda>-0 becomes ppo-lambda-0."""
    return re.sub(r"-*[^\w.+-]+-*", "-", name.replace("<locals>.", ""))


def stored_form(config: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration as `read_config` returns it after it was saved."""
    return dict(yaml.safe_load(_config_text(config)))


def _check_free(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"out={directory} is a file: a run needs a directory; choose another --out.")
    if any((directory / name).exists() for name in RUN_FILES):
        raise ConfigError(_taken(directory))
    if foreign := [name for name in WRITTEN if (directory / name).exists()]:
        raise ConfigError(
            f"out={directory} contains {', '.join(foreign)}, which the run would overwrite: "
            "move what you want to keep, or choose another --out."
        )


def _taken(directory: Path) -> str:
    config: dict[str, object] = {}
    with contextlib.suppress(CheckpointError):
        config = RunDirectory.open(directory).read_config()
    advice = resume_advice(directory, config)
    return f"out={directory} already holds a run: continue it with {advice}, or choose another --out."


def _unwritable(directory: Path, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room, or choose another directory" if is_full else "choose a directory of your own"
    return f"{directory} cannot be written ({error.strerror}): {remedy} with --out."


def _make_directories(directory: Path, made: list[Path]) -> None:
    """Create a directory and its parents as `mkdir -p` does, and append the new directories to `made`."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        else:
            made.append(path)


def _remove(made: list[Path]) -> None:
    for path in reversed(made):
        if path.is_dir():
            with contextlib.suppress(OSError):  # the directory is not empty, because another run uses it now
                path.rmdir()
        else:
            path.unlink(missing_ok=True)


def _config_text(config: Mapping[str, object]) -> str:
    try:
        settings = plain(config)
    except TypeError as error:
        raise ConfigError(f"the configuration cannot be saved: {error}; name it by an import path.") from None
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def _meta(config: Mapping[str, object]) -> dict[str, object]:
    return {**_start(), "seed": config.get("seed")}


def _start() -> dict[str, object]:
    """Return what meta.json stores about the start of a process: time, command, versions, git commit and machine.

    Environment variables are not included, because they may contain passwords.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "versions": versions,
        "git": _git(),
        **({"launch": launch_id()} if is_torchrun() else {}),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
    }


def _git() -> dict[str, str | bool] | None:
    """Return the git commit of the current directory, and whether files differ from it.

    Return None outside a repository, without git, and if git takes too long.
    """
    if shutil.which("git") is None:
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):  # for example, a huge repository on a slow disk takes too long
        return None
    if answer.returncode != 0:
        return None
    commit, _, dirty = answer.stdout.strip().partition("-")
    return {"commit": commit, "dirty": dirty == "dirty"}
