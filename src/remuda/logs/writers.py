"""Where metrics go: files that anything can read, TensorBoard, and Weights & Biases for those who ask for it.

    writers = [MetricsFile(run.path), TensorBoard(run.tb)]
    while training:
        for writer in writers:
            writer.write(steps, {"rollout/ep_rew_mean": 21.5, "time/fps": 9000.0})
    for writer in writers:
        writer.close()

After a crash the run goes on from its last checkpoint: `resume(step)` forgets what was written beyond it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import secrets
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from remuda.errors import CheckpointError, ConfigError
from remuda.logs.files import append_whole, finite, plain, to_json, write_whole

STEP = "time/total_timesteps"

Row = dict[str, float | None]


class Writer(Protocol):
    """Somewhere that metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


# --- metrics.jsonl and metrics.csv ----------------------------------------------------------------------------


def read_metrics(directory: Path) -> list[Row]:
    """The rows of metrics.jsonl, oldest first; a last line that a killed process left half-written is not one."""
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end was never finished
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get(STEP), int):
                raise ValueError
        except ValueError:  # also what json and utf-8 raise
            raise CheckpointError(
                f"line {number} of {path} is damaged: every line is a JSON object with {STEP}; delete that line."
            ) from None
        rows.append(row)
    return rows


class MetricsFile:
    """metrics.jsonl, one object per write, and metrics.csv, the same as a table."""

    def __init__(self, directory: Path) -> None:
        self._jsonl = directory / "metrics.jsonl"
        self._csv = directory / "metrics.csv"
        self._columns: list[str] = []
        self._files: list[io.FileIO] = []
        self._open(read_metrics(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row to both files; after an error, such as that of a full disk, the next row may be written."""
        values = finite(plain(metrics))
        row = {STEP: int(step)} | {key: values[key] for key in sorted(values) if key != STEP}
        jsonl, table = self._files
        append_whole(jsonl, (to_json(row) + "\n").encode())
        if row.keys() <= set(self._columns):
            append_whole(table, _csv_text([row], self._columns).encode())
        else:  # happens a few times at the start of a run, so reading all of it again costs nothing
            self._write_csv(read_metrics(self._jsonl.parent))
            self._files[1] = io.FileIO(self._csv, "a")
            table.close()  # not before: it stays in use where the new one could not be written

    def resume(self, step: int) -> None:
        """Drop the rows beyond `step`: what the process that was killed did after its last checkpoint."""
        rows = [row for row in read_metrics(self._jsonl.parent) if (row[STEP] or 0) <= step]
        self.close()
        self._open(rows)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, rows: list[Row]) -> None:
        if rows or self._jsonl.exists():
            write_whole(self._jsonl, "".join(to_json(row) + "\n" for row in rows))
            self._write_csv(rows)
        self._files = []
        try:
            for path in (self._jsonl, self._csv):
                self._files.append(io.FileIO(path, "a"))
        except OSError:
            self.close()
            raise

    def _write_csv(self, rows: list[Row]) -> None:
        columns = [STEP, *sorted({key for row in rows for key in row} - {STEP})] if rows else []
        header = _csv_text([{name: name for name in columns}], columns) if rows else ""
        write_whole(self._csv, header + _csv_text(rows, columns))
        self._columns = columns


def _csv_text(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


# --- TensorBoard ----------------------------------------------------------------------------------------------


def _crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, bits reversed
        table.append(value)
    return table


CRC32C = _crc32c_table()


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of the TFRecord format; 0.1 ms for the 1 kB of one write."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class TensorBoard:
    """Scalars in an event file below `directory`.

    Only the message types come from the tensorboard package: importing those takes 22 ms where torch is loaded,
    `torch.utils.tensorboard` 170 ms and tensorboard's EventFileWriter 130 to 190 ms, which also starts a thread,
    and loads tensorflow where that is installed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: io.FileIO | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [{"tag": tag, "simple_value": float(value)} for tag, value in metrics.items() if tag != STEP]
        self._add(step=int(step), summary={"value": values})

    def resume(self, step: int) -> None:
        """Start a new event file that tells readers to forget earlier values beyond `step`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        self._add(step=step + 1, session_log={"status": SessionLog.START})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._file is None:
            self._file = self._new_file()
            self._record(self._file, Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._record(self._file, Event(wall_time=time.time(), **fields))

    def _new_file(self) -> io.FileIO:
        self._directory.mkdir(exist_ok=True)
        second = int(time.time())
        for path in self._directory.glob("events.out.tfevents.*"):
            # Readers take files in order of name, and resuming within the same second must come second.
            earlier = path.name.split(".")[3]
            second = max(second, int(earlier) + 1 if earlier.isdigit() else 0)
        name = f"events.out.tfevents.{second:010d}.{platform.node()}.{os.getpid()}"
        return io.FileIO(self._directory / name, "x")

    @staticmethod
    def _record(file: io.FileIO, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        append_whole(file, length + _checksum(length) + data + _checksum(data))


# --- Weights & Biases -----------------------------------------------------------------------------------------


class WandB:
    """A run of Weights & Biases; where and whether it is sent is wandb's own setting (`WANDB_MODE=offline`)."""

    def __init__(self, project: str, run: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                f"log.wandb={project} needs the package wandb, which is not installed: pip install 'remuda[wandb]'."
            ) from None
        identity = run / "wandb-id.txt"  # so that resuming this run continues the same curves
        if not identity.exists():
            write_whole(identity, secrets.token_hex(8))
        self._run = wandb.init(
            project=project,
            name=run.resolve().name,
            id=identity.read_text(encoding="utf-8").strip(),
            dir=str(run),
            config=plain(config),
            resume="allow",
        )
        # wandb's own step may not go back, which a resumed run does.
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: int(step)})

    def close(self) -> None:
        self._run.finish()
