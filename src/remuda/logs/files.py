"""Atomic writes of small files, and conversion of values to JSON that every parser accepts.

write_atomic(run / "result.json", to_json({"status": "done", "loss": float("nan")}))     # loss becomes null
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np


def plain(value: object) -> Any:
    """Convert `value` to dicts, lists, strings, numbers, bools and None; raise TypeError if that is not possible."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # converts subclasses such as StrEnum and numpy.float64, which YAML refuses
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{value!r} is not a number, string, list or mapping")


def finite(value: object) -> Any:
    """Return `value` with None in place of NaN and infinities, which JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def to_json(value: object, indent: int | None = None) -> str:
    """Return `value` as strict JSON, with null in place of NaN and infinities."""
    return json.dumps(finite(plain(value)), allow_nan=False, indent=indent, ensure_ascii=False)


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: readers see either the old or the new text, even after a crash."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append_atomic(file: io.FileIO, data: bytes) -> None:
    """Append all of `data`, or append nothing and raise OSError, so that a full disk leaves no incomplete line."""
    end = os.fstat(file.fileno()).st_size
    if file.write(data) != len(data):
        file.truncate(end)
        file.seek(end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
