"""Test that metric files stay readable if the process that writes them is killed or the disk is full."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remuda.errors import CheckpointError, ConfigError
from remuda.logs import MetricsFile, TensorBoard, WandB, read_metrics

STEP = "time/total_timesteps"


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def strict_rows(directory: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


# --- metrics.jsonl and metrics.csv ----------------------------------------------------------------------------


def test_rows_have_the_step_first_and_sorted_keys(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    writer.write(100, {"train/loss": 0.5, "rollout/ep_rew_mean": np.float32(2.0), STEP: 7, "a": np.int64(3)})
    rows = strict_rows(tmp_path)  # rows are readable immediately, not only after close
    assert list(rows[0].items()) == [(STEP, 100), ("a", 3), ("rollout/ep_rew_mean", 2.0), ("train/loss", 0.5)]
    writer.close()
    assert read_metrics(tmp_path) == rows


def test_nan_and_infinity_become_null_and_empty(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})  # the row that defines the columns
    writer.write(2, {"a": 1.0, "b": -math.inf, "c": math.nan})  # a row that is appended
    writer.close()
    assert strict_rows(tmp_path) == [
        {STEP: 1, "a": None, "b": None, "c": 1.0},
        {STEP: 2, "a": 1.0, "b": None, "c": None},
    ]
    assert table(tmp_path) == [{STEP: "1", "a": "", "b": "", "c": "1.0"}, {STEP: "2", "a": "1.0", "b": "", "c": ""}]


def test_a_new_key_widens_the_table(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    writer.write(1, {"m": 1.0})
    writer.write(2, {"m": 2.0})
    writer.write(3, {"a,quoted": 3.0})
    writer.write(4, {"m": 4.0})
    writer.close()
    assert table(tmp_path) == [
        {STEP: "1", "a,quoted": "", "m": "1.0"},
        {STEP: "2", "a,quoted": "", "m": "2.0"},
        {STEP: "3", "a,quoted": "3.0", "m": ""},
        {STEP: "4", "a,quoted": "", "m": "4.0"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_resume_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    for step in (100, 200, 300):
        writer.write(step, {"m": float(step)})
    writer.write(400, {"late": 1.0})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time/total_timesteps": 500, "m"')  # killed in the middle of a line
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("500,")

    writer = MetricsFile(tmp_path)
    writer.resume(200)
    writer.write(250, {"m": 2.5})
    writer.close()
    assert [row[STEP] for row in strict_rows(tmp_path)] == [100, 200, 250]
    assert table(tmp_path) == [{STEP: "100", "m": "100.0"}, {STEP: "200", "m": "200.0"}, {STEP: "250", "m": "2.5"}]


def test_resume_before_the_first_row_and_without_files(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    writer.resume(0)
    writer.write(10, {"m": 1.0})
    writer.resume(5)
    assert read_metrics(tmp_path) == []
    assert table(tmp_path) == []
    writer.write(6, {"n": 1.0})
    writer.close()
    assert table(tmp_path) == [{STEP: "6", "n": "1.0"}]


def write_until_killed(directory: Path, writer: str, metrics: str) -> int:
    """Write lines in another process, kill it, and return the number of lines that it has reported as written."""
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from remuda.logs import {writer}
        writer = {writer}(Path(sys.argv[1]))
        step = 0
        while True:
            step += 1
            writer.write(step, {metrics})
            print(step, flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        written = 0
        while written < 50:
            written = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=10)
    return written


def test_a_killed_process_leaves_complete_rows(tmp_path: Path) -> None:
    written = write_until_killed(tmp_path, "MetricsFile", '{"m": step / 7, f"key{step % 13}": 1.0}')
    assert len(read_metrics(tmp_path)) >= written
    writer = MetricsFile(tmp_path)
    writer.resume(40)
    writer.close()
    assert [row[STEP] for row in strict_rows(tmp_path)] == list(range(1, 41))
    assert [int(row[STEP]) for row in table(tmp_path)] == list(range(1, 41))


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"time/total_timesteps": 1}\n\x00\x00\n{"time/total_timesteps": 3}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        MetricsFile(tmp_path)


def test_a_table_that_could_not_be_widened_is_widened_by_the_next_row(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    writer.write(1, {"a": 1.0})
    (tmp_path / "metrics.csv.tmp").mkdir()  # writing the new table fails, as on a full disk
    with pytest.raises(OSError, match="Is a directory"):
        writer.write(2, {"a": 2.0, "b": 2.0})
    (tmp_path / "metrics.csv.tmp").rmdir()
    writer.write(3, {"a": 3.0, "b": 3.0})
    writer.close()
    table = (tmp_path / "metrics.csv").read_text()
    assert table == "time/total_timesteps,a,b\n1,1.0,\n2,2.0,2.0\n3,3.0,3.0\n"


def test_a_full_disk_raises_and_keeps_earlier_rows(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        from remuda.logs.writers import MetricsFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = MetricsFile(Path(sys.argv[1]))
        writer.write(1, {"m": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))     # a file that may not grow behaves as a full disk
        for step in range(2, 10):
            try:
                writer.write(step, {"m": 1.0})
            except OSError as error:
                print(step, type(error).__name__)
                break
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.split()[1] == "OSError"
    failed = int(done.stdout.split()[0])
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [row[STEP] for row in read_metrics(tmp_path)] == list(range(1, failed))


# --- TensorBoard ----------------------------------------------------------------------------------------------


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path / "tb")
    for step in range(1, 6):
        writer.write(step * 100, {"rollout/ep_rew_mean": step / 2, "train/loss": -float(step), STEP: step * 100})
    assert scalars(tmp_path / "tb", "train/loss")[-1] == (500, -5.0)  # readable before the file is closed
    writer.close()
    assert scalars(tmp_path / "tb", "rollout/ep_rew_mean") == [(step * 100, step / 2) for step in range(1, 6)]


def test_tensorboard_readers_drop_values_after_the_checkpoint(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in (100, 200, 300):
        first.write(step, {"m": 1.0})
    first.close()
    (event_file,) = tmp_path.iterdir()
    with event_file.open("ab") as file:
        file.write(b"\x40\x00\x00\x00\x00\x00\x00\x00half a record")
    second = TensorBoard(tmp_path)
    second.resume(200)
    second.write(250, {"m": 2.0})
    second.close()
    assert scalars(tmp_path, "m") == [(100, 1.0), (200, 1.0), (250, 2.0)]


def test_tensorboard_creates_no_file_before_the_first_write(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "tb").close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_file_of_a_killed_process_is_readable_up_to_its_last_write(tmp_path: Path) -> None:
    written = write_until_killed(tmp_path, "TensorBoard", '{"m": float(step)}')
    found = scalars(tmp_path, "m")
    assert len(found) >= written
    assert found == [(step, float(step)) for step in range(1, len(found) + 1)]


def test_tensorboard_continues_after_the_disk_was_full(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        from remuda.logs import TensorBoard
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = TensorBoard(Path(sys.argv[1]))
        writer.write(1, {"m": 1.0})
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))    # a file that may not grow behaves as a full disk
        step = 1
        try:
            while step < 100:
                step += 1
                writer.write(step, {"m": 1.0})
        except OSError:
            print(step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        writer.write(200, {"m": 2.0})
        writer.close()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=20, check=True
    )
    failed = int(done.stdout)
    assert scalars(tmp_path, "m") == [*((step, 1.0) for step in range(1, failed)), (200, 2.0)]


def test_tensorboard_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys, threading
        from pathlib import Path
        from remuda.logs import TensorBoard
        writer = TensorBoard(Path(sys.argv[1]))
        writer.write(1, {"m": 1.0})
        print(threading.active_count(), Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "1 []\n"


def test_logs_import_no_heavy_packages(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import remuda.logs
        heavy = ["torch", "gymnasium", "matplotlib", "tensorboard", "rich", "wandb"]
        print([name for name in heavy if name in sys.modules])
        remuda.logs.TensorBoard(Path(sys.argv[1])).write(1, {"m": 1.0})
        print([name for name in ["torch", "tensorflow"] if name in sys.modules])
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


# --- Weights & Biases -----------------------------------------------------------------------------------------


def test_wandb_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb=cats needs the package wandb.*pip install 'remuda\[wandb\]'"):
        WandB("cats", tmp_path, {})
    assert os.listdir(tmp_path) == []


def test_wandb_receives_metrics_and_keeps_its_id_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def define_metric(self, name: str, **options: Any) -> None:
            calls.append(("define", (name, options)))

        def log(self, values: dict[str, float]) -> None:
            calls.append(("log", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    module = types.ModuleType("wandb")

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        writer = WandB("cats", tmp_path, {"seed": 1, "layers": (64, 64)})
        writer.write(100, {"m": 1.5})
        writer.close()
    assert [name for name, _ in calls] == ["init", "define", "log", "finish"] * 2
    options = calls[0][1]
    assert options["project"] == "cats"
    assert options["config"] == {"seed": 1, "layers": [64, 64]}
    assert options["resume"] == "allow"
    assert "mode" not in options  # so that WANDB_MODE decides
    assert calls[4][1]["id"] == options["id"] != ""
    assert calls[1][1] == ("*", {"step_metric": STEP})
    assert calls[2][1] == {"m": 1.5, STEP: 100}
