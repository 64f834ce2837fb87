"""The option `--profile`, which records a trace of a few rounds for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.recipe import Round
from remuda.runs.stopping import Callback

# First and last round of the trace. Earlier rounds include the start-up, and viewers cannot open long traces.
FIRST, LAST = 3, 6


@contextmanager
def profiled(directory: Path | None) -> Iterator[Callback]:
    """Yield a callback that traces a few rounds. It must be called after every round.

    The trace (trace.json.gz) and a table of the slowest calls (top.txt) are written to `directory`. They cover this
    process, which under the scheme `replicas` is rank 0. Without a directory, the callback does nothing.
    """
    if directory is None:
        yield lambda round: False
        return
    from torch.profiler import ProfilerActivity, profile

    directory.mkdir(parents=True, exist_ok=True)
    profiler = profile(activities=[ProfilerActivity.CPU])
    count, is_running = 0, False

    def finish() -> None:
        nonlocal is_running
        if is_running:
            is_running = False
            profiler.stop()
            profiler.export_chrome_trace(str(directory / "trace.json.gz"))
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            (directory / "top.txt").write_text(table)

    def on_round(round: Round) -> bool:
        nonlocal count, is_running
        count += 1
        if count == FIRST - 1:
            profiler.start()
            is_running = True
        elif count == LAST:
            finish()
        return False

    try:
        yield on_round
    finally:
        finish()
        if not any(directory.iterdir()):
            directory.rmdir()
            logging.getLogger("remuda").warning(
                "there is no profile, because the run ended before round %d, in which the trace begins.", FIRST
            )
