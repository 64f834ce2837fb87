"""Writers of metrics: plain files, TensorBoard event files, and Weights & Biases.

    writers = [MetricsFile(run.path), TensorBoard(run.tb)]
    while training:
        for writer in writers:
            writer.write(steps, {"rollout/ep_rew_mean": 21.5, "time/fps": 9000.0})
    for writer in writers:
        writer.close()

A resumed run continues from the step of its last checkpoint. In `MetricsFile` and `TensorBoard`, `resume(step)` drops
the metrics of later steps. `WandB` has no such method and keeps them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remuda.errors import CheckpointError, ConfigError
from remuda.logs.files import append_atomic, finite, plain, to_json, write_atomic

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

STEP = "time/total_timesteps"

Row = dict[str, float | None]


class Writer(Protocol):
    """A destination of metrics. `write` may raise OSError, as on a full disk, and may be called again after that."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


# --- metrics.jsonl and metrics.csv ----------------------------------------------------------------------------


def read_metrics(directory: Path) -> list[Row]:
    """Return the rows of metrics.jsonl, oldest first, or no rows if there is no such file.

    An incomplete last line, left by a killed process, is skipped. Any other damaged line raises CheckpointError.
    """
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for number, line in enumerate(lines[:-1], start=1):  # text after the last newline is an incomplete line
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get(STEP), int):
                raise ValueError
        except ValueError:  # including the errors of the JSON and UTF-8 decoders
            raise CheckpointError(
                f"line {number} of {path} is damaged: every line is a JSON object with {STEP}; delete that line."
            ) from None
        rows.append(row)
    return rows


class MetricsFile:
    """Writes metrics.jsonl, one JSON object per line, and metrics.csv, the same rows as a table."""

    def __init__(self, directory: Path) -> None:
        self._jsonl = directory / "metrics.jsonl"
        self._csv = directory / "metrics.csv"
        self._columns: list[str] = []
        self._files: list[io.FileIO] = []
        self._open(read_metrics(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row to both files. If this fails, as on a full disk, later rows can still be written."""
        values = finite(plain(metrics))
        row = {STEP: int(step)} | {key: values[key] for key in sorted(values) if key != STEP}
        jsonl, table = self._files
        append_atomic(jsonl, (to_json(row) + "\n").encode())
        if row.keys() <= set(self._columns):
            append_atomic(table, _csv_text([row], self._columns).encode())
        else:  # rewrite the table with the new columns; this happens a few times, while the file is short
            self._write_csv(read_metrics(self._jsonl.parent))
            self._files[1] = io.FileIO(self._csv, "a")
            table.close()  # closed last, so that the old table stays in use if the new one cannot be written

    def resume(self, step: int) -> None:
        """Drop the rows for steps after `step`. The earlier process wrote these rows after its last checkpoint."""
        rows = [row for row in read_metrics(self._jsonl.parent) if (row[STEP] or 0) <= step]
        self.close()
        self._open(rows)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, rows: list[Row]) -> None:
        if rows or self._jsonl.exists():
            write_atomic(self._jsonl, "".join(to_json(row) + "\n" for row in rows))
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
        write_atomic(self._csv, header + _csv_text(rows, columns))
        self._columns = columns


def _csv_text(rows: Iterable[Mapping[str, object]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


# --- TensorBoard ----------------------------------------------------------------------------------------------


class TensorBoard:
    """Writes scalars to a TensorBoard event file below `directory`.

    tensorboard's `RecordWriter` encodes the records. Each record is one write, so a killed process leaves no partial
    record. tensorboard's `EventFileWriter` and torch's `SummaryWriter` are not used, because they write from a thread
    that ends at the first error: if the disk is full for a moment, all later metrics are lost. They also load
    tensorflow where it is installed. tensorboard is imported at the first event, because the import takes 70 ms.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: _EventFile | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [{"tag": tag, "simple_value": float(value)} for tag, value in metrics.items() if tag != STEP]
        self._add(step=int(step), summary={"value": values})

    def resume(self, step: int) -> None:
        """Start a new event file with an event that makes readers drop older files' values for steps after `step`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        self._add(step=step + 1, session_log={"status": SessionLog.START})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, **fields: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._file is None:
            self._file = _EventFile(self._new_path())
            self._file.add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.add(Event(wall_time=time.time(), **fields))

    def _new_path(self) -> Path:
        self._directory.mkdir(exist_ok=True)
        second = int(time.time())
        for path in self._directory.glob("events.out.tfevents.*"):
            # Readers take files in order of name, so a run resumed within the same second needs a later name.
            earlier = path.name.split(".")[3]
            second = max(second, int(earlier) + 1 if earlier.isdigit() else 0)
        return self._directory / f"events.out.tfevents.{second:010d}.{platform.node()}.{os.getpid()}"


class _EventFile:
    """A new event file. tensorboard's RecordWriter calls `write`, which appends a whole record or nothing."""

    def __init__(self, path: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._file = io.FileIO(path, "x")
        self._records = RecordWriter(self)

    def add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        append_atomic(self._file, record)

    def close(self) -> None:
        self._file.close()


# --- Weights & Biases -----------------------------------------------------------------------------------------


class WandB:
    """Logs to Weights & Biases. wandb's own settings apply, such as the environment variable WANDB_MODE=offline."""

    def __init__(self, project: str, run: Path, config: Mapping[str, object]) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                f"log.wandb={project} needs the package wandb, which is not installed: pip install 'remuda[wandb]'."
            ) from None
        identity = run / "wandb-id.txt"  # stores the id, so that a resumed run continues the same curves
        if not identity.exists():
            write_atomic(identity, secrets.token_hex(8))
        self._run = wandb.init(
            project=project,
            name=run.resolve().name,
            id=identity.read_text(encoding="utf-8").strip(),
            dir=str(run),
            config=plain(config),
            resume="allow",
        )
        # A resumed run goes back to earlier steps, but wandb's own step counter must not decrease. The step is
        # therefore logged as a metric, which serves as the x-axis.
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: int(step)})

    def close(self) -> None:
        self._run.finish()
