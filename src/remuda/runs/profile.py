"""`--profile`: a trace of a few rounds, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIRST, LAST = 3, 6  # rounds that are traced: past the start-up, and few enough to open


@contextmanager
def profiled(directory: Path | None) -> Iterator[Callable[[Any], bool]]:
    """Yields a callback that counts rounds; trace.json.gz and a table of the costliest calls are left behind."""
    if directory is None:
        yield lambda round: False
        return
    from torch.profiler import ProfilerActivity, profile

    directory.mkdir(parents=True, exist_ok=True)
    profiler = profile(activities=[ProfilerActivity.CPU])
    count, running = 0, False

    def finish() -> None:
        nonlocal running
        if running:
            running = False
            profiler.stop()
            profiler.export_chrome_trace(str(directory / "trace.json.gz"))
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            (directory / "top.txt").write_text(table)

    def on_round(round: Any) -> bool:
        nonlocal count, running
        count += 1
        if count == FIRST - 1:
            profiler.start()
            running = True
        elif count == LAST:
            finish()
        return False

    try:
        yield on_round
    finally:
        finish()
        if not any(directory.iterdir()):
            directory.rmdir()
            logging.getLogger("remuda").warning("the run was too short to profile: let it take %d rounds.", LAST)
