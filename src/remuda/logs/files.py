"""Small files that are there whole or not at all, and JSON that every reader accepts.

write_whole(run / "result.json", to_json({"status": "done", "loss": float("nan")}))     # loss becomes null
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


def plain(value: Any) -> Any:
    """`value` out of dicts, lists, text, numbers and None alone; TypeError names what cannot be said that way."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # subclasses (StrEnum, numpy.float64) are text and numbers for Python, not for YAML
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{value!r} is no number, text, list or mapping")


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON has no words for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; NaN and infinities become null."""
    return json.dumps(finite(plain(value)), allow_nan=False, indent=indent, ensure_ascii=False)


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text`; who reads meanwhile, or after a crash, finds the old or the new text."""
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


def append_whole(file: io.FileIO, data: bytes) -> None:
    """All of it, or nothing: a disk that fills up in the middle of a line must not damage the file."""
    end = os.fstat(file.fileno()).st_size
    if file.write(data) != len(data):
        file.truncate(end)
        file.seek(end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
