"""Meters, writers, the run directory, the terminal's view and plots; neither torch nor gymnasium is needed."""

from remuda.logs.meters import Window
from remuda.logs.terminal import Terminal, where_time_went
from remuda.logs.writers import MetricsFile, TensorBoard, WandB, Writer, read_metrics
from remuda.runs.directory import RunDirectory
from remuda.runs.plots import plot_runs

__all__ = [
    "MetricsFile",
    "RunDirectory",
    "Terminal",
    "TensorBoard",
    "WandB",
    "Window",
    "Writer",
    "plot_runs",
    "read_metrics",
    "where_time_went",
]
